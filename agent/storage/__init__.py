"""Files that outlive a restart of the agent.

Start at `ledger`, what the node remembers; `node_lock` keeps a second agent away.
"""
