"""`aryl simulate`: options, progress, output. Start at `command`."""
