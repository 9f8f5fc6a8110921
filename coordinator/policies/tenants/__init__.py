"""Tenants: quotas, guarantees and fair shares, under any policy.

Start at `enforce`, the passes around a policy's own. `tenancy` counts, `tree` has the tenants, and
`reclaim` gets GPUs back from borrowers.
"""
