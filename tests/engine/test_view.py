"""What a policy sees: facts and when they happened, loads of a season, GPUs that come free."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from common.messages import WorkerPhase
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.state.events import LoadMeasured, PassDue
from coordinator.engine.state.tables import ClusterState, JobEntry, WorkerEntry
from coordinator.policies.contract.decisions import Allocation
from coordinator.policies.contract.seasonal_load import Season
from coordinator.policies.contract.snapshot import ClusterSnapshot
from tests.engine.stopped_jobs import says
from tests.harness.cluster.engine import CHAT, EngineHarness
from tests.harness.cluster.scripted_nodes import BlackHole


def running() -> EngineHarness:
    """A job that has run for a while, and that something was said of since the last pass."""
    harness = EngineHarness(training=1, inference=0)
    job = harness.submit("a", work_s=1e6)
    harness.start(job, "t0")
    harness.wait(5.0)
    says(harness, job, 10, total_steps=1000)
    return harness


def put_to_the_policy(engine: Engine, *, now_s: float) -> ClusterSnapshot:
    """What a pass at an instant decides on."""
    found: list[ClusterSnapshot] = []

    def allocate(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        found.append(snapshot)
        return Allocation(decisions=())

    engine.policy = replace(engine.policy, allocate=allocate)
    engine.handle(PassDue(), now_s=now_s)
    return found[-1]


def test_a_question_changes_nothing_of_what_a_pass_sees() -> None:
    """Nor the instant of a view, as sums from another one are rounded otherwise: in a replay of the
    journal nobody asks."""
    asked, plain = running(), running()
    asked.engine.snapshot()
    at_s = plain.engine.state.now_s + 7.3
    seen = [put_to_the_policy(each.engine, now_s=at_s) for each in (asked, plain)]
    assert seen[0] == seen[1]


def test_who_is_rebuilt_from_a_snapshot_sees_what_the_one_that_saved_it_sees() -> None:
    """Views are not saved, so whoever saves the state makes its own anew as well."""
    harness = running()
    put_to_the_policy(harness.engine, now_s=harness.engine.state.now_s + 1.1)
    saved = harness.engine.encode_state()
    rebuilt = Engine(harness.engine.settings, decode_state(saved))
    at_s = harness.engine.state.now_s + 7.3
    seen = [put_to_the_policy(each, now_s=at_s) for each in (harness.engine, rebuilt)]
    assert seen[0] == seen[1]


WELL = ("x0", "x1", "x2")
"""GPUs of the one node."""


def reports(cell: BlackHole, job: JobEntry, phase: WorkerPhase, **facts: tuple[str, ...]) -> None:
    """The node reports the job's workers."""
    cell.report("t0", *(cell.fact(worker, phase) for worker in job.workers.values()), **facts)


def flexible(cell: BlackHole, gpus: tuple[str, ...]) -> tuple[JobEntry, list[WorkerEntry]]:
    """An elastic job that has all GPUs of the node, and its flexible workers."""
    cell.bad = set()
    cell.report("t0", gpus=gpus)
    job = cell.submit("elastic", gpus=1, most=len(gpus))
    for _ in gpus:
        cell.handle(PassDue())
        for phase in (WorkerPhase.READY, WorkerPhase.RUNNING):
            reports(cell, job, phase, gpus=gpus)
    found = [worker for worker in job.workers.values() if worker.is_flexible]
    assert len(found) == len(gpus) - 1
    return job, found


def own(worker: WorkerEntry) -> str:
    """Its GPU, as its node's report is written."""
    return worker.gpu_uuids[0].removeprefix("t0-")


@pytest.mark.parametrize("how", ["gone", "trespassed"])
def test_nobody_is_released_for_a_gpu_that_comes_free_for_nobody(how: str) -> None:
    """It fell out of its node, or a process of nobody's is on it: to the next job it is worth
    nothing, and its worker goes on as long as it can."""
    gpus = WELL[:2]
    cell = BlackHole(nodes=1)
    job, [worker] = flexible(cell, gpus)
    if how == "gone":
        left = tuple(gpu for gpu in gpus if gpu != own(worker))
        reports(cell, job, WorkerPhase.RUNNING, gpus=left)
        assert any(slot.is_gone for slot in cell.node("t0").gpus)
    else:
        reports(cell, job, WorkerPhase.RUNNING, gpus=gpus, trespassed=(own(worker),))
    cell.submit("base", gpus=1)
    cell.handle(PassDue())
    assert worker.stop is None


def test_of_two_the_one_is_released_whose_gpu_comes_free() -> None:
    """The other costs as much and gives nothing."""
    cell = BlackHole(nodes=1)
    job, [kept, released] = flexible(cell, WELL)
    reports(cell, job, WorkerPhase.RUNNING, gpus=WELL, trespassed=(own(kept),))
    cell.submit("base", gpus=1)
    cell.handle(PassDue())
    assert kept.stop is None
    assert released.stop is not None


def test_the_season_of_a_load_reaches_policies_and_outlives_a_restart() -> None:
    """Each measured load is learned, the snapshot has it, and the kept state gives it back."""
    harness, season = EngineHarness(), Season()
    engine = harness.engine
    for step in range(200):
        at_s, load = 600.0 * step, 10.0 + step % 7
        engine.handle(LoadMeasured(service=CHAT, load=load), now_s=at_s)
        season = season.after(at_s, load)
    (service,) = engine.snapshot().services
    assert service.season == season
    assert season.known_s > 0
    kept = msgspec.msgpack.encode(engine.state)
    assert msgspec.msgpack.decode(kept, type=ClusterState).services[CHAT].season == season
