"""The lease loop: an on-loan node asks to stay on loan, and arms what brings it home if it dies.

Must not know how a node vacates; `agent.life` decides that from what is told it here.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from agent.life import Life
from common import subjects
from common.bus import Bus
from common.clock import Clock
from common.errors import ProtocolError, Unavailable
from common.messages import RenewReply, RenewRequest, decode, encode
from common.model import Lease, NodeRole

log = logging.getLogger(__name__)

RENEWALS_PER_TTL = 3


class LastResort(Protocol):
    """Brings the node home when nobody disarms it in time; survives the agent."""

    async def arm(self, after_s: float) -> None:
        """Fire in `after_s`, instead of whenever it would have fired before."""
        ...

    async def disarm(self) -> None:
        """Do not fire."""
        ...


class LeaseKeeper:
    """Renews the lease every third of its TTL while the node is on its way out or on loan.

    Args:
        changed: called after each answer, when there may be something to write down or to do.
        margin_s: the last resort fires this long after the TTL, so that a living agent is first.
    """

    def __init__(
        self,
        life: Life,
        *,
        cell: str,
        bus: Bus,
        clock: Clock,
        last_resort: LastResort,
        margin_s: float,
        changed: Callable[[], Awaitable[None]],
    ) -> None:
        self._life = life
        self._cell = cell
        self._bus = bus
        self._clock = clock
        self._last_resort = last_resort
        self._margin_s = margin_s
        self._changed = changed
        self._nonce = 0
        self._next_at_s = 0.0
        self._is_armed: bool | None = None
        self.failures = 0

    @property
    def wait_s(self) -> float | None:
        """Time until `step` has something to do; None while there is no lease."""
        if self._lease() is None:
            return None
        return max(0.0, self._next_at_s - self._clock.now_s())

    def _lease(self) -> Lease | None:
        memory = self._life.memory
        wanted = memory.role in (NodeRole.DRAINING, NodeRole.ON_LOAN)
        return memory.lease if wanted else None

    async def step(self) -> None:
        """Renew if it is time; disarm the last resort once the node is home."""
        lease = self._lease()
        if lease is None:
            self._next_at_s = 0.0
            if self._is_armed is not False and self._life.memory.role in _HOME:
                await self._try(self._last_resort.disarm(), "disarm")
                self._is_armed = False
            return
        now_s = self._clock.now_s()
        if now_s < self._next_at_s:
            return
        self._next_at_s = now_s + lease.ttl_s / RENEWALS_PER_TTL
        await self._renew(lease)

    async def _renew(self, lease: Lease) -> None:
        self._nonce += 1
        request = RenewRequest(
            node=self._life.memory.node, lease_id=lease.lease_id, nonce=self._nonce
        )
        sent_at_s = self._clock.now_s()
        try:
            answer = await self._bus.request(
                subjects.node_renew(self._cell, request.node),
                encode(request),
                timeout_s=lease.ttl_s / (RENEWALS_PER_TTL + 1),
            )
            reply = decode(answer, RenewReply)
        except (Unavailable, ProtocolError) as error:
            self.failures += 1
            log.warning("lease %s not renewed: %s", lease.lease_id, error)
            return
        if reply.lease_id != lease.lease_id or reply.nonce != request.nonce:
            self.failures += 1
            log.warning("lease %s: an answer to another request was dropped", lease.lease_id)
            return
        if not reply.is_granted:
            self._life.refused(lease.lease_id, reply.reason)
        else:
            # The TTL that the answer allows can only be shorter than the one agreed on.
            ttl_s = min(lease.ttl_s, reply.ttl_s) if reply.ttl_s else lease.ttl_s
            until_s = sent_at_s + ttl_s
            self._life.renewed(lease.lease_id, until_s)
            after_s = until_s + self._margin_s - self._clock.now_s()
            await self._try(self._last_resort.arm(after_s), "arm")
            self._is_armed = True
        await self._changed()

    async def _try(self, doing: Awaitable[None], what: str) -> None:
        try:
            await doing
        except (Unavailable, OSError) as error:
            self.failures += 1
            log.error("cannot %s the last resort: %s", what, error)


_HOME = (NodeRole.SERVING, NodeRole.TRAINING)
