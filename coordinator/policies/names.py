"""Names of the policies that engine and simulator use by default."""

DEFAULT = "aryl"
"""The policy used if the settings name none."""

YARDSTICK = "sjf"
"""From which a comparison measures the way to the bound."""
