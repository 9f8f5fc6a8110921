"""Renewal of a lease on the node, and the timer that returns the node without its agent.

Start at `renewal`; `agent.core.lease_end` says when a lease is over. `last_resort` arms a timer
outside the agent; `last_resort_process` is that timer on nodes without systemd.
"""
