"""The parent of the NVML child: what a node says while its driver hangs, crashes or comes back."""

from __future__ import annotations

import asyncio
import signal
from itertools import pairwise

import pytest

from agent.gpu.reader import GpuReader, ReaderProcess
from agent.gpu.wire import HEADER, Sample, frame_of, payload_bytes
from common.errors import ProtocolError, Unavailable
from common.messages import GpuHealth, GpuReport
from common.model import GpuUuid
from tests.harness.fake_clock import FakeClock

DEADLINE_S = 1.0
RESTART_AFTER_S = 30.0
MAX_RESTART_AFTER_S = 100.0
END_GRACE_S = 5.0
BACKOFF_S = 2.0


def gpu(index: int, *, busy_ratio: float = 0.5, xids: tuple[int, ...] = ()) -> GpuReport:
    return GpuReport(
        uuid=GpuUuid(f"GPU-{index}"),
        index=index,
        gpu_type="H100",
        memory_total_bytes=80,
        memory_used_bytes=40,
        gpu_busy_ratio=busy_ratio,
        xids=xids,
    )


class ModelProcess:
    """A child whose answers the test gives, and that ends at the signal it is told to."""

    def __init__(self, pid: int, ends_at: str = "close_input") -> None:
        self.pid = pid
        self.ends_at = ends_at
        self.signals: list[str] = []
        self._answers: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self._ended = asyncio.Event()

    def answer(self, *gpus: GpuReport, error: str = "", lost_indices: tuple[int, ...] = ()) -> None:
        sample = Sample(gpus=gpus, error=error, lost_indices=lost_indices)
        self._answers.put_nowait(frame_of(sample)[HEADER.size :])

    def answer_bytes(self, payload: bytes) -> None:
        self._answers.put_nowait(payload)

    def crash(self) -> None:
        self._answers.put_nowait(EOFError())
        self._ended.set()

    async def ask(self) -> bytes:
        answer = await self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close_input(self) -> None:
        self._signal("close_input")

    def urge(self, number: signal.Signals) -> None:
        self._signal(number.name)

    async def wait(self) -> int:
        await self._ended.wait()
        return 0

    def _signal(self, name: str) -> None:
        self.signals.append(name)
        if name == self.ends_at:
            self._ended.set()


class Harness:
    """A reader on a fake clock, and every child that it has started."""

    def __init__(self, ends_at: str = "close_input") -> None:
        self.clock = FakeClock()
        self.children: list[ModelProcess] = []
        self.starts_at_s: list[float] = []
        self.start_failures: list[OSError] = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        self._ends_at = ends_at
        self.reader = GpuReader(
            self._start,
            self.clock,
            deadline_s=DEADLINE_S,
            restart_after_s=RESTART_AFTER_S,
            max_restart_after_s=MAX_RESTART_AFTER_S,
            end_grace_s=END_GRACE_S,
            backoff_s=BACKOFF_S,
            max_backoff_s=4 * BACKOFF_S,
        )

    async def _start(self) -> ReaderProcess:
        self.starts_at_s.append(self.clock.now_s())
        failure = self.start_failures.pop() if self.start_failures else None
        if failure is None:
            self.children.append(ModelProcess(len(self.children) + 1, self._ends_at))
        await self.may_start.wait()  # it runs, and its pipes are not connected yet
        if failure is not None:
            raise failure
        return self.children[-1]

    async def ask(self) -> asyncio.Task[tuple[GpuReport, ...]]:
        """A sample that waits for its answer."""
        task = asyncio.create_task(self.reader.sample())
        await self.clock.settle()
        return task

    async def sample(self, *gpus: GpuReport, error: str = "") -> tuple[GpuReport, ...]:
        """A sample that the present child answers."""
        task = await self.ask()
        self.children[-1].answer(*gpus, error=error)
        return await task

    async def sample_unanswered(self) -> tuple[GpuReport, ...]:
        """A sample whose deadline passes."""
        task = await self.ask()
        await self.clock.advance(DEADLINE_S)
        return await task


async def test_an_answer_is_the_sample() -> None:
    """What the child says within the deadline is what the node says."""
    harness = Harness()
    assert await harness.sample(gpu(0), gpu(1)) == (gpu(0), gpu(1))
    assert harness.reader.error == ""
    await harness.reader.close()


async def test_a_node_whose_only_gpu_is_lost_unseen_tells_its_index_until_silence() -> None:
    """The reader has no name for it, and that is no failure of the reader."""
    harness = Harness()
    task = await harness.ask()
    harness.children[-1].answer(error="GPU 0 was never seen", lost_indices=(0,))
    assert await task == ()
    assert list(harness.reader.lost_indices) == [0]
    assert harness.reader.error == "GPU 0 was never seen"
    with pytest.raises(Unavailable):
        await harness.sample_unanswered()
    assert not list(harness.reader.lost_indices)
    await harness.reader.close()


async def test_silence_is_unresponsive_and_says_nothing_else() -> None:
    """Without an answer a GPU keeps its name; a stale busy share or memory is never repeated."""
    harness = Harness()
    await harness.sample(gpu(0))
    assert await harness.sample_unanswered() == (
        GpuReport(
            uuid=GpuUuid("GPU-0"),
            index=0,
            gpu_type="H100",
            memory_total_bytes=80,
            health=GpuHealth.UNRESPONSIVE,
            processes=None,
        ),
    )
    assert "1 s" in harness.reader.error
    await harness.reader.close()


async def test_a_silent_child_is_waited_for_before_anything_is_done_to_it() -> None:
    """Short of the restart limit a hanging child gets no signal, and its recovery is seen."""
    harness = Harness()
    await harness.sample(gpu(0))
    await harness.sample_unanswered()
    await harness.clock.advance(RESTART_AFTER_S - 2 * DEADLINE_S)
    assert harness.children[0].signals == []
    assert await harness.sample(gpu(0)) == (gpu(0),)
    assert len(harness.children) == 1
    await harness.reader.close()


async def test_events_of_a_late_answer_are_in_the_next_report() -> None:
    """An XID that came with an answer nobody waited for is still reported, and once."""
    harness = Harness()
    await harness.sample(gpu(0))
    await harness.sample_unanswered()
    harness.children[0].answer(gpu(0, xids=(79,)))
    await harness.clock.settle()
    (late,) = await harness.sample(gpu(0, xids=(31,)))
    assert late.xids == (79, 31)
    (after,) = await harness.sample(gpu(0))
    assert after.xids == ()
    await harness.reader.close()


async def test_a_child_stuck_for_long_is_replaced_in_steps() -> None:
    """Closing its input comes first, then SIGTERM, and SIGKILL only when both did not help."""
    harness = Harness(ends_at="SIGKILL")
    await harness.sample(gpu(0))
    await harness.sample_unanswered()
    await harness.clock.advance(RESTART_AFTER_S - DEADLINE_S)
    stuck = harness.children[0]
    assert stuck.signals == ["close_input"]
    await harness.clock.advance(END_GRACE_S)
    assert stuck.signals == ["close_input", "SIGTERM"]
    await harness.clock.advance(END_GRACE_S)
    assert stuck.signals == ["close_input", "SIGTERM", "SIGKILL"]
    assert len(harness.children) == 1
    await harness.clock.advance(BACKOFF_S)
    assert len(harness.children) == 2
    harness.children[1].ends_at = "close_input"
    assert await harness.sample(gpu(0)) == (gpu(0),)
    await harness.reader.close()


async def pause_before_the_end(harness: Harness) -> float:
    """Seconds that the present child, which says nothing, is given until it is asked to end."""
    asked_at_s = harness.clock.now_s()
    task = await harness.ask()
    child = harness.children[-1]
    while not child.signals:
        await harness.clock.advance(1.0)
    await asyncio.gather(task, return_exceptions=True)
    return harness.clock.now_s() - asked_at_s


async def test_a_child_that_has_never_answered_is_given_longer_than_the_one_before_it() -> None:
    """However slowly a starved machine starts it, or a driver opens, one gets there in the end; and
    once one has answered, silence is a hang again."""
    harness = Harness()
    given_s: list[float] = []
    for _ in range(4):
        given_s.append(await pause_before_the_end(harness))
        await harness.clock.advance(END_GRACE_S + 4 * BACKOFF_S)
    assert given_s == [
        RESTART_AFTER_S, 2 * RESTART_AFTER_S, MAX_RESTART_AFTER_S, MAX_RESTART_AFTER_S
    ]  # fmt: skip
    assert await harness.sample(gpu(0)) == (gpu(0),)
    assert await pause_before_the_end(harness) == RESTART_AFTER_S
    await harness.clock.advance(END_GRACE_S + 4 * BACKOFF_S)
    assert await pause_before_the_end(harness) == RESTART_AFTER_S
    await harness.reader.close()


async def test_a_child_that_ends_by_itself_makes_none_of_its_followers_wait_longer() -> None:
    """A crash says nothing of how long an answer takes."""
    harness = Harness()
    for _ in range(3):
        task = await harness.ask()
        harness.children[-1].crash()
        await asyncio.gather(task, return_exceptions=True)
        await harness.clock.advance(4 * BACKOFF_S)
    assert await pause_before_the_end(harness) == RESTART_AFTER_S
    await harness.reader.close()


async def test_a_child_that_even_sigkill_does_not_end_is_left_behind() -> None:
    """A process that the kernel holds does not keep the node from a new reader."""
    harness = Harness(ends_at="never")
    await harness.sample(gpu(0))
    await harness.sample_unanswered()
    await harness.clock.advance(RESTART_AFTER_S + 3 * END_GRACE_S + BACKOFF_S)
    assert len(harness.children) == 2
    harness.children[1].ends_at = "close_input"
    assert await harness.sample(gpu(0)) == (gpu(0),)
    await harness.reader.close()


async def test_a_crash_is_said_at_once_and_healed_after_the_backoff() -> None:
    """A child that ends makes its GPUs unresponsive without waiting for a deadline."""
    harness = Harness()
    await harness.sample(gpu(0))
    task = await harness.ask()
    harness.children[0].crash()
    assert [report.health for report in await task] == [GpuHealth.UNRESPONSIVE]
    assert "ended" in harness.reader.error
    assert (await harness.reader.sample())[0].health is GpuHealth.UNRESPONSIVE
    await harness.clock.advance(BACKOFF_S)
    assert await harness.sample(gpu(0)) == (gpu(0),)
    await harness.reader.close()


async def test_crash_after_crash_waits_longer_each_time() -> None:
    """The pause doubles up to its limit, and is short again after a good answer."""
    harness = Harness()
    harness.start_failures = [OSError(f"no memory, try {number}") for number in range(4)]
    with pytest.raises(Unavailable, match="no memory"):
        await harness.reader.sample()
    await harness.clock.advance(11 * BACKOFF_S)
    pauses_s = [later - earlier for earlier, later in pairwise(harness.starts_at_s)]
    assert pauses_s == [BACKOFF_S, 2 * BACKOFF_S, 4 * BACKOFF_S, 4 * BACKOFF_S]
    await harness.sample(gpu(0))
    crashed_at_s = harness.clock.now_s()
    harness.children[-1].crash()
    await harness.ask()
    await harness.clock.advance(BACKOFF_S)
    assert harness.starts_at_s[5:] == [crashed_at_s + BACKOFF_S]
    await harness.reader.close()


async def test_a_child_that_cannot_start_is_tried_again() -> None:
    """No fork, no memory: the reader says so and goes on trying."""
    harness = Harness()
    harness.start_failures.append(OSError("out of processes"))
    with pytest.raises(Unavailable, match="out of processes"):
        await harness.reader.sample()
    await harness.clock.advance(BACKOFF_S)
    assert await harness.sample(gpu(0)) == (gpu(0),)
    await harness.reader.close()


async def test_a_gpu_that_a_new_child_does_not_find_is_lost() -> None:
    """What one child saw is not forgotten with it: the next one's shorter list means a loss."""
    harness = Harness()
    await harness.sample(gpu(0), gpu(1))
    task = await harness.ask()
    harness.children[0].crash()
    await task
    await harness.clock.advance(BACKOFF_S)
    reports = await harness.sample(gpu(0))
    assert [report.health for report in reports] == [GpuHealth.OK, GpuHealth.LOST]
    assert reports[1].uuid == "GPU-1"
    await harness.reader.close()


async def test_an_error_of_the_library_is_not_no_gpus() -> None:
    """When NVML as a whole fails, known GPUs stay in the report and the reason is told."""
    harness = Harness()
    await harness.sample(gpu(0))
    reports = await harness.sample(error="NVML: Driver Not Loaded")
    assert [report.health for report in reports] == [GpuHealth.UNRESPONSIVE]
    assert harness.reader.error == "NVML: Driver Not Loaded"
    await harness.reader.close()


async def test_a_node_that_never_saw_a_gpu_says_why() -> None:
    """Before the first answer there is nothing to report, so the sample is an error."""
    harness = Harness()
    with pytest.raises(Unavailable, match="did not answer"):
        await harness.sample_unanswered()
    await harness.reader.close()


async def test_a_child_that_talks_nonsense_is_replaced() -> None:
    """After a payload that is no sample the stream cannot be trusted any more."""
    harness = Harness()
    await harness.sample(gpu(0))
    task = await harness.ask()
    harness.children[0].answer_bytes(b"\xc1")
    assert (await task)[0].health is GpuHealth.UNRESPONSIVE
    await harness.clock.advance(BACKOFF_S)
    assert len(harness.children) == 2
    await harness.reader.close()


async def test_closing_ends_the_child_and_the_reader() -> None:
    """A closed reader leaves no child, answers no sample, and may be closed again."""
    harness = Harness()
    await harness.sample(gpu(0))
    await harness.reader.close()
    await harness.reader.close()
    assert harness.children[0].signals == ["close_input"]
    assert harness.reader.child_pid is None
    with pytest.raises(Unavailable, match="closed"):
        await harness.reader.sample()


async def test_a_child_whose_start_is_interrupted_is_ended_in_good_order() -> None:
    """It runs already when the reader is closed: it is waited for and asked, not left or killed."""
    harness = Harness()
    harness.may_start.clear()
    sampling = await harness.ask()
    closing = asyncio.create_task(harness.reader.close())
    await harness.clock.settle()
    harness.may_start.set()
    await closing
    assert [child.signals for child in harness.children] == [["close_input"]]
    await harness.clock.advance(DEADLINE_S)
    with pytest.raises(Unavailable):
        await sampling


async def test_a_start_that_fails_while_the_reader_is_closed_is_nobodys_business() -> None:
    """There is no child to end, and closing says nothing of it."""
    harness = Harness()
    harness.may_start.clear()
    harness.start_failures.append(OSError("out of processes"))
    sampling = await harness.ask()
    closing = asyncio.create_task(harness.reader.close())
    await harness.clock.settle()
    harness.may_start.set()
    await closing
    assert harness.children == []
    await harness.clock.advance(DEADLINE_S)
    with pytest.raises(Unavailable):
        await sampling


def test_a_frame_too_large_is_refused_before_it_is_read() -> None:
    """A length that no sample can have means that the stream is out of step."""
    with pytest.raises(ProtocolError, match="frame"):
        payload_bytes(b"\xff\xff\xff\xff")
