"""Pollux (OSDI'21): goodput by a genetic search. Start at `policy`."""
