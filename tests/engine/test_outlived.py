"""Jobs that take longer than anybody thought: what counts as left, and that they grow by it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import JobId, JobSpec, JobState, WorkerRange
from coordinator.engine.jobs import estimates
from coordinator.engine.state.events import OperatorAction, OperatorAsked
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.registry import policy
from coordinator.service.api import explain
from coordinator.sim.run.simulation import Submission
from tests.builders import make_spec
from tests.engine.house import House, state

SPEC = make_spec("long", workers=(2, 40), gpus_per_worker=8)
THOUGHT_S = 20.0
"""The default running time of this cell: nobody says how long its jobs take."""


def cell(name: str = "aryl", *, training: int = 4) -> House:
    """A cell under a real policy."""
    settings = EngineSettings(
        policy=name, min_runtime_s=0.0, default_expected_runtime_s=THOUGHT_S, resize_cooldown_s=0.0
    )
    house = House(training=training, inference=0, settings=settings)
    house.engine.policy = policy(name)
    return house


def submit(house: House, spec: JobSpec = SPEC, *, work_s: float = 1200.0) -> JobEntry:
    """A job whose length nobody knows."""
    job_id = JobId(spec.name)
    now_s = house.sim.loop.now_s
    house.sim.submit([Submission(at_s=now_s, job_id=job_id, spec=spec, work_s=work_s)])
    house.settle()
    return house.engine.state.jobs[job_id]


def passes(house: House, seconds: float) -> None:
    """Time passes, and then a scheduling pass."""
    house.wait(seconds)
    house.sim.ask_pass()
    house.settle()


def left_s(house: House, job: JobEntry) -> float:
    """Worker-seconds left, as policies see it in a snapshot whose views are as old as may be."""
    passes(house, 0.0)
    snapshot = house.engine.snapshot()
    [view] = [view for view in snapshot.jobs if view.job_id == job.job_id]
    found = view.work_left_s(snapshot.now_s)
    assert found == pytest.approx(estimates.remaining_work(job, snapshot.now_s)[0])
    return found


def test_what_is_left_is_the_estimate_and_then_what_it_ran_over() -> None:
    """It falls to a share of the estimate and grows with the time by which that was outlived."""
    house = cell("fifo", training=2)
    job = submit(house)
    found: list[float] = []
    for _ in range(6):
        found.append(left_s(house, job))
        house.wait(10.0)
    assert found == [40.0, 20.0, 2.0, 20.0, 40.0, 60.0]


def test_an_elastic_job_that_outlived_its_estimate_grows_into_idle_gpus() -> None:
    """The cell was full when it started; a resize costs it less than what is left by then."""
    house = cell()
    submit(house, replace(SPEC, name="block", workers=WorkerRange(min=2, max=2)), work_s=80.0)
    job = submit(house)
    passes(house, 39.0)  # the other nodes are free from 40 s on
    assert (state(job), job.running_workers) == (JobState.RUNNING, 2)
    found: list[int] = []
    for seconds in (2.0, 10.0):
        passes(house, seconds)
        found.append(job.running_workers)
    assert found == [3, 4]


def test_explain_says_that_the_estimate_was_outlived_and_what_is_assumed() -> None:
    """Before that, and of a job that says how far it is, there is nothing to say."""
    house = cell("fifo", training=2)
    job = submit(house)
    passes(house, 15.0)
    assert explain.estimate(house.engine, job) == "5 s left with 2 workers (source: default)"
    passes(house, 20.0)
    assert explain.estimate(house.engine, job) == (
        "15 s left with 2 workers (source: default; it has outlived that by 15 s, and as much "
        "again is assumed)"
    )


@pytest.mark.parametrize(
    ("after_s", "knobs", "said"),
    [
        (16.0, "", "it does not grow: one worker more would save 1.3 s of its estimated"),
        (60.0, "", "it does not grow: no node that its flexible workers may use has 8 free GPUs"),
        (30.0, ":grows_when_idle=true", "it does not grow while jobs wait"),
    ],
)
def test_explain_says_why_a_job_does_not_grow(after_s: float, knobs: str, said: str) -> None:
    """What a resize costs it, that there is no room, or that others come first."""
    house = cell(f"aryl{knobs}", training=2)
    job = submit(house, work_s=1e5)
    if knobs:
        submit(house, replace(SPEC, name="waits", workers=WorkerRange(min=2, max=2)))
    passes(house, after_s)
    reasons = explain.job(house.engine, job)
    assert [reason for reason in reasons if reason.startswith(said)], reasons


def test_explain_says_nothing_of_growth_where_a_job_has_all_that_it_can_use() -> None:
    """It is at its maximum since it started."""
    house = cell(training=3)
    job = submit(house, replace(SPEC, workers=WorkerRange(min=2, max=3)))
    passes(house, 30.0)
    assert (job.running_workers, house.engine.explain.standing(job.job_id)) == (3, ())


def test_what_an_attempt_showed_of_a_jobs_length_holds_for_the_next() -> None:
    """A job that ran three times its estimate and was stopped is not as short as that again."""
    house = cell("fifo", training=2)
    job = submit(house)
    passes(house, 60.0)
    name = next(iter(job.workers.values())).node
    drain = OperatorAsked(action=OperatorAction.DRAIN, by="ops/me", target=str(name))
    house.sim.handle(drain)
    house.settle()
    assert state(job) == JobState.PENDING
    assert estimates.remaining_work(job, house.engine.state.now_s) == (
        120.0,
        "an earlier attempt that outlived the estimate (default)",
    )
