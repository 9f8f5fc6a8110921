"""The time in the queue: from submission on, whatever was tried meanwhile and came to nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from common.model import JobState, NodeName, NodeRole, StopReason
from coordinator.engine.state.accounting import queueing_s
from coordinator.engine.state.events import JobCancelRequested
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Loan, Preempt, Reclaim
from coordinator.policies.contract.snapshot import JobView
from coordinator.sim.run.cluster import Delays
from tests.engine.house import CHAT, House, state
from tests.engine.stopped_jobs import gone_report, lend
from tests.properties.test_engine_safety import DELAYS, Op, often, perform, steps
from tests.tables import each_row

T0, I0 = NodeName("t0"), NodeName("i0")
SUBMITTED_S = 20.0
BEGUN = ("gang_ready -> ",)
OVER = ("vacated -> ", "succeed -> ", "fail -> ", "cancel -> ")


def seen(house: House, job: JobEntry) -> JobView:
    """The job as a policy sees it."""
    return next(view for view in house.engine.snapshot().jobs if view.job_id == job.job_id)


def not_in_time(house: House, job: JobEntry) -> None:
    """The node hears of its worker too late."""
    house.toggle_deaf(T0)
    house.start(job, T0)
    house.wait(house.engine.settings.gang_ready_timeout_s)
    assert house.engine.state.counters.gang_timeouts == 1
    house.toggle_deaf(T0)


def node_dies(house: House, job: JobEntry) -> None:
    """The node reboots while it makes ready."""
    house.start(job, T0)
    house.sim.nodes[T0].crash()
    house.sim.nodes[T0].boot()


def fails_to_start(house: House, job: JobEntry) -> None:
    """Its worker ends before it ran, by the job's own fault, and may be tried again."""
    house.start(job, T0)
    house.sim.nodes[T0].exited(next(iter(job.workers.values())).key, 1)


def gives_way(house: House, job: JobEntry) -> None:
    """It is preempted before it ran."""
    house.start(job, T0)
    house.decide(Preempt(job_id=job.job_id, reason="test"))


def node_goes_home(house: House, job: JobEntry) -> None:
    """Its node is lent, and is called back while the job starts there."""
    house.decide(Loan(node=I0, service=CHAT, reason="test"), lend=True)
    house.wait(1.0)
    house.start(job, I0)
    reclaim = Reclaim(node=I0, service=CHAT, deadline_s=60.0, reason="test")
    house.decide(reclaim, lend=True)


WAYS = (not_in_time, node_dies, fails_to_start, gives_way, node_goes_home)


@each_row("undone", WAYS)
def test_a_start_that_came_to_nothing_is_part_of_the_wait(
    undone: Callable[[House, JobEntry], None],
) -> None:
    """The job has waited all the time, for the figures and for whoever lets it age."""
    house = House(delays=Delays(ready_s=5.0))
    house.wait(SUBMITTED_S)
    job = house.submit(max_restarts=1)
    house.wait(100.0)
    undone(house, job)
    house.wait(house.engine.settings.retry_backoff_s + 1.0)
    assert (state(job), job.attempt.ran_at_s) == (JobState.PENDING, None)
    assert seen(house, job).waiting_since_s == SUBMITTED_S
    house.start(job, "t1")
    house.wait(5.0)
    assert state(job) == JobState.RUNNING
    assert job.started_at_s is not None
    assert job.wait.queueing_s == job.started_at_s - SUBMITTED_S > 100.0


def test_an_attempt_that_ran_is_no_wait() -> None:
    """What it computed is not queueing: the next wait begins when it has left its nodes."""
    house = House(delays=Delays(stop_s=7.0))
    job = house.submit()
    house.wait(30.0)
    house.start(job, T0)
    house.wait(200.0)
    house.decide(Preempt(job_id=job.job_id, reason="test"))
    house.wait(17.0)  # 7 of them to stop
    assert seen(house, job).waiting_since_s == 237.0
    assert queueing_s(job, house.sim.loop.now_s) == 30.0 + 10.0
    house.engine.handle(JobCancelRequested(job_id=job.job_id, by="ops/me"), now_s=250.0)
    assert queueing_s(job, 1000.0) == 30.0 + 13.0


def hears_late(house: House, job: JobEntry, ended_ago_s: float) -> float:
    """i0 is heard to have gone home by itself, with its worker's end so long ago; now."""
    house.wait(400.0)
    home = StopReason.PREEMPT
    report = gone_report(house, job, "i0", ended_ago_s=ended_ago_s, stop_reason=home)
    house.sim.handle(replace(report, role=NodeRole.WARMING, service=CHAT))
    return house.sim.loop.now_s


@each_row(("ended_ago_s", "waited_s"), [(200.0, 200.0), (15.0, 15.0), (14.0, 0.0), (1e6, 400.0)])
def test_a_wait_that_began_while_nobody_led_is_counted_from_its_beginning(
    ended_ago_s: float, waited_s: float
) -> None:
    """Its node went home when its lease had run out, and could tell nobody: that outage is part of
    the wait, for the figures and for whoever lets the job age. A report is always a little late,
    and no wait is longer than since the attempt began to run."""
    house = House()
    lend(house, "i0")
    job = house.submit(work_s=1e6)
    house.wait(30.0)
    house.start(job, I0)
    now_s = hears_late(house, job, ended_ago_s)
    assert (state(job), job.attempt.ran_at_s) == (JobState.PENDING, None)
    assert seen(house, job).waiting_since_s == now_s - waited_s
    assert queueing_s(job, now_s + 10.0) == 30.0 + waited_s + 10.0
    assert house.engine.check() == []


def test_a_gang_waits_from_the_end_of_its_last_worker() -> None:
    """The other node went on until it was told, and held its GPUs."""
    house = House(delays=Delays(stop_s=7.0))
    lend(house, "i0")
    job = house.submit(workers=(2, 2), work_s=1e6)
    house.start(job, I0, T0)
    now_s = hears_late(house, job, 200.0)
    assert state(job) == JobState.PREEMPTING
    house.wait(10.0)
    assert seen(house, job).waiting_since_s == now_s + 7.0


def ran_s(house: House, job: JobEntry) -> float:
    """How long its attempts ran, each until its last worker was gone, by its story."""
    total_s, since_s = 0.0, None
    for line in house.engine.state.stories:
        if line.subject != job.job_id:
            continue
        if line.what.startswith(BEGUN):
            since_s = line.at_s
        elif line.what.startswith(OVER) and since_s is not None:
            total_s, since_s = total_s + line.at_s - since_s, None
    return total_s if since_s is None else total_s + house.sim.loop.now_s - since_s


@settings(often, max_examples=150)
@given(steps(without="amnesia"), DELAYS)
def test_a_job_waits_or_runs_at_every_instant(ops: list[Op], delays: Delays) -> None:
    """From submission to its end, or to now: queueing and the attempts that ran, and nothing
    twice."""
    house = House(delays=delays)
    for op in ops:
        perform(house, op)
    now_s = house.sim.loop.now_s
    for job in house.engine.state.jobs.values():
        end_s = now_s if job.finished_at_s is None else job.finished_at_s
        waited_s, computed_s = queueing_s(job, now_s), ran_s(house, job)
        assert waited_s + computed_s == pytest.approx(end_s - job.submitted_at_s)
        assert min(waited_s, computed_s) >= 0.0
