"""The lease loop: a lent node renews its lease, and arms the last resort in case the agent dies.

The loop reports to `agent.core.node_lifecycle`, which decides how and when the node vacates.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from agent.core.node_lifecycle import Life
from common import subjects
from common.bus import Bus
from common.clock import Clock
from common.errors import ProtocolError, Unavailable
from common.messages import RenewReply, RenewRequest, decode, encode
from common.model import Lease, LeaseId, NodeRole

log = logging.getLogger(__name__)

RENEWALS_PER_TTL = 3
RETRIES_PER_TTL = 12
"""After a failed renewal it asks again this soon. With every third of the TTL alone, a change of
the leader that takes longer than that third could cost a loan."""
LAST_RESORT_MARGIN_S = 1.0
"""The last resort fires this long after the lease, so that a live agent acts first."""
RESORT_LIMIT_S = 30.0
"""No last resort takes longer to arm: systemd's has this limit for all of its commands."""
DISARM_RETRY_S = 10.0
"""A last resort that could not be disarmed does no harm at home: it finds nothing to do."""


class LastResort(Protocol):
    """Brings the node home unless it is disarmed in time; survives the agent."""

    async def arm(self, after_s: float) -> None:
        """Fire in `after_s`, in place of the earlier instant."""
        ...

    async def disarm(self) -> None:
        """Do not fire."""
        ...


class LeaseKeeper:
    """Renews the lease every third of its TTL from its start, sooner after a failure.

    The last resort is armed before the first request, and before the node leaves its routing. A
    node whose agent dies in the drain, and whose coordinator never answered, must come home too.

    Args:
        changed: called after each answer, when there may be something to write down or to do.
        tried: called when a new lease may begin.
        margin_s: the last resort fires this long after the TTL.
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
        tried: Callable[[], None] = lambda: None,
    ) -> None:
        self._life = life
        self._cell = cell
        self._bus = bus
        self._clock = clock
        self._last_resort = last_resort
        self._margin_s = margin_s
        self._changed = changed
        self._tried = tried
        self._tried_for: LeaseId | None = None
        self._nonce = 0
        self._next_at_s = 0.0
        self._renewing: LeaseId | None = None
        self._armed_for: LeaseId | None = None
        self._is_disarmed = False
        self._disarm_at_s = 0.0
        self.failures = 0

    @property
    def wait_s(self) -> float | None:
        """Time until `step` has something to do; None while there is no lease."""
        if self._lease() is None:
            return None
        return max(0.0, self._next_at_s - self._clock.now_s())

    def may_begin(self, lease_id: LeaseId) -> bool:
        """True if the last resort was armed for a lease, or could not be armed.

        In the second case only the agent can bring the node home.
        """
        return self._tried_for == lease_id

    @property
    def step_limit_s(self) -> float:
        """The sum of the time limits inside a step.

        These are one renewal, and the last resort, which a step may arm twice or disarm once.
        """
        lease = self._lease()
        asking_s = 0.0 if lease is None else lease.ttl_s / (RENEWALS_PER_TTL + 1)
        return asking_s + 2 * RESORT_LIMIT_S

    def _lease(self) -> Lease | None:
        memory = self._life.memory
        return memory.lease if memory.role in _LENT else None

    async def step(self) -> None:
        """Renew if it is time; disarm the last resort once the node is home."""
        lease = self._lease()
        if lease is None or lease.lease_id != self._renewing:
            self._renewing = None if lease is None else lease.lease_id
            self._next_at_s = 0.0
        now_s = self._clock.now_s()
        if lease is None:
            await self._disarm_if_home(now_s)
            return
        if now_s < self._next_at_s:
            return
        self._next_at_s = now_s + lease.ttl_s / RENEWALS_PER_TTL
        if self._armed_for != lease.lease_id:
            await self._arm(lease)
        if self._tried_for != lease.lease_id:
            self._tried_for = lease.lease_id
            self._tried()
        await self._renew(lease)

    async def _disarm_if_home(self, now_s: float) -> None:
        is_home = self._life.memory.role in _HOME
        if self._is_disarmed or not is_home or now_s < self._disarm_at_s:
            return
        self._disarm_at_s = now_s + DISARM_RETRY_S
        self._armed_for = None
        self._is_disarmed = await self._try(self._last_resort.disarm(), "disarm")

    async def _renew(self, lease: Lease) -> None:
        self._nonce += 1
        request = RenewRequest(
            node=self._life.memory.node, lease_id=lease.lease_id, nonce=self._nonce
        )
        sent_at_s = self._clock.now_s()
        left_s = (self._life.lease_ends_at_s or sent_at_s) - sent_at_s
        if left_s <= 0:
            return  # it is over; an answer now would come after the node has turned home
        try:
            answer = await self._bus.request(
                subjects.node_renew(self._cell, request.node),
                encode(request),
                timeout_s=min(left_s, lease.ttl_s / (RENEWALS_PER_TTL + 1)),
            )
            reply = decode(answer, RenewReply)
        except (Unavailable, ProtocolError) as error:
            self.failures += 1
            self._next_at_s = min(
                self._next_at_s, self._clock.now_s() + lease.ttl_s / RETRIES_PER_TTL
            )
            log.warning("lease %s not renewed: %s", lease.lease_id, error)
            return
        if reply.lease_id != lease.lease_id or reply.nonce != request.nonce:
            self.failures += 1
            log.warning("lease %s: dropped an answer to another request", lease.lease_id)
            return
        if not reply.is_granted:
            self._life.refused(lease.lease_id, reply.reason)
        else:
            # The TTL in an answer can only be shorter than the agreed one.
            ttl_s = min(lease.ttl_s, reply.ttl_s) if reply.ttl_s else lease.ttl_s
            self._life.renewed(lease.lease_id, sent_at_s + ttl_s)
            self._next_at_s = min(self._next_at_s, sent_at_s + ttl_s / RENEWALS_PER_TTL)
            await self._arm(lease)
        await self._changed()

    async def _arm(self, lease: Lease) -> None:
        """Have the last resort fire some time after the end of the lease as known now."""
        ends_at_s = self._life.lease_ends_at_s
        if ends_at_s is None:
            return  # it ended meanwhile
        after_s = max(0.0, ends_at_s - self._clock.now_s()) + self._margin_s
        self._is_disarmed, self._disarm_at_s = False, 0.0
        if await self._try(self._last_resort.arm(after_s), "arm"):
            self._armed_for = lease.lease_id

    async def _try(self, doing: Awaitable[None], what: str) -> bool:
        """Run one attempt; True if it succeeded.

        A failed one is repeated, with the next renewal or later.
        """
        try:
            await doing
        except (Unavailable, OSError) as error:
            self.failures += 1
            log.error("cannot %s the last resort: %s", what, error)
            return False
        return True


_HOME = (NodeRole.SERVING, NodeRole.TRAINING)
_LENT = (NodeRole.SERVING, NodeRole.DRAINING, NodeRole.ON_LOAN)
"""Roles in which a lease counts; SERVING for the moment between taking it and leaving the
routing."""
