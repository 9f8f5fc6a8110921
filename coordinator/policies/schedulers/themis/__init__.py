"""Themis (NSDI'20): auctions by finish-time fairness.

Start at `policy`; `auction` sells, `bids` offers, `leases` ends. `simple` is the variant without
auctions.
"""
