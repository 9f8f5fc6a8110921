"""Commands to the bus: push desired states until the reports show them. Must not decide.

Level-triggered: a lost, repeated or reordered push costs time, never correctness.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from common import subjects
from common.bus import Bus
from common.clock import Clock
from common.errors import Fenced, ProtocolError, Unavailable
from common.messages import DesiredReply, DesiredState, LedgerReply, LedgerRequest, decode, encode
from common.model import NodeName

log = logging.getLogger(__name__)


class Dispatcher:
    """One push in flight per node; the newest desired state wins.

    Args:
        desired: the node's desired state as it is when the push leaves.
        may_act: whether this coordinator's lease still holds.
        fenced: told when an agent knows a higher epoch.
    """

    def __init__(
        self,
        *,
        cell: str,
        bus: Bus,
        clock: Clock,
        timeout_s: float,
        retry_s: float,
        desired: Callable[[NodeName], DesiredState],
        may_act: Callable[[], bool],
        fenced: Callable[[Fenced], None],
    ) -> None:
        self._cell = cell
        self._bus = bus
        self._clock = clock
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._desired = desired
        self._may_act = may_act
        self._fenced = fenced
        self._wanted: dict[NodeName, None] = {}
        self._in_flight: set[NodeName] = set()
        self._pushed_at_s: dict[NodeName, float] = {}
        self._wake = asyncio.Event()
        self.pushes = 0
        self.refusals = 0

    def push(self, node: NodeName) -> None:
        """This node's desired state changed; send it as soon as its last push is answered."""
        self._wanted[node] = None
        self._wake.set()

    def lags(self, node: NodeName) -> None:
        """A report shows an old generation: push again, but not more often than `retry_s`."""
        last_s = self._pushed_at_s.get(node)
        if last_s is None or self._clock.now_s() - last_s >= self._retry_s:
            self.push(node)

    async def run(self) -> None:
        """Send what is wanted, for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._wake.wait()
                self._wake.clear()
                ready = [node for node in self._wanted if node not in self._in_flight]
                for node in ready:
                    del self._wanted[node]
                    self._in_flight.add(node)
                    group.create_task(self._send(node), name=f"push {node}")

    async def _send(self, node: NodeName) -> None:
        try:
            if self._may_act():
                await self._push_once(node)
        finally:
            self._in_flight.discard(node)
            self._wake.set()

    async def _push_once(self, node: NodeName) -> None:
        desired = self._desired(node)
        self._pushed_at_s[node] = self._clock.now_s()
        self.pushes += 1
        try:
            answer = await self._bus.request(
                subjects.node_desired(self._cell, node), encode(desired), timeout_s=self._timeout_s
            )
            reply = decode(answer, DesiredReply)
        except Unavailable as error:
            log.debug("push to %s: %s", node, error)  # its next report shows that it lags
            return
        except ProtocolError as error:
            log.warning("push to %s: bad answer: %s", node, error)
            return
        if not reply.is_accepted:
            self.refusals += 1
            log.warning("node %s refused generation %d: %s", node, desired.generation, reply.error)
            if reply.epoch > desired.epoch:
                self._fenced(
                    Fenced(f"node {node} has epoch {reply.epoch}, ours is {desired.epoch}")
                )

    async def ledger(self, node: NodeName) -> LedgerReply:
        """What a node holds in full.

        Raises:
            Unavailable: the node does not answer.
            ProtocolError: its answer does not fit.
        """
        answer = await self._bus.request(
            subjects.node_ledger(self._cell, node),
            encode(LedgerRequest(node=node)),
            timeout_s=self._timeout_s,
        )
        return decode(answer, LedgerReply)
