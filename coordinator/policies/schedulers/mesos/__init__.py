"""Mesos (NSDI'11): offers that frameworks take or refuse. Start at `policy`."""
