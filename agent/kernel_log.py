"""XIDs from the kernel log: its lines -> which GPU and code, followed over the death of a reader.

Must not know NVML, nor where the log is read: an opener hands in its entries. The log has what NVML
lacks: XIDs that the driver does not count as critical, of a GPU that is already gone, or of before
NVML answered (DCGM#235; dcgm-exporter#190, #500).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from msgspec import Struct

from agent.pci import pci_address
from common.clock import Clock
from common.errors import ProtocolError

log = logging.getLogger(__name__)

MAX_PENDING_XIDS = 256
"""XIDs that wait for a report; a storm says nothing more after that."""
ENTRIES_PER_TURN = 64
"""After so many entries without a pause everybody else has a turn: reports must not wait."""

# NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
# NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.
# Some have the function behind the device, or a MIG instance; very old drivers lack the `PCI:`.
_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<domain>[0-9a-f]{4,8}):(?P<bus>[0-9a-f]{2}):(?P<device>[0-9a-f]{2})"
    r"(?:\.[0-9a-f])?(?: [^)]*)?\): (?P<code>\d{1,6})\b",
    re.IGNORECASE,
)


class XidLine(Struct, frozen=True):
    """One XID as the kernel tells it; the address as `agent.pci` writes it."""

    pci_address: str
    code: int


class Entry(Struct, frozen=True, kw_only=True):
    """One entry of a log; `place` finds it again in another reading of the same log.

    is_old: was there before anybody began to read; only its place is of interest.
    """

    place: str
    message: str
    is_old: bool = False


class LogReader(Protocol):
    """An open log; `agent.kernel_log_readers` has the real ones."""

    @property
    def pid(self) -> int | None:
        """The child that reads it; None where there is none."""
        ...

    async def next(self) -> Entry:
        """The next entry, as soon as there is one.

        Raises:
            OSError, EOFError, ProtocolError: the log cannot be read on; the text says why.
        """
        ...

    async def close(self) -> None:
        """End it; returns when nothing of it runs."""
        ...


LogOpener = Callable[[str], Awaitable[LogReader]]
"""Opens the log behind a place, or with an empty one from now on; OSError when it cannot."""


def parse_xid(message: str) -> XidLine | None:
    """The XID that a kernel message tells, or None.

    Only a message that begins so: the name of a process may hold anything.
    """
    found = _XID.match(message)
    if found is None:
        return None
    place = (int(found[name], 16) for name in ("domain", "bus", "device"))
    return XidLine(pci_address(*place), int(found["code"]))


class KernelLog:
    """Follows the kernel log in a task of its own; nobody ever waits for it.

    A reader that ends is opened again after `backoff_s`, doubled up to `max_backoff_s` while none
    gives an entry, and goes on behind the last one: what was logged meanwhile is not lost.
    """

    def __init__(
        self,
        open_log: LogOpener,
        clock: Clock,
        *,
        backoff_s: float = 1.0,
        max_backoff_s: float = 60.0,
    ) -> None:
        self._open_log = open_log
        self._clock = clock
        self._backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._place = ""
        self._pending: list[XidLine] = []
        self._error = ""
        self._reader: LogReader | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_entry = False

    @property
    def error(self) -> str:
        """Why the log is not read now; empty while it is."""
        return self._error

    @property
    def child_pid(self) -> int | None:
        """The child that reads now; None where there is none."""
        return None if self._reader is None else self._reader.pid

    def start(self) -> None:
        """Begin to follow it, once; a defect of the follower is raised here, not swallowed."""
        if self._task is None:
            self._task = asyncio.create_task(self._follow(), name="kernel-log")
        elif self._task.done():
            self._task.result()

    def take(self) -> tuple[XidLine, ...]:
        """Every XID since the last call, in their order."""
        taken, self._pending = tuple(self._pending), []
        return taken

    async def close(self) -> None:
        """Stop following; no child is left."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _follow(self) -> None:
        backoff_s = self._backoff_s
        while True:
            self._has_entry = False
            self._error = reason = await self._read_until_it_ends()
            if self._has_entry:
                backoff_s = self._backoff_s
            log.warning("kernel log: read again in %g s: %s", backoff_s, reason)
            await self._clock.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, self._max_backoff_s)

    async def _read_until_it_ends(self) -> str:
        """Returns why there is no more to read."""
        # A task of its own: a child whose start is interrupted would be nobody's.
        opening = asyncio.ensure_future(self._open_log(self._place))
        try:
            reader = await asyncio.shield(opening)
            self._reader = reader
            self._error = ""
            count = 0
            while True:
                self._take(await reader.next())
                count += 1
                if count % ENTRIES_PER_TURN == 0:
                    await asyncio.sleep(0)
        except (OSError, EOFError, ProtocolError) as error:
            return str(error) or repr(error)
        finally:
            self._reader = None
            await _end(opening)

    def _take(self, entry: Entry) -> None:
        self._has_entry = True
        self._place = entry.place
        found = None if entry.is_old else parse_xid(entry.message)
        if found is None:
            return
        log.warning("kernel: %s", entry.message)
        if len(self._pending) < MAX_PENDING_XIDS:
            self._pending.append(found)


async def _end(opening: asyncio.Future[LogReader]) -> None:
    """Close what was opened, or is about to be; a cancellation waits for that."""

    async def close() -> None:
        with suppress(OSError):  # it could not be opened
            await (await opening).close()

    closing = asyncio.create_task(close())
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await asyncio.wait([closing])
        raise
