"""Which lent nodes go home, at the least preemption cost.

Start at `choose_nodes`; `search` orders the solvers, `preemption_cost` says what a stop costs.
"""
