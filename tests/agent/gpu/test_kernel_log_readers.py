"""Who reads the kernel log: real children as journalctl is one, /dev/kmsg, and the fake log."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.gpu.fake.fleet import FakeFleet, parse_fleet
from agent.gpu.fake.kernel_log import FakeLogSettings, lines_of, written
from agent.gpu.kernel_log import (
    Entry,
    KernelLog,
    KmsgReader,
    LogOpener,
    XidLine,
    fake_opener,
    find_kernel_log,
    journal_command,
    journal_opener,
    kmsg_opener,
    parse_xid,
)
from agent.gpu.reader import GpuReader, ReaderProcess
from agent.settings import KernelLogChoice
from agent.telemetry.collectors import CostCollector, build_collectors
from agent.telemetry.page_fetch import page_fetcher
from common.clock import SystemClock
from common.errors import ProtocolError
from tests.harness.fake_clock import FakeClock
from tests.harness.node.workers import is_alive
from tests.tables import each_row

LIMIT_S = 20.0
GPU0 = "0000:3b:00"
XID79 = f"NVRM: Xid (PCI:{GPU0}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
XID13 = f"NVRM: Xid (PCI:{GPU0}): 13, pid=4711, name=python, Graphics Exception: ESR 0x505730"


# --- real children -----------------------------------------------------------------------------


def script(*lines: object, then: str = "time.sleep(3600)") -> Sequence[str]:
    """A program that writes lines as journalctl does and then does something."""
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    code = f"import sys, time; sys.stdout.write({text!r}); sys.stdout.flush(); {then}"
    return (sys.executable, "-I", "-S", "-c", code)


def line(cursor: str, message: object) -> dict[str, object]:
    """One line of `journalctl --output=json --output-fields=MESSAGE`."""
    return {"__CURSOR": cursor, "__REALTIME_TIMESTAMP": "1", "_BOOT_ID": "b", "MESSAGE": message}


class Children:
    """A log whose readers are these programs in turn, by the places they were asked for."""

    def __init__(self, *programs: Sequence[str]) -> None:
        self.places: list[str] = []
        self._programs = list(programs)
        self.clock = SystemClock()
        self.open = journal_opener(self.clock, self._command)

    def _command(self, place: str) -> Sequence[str]:
        self.places.append(place)
        return self._programs.pop(0) if len(self._programs) > 1 else self._programs[0]


@asynccontextmanager
async def following(open_log: LogOpener) -> AsyncIterator[KernelLog]:
    """A follower on a real log, tried again at once."""
    log = KernelLog(open_log, SystemClock(), backoff_s=0.01, max_backoff_s=0.01)
    log.start()
    try:
        yield log
    finally:
        await log.close()


async def until(fact: Callable[[], bool], what: str) -> None:
    """Return when it is so."""
    clock = SystemClock()
    try:
        async with clock.timeout(LIMIT_S):
            while not fact():
                await clock.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not in {LIMIT_S:g} s: {what}") from None


async def taken(log: KernelLog, count: int) -> list[XidLine]:
    """So many XIDs, as soon as they are there."""
    found: list[XidLine] = []

    def is_there() -> bool:
        found.extend(log.take())
        return len(found) >= count

    await until(is_there, f"{count} XIDs, not {found}")
    return found


async def test_the_lines_of_a_child_are_read() -> None:
    """The first is of before; text, bytes and nothing at all are messages; then it is killed and
    another one goes on from the last place."""
    children = Children(
        script(
            line("c0", XID79),
            line("c1", XID13),
            line("c2", list(XID79.encode() + b"\xff")),
            line("c3", None),
        ),
        script(line("c4", XID13)),
    )
    async with following(children.open) as log:
        assert [found.code for found in await taken(log, 2)] == [13, 79]
        pid = log.child_pid
        assert pid is not None
        os.kill(pid, 9)
        assert [found.code for found in await taken(log, 1)] == [13]
        second = log.child_pid
        assert children.places == ["", "c3"]
    assert second is not None
    assert not is_alive(pid)
    assert not is_alive(second)


@each_row(
    ("program", "words"),
    [
        (script(then="sys.exit('No journal files were opened')"), "ended with 1: No journal files"),
        (script("no json"), "journalctl: "),
        (script({"MESSAGE": "no cursor"}), "__CURSOR"),
        (script(then="sys.stdout.write('x' * 2_000_000)"), "journalctl: "),
        (("/nonexistent/journalctl",), "No such file"),
    ],
    ids=["last words", "no json", "no cursor", "endless line", "no program"],
)
async def test_a_child_that_is_no_journal_is_an_error_in_words(
    program: Sequence[str], words: str
) -> None:
    """What it said, or what was wrong with it, is the collector's error; it is tried again."""
    children = Children(program)
    async with following(children.open) as log:
        await until(lambda: words in log.error, words)
        await until(lambda: len(children.places) > 1, "another try")


async def test_a_child_that_ignores_sigterm_is_killed() -> None:
    """Nothing of a follower that was closed runs on."""
    stubborn = (
        "import signal; signal.signal(15, signal.SIG_IGN); print('{}', flush=True); "
        "time.sleep(3600)"
    )
    clock = FakeClock()
    reader = await journal_opener(clock, lambda _place: script(line("c0", ""), then=stubborn))("")
    pid = reader.pid
    assert pid is not None
    async with asyncio.timeout(LIMIT_S):
        await reader.next()
        with pytest.raises(ProtocolError):
            await reader.next()  # its second line comes once it is deaf
    closing = asyncio.create_task(reader.close())
    await until(lambda: clock.next_deadline_s is not None, "the grace")
    await clock.advance(5.0)
    async with asyncio.timeout(LIMIT_S):
        await closing
    assert not is_alive(pid)


async def test_what_the_child_costs_is_the_agent_s_cost() -> None:
    """It is Aryl's on this node as the NVML child is."""

    async def no_child() -> ReaderProcess:
        raise OSError("no NVML child in this test")

    clock = SystemClock()
    async with following(Children(script(line("c0", ""))).open) as log:
        gpus = GpuReader(no_child, clock)
        collectors = build_collectors(gpus, clock, fetch=page_fetcher(clock), kernel_log=log)
        [cost] = [one for one in collectors if isinstance(one, CostCollector)]
        await until(lambda: log.child_pid is not None, "a child")
        await cost.collect()
        assert cost.child_cost.rss_bytes > 1 << 20
    await cost.collect()
    assert cost.child_cost.rss_bytes == 0


@each_row("turns", range(0, 40, 3))
async def test_a_follower_that_is_closed_at_any_moment_leaves_no_child(turns: int) -> None:
    """Also while a child is just being started, or ended for being no journal."""
    log = KernelLog(Children(script("no json")).open, SystemClock(), backoff_s=0.0)
    log.start()
    for _ in range(turns):
        await asyncio.sleep(0)
    await log.close()
    # A child that nobody waited for is an unraisable ResourceWarning, which is an error here.
    gc.collect()


def test_the_journal_is_asked_for_what_is_new() -> None:
    """Without a place for the last message as one, with it for all that came behind it."""
    first, again = journal_command(""), journal_command("s=1;i=2")
    assert first[:2] == again[:2] == ("journalctl", "--dmesg")
    assert "--lines=1" in first
    assert {"--no-tail", "--after-cursor=s=1;i=2"} <= set(again)
    assert "--lines=1" not in again


# --- /dev/kmsg ---------------------------------------------------------------------------------


def record(sequence: int, message: str) -> bytes:
    """As the kernel writes one: `Documentation/ABI/testing/dev-kmsg`."""
    return f"4,{sequence},5140900,-,caller=T1;{message}\n SUBSYSTEM=pci\n".encode()


async def test_the_kernel_s_buffer_is_read_record_by_record() -> None:
    """Each read is one record; those that are known already are passed over."""
    read, write = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)  # one packet a read, as /dev/kmsg has it
    reader = KmsgReader(read, "6")
    os.write(write, record(6, XID79))
    os.write(write, record(7, XID13))
    assert await reader.next() == Entry(place="7", message=XID13)
    waiting = asyncio.create_task(reader.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    os.write(write, record(8, "noise"))
    async with asyncio.timeout(LIMIT_S):
        assert await waiting == Entry(place="8", message="noise")
    os.write(write, b"no record")
    with pytest.raises(ProtocolError, match="no record"):
        await reader.next()
    os.close(write)
    with pytest.raises(EOFError):
        await reader.next()
    await reader.close()


async def test_the_real_kernel_s_buffer_is_read() -> None:
    """From its first record on, as this machine has it."""
    try:
        reader = await kmsg_opener()("-1")
    except OSError as error:
        pytest.skip(f"/dev/kmsg: {error.strerror}")
    async with asyncio.timeout(LIMIT_S):
        first, second = await reader.next(), await reader.next()
    await reader.close()
    assert int(second.place) > int(first.place)
    assert first.message


# --- choosing ----------------------------------------------------------------------------------


def test_a_log_that_this_account_cannot_read_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`auto` goes on with NVML alone; what is named is tried all the same."""
    clock, nowhere = SystemClock(), tmp_path / "kmsg"
    found = find_kernel_log(KernelLogChoice.AUTO, clock, journal_dirs=[tmp_path], kmsg=nowhere)
    assert found is None
    [said] = caplog.messages
    assert "XIDs come from NVML alone" in said
    assert "No such file" in said
    assert find_kernel_log(KernelLogChoice.OFF, clock) is None
    assert find_kernel_log(KernelLogChoice.JOURNAL, clock, journal_dirs=[tmp_path]) is not None
    assert find_kernel_log(KernelLogChoice.KMSG, clock, kmsg=nowhere) is not None
    assert caplog.messages == [said]


async def test_the_kernel_s_buffer_is_taken_where_there_is_no_journal(tmp_path: Path) -> None:
    """A file that can be opened is enough for `auto`; a journal of the system wins over it."""
    kmsg = tmp_path / "kmsg"
    os.mkfifo(kmsg)
    clock = SystemClock()
    found = find_kernel_log(KernelLogChoice.AUTO, clock, journal_dirs=[tmp_path], kmsg=kmsg)
    assert found is not None
    reader = await found("")
    assert isinstance(reader, KmsgReader)
    await reader.close()


# --- the fake ----------------------------------------------------------------------------------

FLEET = """
gpu = [{count = 2, model = "H100", memory_bytes = 80000}]
fault = [
  {kind = "xid", gpu = 1, value = 13, at_s = 5.0, told_by = "kernel_log"},
  {kind = "xid", gpu = 0, value = 79, at_s = 2.0, told_by = "both"},
  {kind = "xid", gpu = 0, value = 31, at_s = 3.0},
]
"""


def fake_log(fleet: FakeFleet, *, age_s: float = 0.0, place: str = "") -> list[tuple[float, Entry]]:
    """Everything that a reader gets, and when after it began."""
    now_s = 0.0

    def wait(delay_s: float) -> bool:
        nonlocal now_s
        now_s += delay_s
        return now_s < 1000.0

    settings = FakeLogSettings(fleet="", age_s=age_s, place=place)
    found: list[tuple[float, Entry]] = []
    for text in written(lines_of(fleet), settings, wait):
        values = json.loads(text)
        found.append((now_s, Entry(place=values["__CURSOR"], message=values["MESSAGE"])))
    return found


def codes(found: list[tuple[float, Entry]]) -> list[tuple[float, int]]:
    """The XIDs among them."""
    parsed = [(at_s, parse_xid(entry.message)) for at_s, entry in found]
    return [(at_s, xid.code) for at_s, xid in parsed if xid is not None]


def test_the_fake_log_is_a_log() -> None:
    """First a line of before, then each XID that it tells when it is due; one that is opened again
    goes on behind its place, also with what was due meanwhile."""
    fleet = parse_fleet(FLEET)
    first = fake_log(fleet)
    assert parse_xid(first[0][1].message) is None
    assert codes(first) == [(2.0, 79), (5.0, 13)]
    assert codes(fake_log(fleet, age_s=4.0, place=first[0][1].place)) == [(0.0, 79), (1.0, 13)]
    assert codes(fake_log(fleet, age_s=4.0, place=first[1][1].place)) == [(1.0, 13)]
    later = fake_log(fleet, age_s=4.0)
    assert codes(later[1:]) == [(1.0, 13)]


@pytest.mark.slow
async def test_the_fake_log_is_read_by_the_real_reader(tmp_path: Path) -> None:
    """A child of its own, killed and started again: each XID once; it ends with its reader."""
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(FLEET.replace("5.0", "0.1").replace("2.0", "0.0"))
    async with following(fake_opener(SystemClock(), fleet)) as log:
        found = await taken(log, 1)
        pid = log.child_pid
        assert pid is not None
        os.kill(pid, 9)
        found += await taken(log, 2 - len(found)) if len(found) < 2 else []
        await until(lambda: log.child_pid not in (None, pid), "another child")
        second = log.child_pid
    assert [(xid.pci_address, xid.code) for xid in found] == [
        ("0000:01:00", 79),
        ("0000:02:00", 13),
    ]
    assert second is not None
    assert not is_alive(second)


async def test_a_kernel_log_that_cannot_be_waited_for_keeps_no_descriptor() -> None:
    """A container may have /dev/null there: each retry would cost the agent a descriptor."""
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count
    with pytest.raises(PermissionError):
        await kmsg_opener(Path(os.devnull))("")
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - as above
