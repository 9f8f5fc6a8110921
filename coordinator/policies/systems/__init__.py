"""The published schedulers, one module or package each. Must not know one another's names."""
