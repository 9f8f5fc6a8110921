"""Workloads: public traces, our own CSV and a generator, as typed jobs and load over time.

Nothing here calls an engine, sends a message or reads a clock. Import the module that you need:
`formats` and `load_formats` (files), `records` (their contents), `shaping` (from trace rows to jobs
of the simulator), `paper` (the generator of the paper's cluster), `scenarios` (the paper's
variations), `paper_runs` (its runs by name, policies included).
"""
