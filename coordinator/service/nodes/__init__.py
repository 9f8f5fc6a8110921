"""Messages from and to agents.

Start at `report_folding`, the effect of a report; `desired_state_push` and `lease_renewal` go out.
"""
