"""What happens to a node: reports, silence, faults, maintenance.

Start at `reports`; `lost` decides when a silent node is given up, `recovery` what it still runs
when it returns.
"""
