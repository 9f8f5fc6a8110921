"""Jobs in the engine: gangs, faults, preemption, resizes. Decisions are scripted by the tests."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName
from coordinator.engine.state.events import JobCancelRequested
from coordinator.engine.state.settings import EngineSettings
from coordinator.policies.contract.decisions import Placement, Preempt, Resize, Start
from coordinator.sim.run.cluster import Delays
from tests.harness.cluster.engine import EngineHarness, start, state


def test_a_started_job_runs_and_succeeds() -> None:
    """Work of 1000 worker-seconds on two workers takes 500 s."""
    harness = EngineHarness()
    job = harness.submit(workers=(2, 2), work_s=1000.0)
    harness.start(job, "t0", "t1")
    assert state(job) == JobState.RUNNING
    harness.wait(499.0)
    assert state(job) == JobState.RUNNING
    harness.wait(2.0)
    assert state(job) == JobState.SUCCEEDED
    assert job.finished_at_s == 500.0


def test_a_gang_that_is_not_ready_in_time_waits_again_free_of_charge() -> None:
    """The attempt ends, no budget is charged, and the GPUs are free."""
    harness = EngineHarness(delays=Delays(ready_s=1e6))
    job = harness.submit()
    harness.start(job, "t0")
    harness.wait(harness.engine.settings.gang_ready_timeout_s + 31.0)
    assert state(job) == JobState.PENDING
    assert (job.counts.preemptions, job.counts.own_faults, job.counts.node_faults) == (0, 0, 0)
    assert harness.engine.state.counters.gang_timeouts == 1
    assert harness.node("t0").gpus[0].holder is None


def test_a_preempted_job_queues_again_with_a_higher_attempt() -> None:
    """Preemption is charged to no budget of the job's own."""
    harness = EngineHarness()
    job = harness.submit()
    harness.start(job, "t0")
    harness.decide(Preempt(job_id=job.job_id, reason="test"))
    assert state(job) == JobState.PENDING
    assert (job.counts.preemptions, job.counts.own_faults) == (1, 0)
    harness.start(job, "t1")
    assert (state(job), job.attempt.number) == (JobState.RUNNING, 2)


@pytest.mark.parametrize(
    ("waits_s", "is_for_loan", "count"), [(5, False, 1), (15, False, 2), (5, True, 2)]
)
def test_no_job_is_preempted_twice_at_once(waits_s: float, is_for_loan: bool, count: int) -> None:
    """Not within min_runtime_s for another job's turn; a service that takes back waits for none."""
    harness = EngineHarness(settings=EngineSettings(policy="fifo", min_runtime_s=10.0))
    job = harness.submit()
    node = NodeName("t0") if is_for_loan else None
    for _ in range(2):
        harness.start(job, "t0")
        harness.wait(waits_s)
        harness.decide(Preempt(job_id=job.job_id, node=node, reason="test"))
    assert job.counts.preemptions == count


def test_a_resize_grows_and_shrinks_without_preemption() -> None:
    """Flexible workers come and go; the attempt and the base gang stay."""
    harness = EngineHarness()
    job = harness.submit(workers=(1, 2), work_s=1000.0)
    harness.start(job, "t0")
    harness.wait(100.0)
    grow = (Placement(node=NodeName("t1"), worker_count=1, is_flexible=True),)
    harness.decide(Resize(job_id=job.job_id, added=grow, reason="room"))
    assert (state(job), job.running_workers) == (JobState.RUNNING, 2)
    harness.wait(100.0)
    flexible = next(i for i, worker in job.workers.items() if worker.is_flexible)
    harness.decide(Resize(job_id=job.job_id, removed_workers=(flexible,), reason="needed"))
    assert (job.running_workers, job.attempt.number, job.counts.preemptions) == (1, 1, 0)
    harness.wait(1000.0)
    assert job.finished_at_s == 900.0  # 100 + 2 x 100 + 700


def test_a_base_worker_is_never_released_by_a_resize() -> None:
    """A resize that names a base worker is refused and changes nothing."""
    harness = EngineHarness()
    job = harness.submit(workers=(1, 2))
    harness.start(job, "t0")
    harness.decide(Resize(job_id=job.job_id, removed_workers=(0,), reason="wrong"))
    assert job.running_workers == 1
    assert harness.engine.state.counters.decisions_refused == 1


def test_a_start_that_no_longer_fits_is_refused_and_changes_nothing() -> None:
    """The engine re-checks: full nodes, unknown nodes, half gangs, another GPU type."""
    harness = EngineHarness()
    first = harness.submit("first")
    harness.start(first, "t0")
    job = harness.submit("second", workers=(2, 2))
    wrong = [
        start(job, "t0", "t1"),  # t0 is full
        start(job, "t1"),  # half a gang
        start(job, "t1", "nowhere"),
        start(job, "t1", "i0"),  # serves
    ]
    for decision in wrong:
        before = harness.engine.encode_state()
        harness.decide(decision)
        assert (state(job), job.attempt.number, job.workers) == (JobState.PENDING, 0, {})
        assert len(harness.engine.encode_state()) >= len(before)
    assert harness.engine.state.counters.decisions_refused == len(wrong)


def test_an_own_fault_is_retried_within_the_budget_and_then_fails() -> None:
    """max_restarts = 1: the first fault requeues, the second fails the job."""
    harness = EngineHarness()
    job = harness.submit(max_restarts=1)
    harness.start(job, "t0")
    harness.sim.nodes[NodeName("t0")].exited(job.workers[0].key, 3)
    harness.settle()
    assert (state(job), job.counts.own_faults) == (JobState.PENDING, 1)
    harness.start(job, "t0")
    harness.sim.nodes[NodeName("t0")].exited(job.workers[0].key, 3)
    harness.settle()
    assert (state(job), job.exit_code) == (JobState.FAILED, 3)


def test_a_reboot_is_a_node_fault_and_free() -> None:
    """A new boot id ends the attempts of the node; the job's own budget is untouched."""
    harness = EngineHarness()
    job = harness.submit()
    harness.start(job, "t0")
    harness.sim.nodes[NodeName("t0")].crash()
    harness.sim.nodes[NodeName("t0")].boot()
    harness.settle()
    assert (state(job), job.counts.node_faults, job.counts.own_faults) == (JobState.PENDING, 1, 0)


def test_a_node_fault_is_called_one_once() -> None:
    """The agent's own words say whose fault it was; the story does not say it twice."""
    harness = EngineHarness()
    job = harness.submit()
    harness.start(job, "t0")
    harness.sim.nodes[NodeName("t0")].crash()
    harness.sim.nodes[NodeName("t0")].boot()
    harness.settle()
    [said] = [line.reason for line in harness.engine.state.stories if "node fault" in line.reason]
    assert said.count("node fault") == 1


def test_cancel_stops_the_workers_and_ends_the_job() -> None:
    """A cancelled job holds nothing and is not requeued."""
    harness = EngineHarness()
    job = harness.submit()
    harness.start(job, "t0")
    harness.engine.handle(JobCancelRequested(job_id=job.job_id, by="t/u"), now_s=1.0)
    harness.sim.ask_pass()
    harness.sim.nodes[NodeName("t0")].obey(harness.engine.desired(NodeName("t0")))
    harness.settle()
    assert (state(job), job.workers) == (JobState.CANCELLED, {})


def test_submitting_the_same_id_twice_is_one_job() -> None:
    """A retried submit starts nothing twice."""
    harness = EngineHarness()
    job = harness.submit("same")
    assert harness.submit("same") is job
    assert harness.engine.state.counters.jobs_submitted == 1


def test_freed_room_can_be_promised_before_it_is_empty() -> None:
    """A start may take GPUs that a released worker still holds; it waits for them."""
    harness = EngineHarness(delays=Delays(stop_s=20.0))
    elastic = harness.submit("elastic", workers=(1, 2))
    harness.start(elastic, "t0", flexible=("t1",))
    job = harness.submit("waiting")
    release = Resize(job_id=elastic.job_id, removed_workers=(1,), reason="base demand first")
    harness.decide(release, start(job, "t1"))
    assert state(job) == JobState.STARTING
    assert {slot.holder.job_id for slot in harness.node("t1").gpus if slot.holder} == {"elastic"}
    harness.wait(21.0)
    assert state(job) == JobState.RUNNING
    assert {slot.holder.job_id for slot in harness.node("t1").gpus if slot.holder} == {"waiting"}


def test_a_time_limit_ends_the_job_as_failed() -> None:
    """time_limit_s counts from the attempt's start and is not retried."""
    harness = EngineHarness()
    job = harness.submit(max_restarts=5)
    job.spec = type(job.spec)(
        name="j", command=("train",), workers=job.spec.workers, gpus_per_worker=8, time_limit_s=60.0
    )
    harness.start(job, "t0")
    harness.wait(100.0)
    assert state(job) == JobState.FAILED
    assert "time_limit_s" in job.error


@pytest.mark.parametrize("at_s", [100.0, 100.7])
def test_a_time_limit_ends_the_job_at_the_very_instant_that_it_is_over(at_s: float) -> None:
    """Though `at_s + 60 - at_s` may be less than 60; nothing else happens then, or later."""
    harness = EngineHarness()
    job = harness.submit()
    job.spec = replace(job.spec, time_limit_s=60.0)
    harness.wait(at_s)
    harness.start(job, "t0")
    harness.wait(60.0)
    assert (state(job), job.finished_at_s) == (JobState.FAILED, at_s + 60.0)


def test_the_second_base_gang_may_not_take_a_promised_gpu() -> None:
    """A GPU has at most one holder and one nominee."""
    harness = EngineHarness(delays=Delays(stop_s=20.0))
    first = harness.submit("first")
    harness.start(first, "t0")
    second, third = harness.submit("second"), harness.submit("third")
    harness.decide(Preempt(job_id=first.job_id, reason="test"), start(second, "t0"))
    harness.decide(start(third, "t0"))
    assert state(second) == JobState.STARTING
    assert state(third) == JobState.PENDING


def test_unknown_job_in_a_decision_is_refused() -> None:
    """A decision about nobody changes nothing."""
    harness = EngineHarness()
    harness.decide(Preempt(job_id=JobId("ghost"), reason="test"))
    assert harness.engine.state.counters.decisions_refused == 1
    assert isinstance(start(harness.submit(), "t0"), Start)
