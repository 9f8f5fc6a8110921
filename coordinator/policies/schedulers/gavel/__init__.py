"""Gavel (OSDI'20): rounds by time shares. Start at `policy`."""
