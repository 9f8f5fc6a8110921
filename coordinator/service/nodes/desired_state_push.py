"""Sends commands over the bus: pushes desired states until the reports show them.

Level-triggered: a lost, repeated or reordered push costs time, never correctness.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from msgspec import UnsetType

from common import subjects
from common.bus import Bus
from common.clock import Clock
from common.errors import Fenced, ProtocolError, Unavailable
from common.messages import (
    DesiredReply,
    DesiredState,
    LedgerReply,
    LedgerRequest,
    LogReply,
    LogRequest,
    Message,
    decode,
    encode,
)
from common.model import NodeName, WorkerKey
from coordinator.service.nodes import report_validation
from coordinator.service.nodes.log_throttle import Complaints
from coordinator.service.nodes.per_node_queue import OneEach

log = logging.getLogger(__name__)


class _Ordered(NamedTuple):
    """The last order of a node, and when it was given."""

    desired: DesiredState
    at_s: float

    @property
    def number(self) -> tuple[int, int]:
        """(epoch, generation)."""
        return self.desired.epoch, self.desired.generation

    def at(self, now_s: float) -> DesiredState:
        """The order as it is sent now: a reclaim's time runs on while the order is on its way."""
        if self.desired.reclaim_in_s is None:
            return self.desired
        left_s = max(0.0, self.desired.reclaim_in_s - (now_s - self.at_s))
        return msgspec.structs.replace(self.desired, reclaim_in_s=left_s)


class Dispatcher:
    """One push in flight per node; the newest desired state wins.

    It sends only states that it was given, whatever the engine has decided since: that is not yet
    in the journal.

    Args:
        may_act: whether this coordinator's lease still holds.
        fenced: called when an agent knows a higher epoch.
        instance: the start of a node's agent that is meant, when a message leaves; unset: any.
    """

    def __init__(
        self,
        *,
        cell: str,
        bus: Bus,
        clock: Clock,
        timeout_s: float,
        retry_s: float,
        may_act: Callable[[], bool],
        fenced: Callable[[Fenced], None],
        instance: Callable[[NodeName], str | UnsetType],
    ) -> None:
        self._instance = instance
        self._cell = cell
        self._bus = bus
        self._clock = clock
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._ordered: dict[NodeName, _Ordered] = {}
        self._may_act = may_act
        self._fenced = fenced
        self._line = OneEach(self._send, name="push")
        self._pushed_at_s: dict[NodeName, float] = {}
        self.pushes = 0
        self.refusals = 0
        self.bad_messages = 0
        self._bad_answers = Complaints(clock, "bad answers")
        self._refusals = Complaints(clock, "refusals of orders")

    def push(self, desired: DesiredState) -> None:
        """A node's desired state is in the journal; send it when its last push is answered."""
        node = NodeName(desired.node)
        self._ordered[node] = _Ordered(desired, self._clock.now_s())
        self._line.want(node)

    def compare(self, node: NodeName, *, epoch: int, generation: int) -> None:
        """Push again if the generation that a node acts on is not the one ordered.

        At most once per `retry_s`; nothing to a node without an order yet.
        """
        ordered = self._ordered.get(node)
        if ordered is None or (epoch, generation) == ordered.number:
            return
        last_s = self._pushed_at_s.get(node)
        if last_s is None or self._clock.now_s() - last_s >= self._retry_s:
            self._line.want(node)

    async def run(self) -> None:
        """Send the pending states, for ever."""
        await self._line.run()

    async def _send(self, node: NodeName) -> None:
        if self._may_act():
            await self._push_once(node)

    async def _push_once(self, node: NodeName) -> None:
        desired = self._ordered[node].at(self._clock.now_s())
        desired = msgspec.structs.replace(desired, instance=self._instance(node))
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
            self._note_bad(node, error)
            return
        if not reply.is_accepted:
            self.refusals += 1
            why = f"node {node} refused generation {desired.generation}: {reply.error}"
            self._refusals.note(node, reply.error, said=why)  # requested again while it refuses
            if report_validation.trusted_epoch(reply.epoch) > desired.epoch:
                self._fenced(
                    Fenced(f"node {node} has epoch {reply.epoch}, ours is {desired.epoch}")
                )

    async def ledger(self, node: NodeName) -> LedgerReply:
        """All that a node holds.

        Raises:
            Unavailable: the node does not answer.
            ProtocolError: its answer is invalid.
        """
        request = LedgerRequest(node=node, instance=self._instance(node))
        answer = await self._ask(subjects.node_ledger(self._cell, node), request)
        try:
            return _of(node, decode(answer, LedgerReply))
        except ProtocolError as error:
            self._note_bad(node, error)
            raise

    async def log(self, node: NodeName, key: WorkerKey, *, max_bytes: int) -> LogReply:
        """The last `max_bytes` bytes of a worker's log, or why there are none.

        Raises:
            Unavailable: the node does not answer.
            ProtocolError: its answer is invalid.
        """
        request = LogRequest(node=node, key=key, max_bytes=max_bytes, instance=self._instance(node))
        answer = await self._ask(subjects.node_logs(self._cell, node), request)
        try:
            return decode(answer, LogReply)
        except ProtocolError as error:
            self._note_bad(node, error)
            raise

    async def _ask(self, subject: str, request: Message) -> bytes:
        return await self._bus.request(subject, encode(request), timeout_s=self._timeout_s)

    def _note_bad(self, node: NodeName, error: ProtocolError) -> None:
        """Count a node's bad answer, and name the node in the log."""
        self.bad_messages += 1
        self._bad_answers.note(node, str(error))


def _of(node: NodeName, reply: LedgerReply) -> LedgerReply:
    if reply.node != node:
        raise ProtocolError(f"LedgerReply: field node: it is signed {reply.node}")
    return reply
