"""Why a worker failed: read in its log by its node, once, and told with its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import psutil
import pytest

from agent.core.state import WorkerFact
from agent.settings import Starter
from agent.shim import files as shim_files
from agent.workers.failure_child import Question, answer
from agent.workers.failure_reader import FailureReader, match_in_child
from agent.workers.runner import WorkerStatus
from agent.workers.shim_runner import ShimRunner, make_runner
from agent.workers.starters import DetachedStarter
from common.clock import SystemClock
from common.errors import ConfigError
from common.failure_rules import TAIL_BYTES, FailureRules, read_rules
from common.failures import Failure, RetryClass
from common.faults import Fault
from common.messages import WorkerPhase
from common.model import NodeRole, StopReason
from tests.harness.fake_clock import FakeClock
from tests.harness.node.life import LifeHarness, key, order, settings
from tests.harness.node.workers import WorkerHarness, kill, make_order, talker

LIMIT_S = 60.0
"""A test that waits this long has failed; nothing here is timed."""


class ReadingHarness(WorkerHarness):
    """Workers whose logs are read."""

    def new_runner(self) -> ShimRunner:
        """With the packaged rules."""
        return ShimRunner(
            self.run_dir,
            clock=self.clock,
            starter=DetachedStarter(self.clock),
            is_root_allowed=True,
            failure_rules=read_rules(),
        )


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncGenerator[ReadingHarness, None]:
    """A run directory with a runner that reads logs."""
    harness = ReadingHarness(tmp_path / "workers")
    try:
        yield harness
    finally:
        await asyncio.shield(harness.close())


def shell(script: str) -> tuple[str, ...]:
    """A worker that is a shell script."""
    return ("sh", "-c", script)


async def test_a_worker_that_fails_is_told_with_what_its_log_says(harness: ReadingHarness) -> None:
    """Standard error is part of the log; the root cause is found under what comes after it."""
    script = "echo 'RuntimeError: CUDA out of memory. Tried' >&2; echo bye; exit 3"
    worker = await harness.start(make_order(*shell(script)))
    status = await harness.until_exited(worker)
    assert status.failure is not None
    assert (status.exit_code, status.failure.reason) == (3, "gpu_out_of_memory")
    assert status.failure.retry == RetryClass.NEVER
    assert status.failure.line == "RuntimeError: CUDA out of memory. Tried"


async def test_a_worker_that_succeeds_has_no_failure(harness: ReadingHarness) -> None:
    """Whatever it wrote."""
    worker = await harness.start(make_order(*shell("echo SyntaxError: not really")))
    assert (await harness.until_exited(worker)).failure is None


async def test_a_worker_that_was_told_to_stop_has_no_failure(harness: ReadingHarness) -> None:
    """Its end was an order, whatever the signal made it say."""
    body = """
import signal
def leave(*_):
    log("Traceback (most recent call last):")
    sys.exit(1)
signal.signal(signal.SIGTERM, leave)
log("up")
time.sleep(60)
"""
    worker = await harness.start(make_order(*talker(body), grace_s=5.0))
    await harness.until_said(worker, "up")
    await harness.runner.stop(worker, StopReason.PREEMPT, 1.0)
    status = await harness.until_exited(worker)
    assert (status.stop_reason, status.failure) == (StopReason.PREEMPT, None)


async def test_a_lost_supervisor_is_its_node_s_fault(harness: ReadingHarness) -> None:
    """Nothing in the log says why a shim died, so nothing is read there."""
    worker = await harness.start(make_order(*shell("echo SyntaxError; sleep 60")))
    await harness.until_said(worker, "SyntaxError")
    record = harness.raw(worker)
    shim = record["shim_pid"]
    assert isinstance(shim, int)
    kill(shim)
    status = await harness.until_exited(worker)
    assert status.error.startswith("shim lost")
    assert status.fault == Fault.SHIM_LOST
    assert status.failure is None


async def test_a_log_that_cannot_be_read_is_its_worker_s_loss_alone(tmp_path: Path) -> None:
    """A job or its disk may be at fault; the look at all the others goes on."""
    (tmp_path / "worker").touch()
    reader = FailureReader(read_rules(), SystemClock())
    failed = WorkerStatus(key=key(), phase=WorkerPhase.EXITED, pid=0, exit_code=3)
    status = await reader.added(failed, tmp_path / "worker")
    assert status.failure is not None
    assert status.failure.line.startswith("log not read: ")
    assert reader.unread_count == 1


async def test_a_log_is_read_once(harness: ReadingHarness) -> None:
    """The statuses of ended workers are asked for again and again until they are forgotten."""
    worker = await harness.start(make_order(*shell("echo SyntaxError: x; exit 1")))
    first = (await harness.until_exited(worker)).failure
    (harness.directory(worker) / shim_files.LOG_FILE).write_text("CUDA out of memory")
    assert first is not None
    assert (await harness.status(worker)).failure == first
    await harness.runner.forget(worker)
    again = await harness.start(make_order(*shell("echo CUDA out of memory; exit 1")))
    found = (await harness.until_exited(again)).failure
    assert found is not None
    assert found.reason == "gpu_out_of_memory"


async def test_only_the_end_of_a_large_log_is_read(harness: ReadingHarness) -> None:
    """A cause that lies farther back is not looked for: the cost of a failure is bounded."""
    lines = TAIL_BYTES // 4
    script = f"echo SyntaxError: x; yes abc | head -n {lines + 1}; exit 1"
    worker = await harness.start(make_order(*shell(script)))
    found = (await harness.until_exited(worker)).failure
    assert found is not None
    assert found.reason == "no_signature"


# --- patterns of a site ---------------------------------------------------------------------------

HANGS = "(a+)+b"
"""Each further `a` of a line without a `b` doubles the time that `re` takes."""


def site_rules(tmp_path: Path, pattern: str) -> FailureRules:
    """The packaged rules and one of a site."""
    path = tmp_path / "rules.toml"
    path.write_text(f'[[signature]]\nreason = "core_dump"\npatterns = ["{pattern}"]\n')
    return read_rules(str(path))


def ended(tmp_path: Path, log: str) -> WorkerStatus:
    """A worker that failed by itself and left this log."""
    (tmp_path / shim_files.LOG_FILE).write_text(log)
    return WorkerStatus(key=key(), phase=WorkerPhase.EXITED, pid=0, exit_code=1)


class Pattern:
    """A child that never answers, and says when it was begun and when it was ended."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.has_ended = asyncio.Event()
        self._answer: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()

    async def __call__(self, question: Question) -> Failure:
        """As `failure_reader.Match`."""
        self.has_begun.set()
        try:
            return await self._answer
        finally:
            self.has_ended.set()


async def test_what_a_site_s_pattern_finds_is_reported(tmp_path: Path) -> None:
    """A process of its own finds what the rules say, with all that they say of it."""
    reader = FailureReader(site_rules(tmp_path, "disk .* gone"), SystemClock(), limit_s=LIMIT_S)
    status = await reader.added(ended(tmp_path, "disk sda is gone\n"), tmp_path)
    assert status.failure is not None
    assert (status.failure.reason, status.failure.line) == ("core_dump", "disk sda is gone")
    assert reader.unread_count == 0


async def test_a_pattern_that_never_ends_is_ended_at_its_limit(tmp_path: Path) -> None:
    """Other tasks have their turns meanwhile; then the failure has no signature and says why, and
    the log is counted and not matched again."""
    clock, pattern = FakeClock(), Pattern()
    rules = site_rules(tmp_path, HANGS)
    reader = FailureReader(rules, clock, match=pattern, limit_s=5.0)
    failed = ended(tmp_path, "a" * 60)
    reading = asyncio.create_task(reader.added(failed, tmp_path))
    await pattern.has_begun.wait()
    await clock.advance(4.9)
    assert not reading.done()
    assert not pattern.has_ended.is_set()
    await clock.advance(0.2)
    failure = (await reading).failure
    assert failure is not None
    assert pattern.has_ended.is_set()
    assert failure.reason == "no_signature"
    assert failure.line == "log not read: the site's patterns took longer than 5 s"
    assert (await reader.added(failed, tmp_path)).failure == failure
    assert reader.unread_count == 1


async def test_the_process_that_matches_is_killed_with_its_question(tmp_path: Path) -> None:
    """It holds a processor: whoever gives its answer up has none left behind."""
    rules = site_rules(tmp_path, HANGS)
    question = Question(files=rules.files, log=b"a" * 60, exit_code=1, error="")
    before = children()
    asking = asyncio.create_task(match_in_child(question))
    while not children() - before:
        assert not asking.done()
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    assert children() == before


async def test_a_process_that_still_matches_at_the_limit_is_killed(tmp_path: Path) -> None:
    """One that has its question and would never answer it."""
    rules, before = site_rules(tmp_path, HANGS), children()
    reader = FailureReader(rules, SystemClock(), limit_s=0.5)
    reading = asyncio.create_task(reader.added(ended(tmp_path, "a" * 60), tmp_path))
    await asyncio.wait([reading], timeout=LIMIT_S)
    left = children() - before
    for pid in left:
        kill(pid)
    assert not left
    failure = (await reading).failure
    assert failure is not None
    assert failure.line == "log not read: the site's patterns took longer than 0.5 s"


def children() -> set[int]:
    """Processes that this one has started and that are not gone."""
    return {child.pid for child in psutil.Process().children()}


async def test_a_process_that_ends_without_an_answer_is_told(tmp_path: Path) -> None:
    """The failure has no signature; a node goes on."""

    async def dies(_: Question) -> Failure:
        return msgspec.msgpack.decode(b"", type=Failure)

    reader = FailureReader(site_rules(tmp_path, "x"), SystemClock(), match=dies, limit_s=LIMIT_S)
    failure = (await reader.added(ended(tmp_path, "x"), tmp_path)).failure
    assert failure is not None
    assert failure.reason == "no_signature"
    assert failure.line.startswith("log not read: the process that matches it ended: ")
    assert reader.unread_count == 1


@pytest.mark.parametrize(
    ("text", "is_asked"), [('patterns = ["x"]', True), ('texts = ["x"]', False)]
)
async def test_only_patterns_of_a_site_need_a_process(
    tmp_path: Path, text: str, *, is_asked: bool
) -> None:
    """Where there is none, what a log takes is bounded, and no process is started for it."""
    asked: list[Question] = []

    async def match(question: Question) -> Failure:
        asked.append(question)
        return msgspec.msgpack.decode(answer(msgspec.msgpack.encode(question)), type=Failure)

    path = tmp_path / "rules.toml"
    path.write_text(f'[[signature]]\nreason = "core_dump"\n{text}\n')
    reader = FailureReader(read_rules(str(path)), SystemClock(), match=match, limit_s=LIMIT_S)
    failure = (await reader.added(ended(tmp_path, "x"), tmp_path)).failure
    assert failure is not None
    assert failure.reason == "core_dump"
    assert bool(asked) == is_asked


def test_the_rules_of_a_site_are_read_from_the_agent_s_settings(tmp_path: Path) -> None:
    """A mistake in them keeps the agent from starting."""
    path = tmp_path / "rules.toml"
    path.write_text("[[signature]]\nreason = 'nope'")
    ours = settings(inference=False, worker_starter=Starter.DETACHED, state_dir=str(tmp_path))
    make_runner(ours, clock=SystemClock())
    with pytest.raises(ConfigError, match="nope"):
        make_runner(msgspec.structs.replace(ours, failure_rules=str(path)), clock=SystemClock())


def test_a_failure_is_reported_and_outlives_the_agent() -> None:
    """It is in the worker's report and in the ledger, until the coordinator has taken it."""
    life_harness = LifeHarness(inference=False)
    life_harness.want(NodeRole.TRAINING, order())
    life_harness.step()
    life_harness.life.workers.checked(key(), endpoint="n1:1", refusal=None)
    life_harness.step()
    life_harness.life.workers.started(key(), error="")
    said = read_rules().failure("core_dump", line="Aborted (core dumped)")
    life_harness.workers[key()] = WorkerFact(
        key=key(), phase=WorkerPhase.EXITED, exit_code=-6, failure=said
    )
    life_harness.step()
    [report] = life_harness.life.workers.reports()
    assert report.failure == said
    memory = life_harness.memory
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(memory), type=type(memory))
    assert again.workers[str(key())].failure == said
