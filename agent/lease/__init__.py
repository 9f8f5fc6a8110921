"""How a lease ends on the node: its renewal, and the timer that brings the node home without its
agent.

Start at `renewal`. `last_resort` arms a timer outside the agent; `last_resort_process` is that
timer on nodes without systemd.
"""
