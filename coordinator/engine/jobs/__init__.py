"""What happens to a job: start, progress, resize, retry, end.

Start at `lifecycle`; `gang_start` starts a gang whole or not at all, `retry` decides what follows a
failure, `deadlines` knows when time alone changes something.
"""
