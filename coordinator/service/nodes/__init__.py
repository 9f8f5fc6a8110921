"""Messages from and to agents.

Start at `report_folding`, what a report changes; `desired_state_push` and `lease_renewal` go out.
"""
