"""Policies: pure functions from a frozen snapshot to decisions, bundled in one explicit table."""
