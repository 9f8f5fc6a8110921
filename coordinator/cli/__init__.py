"""The command line of operators and submitters."""
