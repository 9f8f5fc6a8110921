"""The published schedulers, one module or folder each.

A folder has all that only this scheduler uses; start at its `policy`. None knows another.
"""
