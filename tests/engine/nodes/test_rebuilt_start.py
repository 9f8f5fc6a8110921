"""The clocks of a job that is rebuilt from ledgers: they go on from the start that nodes report."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from common.messages import WorkerPhase
from common.model import JobId, JobState, NodeName, PrerunSpec
from coordinator.engine.jobs import estimates
from coordinator.engine.state.events import OperatorAction, OperatorAsked
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Placement, Resize, Start, Suspend
from coordinator.sim.run.cluster import Delays
from coordinator.sim.run.simulation import Submission
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import EngineHarness, start, state

LIMIT_S = 500.0
JOB = JobId("j")


def found(harness: EngineHarness, name: str = "j") -> JobEntry:
    """A job as the coordinator knows it now."""
    return harness.engine.state.jobs[JobId(name)]


def told(harness: EngineHarness) -> list[str]:
    """The lines about the job."""
    lines = [line for line in harness.engine.state.stories if line.subject == JOB]
    return [f"{line.what}: {line.reason}" for line in lines]


def grow(harness: EngineHarness, job: JobEntry, node: str) -> None:
    """Add a flexible worker."""
    added = (Placement(node=NodeName(node), worker_count=1, is_flexible=True),)
    harness.decide(Resize(job_id=job.job_id, added=added, reason="room"))


def forget_starts(harness: EngineHarness, *names: str) -> None:
    """These nodes do not report since when their workers run."""
    for name in names:
        harness.sim.nodes[NodeName(name)].began_ago_s = dict  # type: ignore[method-assign]  # a node that does not know


def clocks(harness: EngineHarness) -> tuple[float, ...]:
    """What counts from the start of the attempt, at this instant."""
    job, now_s = found(harness), harness.sim.loop.now_s
    assert job.started_at_s is not None
    assert job.attempt.ran_at_s is not None
    return (
        job.started_at_s,
        job.attempt.ran_at_s,
        estimates.attained_gpu_s(job, now_s),
        estimates.attempt_worker_s(job, now_s),
        estimates.held_worker_s(job, now_s),
    )


@given(
    gaps_s=st.lists(st.floats(min_value=1.0, max_value=600.0), min_size=1, max_size=4),
    workers=st.integers(min_value=1, max_value=2),
)
@settings(max_examples=40, deadline=None)
def test_a_lost_journal_gives_a_job_no_second_limit(gaps_s: list[float], workers: int) -> None:
    """However often and whenever it is lost, the job ends when its limit is over."""
    harness = EngineHarness(inference=0)
    job = harness.submit(workers=(workers, workers), work_s=1e6, time_limit_s=LIMIT_S)
    began_s = harness.sim.loop.now_s
    harness.start(job, *["t0", "t1"][:workers])
    for gap_s in gaps_s:
        harness.wait(gap_s)
        if state(found(harness)) != JobState.RUNNING:
            break
        harness.lose_journal()
        assert harness.engine.check() == []
    harness.wait(LIMIT_S)
    ended = found(harness)
    assert (ended.state, ended.error) == (JobState.FAILED, "ran into its time_limit_s of 500 s")
    assert ended.finished_at_s == pytest.approx(began_s + LIMIT_S)


def test_a_rebuilt_job_has_the_clocks_that_it_had() -> None:
    """Its start, attained service and work; a worker that came later counts from then."""
    harness = EngineHarness(inference=0)
    harness.start(harness.submit(workers=(1, 2), work_s=1e6), "t0")
    harness.wait(100.0)
    grow(harness, found(harness), "t1")
    harness.wait(50.0)
    harness.wait(2.0)  # as long as the loss takes
    before = clocks(harness)
    harness.lose_journal()
    assert found(harness).is_recovered
    added = (0.0, 0.0, 2 * 8 * 2.0, 2 * 2.0, 2 * 2.0)  # 2 s of 2 workers on 8 GPUs each
    assert clocks(harness) == pytest.approx(
        [was + more for was, more in zip(before, added, strict=True)]
    )
    assert harness.engine.check() == []


def test_the_earliest_start_of_its_workers_counts() -> None:
    """The ledger of a worker that came later is read first."""
    harness = EngineHarness(inference=0)
    harness.start(harness.submit(workers=(1, 2), work_s=1e6, time_limit_s=LIMIT_S), "t1")
    harness.wait(300.0)
    grow(harness, found(harness), "t0")
    harness.wait(100.0)
    harness.lose_journal()
    assert found(harness).attempt.ran_at_s == 0.0
    assert "began earlier: t1 reports its start 400 s ago" in told(harness)
    harness.wait(100.0)
    assert state(found(harness)) == JobState.FAILED


@pytest.mark.parametrize("silent", [("t0",), ("t1",)])
def test_one_node_that_knows_the_start_is_enough(silent: tuple[str, ...]) -> None:
    """Whichever ledger is read first."""
    harness = EngineHarness(inference=0)
    harness.start(harness.submit(workers=(2, 2), work_s=1e6, time_limit_s=LIMIT_S), "t0", "t1")
    harness.wait(400.0)
    forget_starts(harness, *silent)
    harness.lose_journal()
    assert found(harness).attempt.ran_at_s == 0.0


def test_a_limit_counts_again_where_no_node_knows_the_start() -> None:
    """The line of the rebuild says so."""
    harness = EngineHarness(inference=0)
    harness.start(harness.submit(work_s=1e6, time_limit_s=LIMIT_S), "t0")
    harness.wait(400.0)
    forget_starts(harness, "t0")
    harness.lose_journal()
    why = "t0 does not report its start, so its time limit counts from now"
    assert f"gang_ready -> running: it had been ordered to run; {why}" in told(harness)
    harness.wait(400.0)
    assert state(found(harness)) == JobState.RUNNING
    harness.wait(100.0)
    assert state(found(harness)) == JobState.FAILED


def test_the_line_of_the_rebuild_says_since_when_it_runs() -> None:
    """As its node reports it."""
    harness = EngineHarness(inference=0)
    harness.start(harness.submit(work_s=1e6), "t0")
    harness.wait(400.0)
    harness.lose_journal()
    why = "it had been ordered to run; t0 reports its start 400 s ago"
    assert f"gang_ready -> running: {why}" in told(harness)


def test_a_limit_that_is_over_also_ends_workers_that_are_found_later() -> None:
    """Its second node is heard only after the limit ended the worker on the first one."""
    harness = EngineHarness(inference=0, delays=Delays(stop_s=5.0))
    harness.start(harness.submit(workers=(2, 2), work_s=1e6, time_limit_s=60.0), "t0", "t1")
    harness.wait(59.0)
    node = harness.sim.nodes[NodeName("t1")]
    node.is_up = False
    harness.lose_journal()
    harness.wait(1.0)
    node.is_up = True
    node.report_soon()
    harness.wait(60.0)
    assert state(found(harness)) == JobState.FAILED
    assert not [one for one in harness.sim.nodes.values() if one.keys(WorkerPhase.RUNNING)]
    assert harness.engine.check() == []


def test_suspended_time_counts_for_the_limit_and_for_nothing_else() -> None:
    """A node does not know how long its worker was suspended: of its work nothing is counted."""
    harness = EngineHarness(training=1, inference=0)
    first = harness.submit(work_s=1e6, time_limit_s=LIMIT_S)
    harness.start(first, "t0")
    harness.wait(100.0)
    [worker] = first.workers.values()
    second = harness.submit("second", work_s=1e6)
    place = Placement(node=worker.node, worker_count=1, gpu_uuids=worker.gpu_uuids)
    beside: Start = structs.replace(start(second, "t0"), placements=(place,))
    harness.decide(Suspend(job_id=JOB, reason="the test says so"), beside)
    harness.wait(300.0)
    harness.lose_journal()
    assert state(found(harness)) == JobState.SUSPENDED
    assert estimates.attained_gpu_s(found(harness), harness.sim.loop.now_s) == 0.0
    harness.wait(97.0)
    assert state(found(harness)) == JobState.SUSPENDED
    harness.wait(2.0)
    assert found(harness).error == "ran into its time_limit_s of 500 s"


def test_a_pre_run_ends_when_it_would_have() -> None:
    """It counts from its start as well."""
    harness = EngineHarness(inference=0)
    spec = make_spec("j", workers=(2, 2), gpus_per_worker=8, prerun=PrerunSpec(time_s=100.0))
    harness.sim.submit([Submission(at_s=0.0, job_id=JOB, spec=spec, work_s=1e6)])
    harness.settle()
    harness.start(found(harness), "t0")
    harness.wait(90.0)
    harness.lose_journal()
    assert state(found(harness)) == JobState.RUNNING
    harness.wait(7.0)
    assert state(found(harness)) == JobState.RUNNING
    harness.wait(2.0)
    assert (state(found(harness)), found(harness).spec.workers.min) == (JobState.PENDING, 2)


def test_a_window_after_its_limit_finds_a_rebuilt_job_ended() -> None:
    """The window that was planned by the limit stops no job."""
    harness = EngineHarness(inference=0)
    harness.start(harness.submit(work_s=1e6, time_limit_s=LIMIT_S), "t0")
    harness.wait(400.0)
    harness.lose_journal()
    asked = OperatorAsked(action=OperatorAction.DRAIN_AT, by="ops", target="t0", in_s=200.0)
    harness.sim.handle(asked)
    harness.wait(150.0)
    assert state(found(harness)) == JobState.FAILED
