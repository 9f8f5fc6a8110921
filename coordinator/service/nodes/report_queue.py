"""The inbound queue of node reports: the newest of each agent, processed in time slices.

Under overload the queue sheds reports: the next report of an agent replaces one that waits. So no
backlog grows beyond one report per agent, and requests, renewals and decisions have their turn
between two slices.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import msgspec
from msgspec import Struct

from common import subjects
from common.bus import BusMessage
from common.clock import Clock
from common.decoding import UNREADABLE
from common.log import REPEAT_PERIOD_S

log = logging.getLogger(__name__)

SLICE_S = 0.005
"""Work on reports between two turns of the event loop: a request waits some ten turns."""
SLICE_REPORTS = 100
"""The same as a number of reports, for a clock that stands still."""
AGENTS_PER_NODE = 4
"""Agents of one name whose reports wait side by side; `duplicate_agents` judges which one speaks.
"""
SHOWN_S = 60.0
"""How long after the last report that was shed `aryl status` shows it."""


class _Sender(Struct, frozen=True):
    """The sender and number of a report; the rest of the report is skipped, not decoded."""

    boot_id: str = ""
    instance: str | None = None
    sequence: int = 0


class _Waiting(Struct):
    """The newest report of one agent."""

    message: BusMessage
    at_s: float
    sender: _Sender | None = None
    """Decoded only if a second report of the node comes before the first is taken."""


Take = Callable[[BusMessage, float], Awaitable[None]]


class Inflow:
    """The reports that wait to be taken, at most one of each agent.

    Args:
        take: takes a report and its time of arrival, on the boot clock.
    """

    def __init__(self, take: Take, *, clock: Clock) -> None:
        self.shed_count = 0
        """Reports that a later one of the same agent replaced before they were taken."""
        self.failures = 0
        """Reports on which `take` broke."""
        self._take = take
        self._clock = clock
        self._waiting: OrderedDict[str, list[_Waiting]] = OrderedDict()
        """By node; the node that waits longest first."""
        self._arrived = asyncio.Event()
        self._shed_at_s = float("-inf")
        self._logged_at_s = float("-inf")
        self._logged_count = 0

    def __contains__(self, node: object) -> bool:
        """True if a report of a node waits: the node is not silent then."""
        return node in self._waiting

    @property
    def lately_shed_count(self) -> int:
        """`shed_count` while reports are shed, and for `SHOWN_S` after; else 0."""
        is_late = self._clock.now_s() - self._shed_at_s > SHOWN_S
        return 0 if is_late else self.shed_count

    async def put(self, message: BusMessage) -> None:
        """Keep a report until its turn; the bus's handler."""
        node = subjects.node_of(message.subject)
        arrived = _Waiting(message, self._clock.now_s())
        waiting = self._waiting.get(node)
        if waiting is None:
            self._waiting[node] = [arrived]
            self._arrived.set()
        else:
            self._join(waiting, arrived)

    def _join(self, waiting: list[_Waiting], arrived: _Waiting) -> None:
        """Replace the report of the same agent, or wait beside those of other agents."""
        sender = arrived.sender = _sender(arrived)
        for at, other in enumerate(waiting):
            other.sender = other.sender or _sender(other)
            if (other.sender.boot_id, other.sender.instance) == (sender.boot_id, sender.instance):
                if sender.sequence >= other.sender.sequence:
                    waiting[at] = arrived
                self._shed()
                return
        if len(waiting) < AGENTS_PER_NODE:
            waiting.append(arrived)
        else:
            self._shed()

    def _shed(self) -> None:
        self.shed_count += 1
        self._shed_at_s = self._clock.now_s()

    async def run(self) -> None:
        """Process the waiting reports, slice by slice, for ever."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                await self._slice()
                await asyncio.sleep(0)  # other ready tasks have their turn

    async def _slice(self) -> None:
        until_s = self._clock.now_s() + SLICE_S
        count = 0
        while self._waiting and count < SLICE_REPORTS and self._clock.now_s() < until_s:
            _, waiting = self._waiting.popitem(last=False)
            for one in waiting:
                count += 1
                try:
                    await self._take(one.message, one.at_s)
                except Exception:
                    self.failures += 1
                    log.exception("report on %s failed", one.message.subject)

    def look(self) -> None:
        """Log, each period, how many reports were shed since the last line."""
        now_s = self._clock.now_s()
        new = self.shed_count - self._logged_count
        if new and now_s - self._logged_at_s >= REPEAT_PERIOD_S:
            log.warning(
                "overload: %d reports shed, the newest of each node is kept; %d nodes wait "
                "(%d shed in all)",
                new,
                len(self._waiting),
                self.shed_count,
            )
            self._logged_at_s, self._logged_count = now_s, self.shed_count


def _sender(waiting: _Waiting) -> _Sender:
    """The sender of a report; an unreadable report has a kind of sender of its own."""
    try:
        return _DECODER.decode(waiting.message.data)
    except UNREADABLE:
        return _UNREADABLE


_DECODER = msgspec.msgpack.Decoder(_Sender)
_UNREADABLE = _Sender()
