"""`aryl-agent --go-home`: bring a lent node home with agent, coordinator and NATS all dead.

The same node driver and the same rules as the agent's, with nobody to ask: its lease is over. Must
not run beside an agent; whoever calls it holds the node's lock.
"""

from __future__ import annotations

import logging

from agent.node import Node
from agent.settings import SHORTEST_HUNG_S, AgentSettings
from agent.state import Memory
from common.clock import Clock
from common.errors import Unavailable
from common.model import NodeRole

log = logging.getLogger(__name__)

_AWAY = (NodeRole.DRAINING, NodeRole.ON_LOAN, NodeRole.VACATING, NodeRole.WARMING)
_STUCK = (NodeRole.QUARANTINED,)
HUNG_TTL_RATIO = 0.5
"""An agent that hung when coordinator and NATS died has been silent for at least the two thirds of
its TTL that were left then: with half of it the way home begins no later than with a dead agent."""


def is_away(memory: Memory) -> bool:
    """Whether a node is on loan, or on its way there or home."""
    return memory.role in _AWAY


def hung_after_s(settings: AgentSettings, memory: Memory) -> float:
    """Seconds of silence after which whoever holds this node is in its way home."""
    after_s = settings.hung_after_s
    if memory.lease is not None:
        after_s = min(after_s, HUNG_TTL_RATIO * memory.lease.ttl_s)
    return max(SHORTEST_HUNG_S, after_s)


def lease_left_s(memory: Memory, now_s: float) -> float:
    """Seconds until the lease is over, as this memory knows it; 0 without one."""
    ends_at_s = memory.lease_ends_at_s
    return 0.0 if ends_at_s is None else max(0.0, ends_at_s - now_s)


async def go_home(node: Node, *, clock: Clock) -> str:
    """Vacate, wait for the GPUs, restart the server, route to it.

    Returns:
        What was done, in words; an empty text when the node is not away.

    Raises:
        Unavailable: the lease is valid, so it is too early: whoever calls must try again, or
            nobody would be left to bring the node home.
    """
    life = node.life
    memory = life.memory
    if memory.role not in _AWAY:
        return ""
    left_s = lease_left_s(memory, clock.now_s())
    if memory.lease is not None and left_s > 0:
        raise Unavailable(f"lease {memory.lease.lease_id} is valid for another {left_s:.1f} s")
    if memory.lease is not None:
        life.refused(memory.lease.lease_id, "the last resort fired")
    memory.desired_role = NodeRole.SERVING
    began_at_s = clock.now_s()
    while memory.role in _AWAY:
        await node.sample()
        await node.step()
        if memory.role in _STUCK:
            return f"quarantined: {life.detail}"
        await clock.sleep(node.settings.step_period_s)
    return f"serving again after {clock.now_s() - began_at_s:.1f} s"
