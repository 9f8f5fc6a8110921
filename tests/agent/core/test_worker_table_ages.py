"""How long ago a worker saved and ended, as its node says of it, on the clock of the node."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import pytest

from agent.core.state import WorkerFact
from agent.shim import files as shim_files
from agent.shim.status import Status
from common.messages import WorkerPhase
from common.model import Checkpoint, NodeRole, StopReason
from tests.harness.node.life import LifeHarness, key, order
from tests.harness.node.workers import WorkerHarness, make_harness, make_order, talker

SAVED = Checkpoint(step=4, path="/c", is_verified=True)


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncGenerator[WorkerHarness, None]:
    """Real workers."""
    async for made in make_harness(tmp_path / "run"):
        yield made


def ages(life_harness: LifeHarness) -> tuple[float, float]:
    """(saved, ended) so long ago, as the node's report of now says."""
    [report] = life_harness.life.workers.reports(life_harness.now_s)
    return report.saved_ago_s, report.ended_ago_s


def held(*, saved_at_s: float) -> LifeHarness:
    """A training node with a worker that computes and has saved."""
    life_harness = LifeHarness(inference=False, at_s=100.0)
    life_harness.want(NodeRole.TRAINING, order())
    life_harness.workers[key()] = WorkerFact(
        key=key(), phase=WorkerPhase.RUNNING, checkpoint=SAVED, saved_at_s=saved_at_s
    )
    life_harness.step()
    return life_harness


def test_a_save_gets_older_with_each_report() -> None:
    """The same checkpoint was made at the same instant, whenever it is told."""
    life_harness = held(saved_at_s=98.0)
    assert ages(life_harness) == (3.0, 0.0)
    life_harness.step(after_s=10.0)
    assert ages(life_harness) == (13.0, 0.0)


def test_an_end_is_dated_by_the_shim_and_outlives_the_agent() -> None:
    """Not by when an agent saw it, which may have been dead itself; the ledger keeps both."""
    life_harness = held(saved_at_s=98.0)
    life_harness.workers[key()] = WorkerFact(
        key=key(), phase=WorkerPhase.EXITED, checkpoint=SAVED, saved_at_s=98.0, ended_at_s=101.0
    )
    life_harness.step(after_s=19.0)
    assert ages(life_harness) == (22.0, 19.0)
    kept = msgspec.msgpack.decode(
        msgspec.msgpack.encode(life_harness.memory), type=type(life_harness.memory)
    )
    again = LifeHarness(inference=False, memory=kept, at_s=150.0)
    assert ages(again) == (52.0, 49.0)


def test_a_worker_without_a_last_word_ended_when_that_was_seen() -> None:
    """Its files are gone: nothing better is known."""
    life_harness = held(saved_at_s=98.0)
    life_harness.workers.clear()
    life_harness.step()
    life_harness.now_s += 7.0
    assert ages(life_harness)[1] == 7.0


def test_what_was_before_a_reboot_is_as_old_as_the_boot_at_least() -> None:
    """Clocks of two boots are never compared: the new one begins after all of it."""
    life_harness = held(saved_at_s=98.0)
    again = LifeHarness(inference=False, memory=life_harness.memory, boot_id="boot-2", at_s=12.0)
    assert ages(again) == (12.0, 12.0)


def test_a_save_that_is_seen_is_as_old_as_its_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was made before it was looked at; another claim is another save."""
    monkeypatch.chdir(tmp_path)  # a shim lives in its worker's directory
    status = Status({}, pid=1, start_ticks=1)

    def saved_at_s() -> object:
        status.write(is_durable=False)
        return (shim_files.read_json(shim_files.STATUS_FILE) or {})["checkpoint_boot_s"]

    assert saved_at_s() is None
    status.saved(4, "/c", is_verified=False)
    claimed_s = saved_at_s()
    status.saved(4, "/c", is_verified=True)
    assert isinstance(claimed_s, float)
    assert saved_at_s() == claimed_s
    status.saved(5, "/c", is_verified=False)
    assert saved_at_s() != claimed_s


async def test_a_shim_dates_a_save_by_its_claim(harness: WorkerHarness, tmp_path: Path) -> None:
    """Looking at the path takes a while; the save was made before that, and the end came later."""
    path = tmp_path / "checkpoint"
    body = f"""
say(type="progress", step=1)
path = {str(path)!r}
open(path, "w").write("x")
log("at", time.clock_gettime(time.CLOCK_BOOTTIME))
say(type="checkpoint", stage="saved", step=4, path=path)
for line in hear:
    pass
time.sleep(600)
"""
    worker = await harness.start(make_order(*talker(body), checkpoint=path))
    status = await harness.until_status(
        worker, lambda s: s.checkpoint is not None and s.checkpoint.is_verified, "verified"
    )
    said_s = float(harness.log(worker).split()[1])
    assert status.saved_at_s is not None
    assert said_s <= status.saved_at_s < shim_files.boot_time_s() - shim_files.SETTLE_S
    assert status.ended_at_s is None
    await harness.runner.stop(worker, StopReason.CANCEL, 0.0)
    ended = await harness.until_exited(worker)
    assert ended.saved_at_s == status.saved_at_s
    assert ended.ended_at_s is not None
    assert status.saved_at_s < ended.ended_at_s <= shim_files.boot_time_s()


async def test_a_record_of_an_earlier_boot_is_older_than_this_one(harness: WorkerHarness) -> None:
    """Its instants are on a clock that is gone."""
    worker = await harness.start(make_order("true"))
    await harness.until_exited(worker)
    record = harness.raw(worker) | {"boot_id": "another", "checkpoint_boot_s": 1e9}
    path = harness.directory(worker) / shim_files.STATUS_FILE
    shim_files.write_json(str(path), record, is_durable=False)
    status = await harness.status(worker)
    assert (status.saved_at_s, status.ended_at_s) == (0.0, 0.0)
