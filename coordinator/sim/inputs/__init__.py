"""What a run is made of, from what a person writes.

Start at `inputs`; `tasks` makes one run of each scenario, policy and seed.
"""
