"""Names of the policies that engine and simulator use by default."""

DEFAULT = "aryl"
"""What decides where the settings name no policy."""

YARDSTICK = "sjf"
"""From which a comparison measures the way to the bound."""
