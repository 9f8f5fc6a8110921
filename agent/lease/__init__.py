"""How a lease ends on the node: its renewal, and what brings the node home without its agent.

Start at `renewal`. `last_resort` arms a timer outside the agent; `last_resort_process` is that
timer where systemd has none.
"""
