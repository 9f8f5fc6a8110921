"""Policies that drivers mean by name without a user's word.

Whoever runs policies names none: engine and simulator take these from here.
"""

DEFAULT = "aryl"
"""What decides where the settings name no policy."""

YARDSTICK = "sjf"
"""From which a comparison measures the way to the bound."""
