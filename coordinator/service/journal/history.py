"""The history of a cell: each event line that is in the journal, in order, for `aryl explain`.

The engine's state keeps only the newest lines.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from common.clock import Clock
from common.errors import ConfigError, Unavailable
from common.history import HistoryLine
from common.log import Throttle
from coordinator.engine.state.tables import ClusterState
from coordinator.service.api.rows import history_lines

log = logging.getLogger(__name__)

BATCH_LINES = 200
MAX_PENDING_LINES = 100_000
"""Lines kept in memory while the history takes nothing; beyond it the oldest are lost to the
history."""
RETRY_S = 1.0
COMPLAINT_PERIOD_S = 60.0


class Tail(NamedTuple):
    """Messages of the stream from a sequence on.

    identity: of the stream; another stream of the name has another one.
    first, last: its sequences now.
    messages: in order; all up to `until` were read.
    """

    identity: str
    first: int
    last: int
    messages: list[bytes]
    until: int


class HistoryPort(Protocol):
    """Event lines by their numbers, which only grow."""

    @property
    def server(self) -> str:
        """The run of the server that keeps it; another run may have lost the newest lines."""
        ...

    async def open(self) -> int:
        """Create missing parts; the number of the last line, 0 for an empty history.

        Raises:
            Unavailable: no answer.
        """
        ...

    async def write(self, lines: Sequence[HistoryLine]) -> None:
        """Append lines, in their order, after the last one known here.

        Raises:
            Unavailable: not known to be written, or only the first ones, or another is the last.
        """
        ...

    async def read(
        self, words: Collection[str], *, after: int, before: int, most_bytes: int, newest: bool
    ) -> tuple[list[HistoryLine], bool]:
        """Lines between two numbers, both ends excluded, and whether more of them are there.

        words: the subjects of these lines; empty: of any.
        newest: where not all fit, the last ones instead of the first ones.

        Raises:
            Unavailable: no answer.
        """
        ...

    async def tail(self, sequence: int, *, most: int) -> Tail:
        """Up to `most` messages from a sequence on, as they are.

        Raises:
            Unavailable: no answer.
        """
        ...


class Historian:
    """Copies the lines of the engine's state into the history as they are journaled.

    Lines that a server lost, or that a leader had no time for, are in the state of the next leader:
    the copy continues after the last line that is there.
    """

    def __init__(self, history: HistoryPort, *, clock: Clock) -> None:
        self._history = history
        self._clock = clock
        self._state = ClusterState()
        self._pending: deque[HistoryLine] = deque()
        """Lines that are journaled and not known to be in the history."""
        self._taken = 0
        """Number of the last line that was pending."""
        self._last: int | None = None
        """Number of the last line in the history; None: to be looked up."""
        self._server = ""
        self._wake = asyncio.Event()
        self._warn = Throttle(clock, COMPLAINT_PERIOD_S)

    def journaled(self, state: ClusterState) -> None:
        """Record that all lines of a state are in the journal."""
        self._state = state
        end = state.stories_dropped + len(state.stories)
        if end <= self._taken:
            return
        begin = max(self._taken, state.stories_dropped)
        if 0 < self._taken < begin:
            log.warning(
                "history: lines %d to %d dropped: they came too fast", self._taken + 1, begin
            )
        new = state.stories[begin - state.stories_dropped :]
        self._pending += history_lines(state, new, begin)
        self._taken = end
        while len(self._pending) > MAX_PENDING_LINES:
            self._pending.popleft()
        self._wake.set()

    @property
    def pending_lines(self) -> int:
        """Lines that are journaled and not known to be in the history."""
        return len(self._pending)

    async def last_number(self) -> int:
        """The number of the last line that is there; 0 where the history cannot be read."""
        try:
            return await self._history.open()
        except (Unavailable, ConfigError) as error:
            log.warning("history: %s", error)
            return 0

    async def run(self) -> None:
        """Copy for ever; a history that takes nothing delays no decision."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                while self._pending:
                    await self._copy()
            except (Unavailable, ConfigError) as error:
                self._last = None
                if self._warn.is_due(str(error)):
                    log.warning("history: %s; retrying", error)
                await self._clock.sleep(RETRY_S)
                self._wake.set()

    async def _copy(self) -> None:
        """Write the next lines."""
        if self._last is None or self._server != self._history.server:
            self._last = await self._history.open()
            self._server = self._history.server
            self._find_place(self._last)
        lines = [self._pending[index] for index in range(min(BATCH_LINES, len(self._pending)))]
        if not lines:
            return
        self._last = None  # until they are known to be there
        await self._history.write(lines)
        self._last = lines[-1].number
        while self._pending and self._pending[0].number <= self._last:
            self._pending.popleft()

    def _find_place(self, last: int) -> None:
        """The place after the last line that is there; lost lines are still in the state."""
        state, pending = self._state, self._pending
        first = pending[0].number if pending else self._taken + 1
        begin = max(last, state.stories_dropped)
        if begin + 1 < first:
            kept = state.stories[begin - state.stories_dropped : first - 1 - state.stories_dropped]
            pending.extendleft(reversed(history_lines(state, kept, begin)))
        while pending and pending[0].number <= last:
            pending.popleft()
        if pending and pending[0].number > last + 1:
            log.warning("history: lines %d to %d are lost", last + 1, pending[0].number - 1)
