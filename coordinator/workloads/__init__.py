"""Workloads: public traces, our own CSV and a generator, as typed jobs and load over time.

Import the module that you need: `formats` and `load_formats` (files), `records` (what they hold),
`shaping` (from trace rows to jobs of the simulator), `paper` (the generator of the paper's
cluster), `scenarios` (what the paper varies), `paper_runs` (its runs by name, policies included).
"""
