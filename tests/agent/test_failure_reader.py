"""Why a worker failed: read in its log by its node, once, and told with its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import pytest

from agent import shim_files
from agent.settings import Starter
from agent.starters import DetachedStarter
from agent.state import WorkerFact
from agent.workers import ShimRunner, make_runner
from common.clock import SystemClock
from common.errors import ConfigError
from common.failure_rules import TAIL_BYTES, read_rules
from common.failures import RetryClass
from common.messages import WorkerPhase
from common.model import NodeRole, StopReason
from tests.agent.bench import Bench, key, order, settings
from tests.agent.worker_house import WorkerHouse, kill, make_order, talker


class ReadingHouse(WorkerHouse):
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
async def house(tmp_path: Path) -> AsyncGenerator[ReadingHouse, None]:
    """A run directory with a runner that reads logs."""
    house = ReadingHouse(tmp_path / "workers")
    try:
        yield house
    finally:
        await asyncio.shield(house.close())


def shell(script: str) -> tuple[str, ...]:
    """A worker that is a shell script."""
    return ("sh", "-c", script)


async def test_a_worker_that_fails_is_told_with_what_its_log_says(house: ReadingHouse) -> None:
    """Standard error is part of the log; the root cause is found under what comes after it."""
    script = "echo 'RuntimeError: CUDA out of memory. Tried' >&2; echo bye; exit 3"
    worker = await house.start(make_order(*shell(script)))
    status = await house.until_exited(worker)
    assert status.failure is not None
    assert (status.exit_code, status.failure.reason) == (3, "gpu_out_of_memory")
    assert status.failure.retry == RetryClass.NEVER
    assert status.failure.line == "RuntimeError: CUDA out of memory. Tried"


async def test_a_worker_that_succeeds_has_no_failure(house: ReadingHouse) -> None:
    """Whatever it wrote."""
    worker = await house.start(make_order(*shell("echo SyntaxError: not really")))
    assert (await house.until_exited(worker)).failure is None


async def test_a_worker_that_was_told_to_stop_has_no_failure(house: ReadingHouse) -> None:
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
    worker = await house.start(make_order(*talker(body), grace_s=5.0))
    await house.until_said(worker, "up")
    await house.runner.stop(worker, StopReason.PREEMPT, 1.0)
    status = await house.until_exited(worker)
    assert (status.stop_reason, status.failure) == (StopReason.PREEMPT, None)


async def test_a_lost_supervisor_is_its_node_s_fault(house: ReadingHouse) -> None:
    """Nothing in the log says why a shim died, so nothing is read there."""
    worker = await house.start(make_order(*shell("echo SyntaxError; sleep 60")))
    await house.until_said(worker, "SyntaxError")
    record = house.raw(worker)
    shim = record["shim_pid"]
    assert isinstance(shim, int)
    kill(shim)
    status = await house.until_exited(worker)
    assert status.error.startswith("shim lost")
    assert status.failure is None


async def test_a_log_is_read_once(house: ReadingHouse) -> None:
    """The statuses of ended workers are asked for again and again until they are forgotten."""
    worker = await house.start(make_order(*shell("echo SyntaxError: x; exit 1")))
    first = (await house.until_exited(worker)).failure
    (house.directory(worker) / shim_files.LOG_FILE).write_text("CUDA out of memory")
    assert first is not None
    assert (await house.status(worker)).failure == first
    await house.runner.forget(worker)
    again = await house.start(make_order(*shell("echo CUDA out of memory; exit 1")))
    found = (await house.until_exited(again)).failure
    assert found is not None
    assert found.reason == "gpu_out_of_memory"


async def test_only_the_end_of_a_large_log_is_read(house: ReadingHouse) -> None:
    """A cause that lies farther back is not looked for: the cost of a failure is bounded."""
    lines = TAIL_BYTES // 4
    script = f"echo SyntaxError: x; yes abc | head -n {lines + 1}; exit 1"
    worker = await house.start(make_order(*shell(script)))
    found = (await house.until_exited(worker)).failure
    assert found is not None
    assert found.reason == "no_signature"


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
    bench = Bench(inference=False)
    bench.want(NodeRole.TRAINING, order())
    bench.step()
    bench.life.workers.checked(key(), endpoint="n1:1", refusal="")
    bench.step()
    bench.life.workers.started(key(), error="")
    said = read_rules().failure("core_dump", line="Aborted (core dumped)")
    bench.workers[key()] = WorkerFact(
        key=key(), phase=WorkerPhase.EXITED, exit_code=-6, failure=said
    )
    bench.step()
    [report] = bench.life.workers.reports()
    assert report.failure == said
    memory = bench.memory
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(memory), type=type(memory))
    assert again.workers[str(key())].failure == said
