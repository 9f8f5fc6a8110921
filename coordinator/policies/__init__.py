"""Policies: pure functions from a frozen snapshot to decisions.

Start at `registry`, the table of all policies, and `policy`, what one is. `contract` is what each
reads and returns, `aryl` ours, `schedulers` the published ones, `parts` what several of them share,
`tenants` the guarantees around all of them.
"""
