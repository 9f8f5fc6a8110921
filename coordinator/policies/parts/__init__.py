"""Parts that at least two schedulers share.

Start at `grants`, which places a scheduler's allocations. `memory` is a policy's state between
passes.
"""
