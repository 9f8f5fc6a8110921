"""Where a kernel log is read: from a `journalctl` child, else from /dev/kmsg. An edge.

Must not know what is looked for in it. The journal comes first: its group is a smaller right than
the kernel's own ring buffer, and it holds what was logged while nobody read.
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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct, field

import agent
from agent.fake_kernel_log import FakeLogSettings
from agent.kernel_log import Entry, LogOpener, LogReader
from agent.settings import KernelLogChoice
from common.children import send_signal
from common.clock import Clock
from common.decoding import UNREADABLE
from common.errors import ProtocolError

log = logging.getLogger(__name__)

KMSG = Path("/dev/kmsg")
JOURNAL_DIRS = (Path("/var/log/journal"), Path("/run/log/journal"))
JOURNALCTL = "journalctl"
END_GRACE_S = 5.0
MAX_LINE_BYTES = 256 * 1024
MAX_RECORD_BYTES = 8192
"""The kernel's own limit of a record of /dev/kmsg (Documentation/ABI/testing/dev-kmsg)."""
MAX_REASON_CHARS = 200


class _Line(Struct):
    """What is read of a line of `journalctl --output=json` (systemd's Journal JSON Format).

    A message that is no text is a list of bytes; one that is too large, null.
    """

    cursor: str = field(name="__CURSOR")
    message: str | list[int] | None = field(name="MESSAGE", default=None)


_decoder = msgspec.json.Decoder(_Line)
_SEQUENCE = re.compile(rb"[0-9]{1,20}")


def journal_command(place: str) -> tuple[str, ...]:
    """The command that follows the kernel's messages of this boot.

    Without a place it gives the last message first, as the place from which it goes on.
    """
    start = ("--no-tail", f"--after-cursor={place}") if place else ("--lines=1",)
    return (
        JOURNALCTL, "--dmesg", "--follow", "--quiet", "--no-pager",
        "--output=json", "--output-fields=MESSAGE", *start,
    )  # fmt: skip


def journal_opener(
    clock: Clock, command: Callable[[str], Sequence[str]] = journal_command
) -> LogOpener:
    """A log that a child writes as `journalctl` does; `command` is its command line."""

    async def open_log(place: str) -> LogReader:
        process = await asyncio.create_subprocess_exec(
            *command(place),
            # Held open and never written: a child that watches it ends with this agent. journalctl
            # ends as soon as nobody reads it.
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            # `-m` looks in the working directory first: a fake is of the agent's own release.
            cwd=Path(agent.__file__).parents[1],
        )
        return JournalReader(process, clock, is_new=not place)

    return open_log


def fake_opener(clock: Clock, fleet: Path) -> LogOpener:
    """The kernel log of fake GPUs; its script begins when it is first opened, and goes on."""
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
            "agent.fake_kernel_log",
            msgspec.json.encode(settings).decode(),
        )

    return journal_opener(clock, command)


class JournalReader:
    """The lines of a running child; `is_new`: its first one was there before."""

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
            EOFError: the child has ended; what it said last is the text.
            ProtocolError: a line that is none of a journal.
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
        """SIGTERM, and SIGKILL if that is not heard."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            send_signal(self._process, number)
            with suppress(TimeoutError):
                async with self._clock.timeout(END_GRACE_S):
                    await self._process.communicate()
                return
        log.error("kernel log: pid %d does not end; left behind", self._process.pid)


def _text(message: str | list[int] | None) -> str:
    if isinstance(message, list):
        return bytes(byte & 0xFF for byte in message).decode(errors="replace")
    return message or ""


def kmsg_opener(path: Path = KMSG) -> LogOpener:
    """The kernel's ring buffer, without a child."""

    async def open_log(place: str) -> LogReader:
        return KmsgReader(_open_kmsg(path), place)

    return open_log


def _open_kmsg(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


class KmsgReader:
    """Records of /dev/kmsg by an open file: `priority,sequence,time,flags;message`, one a read.

    Args:
        place: the sequence number of the last one that is known; empty for the end of the buffer.
    """

    pid = None

    def __init__(self, fd: int, place: str) -> None:
        self._fd = fd
        self._known = int(place) if place else -1
        self._has_news = asyncio.Event()
        with suppress(OSError):  # a pipe of a test has no places
            os.lseek(fd, 0, os.SEEK_SET if place else os.SEEK_END)
        asyncio.get_running_loop().add_reader(fd, self._has_news.set)

    async def next(self) -> Entry:
        """The next record; those that the kernel has overwritten are lost.

        Raises:
            OSError: it cannot be read.
            EOFError: it has an end, which /dev/kmsg has not.
            ProtocolError: a record that is none.
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
        """Let go of the file."""
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)


def kmsg_record(data: bytes) -> tuple[int, str]:
    """Sequence number and first line of a record; the lines below are properties of a device.

    Raises:
        ProtocolError: it is no record.
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
    """Where this machine's kernel log is read; None where it is not.

    With `auto`, a machine that lets this account read neither is said once, here; one that was told
    to read a certain one says in each report why it cannot.
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
    """Whether the system's own journal is ours to read; journalctl shows less without a word."""
    return any(
        os.access(path, os.R_OK)
        for directory in directories
        for path in directory.glob("*/system.journal")
    )
