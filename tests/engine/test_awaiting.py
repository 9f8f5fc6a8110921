"""Reclaims that wait for jobs to end by themselves."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import JobState, NodeName, NodeRole
from coordinator.engine.engine import Engine, decode_state
from coordinator.policies.decisions import Loan, Reclaim
from coordinator.sim.cluster import Delays
from tests.engine.house import CHAT, House, state

QUICK = Delays(stop_s=3.0, device_free_s=1.0, warm_up_s=10.0)


def lend(house: House) -> None:
    """Lend the first inference node."""
    house.decide(Loan(node=NodeName("i0"), service=CHAT, reason="idle"), lend=True)
    house.wait(1.0)


def waits(wait_s: float = 30.0) -> Reclaim:
    """A reclaim that waits, as a policy would write it."""
    return Reclaim(
        node=NodeName("i0"), service=CHAT, deadline_s=60.0, reason="load rose", wait_s=wait_s
    )


def test_a_job_that_ends_in_time_is_not_stopped() -> None:
    """The node takes no other work meanwhile, counts as coming, and goes home when the job ends,
    within the deadline that runs from the order."""
    house = House(delays=QUICK)
    lend(house)
    job = house.submit("ends", work_s=20.0)
    house.start(job, "i0")
    house.wait(1.0)
    house.decide(waits(), lend=True)
    (view,) = (node for node in house.engine.snapshot().nodes if node.name == "i0")
    assert (view.is_schedulable, view.is_reclaimed) == (False, True)
    other = house.submit("other", gpus_per_worker=1)
    house.start(other, "i0")
    assert state(other) == JobState.PENDING
    house.wait(59.0)
    assert (state(job), job.preemption_count) == (JobState.SUCCEEDED, 0)
    assert house.node("i0").role == NodeRole.SERVING
    counters = house.engine.state.counters
    assert (counters.reclaims, counters.reclaims_late, counters.preemptions) == (1, 0, 0)
    assert 20.0 < counters.reclaim_s[0] < 40.0  # not the whole wait and the way home
    assert not house.engine.state.awaited
    assert not house.node("i0").is_awaited


def test_when_the_wait_is_over_the_job_stops() -> None:
    """An estimate was wrong: after wait_s the reclaim is one like any other, and in time."""
    house = House(delays=QUICK)
    lend(house)
    job = house.submit("stays", work_s=1000.0)
    house.start(job, "i0")
    house.wait(1.0)
    house.decide(waits(), lend=True)
    house.wait(29.0)
    assert state(job) == JobState.RUNNING
    house.wait(25.0)
    assert (state(job), job.preemption_count) == (JobState.PENDING, 1)
    assert house.node("i0").role == NodeRole.SERVING
    assert house.engine.state.counters.reclaim_s == [pytest.approx(44.0)]  # 30 + 3 + 1 + 10


def test_flexible_workers_go_at_once() -> None:
    """Nobody waits for them: to release them costs nothing."""
    house = House(delays=QUICK)
    lend(house)
    job = house.submit("ends", workers=(1, 2), gpus_per_worker=4, work_s=20.0)
    house.start(job, "i0", flexible=("i0",))
    house.wait(1.0)
    house.decide(waits(), lend=True)
    house.wait(4.0)
    assert [worker.is_flexible for worker in job.workers.values()] == [False]
    assert state(job) == JobState.RUNNING


def test_a_recall_ends_the_wait() -> None:
    """What is ordered to come home now does not wait on."""
    house = House(delays=QUICK)
    lend(house)
    job = house.submit("stays", work_s=1000.0)
    house.start(job, "i0")
    house.wait(1.0)
    house.decide(waits(), lend=True)
    house.decide(replace(waits(), wait_s=0.0), lend=True)
    house.wait(15.0)
    assert (state(job), house.node("i0").role) == (JobState.PENDING, NodeRole.SERVING)
    assert not house.engine.state.awaited


def test_only_a_lent_node_waits_and_only_once() -> None:
    """A second order to wait, or one for a node that serves, is refused and changes nothing."""
    house = House(delays=QUICK)
    house.decide(waits(), lend=True)
    assert not house.engine.state.awaited
    lend(house)
    job = house.submit("stays", work_s=1000.0)
    house.start(job, "i0")
    house.decide(waits(), lend=True)
    until_s = house.engine.state.awaited[NodeName("i0")].until_s
    house.wait(5.0)
    house.decide(waits(), lend=True)
    assert house.engine.state.awaited[NodeName("i0")].until_s == until_s
    assert house.engine.state.counters.decisions_refused == 2


def test_a_wait_outlives_the_coordinator() -> None:
    """The state carries it: whoever leads next takes the node back at the same instant."""
    house = House(delays=QUICK)
    lend(house)
    job = house.submit("stays", work_s=1000.0)
    house.start(job, "i0")
    house.wait(1.0)
    house.decide(waits(), lend=True)
    saved = decode_state(house.engine.encode_state())
    assert saved.awaited == house.engine.state.awaited
    fresh = Engine(house.engine.settings, saved)
    fresh.policy = house.engine.policy
    house.sim.adopt_engine(fresh)
    house.engine = fresh
    house.wait(55.0)
    assert fresh.state.jobs[job.job_id].state == JobState.PENDING
    assert house.node("i0").role == NodeRole.SERVING
