"""The daemon of one GPU node: it reports, obeys desired state, and brings a lent node home.

It decides nothing about other nodes, never imports the coordinator, and stops a worker only on an
explicit order, on the end of its lease, or when the node's boot id changed.
"""
