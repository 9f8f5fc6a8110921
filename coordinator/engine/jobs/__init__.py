"""Job handlers: start, progress, resize, retry, end.

Start at `lifecycle`. `gang_start` starts a gang whole or not at all, `retry` decides what follows a
failure, and `deadlines` holds the instants at which time alone changes a job.
"""
