"""The published schedulers, one module or folder each.

A folder has all code that only this scheduler uses; start at its `policy`. No scheduler imports
another.
"""
