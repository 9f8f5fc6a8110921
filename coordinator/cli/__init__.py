"""What operators and submitters type and read."""
