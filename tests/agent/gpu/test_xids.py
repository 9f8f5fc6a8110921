"""XIDs from NVML and from the kernel log: each is told once, whoever tells it first."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from agent.gpu.kernel_log import Entry, KernelLog, LogReader, XidLine
from agent.gpu.reader import GpuReader, ReaderProcess
from agent.gpu.wire import Sample
from agent.gpu.xids import MAX_KEPT_XIDS, SAME_XID_WINDOW_S, GpuXids, UntoldXids
from agent.telemetry.collectors import GpuCollector, KernelLogCollector, collect_all
from common.messages import GpuReport
from common.model import GpuUuid
from tests.harness.fake_clock import FakeClock

ADDRESSES = {"0000:01:00": GpuUuid("GPU-0"), "0000:02:00": GpuUuid("GPU-1")}


def gpus(*xids: Sequence[int]) -> tuple[GpuReport, ...]:
    """A GPU for each, with these NVML events."""
    return tuple(
        GpuReport(
            uuid=GpuUuid(f"GPU-{index}"),
            index=index,
            gpu_type="H100",
            memory_total_bytes=1,
            xids=tuple(codes),
        )
        for index, codes in enumerate(xids)
    )


def lines(*codes: int, gpu: int = 0) -> tuple[XidLine, ...]:
    """These XIDs of one GPU, as the kernel log names it."""
    return tuple(XidLine(f"0000:{gpu + 1:02x}:00", code) for code in codes)


class Rounds:
    """Looks at two GPUs, one after the other."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._xids = GpuXids()

    def look(
        self, nvml: Sequence[int] = (), logged: Sequence[XidLine] = (), *, after_s: float = 1.0
    ) -> tuple[int, ...]:
        """The XIDs that the first GPU's report has now."""
        self.now_s += after_s
        return self._xids.add(gpus(nvml, ()), logged, ADDRESSES, self.now_s)[0].xids


def test_an_xid_that_both_tell_is_one() -> None:
    """In one look or in two, in either order, and as long as the driver may have hung between."""
    rounds = Rounds()
    assert rounds.look([79], lines(79)) == (79,)
    assert rounds.look([], lines(31)) == (31,)
    assert rounds.look([31], after_s=SAME_XID_WINDOW_S) == ()
    assert rounds.look([48]) == (48,)
    assert rounds.look([], lines(48)) == ()


def test_what_one_of_them_tells_twice_is_two() -> None:
    """Two processes that fail alike are two events and two lines, and the report has two."""
    rounds = Rounds()
    assert rounds.look([13, 13]) == (13, 13)
    assert rounds.look([], lines(13, 13)) == ()
    assert rounds.look([], lines(13)) == (13,)


def test_an_xid_much_later_is_another() -> None:
    """An old one does not swallow what comes after its window."""
    rounds = Rounds()
    assert rounds.look([], lines(79)) == (79,)
    assert rounds.look([79], after_s=SAME_XID_WINDOW_S + 1.0) == (79,)


def test_another_code_or_gpu_is_another_xid() -> None:
    """Only the same code of the same GPU is the same."""
    xids = GpuXids()
    first, second = xids.add(gpus([79], []), (*lines(31), *lines(79, gpu=1)), ADDRESSES, 0.0)
    assert (first.xids, second.xids) == ((79, 31), (79,))


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([13, 31, 79])), max_size=12))
def test_each_event_is_told_once_whatever_the_order(told: list[tuple[bool, int]]) -> None:
    """Within the window the report has as many of a code as the teller that saw more of them."""
    rounds = Rounds()
    found: list[int] = []
    for is_nvml, code in told:
        found += rounds.look([code] if is_nvml else [], () if is_nvml else lines(code), after_s=1.0)
    for code in (13, 31, 79):
        counts = [told.count((is_nvml, code)) for is_nvml in (True, False)]
        assert found.count(code) == max(counts)


def test_a_line_of_a_gpu_that_was_not_seen_yet_waits() -> None:
    """The log may be faster than NVML's first answer; a GPU that is none of ours is left out."""
    xids = GpuXids()
    assert xids.add((), lines(79), {}, 0.0) == ()
    foreign = XidLine("0000:99:00", 13)
    first, second = xids.add(gpus([], []), (foreign, foreign), ADDRESSES, 1.0)
    assert (first.xids, second.xids) == ((79,), ())


def test_what_no_report_has_told_is_kept_for_the_next() -> None:
    """Two looks between two reports are one report's XIDs; what was told is not told again, and
    what came while it was being sent is."""
    untold = UntoldXids()
    first = untold.saw(gpus([79], []))
    later = untold.saw(gpus([31], [13]))
    assert [gpu.xids for gpu in later] == [(79, 31), (13,)]
    untold.told(first)
    assert [gpu.xids for gpu in untold.untold(later)] == [(31,), (13,)]
    untold.told(untold.untold(later))
    assert [gpu.xids for gpu in untold.saw(gpus([], []))] == [(), ()]
    for _ in range(MAX_KEPT_XIDS):
        untold.saw(gpus([1, 2], []))
    assert len(untold.saw(gpus([], []))[0].xids) == MAX_KEPT_XIDS


class OneSample:
    """An NVML child that says the same again and again."""

    pid = 1

    def __init__(self, sample: Sample) -> None:
        self._payload = msgspec.msgpack.encode(sample)

    async def ask(self) -> bytes:
        return self._payload

    def close_input(self) -> None:
        pass

    def urge(self, number: signal.Signals) -> None:
        pass

    async def wait(self) -> int:
        return 0


class OneEntry:
    """A kernel log with one XID, which then dies."""

    pid = 2

    def __init__(self, message: str) -> None:
        self._message = message

    async def next(self) -> Entry:
        message, self._message = self._message, ""
        if not message:
            raise EOFError("journalctl ended with 1")
        return Entry(place="p1", message=message)

    async def close(self) -> None:
        pass


async def test_a_round_has_the_log_s_xids_and_its_fate() -> None:
    """A GPU's report has the XID once, the collector's the reason why the log is not read now."""
    clock = FakeClock()
    sample = Sample(gpus=gpus([], []), uuid_by_pci_address=ADDRESSES)

    async def start() -> ReaderProcess:
        return OneSample(sample)

    async def open_log(place: str) -> LogReader:
        return OneEntry("NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus.")

    reader, log = GpuReader(start, clock), KernelLog(open_log, clock)
    collectors = (GpuCollector(reader, clock, log), KernelLogCollector(log))
    first = await collect_all(collectors, clock, 1.0)
    assert [report.is_success for report in first.collectors] == [True, True]
    await asyncio.sleep(0)
    await clock.settle()
    second = await collect_all(collectors, clock, 1.0)
    # Which round the log's entry comes in depends on how soon the GPUs answer; none has it twice.
    told = [[gpu.xids for gpu in each.gpus] for each in (first, second)]
    assert sorted(told) == [[(), ()], [(), (79,)]]
    [_, fared] = second.collectors
    assert (fared.name, fared.error) == ("kernel_log", "journalctl ended with 1")
    await log.close()
    await reader.close()


@given(st.lists(st.tuples(st.sampled_from([13, 79]), st.booleans()), max_size=20))
def test_every_report_tells_how_often_each_xid_was_seen(looks: list[tuple[int, bool]]) -> None:
    """Whichever reports are sent or lost: the counts are of all looks, so the last is enough."""
    untold, seen = UntoldXids(), Counter[int]()
    for code, is_sent in looks:
        seen[code] += 1
        told = untold.saw(gpus([code]))
        if is_sent:
            untold.told(told)
        [gpu] = untold.untold(gpus(()))
        assert {one.code: one.count for one in gpu.xid_counts} == seen
