"""Which pool a node belonged to when its ledger was written: settings change while agents are away.
Pure; must not know what is done about it.
"""

from __future__ import annotations

from agent.state import Memory
from common.model import NodeRole, Pool


def left_pool(memory: Memory, pool: Pool) -> Pool | None:
    """The pool that a node belonged to and does no more, as its settings name `pool`; else None."""
    old = memory.home_pool or _pool_of_role(memory)
    return None if old in (None, pool) else old


def _pool_of_role(memory: Memory) -> Pool | None:
    """A memory of an older version does not name the pool, but mostly its role does."""
    role = memory.desired_role if memory.role == NodeRole.QUARANTINED else memory.role
    if role == NodeRole.QUARANTINED:
        return None
    return Pool.TRAINING if role == NodeRole.TRAINING else Pool.INFERENCE
