"""Aryl's own policy: order, size, place, lend, reclaim.

Start at `scheduling_pass`, one pass from snapshot to decisions. `lending` and `reclaim` decide on
loans.
"""
