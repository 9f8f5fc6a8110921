"""The decisions of one node: roles, workers, the lease, GPUs that change hands. No I/O here.

Start at `node_lifecycle`, one step of a node; `state` has the data that each rule reads and writes,
`lease_end` says why a lease is over.
`agent.driver` carries out the actions.
"""
