"""Keeps a coordinator's index of the history at the end of its stream, leading or standing by.

Reading never holds up a decision: the index lives in a thread, and while much is to be read it
takes at most half of the time. A file that cannot be used, as on a full disk, leaves the history
without answers and everything else as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import stat
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from common.clock import Clock
from common.errors import ConfigError, Unavailable
from common.log import Throttle
from coordinator.service.history.index import HistoryIndex, read_line
from coordinator.service.journal.history import HistoryPort, Tail

log = logging.getLogger(__name__)

T = TypeVar("T")

PERIOD_S = 1.0
"""How often the stream is looked at; a question that needs newer lines has it looked at at once."""
READ_LINES = 5_000
AGAIN_LINES = 10_000
"""Lines that are read again after the server was another one: it may have lost the newest, and got
others in their place."""
RETRY_S = 30.0
COMPLAINT_PERIOD_S = 600.0
KICK_S = 0.02
LEAST_PAUSE_S = 0.001

InThread = Callable[..., Awaitable[Any]]


def directory(setting: str) -> Path:
    """Where the index is kept: by the setting, or systemd's cache, or a temporary directory.

    The temporary one is the same at each start, and this user's alone.
    """
    found = setting or os.environ.get("CACHE_DIRECTORY", "").split(":")[0]
    if found:
        return Path(found)
    own = Path(tempfile.gettempdir()) / f"aryl-history-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    state = own.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise ConfigError(f"history_index_dir: {own} is not a directory of this user alone")
    return own


class IndexKeeper:
    """Reads the stream into the index, and takes questions to it.

    Args:
        path: of the index.
        in_thread: calls a function in a thread.
    """

    def __init__(
        self,
        history: HistoryPort,
        *,
        path: Path,
        clock: Clock,
        in_thread: InThread = asyncio.to_thread,
    ) -> None:
        self._history = history
        self._path = path
        self._clock = clock
        self._in_thread = in_thread
        self._index: HistoryIndex | None = None
        self._damage: sqlite3.DatabaseError | None = None
        """What a question found in the index: the reading of the stream may never meet it."""
        self._server = ""
        self._first = 0
        """First sequence of the stream when the index was cut to it."""
        self._kick = asyncio.Event()
        self._warn = Throttle(clock, COMPLAINT_PERIOD_S)
        self.last_sequence = 0
        """The end of the stream, when it was looked at last."""

    @property
    def number(self) -> int:
        """The last line in the index."""
        return 0 if self._index is None else self._index.position.number

    @property
    def lag_lines(self) -> int:
        """Messages of the stream that the index does not have, when it was looked at last."""
        if self._index is None:
            return self.last_sequence
        return max(0, self.last_sequence + 1 - self._index.position.sequence)

    async def run(self) -> None:
        """Read for ever."""
        try:
            while True:
                try:
                    pause_s = await self._round()
                except Unavailable as error:
                    self._complain(error)
                    pause_s = PERIOD_S
                except (ConfigError, sqlite3.Error, OSError) as error:
                    self._complain(error)
                    # A full disk or a lock passes; a damaged file does not.
                    is_passing = isinstance(error, sqlite3.OperationalError | OSError | ConfigError)
                    self._leave(is_broken=not is_passing)
                    pause_s = RETRY_S
                except Exception:
                    # The past is worth no lead: this coordinator goes on, with another file.
                    log.exception("history: its index failed and is made again")
                    self._leave(is_broken=True)
                    pause_s = RETRY_S
                await self._sleep(pause_s)
        finally:
            self._leave()

    def _complain(self, error: Exception) -> None:
        if self._warn.is_due(str(error)):
            log.warning("history: its index is not read on: %s; retrying", error)

    async def _sleep(self, pause_s: float) -> None:
        """Wait for the next round, or until a question comes."""
        with contextlib.suppress(TimeoutError):
            async with self._clock.timeout(max(pause_s, LEAST_PAUSE_S)):
                await self._kick.wait()
        self._kick.clear()

    def _leave(self, *, is_broken: bool = False) -> None:
        """Leave the index; a broken one is made again."""
        index, self._index, self._damage = self._index, None, None
        if index is not None:
            index.close(is_broken=is_broken)

    async def _round(self) -> float:
        """Read a part of the stream, or drop what it dropped; the pause until the next round."""
        if self._damage is not None:
            raise self._damage
        index = self._index or await self._open()
        began_s = self._clock.now_s()
        tail = await self._history.tail(index.position.sequence, most=READ_LINES)
        self.last_sequence = tail.last
        if tail.identity != index.position.identity:
            await self._in_thread(index.clear, tail.identity)
            return 0.0
        is_other = self._server not in ("", self._history.server)
        self._server = self._history.server
        if is_other or tail.last < index.position.sequence - 1:
            await self._go_back(index, tail)
            return 0.0
        if tail.until >= index.position.sequence:
            await self._in_thread(index.add, tail.messages, until=tail.until)
        has_old = await self._drop(index, tail)
        took_s = self._clock.now_s() - began_s
        return took_s if has_old or tail.until < tail.last else PERIOD_S

    async def _open(self) -> HistoryIndex:
        index: HistoryIndex = await self._in_thread(HistoryIndex, self._path)
        self._index, self._first = index, 0
        return index

    async def _go_back(self, index: HistoryIndex, tail: Tail) -> None:
        """Read the newest lines again."""
        end = min(index.position.sequence, tail.last + 1)
        sequence = max(tail.first, end - AGAIN_LINES)
        found = await self._history.tail(sequence, most=1)
        line = read_line(found.messages[0]) if found.messages else None
        number = 0 if line is None else line.number - 1
        await self._in_thread(index.go_back, number, sequence=sequence)

    async def _drop(self, index: HistoryIndex, tail: Tail) -> bool:
        """Drop the lines that the stream dropped by their age; whether more of them are left."""
        if tail.first <= max(1, self._first):
            return False
        found = await self._history.tail(tail.first, most=1)
        line = read_line(found.messages[0]) if found.messages else None
        has_more = line is not None and bool(await self._in_thread(index.drop, line.number))
        if not has_more:
            self._first = tail.first
        return has_more

    async def caught_up(self, number: int, *, within_s: float) -> int:
        """Wait until the index has a line, for a while; the last line that it has."""
        with contextlib.suppress(TimeoutError):
            async with self._clock.timeout(within_s):
                while self.number < number:
                    self._kick.set()
                    await self._clock.sleep(KICK_S)
        return self.number

    async def ask(self, question: Callable[[HistoryIndex], T]) -> T:
        """Ask the index something.

        Raises:
            Unavailable: there is no index now, or the answer takes too long.
        """
        index = self._index
        if index is None:
            raise Unavailable("history: its index is not open; see the coordinator's log")
        try:
            answer: T = await self._in_thread(question, index)
        except sqlite3.Error as error:
            if type(error) is sqlite3.DatabaseError and index is self._index:
                self._damage = error
                self._kick.set()
            raise Unavailable(f"history: {error}") from error
        return answer
