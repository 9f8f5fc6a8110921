"""What happens to a loan: made, called back, home again.

Start at `lifecycle`; `recall` is the call home, `delayed_reclaim` one that waits for jobs to end.
"""
