"""Gandiva (OSDI'18): time slices, packing, migration, growth.

Start at `policy`; `sets` is the variant that shares node sets by trials.
"""
