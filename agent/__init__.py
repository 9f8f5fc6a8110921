"""The daemon of one GPU node: it reports, obeys desired state, and brings a lent node home.

It decides nothing about other nodes and never imports the coordinator. It stops a worker only on an
order, at the end of its lease, after a reboot or a change of pool, or where it cannot tell whether
the worker runs. Start at `driver`; the rules are in `core`.
"""
