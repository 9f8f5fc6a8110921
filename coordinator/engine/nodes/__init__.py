"""Node handlers: reports, silence, faults, maintenance.

Start at `reports`. `lost` gives up silent nodes, and `recovery` rebuilds what they still run when
they return.
"""
