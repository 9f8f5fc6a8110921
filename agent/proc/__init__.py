"""Processes of this machine: start, watch, signal, end.

Start at `commands`; `process_tree` finds what a command left behind. Nothing here knows of jobs.
"""
