"""Reclaim: which lent nodes go home, at the least preemption cost.

Start at `choose_nodes`. `search` orders the solvers, `preemption_cost` gives the cost of a stop.
"""
