"""Files that outlive a restart of the agent.

Start at `ledger`, the node's memory on disk; `node_lock` keeps a second agent away.
"""
