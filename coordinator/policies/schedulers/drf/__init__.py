"""DRF (NSDI'11): fair shares of the dominant resource. Start at `policy`."""
