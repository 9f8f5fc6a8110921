"""The kernel log: what is an XID in it, and that following it costs and delays nobody."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from agent.gpu.kernel_log import (
    MAX_PENDING_XIDS,
    Entry,
    KernelLog,
    LogReader,
    XidLine,
    parse_xid,
)
from common.errors import ProtocolError
from tests.harness.fake_clock import FakeClock
from tests.tables import each_row

GPU0 = "0000:3b:00"
XID79 = f"NVRM: Xid (PCI:{GPU0}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
XID13 = f"NVRM: Xid (PCI:{GPU0}): 13, pid=4711, name=python, Graphics Exception: ESR 0x505730"


# --- lines -------------------------------------------------------------------------------------


@each_row(
    ("message", "code"),
    [
        (XID79, 79),
        (XID13, 13),
        (f"NVRM: Xid (PCI:{GPU0}): 79, GPU has fallen off the bus.", 79),
        (f"NVRM: Xid ({GPU0}): 31, Ch 00000008, engmask 00000101, intr 10000000", 31),
        ("NVRM: Xid (PCI:0000:3B:00.0): 154, GPU recovery action changed from 0x0 to 0x1", 154),
        ("NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 43, pid=1, name=x", 43),
        ("NVRM: Xid (PCI:00000000:3b:00): 48, An uncorrectable double bit error", 48),
    ],
)
def test_an_xid_is_read_in_each_form_of_the_driver(message: str, code: int) -> None:
    """With a process and without, of a MIG instance, and with the addresses of old drivers."""
    assert parse_xid(message) == XidLine(GPU0, code)


@each_row(
    "message",
    [
        "",
        "usb 1-1: new high-speed USB device",
        "NVRM: GPU at PCI:0000:3b:00: GPU-4b5e1a3c",
        f"python[3]: {XID79}",
        f"NVRM: Xid (PCI:{GPU0}): , pid=1",
        "NVRM: Xid (PCI:3b:00): 79, no domain",
        "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal",
        f"NVRM: Xid (PCI:{GPU0}): 99999999999999999999, no code has so many digits",
    ],
)
def test_another_message_is_no_xid(message: str) -> None:
    """Also one of a switch, and one that only holds the words: a process may be called anything."""
    assert parse_xid(message) is None


# --- following ---------------------------------------------------------------------------------


class ScriptedReader:
    """A log that gives these entries and then does what its test says."""

    pid = 4711

    def __init__(self, entries: Sequence[Entry], end: Exception | None) -> None:
        self._entries = list(entries)
        self._end = end
        self.is_closed = False

    @property
    def is_empty(self) -> bool:
        return not self._entries

    async def next(self) -> Entry:
        if self._entries:
            return self._entries.pop(0)
        if self._end is not None:
            raise self._end
        await asyncio.Event().wait()
        raise AssertionError

    async def close(self) -> None:
        self.is_closed = True


class Harness:
    """A follower whose logs are scripted, one for each time that it opens one."""

    def __init__(self, *readers: ScriptedReader | OSError) -> None:
        self.clock = FakeClock()
        self.places: list[str] = []
        self._readers = list(readers)
        self.log = KernelLog(self._open, self.clock)

    async def _open(self, place: str) -> LogReader:
        self.places.append(place)
        reader = self._readers.pop(0)
        if isinstance(reader, OSError):
            raise reader
        return reader

    @asynccontextmanager
    async def running(self) -> AsyncIterator[KernelLog]:
        """The follower, until the end of the block."""
        self.log.start()
        await self.clock.settle()
        try:
            yield self.log
        finally:
            await self.log.close()


def entry(number: int, message: str = "") -> Entry:
    """One entry, at a place of its own."""
    return Entry(place=f"p{number}", message=message)


async def test_what_was_there_before_is_no_news() -> None:
    """An XID of before the agent began is not told again at each of its starts."""
    old = Entry(place="p0", message=XID79, is_old=True)
    harness = Harness(ScriptedReader([old, entry(1, XID13), entry(2, "noise")], None))
    async with harness.running() as log:
        assert log.take() == (XidLine(GPU0, 13),)
        assert log.take() == ()
        assert (log.error, log.child_pid) == ("", 4711)


async def test_a_reader_that_dies_is_followed_by_one_that_goes_on_behind_it() -> None:
    """The reason is told until there is another reader, and nothing is lost or read twice."""
    first = ScriptedReader([entry(1, XID79), entry(2)], EOFError("journalctl ended with -9"))
    harness = Harness(first, ScriptedReader([entry(3, XID13)], None))
    async with harness.running() as log:
        assert (log.error, log.child_pid) == ("journalctl ended with -9", None)
        assert first.is_closed
        await harness.clock.advance(1.0)
        assert log.error == ""
        assert log.take() == (XidLine(GPU0, 79), XidLine(GPU0, 13))
    assert harness.places == ["", "p2"]


async def test_readers_that_cannot_be_opened_are_tried_less_and_less() -> None:
    """1, 2, 4 s ... at most 60 s apart; one that gave an entry begins that anew."""
    failures = [OSError(13, "Permission denied") for _ in range(8)]
    ended = ScriptedReader([entry(1)], ProtocolError("no line of a journal"))
    harness = Harness(*failures, ended, ScriptedReader([], None))
    async with harness.running() as log:
        began_at_s, tries_s = harness.clock.now_s(), [0.0]
        for count in range(2, 11):
            await harness.clock.advance_until(
                lambda n=count: len(harness.places) == n,  # type: ignore[misc]  # a loop variable
                limit_s=61.0,
            )
            tries_s.append(harness.clock.now_s() - began_at_s)
            if count < 9:
                assert "Permission denied" in log.error
        gaps = [later - earlier for earlier, later in itertools.pairwise(tries_s)]
        assert gaps == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 1.0]


async def test_a_storm_keeps_neither_memory_nor_the_loop() -> None:
    """Of ten thousand XIDs the first ones wait for a report, and others have their turns."""
    storm = ScriptedReader([entry(number, XID79) for number in range(10_000)], None)
    harness = Harness(storm)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while not storm.is_empty:
            turns += 1
            await asyncio.sleep(0)

    bystander = asyncio.create_task(others())
    async with harness.running() as log:
        await bystander
        assert turns >= 100
        assert len(log.take()) == MAX_PENDING_XIDS


async def test_a_defect_of_the_follower_shows() -> None:
    """An error that nobody foresaw is raised where the collector reports it."""
    harness = Harness(ScriptedReader([], ZeroDivisionError("a defect")))
    harness.log.start()
    await harness.clock.settle()
    with pytest.raises(ZeroDivisionError):
        harness.log.start()
