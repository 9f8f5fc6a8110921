"""Philly (ATC'19): locality that relaxes while a gang waits. Start at `policy`."""
