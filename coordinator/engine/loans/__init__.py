"""Loan handlers: made, reclaimed, returned.

Start at `lifecycle`. `recall` ends a loan by order, `delayed_reclaim` waits for jobs to end, and
`idle_return` ends loans that training does not use.
"""
