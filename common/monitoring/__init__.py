"""The metrics page of a daemon: its settings, its HTTP server and the tables of its metrics.

Must not know which daemon serves it.
"""
