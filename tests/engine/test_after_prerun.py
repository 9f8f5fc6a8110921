"""After its pre-run a job is another gang: what was learned of one worker says nothing of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.failure_rules import read_rules
from common.model import Checkpoint, JobId, JobState, Progress
from coordinator.engine.state.events import ProgressReported
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.estimates import Source
from coordinator.policies.contract.snapshot import Behind, JobView
from coordinator.sim.run.cluster import Delays
from tests.engine.house import House, start, state
from tests.engine.jobs.test_prerun import GANG, TIME_S, cell, submit

RULES = read_rules()
WORK_S = 10_000.0
"""Worker-seconds of the gang of `submit`, which has two workers."""


def view(house: House, name: str = "j") -> JobView:
    """A job as policies see it."""
    return next(job for job in house.engine.snapshot().jobs if job.job_id == name)


def fails_on(house: House, job: JobEntry, node: str) -> None:
    """Its pre-run fails there by what another node may do better."""
    house.start(job, node)
    worker = job.workers[0]
    house.sim.nodes[worker.node].exited(worker.key, 1, RULES.failure("cuda_failure"))
    house.settle()
    assert job.retry.avoid_nodes == [node]


@pytest.mark.parametrize(("nodes", "avoided"), [(2, []), (3, ["t0"])])
def test_a_node_is_left_alone_only_where_the_others_take_the_gang(
    nodes: int, avoided: list[str]
) -> None:
    """One worker fits without it, a gang of all nodes does not; it may start at once then."""
    settings = EngineSettings(policy="fifo", min_runtime_s=0.0)
    house = House(training=nodes, inference=0, settings=settings)
    job = submit(house)
    fails_on(house, job, "t0")
    house.start(job, "t1")
    house.wait(TIME_S)
    assert job.spec.workers == GANG
    assert job.retry.avoid_nodes == list(view(house).avoid_nodes) == avoided


def test_of_two_nodes_the_one_to_be_left_for_longer_is() -> None:
    """Where the gang can do without one of them alone."""
    settings = EngineSettings(policy="fifo", min_runtime_s=0.0)
    house = House(training=3, inference=0, settings=settings)
    job = submit(house)
    fails_on(house, job, "t0")
    known = job.retry.avoided
    house.start(job, "t1")
    for name in ("t0", "t1"):  # as if another node had failed it too, later
        until_s = house.engine.state.now_s + (5000.0 if name == "t1" else 4000.0)
        known[house.node(name).name] = replace(next(iter(known.values())), until_s=until_s)
    house.wait(TIME_S)
    assert job.spec.workers == GANG
    assert job.retry.avoid_nodes == ["t1"]


def test_the_pace_of_one_worker_is_no_pace_of_the_gang() -> None:
    """Its length is what was declared, and no step time is known, whatever the pre-run told."""
    house = cell()
    job = submit(house)
    house.start(job, "t0")
    for step in (10, 20, 30):
        house.wait(100.0)
        told = Progress(step=step, total_steps=1_000_000)
        house.sim.handle(ProgressReported(job_id=job.job_id, attempt=1, progress=told))
    seen = view(house)
    assert seen.estimate_source == Source.PRERUN
    assert (seen.step_time_s, seen.steps_left) == (None, None)
    house.wait(TIME_S)
    seen = view(house)
    assert (seen.workers, seen.gpus_per_worker) == (GANG, 8)
    assert (seen.step_time_s, seen.steps_left, seen.step_time_workers) == (None, None, 0)
    assert (seen.remaining_work_s, seen.estimate_source) == (WORK_S, Source.DECLARED)


def test_a_pre_run_that_is_longer_than_its_gang_does_not_outlive_it() -> None:
    """So many seconds on one GPU are not so many on all."""
    house = cell()
    job = submit(house, time_s=3 * WORK_S)
    house.start(job, "t0")
    house.wait(3 * WORK_S)
    assert job.spec.workers == GANG
    assert view(house).remaining_work_s == WORK_S


def test_a_pre_run_shows_the_gang_behind_it() -> None:
    """Its own length is the pre-run's; what comes after it can be planned, until it has come."""
    house = cell()
    job = submit(house)
    seen = view(house)
    assert seen.whole_work_s == seen.remaining_work_s == TIME_S
    assert seen.behind == Behind(
        workers=GANG, gpus_per_worker=8, work_s=WORK_S, estimate_source=Source.DECLARED
    )
    house.start(job, "t0")
    house.wait(TIME_S)
    seen = view(house)
    assert (seen.behind, seen.whole_work_s) == (None, WORK_S)


def test_a_gang_that_succeeds_after_its_pre_run_is_remembered() -> None:
    """Its like needs no pre-run any more, and is as long as it was."""
    house = cell()
    job = submit(house, "a")
    house.start(job, "t0")
    house.wait(TIME_S)
    house.decide(start(job, "t0", "t1"))
    house.wait(WORK_S)
    assert state(job) == JobState.SUCCEEDED
    again = submit(house, "b")
    assert again.spec.prerun.gang is None
    assert again.estimate.expected_work_s == pytest.approx(WORK_S)


def test_work_of_a_pre_run_that_was_all_counts_in_workers_of_the_gang() -> None:
    """800 s on one GPU are 100 s of a worker of eight."""
    house = cell()
    job = submit(house, "a", time_s=1000.0)
    house.start(job, "t0")
    house.wait(800.0)
    worker = job.workers[0]
    house.sim.nodes[worker.node].exited(worker.key, 0)
    house.settle()
    assert state(job) == JobState.SUCCEEDED
    assert submit(house, "b").estimate.expected_work_s == pytest.approx(100.0)


def test_a_lost_journal_forgets_no_work_of_the_gang() -> None:
    """While its pre-run is on a ledger tells of one worker, and of how many there will be."""
    house = cell()
    job = submit(house)
    house.start(job, "t0")
    house.wait(10.0)
    house.lose_journal()
    assert house.engine.state.jobs[JobId("j")].estimate.expected_work_s == WORK_S


def test_a_pre_run_that_is_over_has_nothing_left_while_it_stops() -> None:
    """However early its checkpoint ended it: its gang comes next, and not another one."""
    house = cell(delays=Delays(stop_s=3.0))
    job = submit(house)
    house.start(job, "t0")
    house.wait(100.0)
    assert view(house).work_left_s(house.sim.loop.now_s) == pytest.approx(TIME_S - 100.0)
    saved = Checkpoint(step=10, path="/c", is_verified=True)
    house.sim.handle(ProgressReported(job_id=job.job_id, attempt=1, checkpoint=saved))
    house.settle()
    assert state(job) == JobState.PREEMPTING
    assert view(house).work_left_s(house.sim.loop.now_s) == 0.0
    house.wait(10.0)
    assert job.spec.workers == GANG
