"""Inputs of a run, from a person's options.

Start at `inputs`; `tasks` makes one run of each scenario, policy and seed.
"""
