"""The end of a lease on the node: its renewal, and the timer that returns a node without its agent.

Start at `renewal`. `last_resort` arms a timer outside the agent; `last_resort_process` is that
timer on nodes without systemd.
"""
