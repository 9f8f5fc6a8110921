"""XIDs from the kernel log: each line gives a GPU and a code; a reader that dies is replaced.

The log has XIDs that NVML lacks: those that the driver does not count as critical, those of a GPU
that has already dropped off, and those from before NVML answered (DCGM#235; dcgm-exporter#190,
#500).

The log comes from a `journalctl` child, else from /dev/kmsg. The journal is preferred: its group
grants less than access to the kernel's own ring buffer, and it holds entries from times without a
reader.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct, field

import agent
from agent.gpu.fake.kernel_log import FakeLogSettings
from agent.gpu.wire import pci_address
from agent.settings import KernelLogChoice
from common.children import send_signal
from common.clock import Clock
from common.decoding import UNREADABLE
from common.errors import ProtocolError

KMSG = Path("/dev/kmsg")
JOURNAL_DIRS = (Path("/var/log/journal"), Path("/run/log/journal"))
JOURNALCTL = "journalctl"
END_GRACE_S = 5.0
MAX_LINE_BYTES = 256 * 1024
MAX_RECORD_BYTES = 8192
"""The kernel's own limit of a record of /dev/kmsg (Documentation/ABI/testing/dev-kmsg)."""
MAX_REASON_CHARS = 200


class _Line(Struct):
    """The fields used from a line of `journalctl --output=json` (systemd's Journal JSON Format).

    A message that is not text is a list of bytes; one that is too large, null.
    """

    cursor: str = field(name="__CURSOR")
    message: str | list[int] | None = field(name="MESSAGE", default=None)


_decoder = msgspec.json.Decoder(_Line)
_SEQUENCE = re.compile(rb"[0-9]{1,20}")


def journal_command(place: str) -> tuple[str, ...]:
    """The command that follows the kernel's messages of this boot.

    Without a place it prints the last message first, as the place to continue from.
    """
    start = ("--no-tail", f"--after-cursor={place}") if place else ("--lines=1",)
    return (
        JOURNALCTL, "--dmesg", "--follow", "--quiet", "--no-pager",
        "--output=json", "--output-fields=MESSAGE", *start,
    )  # fmt: skip


def journal_opener(
    clock: Clock, command: Callable[[str], Sequence[str]] = journal_command
) -> LogOpener:
    """Opens a log through a child that writes as `journalctl` does.

    `command` is its command line.
    """

    async def open_log(place: str) -> LogReader:
        process = await asyncio.create_subprocess_exec(
            *command(place),
            # Held open and never written: a child that watches it ends with this agent. journalctl
            # ends as soon as its output has no reader.
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            # `-m` searches the working directory first: a fake is of the agent's own release.
            cwd=Path(agent.__file__).parents[1],
        )
        return JournalReader(process, clock, is_new=not place)

    return open_log


def fake_opener(clock: Clock, fleet: Path) -> LogOpener:
    """Opens the kernel log of fake GPUs; its script begins at the first opening, and goes on."""
    path = str(fleet.resolve())  # the child has another working directory
    first_open_s: float | None = None

    def command(place: str) -> Sequence[str]:
        nonlocal first_open_s
        now_s = clock.now_s()
        if first_open_s is None:
            first_open_s = now_s
        settings = FakeLogSettings(fleet=path, age_s=now_s - first_open_s, place=place)
        return (
            sys.executable,
            "-m",
            "agent.gpu.fake.kernel_log",
            msgspec.json.encode(settings).decode(),
        )

    return journal_opener(clock, command)


class JournalReader:
    """The lines of a running child; `is_new`: its first line was there before."""

    def __init__(self, process: asyncio.subprocess.Process, clock: Clock, *, is_new: bool) -> None:
        assert process.stdout is not None
        self._process = process
        self._stdout = process.stdout
        self._clock = clock
        self._is_first_old = is_new

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def next(self) -> Entry:
        """The next message.

        Raises:
            EOFError: the child has ended; the text is its last output.
            ProtocolError: the line is not one of a journal.
        """
        try:
            data = await self._stdout.readline()
        except ValueError as error:
            raise ProtocolError(f"{JOURNALCTL}: {error}") from None
        if not data.endswith(b"\n"):
            raise EOFError(await self._last_words())
        try:
            line = _decoder.decode(data)
        except UNREADABLE as error:
            raise ProtocolError(f"{JOURNALCTL}: {error}") from None
        is_old, self._is_first_old = self._is_first_old, False
        return Entry(place=line.cursor, message=_text(line.message), is_old=is_old)

    async def _last_words(self) -> str:
        assert self._process.stderr is not None
        said = ""
        with suppress(TimeoutError, ValueError):
            async with self._clock.timeout(END_GRACE_S):
                said = (await self._process.stderr.read(MAX_LINE_BYTES)).decode(errors="replace")
                await self._process.wait()
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        status = self._process.returncode
        ended = "has closed its output" if status is None else f"ended with {status}"
        return f"{JOURNALCTL} {ended}{': ' if lines else ''}{' '.join(lines)[-MAX_REASON_CHARS:]}"

    async def close(self) -> None:
        """Send SIGTERM, and SIGKILL if the child does not end."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            send_signal(self._process, number)
            with suppress(TimeoutError):
                async with self._clock.timeout(END_GRACE_S):
                    await self._process.communicate()
                return
        log.error("kernel log: pid %d does not exit; left behind", self._process.pid)


def _text(message: str | list[int] | None) -> str:
    if isinstance(message, list):
        return bytes(byte & 0xFF for byte in message).decode(errors="replace")
    return message or ""


def kmsg_opener(path: Path = KMSG) -> LogOpener:
    """Opens the kernel's ring buffer, without a child."""

    async def open_log(place: str) -> LogReader:
        return KmsgReader(_open_kmsg(path), place)

    return open_log


def _open_kmsg(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


class KmsgReader:
    """Records of /dev/kmsg by an open file: `priority,sequence,time,flags;message`, one a read.

    Args:
        fd: this object's own from now on.
        place: the sequence number of the last known record; empty for the end of the buffer.

    Raises:
        OSError: the loop cannot wait for the file, as in a container where it is /dev/null.
    """

    pid = None

    def __init__(self, fd: int, place: str) -> None:
        self._fd = fd
        self._known = int(place) if place else -1
        self._has_news = asyncio.Event()
        with suppress(OSError):  # a pipe in a test has no places
            os.lseek(fd, 0, os.SEEK_SET if place else os.SEEK_END)
        try:
            asyncio.get_running_loop().add_reader(fd, self._has_news.set)
        except OSError:
            os.close(fd)
            raise

    async def next(self) -> Entry:
        """The next record; records that the kernel has overwritten are lost.

        Raises:
            OSError: the file cannot be read.
            EOFError: the file has an end, which /dev/kmsg does not have.
            ProtocolError: the data is not a record.
        """
        while True:
            try:
                data = os.read(self._fd, MAX_RECORD_BYTES)
            except BlockingIOError:
                self._has_news.clear()
                await self._has_news.wait()
                continue
            except OSError as error:
                if error.errno == errno.EPIPE:
                    continue
                raise
            if not data:
                raise EOFError(f"{KMSG} has ended")
            sequence, message = kmsg_record(data)
            if sequence > self._known:
                self._known = sequence
                return Entry(place=str(sequence), message=message)

    async def close(self) -> None:
        """Close the file."""
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)


def kmsg_record(data: bytes) -> tuple[int, str]:
    """Sequence number and first line of a record; the lines below are properties of a device.

    Raises:
        ProtocolError: the data is not a record.
    """
    head, semicolon, text = data.partition(b";")
    fields = head.split(b",")
    if not semicolon or len(fields) < 3 or not _SEQUENCE.fullmatch(fields[1]):
        raise ProtocolError(f"{KMSG}: {data[:80]!r} is no record")
    return int(fields[1]), text.partition(b"\n")[0].decode(errors="replace")


def find_kernel_log(
    choice: KernelLogChoice,
    clock: Clock,
    *,
    journal_dirs: Iterable[Path] = JOURNAL_DIRS,
    kmsg: Path = KMSG,
) -> LogOpener | None:
    """Find where to read this machine's kernel log; None where that is impossible.

    With `auto`, a machine that lets this account read neither source logs that once, here. With a
    named source, each report carries the reason why it cannot be read.
    """
    match choice:
        case KernelLogChoice.OFF:
            return None
        case KernelLogChoice.JOURNAL:
            return journal_opener(clock)
        case KernelLogChoice.KMSG:
            return kmsg_opener(kmsg)
        case KernelLogChoice.AUTO:
            if shutil.which(JOURNALCTL) and _can_read_journal(journal_dirs):
                return journal_opener(clock)
            try:
                os.close(_open_kmsg(kmsg))
            except OSError as error:
                log.warning(
                    "XIDs come from NVML alone: this account can read neither the system's journal"
                    " (group systemd-journal) nor %s (%s)",
                    kmsg,
                    error.strerror,
                )
                return None
            return kmsg_opener(kmsg)


def _can_read_journal(directories: Iterable[Path]) -> bool:
    """True if this account may read the system's journal.

    Without the right, journalctl shows less and no error.
    """
    return any(
        os.access(path, os.R_OK)
        for directory in directories
        for path in directory.glob("*/system.journal")
    )


log = logging.getLogger(__name__)

MAX_PENDING_XIDS = 256
"""XIDs that wait for a report; in a storm more would add nothing."""
ENTRIES_PER_TURN = 64
"""After this many entries without a pause other tasks have a turn: reports must not wait."""

# NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
# NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.
# Some have the function behind the device, or a MIG instance; very old drivers lack the `PCI:`.
_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<domain>[0-9a-f]{4,8}):(?P<bus>[0-9a-f]{2}):(?P<device>[0-9a-f]{2})"
    r"(?:\.[0-9a-f])?(?: [^)]*)?\): (?P<code>\d{1,6})\b",
    re.IGNORECASE,
)


class XidLine(Struct, frozen=True):
    """One XID from the kernel log; `agent.gpu.wire` defines the form of the address."""

    pci_address: str
    code: int


class Entry(Struct, frozen=True, kw_only=True):
    """One entry of a log; `place` finds it again in another reading of the same log.

    is_old: it was there before reading began; only its place matters.
    """

    place: str
    message: str
    is_old: bool = False


class LogReader(Protocol):
    """An open log; `agent.gpu.kernel_log` has the real ones."""

    @property
    def pid(self) -> int | None:
        """The child that reads the log; None without one."""
        ...

    async def next(self) -> Entry:
        """The next entry, as soon as there is one.

        Raises:
            OSError, EOFError, ProtocolError: the log cannot be read further; the text gives the
                reason.
        """
        ...

    async def close(self) -> None:
        """Close the log; returns when no part of the reader runs."""
        ...


LogOpener = Callable[[str], Awaitable[LogReader]]
"""Opens the log behind a place, or with an empty one from now on; OSError when it cannot."""


def parse_xid(message: str) -> XidLine | None:
    """The XID in a kernel message, or None.

    Only the start of a message counts, because the name of a process may hold any text.
    """
    found = _XID.match(message)
    if found is None:
        return None
    place = (int(found[name], 16) for name in ("domain", "bus", "device"))
    return XidLine(pci_address(*place), int(found["code"]))


class KernelLog:
    """Follows the kernel log in a task of its own; no caller waits for it.

    A reader that ends is opened again after `backoff_s`, doubled up to `max_backoff_s` while
    readers give no entry. It continues behind the last entry, so entries logged in between are not
    lost.
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
        """The child that reads now; None without one."""
        return None if self._reader is None else self._reader.pid

    def start(self) -> None:
        """Start to follow the log, once; a defect of the follower is raised here, not swallowed."""
        if self._task is None:
            self._task = asyncio.create_task(self._follow(), name="kernel-log")
        elif self._task.done():
            self._task.result()

    def take(self) -> tuple[XidLine, ...]:
        """Every XID since the last call, in order."""
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
            log.warning("kernel log: retrying in %g s: %s", backoff_s, reason)
            await self._clock.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, self._max_backoff_s)

    async def _read_until_it_ends(self) -> str:
        """Read entries until the reader ends; return the reason."""
        # A task of its own: a child whose start is interrupted would have no owner.
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
    """Close an open reader, or one that is being opened; a cancellation waits for that."""

    async def close() -> None:
        with suppress(OSError):  # it could not be opened
            await (await opening).close()

    closing = asyncio.create_task(close())
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await asyncio.wait([closing])
        raise
