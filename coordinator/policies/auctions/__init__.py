"""Parts of auctions of GPUs on lease: bids, the mechanism, leases, standing. Know no policy."""
