"""AFS (NSDI'21): elastic shares by pairwise comparison. Start at `policy`."""
