"""Themis (NSDI'20): finish-time fairness by auctions of leases. Must not know the engine."""
