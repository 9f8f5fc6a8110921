"""What tenants are promised and may take, under any policy.

Start at `enforce`, the passes around a policy's own; `tenancy` counts, `tree` has the tenants,
`reclaim` takes GPUs back.
"""
