"""Themis (NSDI'20): auctions by finish-time fairness.

Start at `policy`. `auction` allocates GPUs, `bids` makes the bids, and `leases` ends leases.
`simple` is the variant without auctions.
"""
