"""`aryl-agent --go-home`: bring a lent node home with agent, coordinator and NATS all dead.

The same node driver and the same rules as the agent's, with nobody to ask: its lease is over. Must
not run beside an agent; whoever calls it holds the node's lock.
"""

from __future__ import annotations

import logging

from agent.node import Node
from common.clock import Clock
from common.errors import Unavailable
from common.model import NodeRole

log = logging.getLogger(__name__)

_AWAY = (NodeRole.DRAINING, NodeRole.ON_LOAN, NodeRole.VACATING, NodeRole.WARMING)
_STUCK = (NodeRole.QUARANTINED,)


async def go_home(node: Node, *, clock: Clock) -> str:
    """Vacate, wait for the GPUs, restart the server, route to it.

    Returns:
        What was done, in words; an empty text when the node is not away.

    Raises:
        Unavailable: the lease is valid, so it is too early: whoever calls must try again, or
            nobody would be left to bring the node home; or the ledger cannot be written.
    """
    life = node.life
    memory = life.memory
    if memory.role not in _AWAY:
        return ""
    until_s = life.lease_ends_at_s
    if memory.lease is not None and until_s is not None and until_s > clock.now_s():
        left_s = until_s - clock.now_s()
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
