"""Policies: pure functions from a frozen snapshot to decisions.

Start at `registry`, the table of all policies, and `policy`, the form of one. `contract` is what
each policy reads and returns. `aryl` is Aryl's own policy, `schedulers` has the published ones,
`parts` the code that several schedulers share, and `tenants` the quotas and guarantees that hold
under any policy.
"""
