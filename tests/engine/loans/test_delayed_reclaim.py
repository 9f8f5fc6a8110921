"""Reclaims that wait for jobs to end by themselves."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import JobState, NodeName, NodeRole
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.state import loan_outcome
from coordinator.engine.state.accounting import ReclaimTimes, figures
from coordinator.engine.state.events import LeaderStarted, PassDue
from coordinator.engine.state.settings import EngineSettings
from coordinator.policies.contract.decisions import Loan, Reclaim
from coordinator.service.api.rows import loan_row
from coordinator.sim.run.cluster import Delays
from tests.engine.house import CHAT, House, state
from tests.engine.test_lapses import says
from tests.tables import each_row

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


def waiting_house(wait_s: float = 30.0) -> House:
    """Its lent node was just called back, and waits for a long job with a base worker there."""
    house = House(delays=QUICK)
    lend(house)
    house.start(house.submit("stays", work_s=1000.0), "i0")
    house.wait(1.0)
    house.decide(waits(wait_s), lend=True)
    return house


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
    assert (state(job), job.counts.preemptions) == (JobState.SUCCEEDED, 0)
    assert house.node("i0").role == NodeRole.SERVING
    counters = house.engine.state.counters
    assert (counters.reclaims, counters.reclaims_late, counters.preemptions) == (1, 0, 0)
    assert 20.0 < counters.reclaim_s[0] < 40.0  # not the whole wait and the way home
    assert not house.engine.state.awaited
    assert not house.node("i0").homecoming.is_awaited


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
    assert (state(job), job.counts.preemptions) == (JobState.PENDING, 1)
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
    house.sim.engine = fresh
    house.engine = fresh
    house.wait(55.0)
    assert fresh.state.jobs[job.job_id].state == JobState.PENDING
    assert house.node("i0").role == NodeRole.SERVING


WAY_S = {"vacate": 3.0, "device_free": 1.0, "server_ready": 10.0}


@each_row(
    ("home_s", "unattended_s", "is_late"),
    [
        (50.0, 0.0, False),
        (50.0, 17.0, True),  # 31 s of the 30 s that the TTL leaves, 50 s of the 60 s from the order
        (61.0, 0.0, True),  # 14 s and 61 s
        (87.0, 15.0, True),
    ],
)
def test_an_order_that_waits_while_its_lease_lapses_is_a_reclaim_with_both_promises(
    home_s: float, unattended_s: float, is_late: bool
) -> None:
    """Its service asked for the node, and has it in time only if neither promise is broken."""
    house = waiting_house()
    ordered_at_s = house.engine.state.now_s
    stages_s = WAY_S | {"unattended": unattended_s}
    report = replace(says(house, NodeRole.SERVING, stages_s), home_ago_s=2.0)
    house.engine.handle(report, now_s=ordered_at_s + home_s)
    [loan] = house.engine.state.loans.values()
    found = figures(house.engine.state)
    assert (found.reclaims, found.reclaims_late) == (1, int(is_late))
    assert (found.leases_lapsed, found.lapses_late, found.lapse_s) == (0, 0, ReclaimTimes())
    assert found.reclaim_s.max == home_s
    row = loan_row(loan, now_s=ordered_at_s + 1e6)
    assert (row.state, row.reclaim_s, row.lapse_s) == ("returned", home_s, None)
    assert row.is_late is is_late
    assert sum(row.stage_durations_s.values()) == pytest.approx(home_s)
    assert house.engine.check() == []


@pytest.mark.parametrize("is_lapsing", [False, True])
def test_what_waits_and_never_comes_home_is_overdue_by_the_first_promise_that_ends(
    is_lapsing: bool,
) -> None:
    """60 s from the order, or 30 s from the end of its lease."""
    house = waiting_house()
    [loan] = house.engine.state.loans.values()
    began_s = house.engine.state.now_s
    if is_lapsing:
        house.engine.handle(says(house, NodeRole.VACATING), now_s=began_s + 5.0)
    assert loan_outcome.is_lapse(loan) is False
    due_s = began_s + (35.0 if is_lapsing else 60.0)
    assert (loan_outcome.overdue_s(loan, due_s), loan_outcome.overdue_s(loan, due_s + 7.0)) == (
        0.0,
        7.0,
    )


def test_a_wait_takes_its_time_of_the_deadline() -> None:
    """What its agent has left after it is what it is told to be home by."""
    house = waiting_house(20.0)
    ordered_at_s = house.engine.state.now_s
    house.wait(21.0)
    assert house.node("i0").homecoming.reclaim_at_s == ordered_at_s + 60.0


def test_a_wait_goes_on_though_its_service_is_in_no_settings_any_more() -> None:
    """It was called back already: whoever leads next keeps what was promised to its jobs."""
    house = waiting_house()
    until_s = house.engine.state.awaited[NodeName("i0")].until_s
    settings = EngineSettings(policy="fifo")
    now_s = house.engine.state.now_s
    house.engine.handle(LeaderStarted(epoch=9, holder="next", settings=settings), now_s=now_s)
    node = house.node("i0")
    assert (node.homecoming.is_awaited, node.desired.role) == (True, NodeRole.ON_LOAN)
    assert house.engine.check() == []
    house.engine.handle(PassDue(), now_s=until_s)
    assert (node.homecoming.is_awaited, node.desired.role) == (False, NodeRole.SERVING)
    assert node.homecoming.reclaim_at_s == until_s + 30.0


@pytest.mark.parametrize(("unattended_s", "is_late"), [(16.0, False), (17.0, True)])
def test_a_lapse_is_held_to_the_last_promise_of_a_service_that_is_in_no_settings(
    unattended_s: float, is_late: bool
) -> None:
    """Its deadline was 60 s, and the TTL of the lease 30 s of it."""
    house = waiting_house()
    now_s = house.engine.state.now_s
    started = LeaderStarted(epoch=9, holder="next", settings=EngineSettings(policy="fifo"))
    house.engine.handle(started, now_s=now_s)
    stages_s = WAY_S | {"unattended": unattended_s}
    house.engine.handle(says(house, NodeRole.SERVING, stages_s), now_s=now_s + 50.0)
    [loan] = house.engine.state.loans.values()
    assert (loan.lapse_deadline_s, loan_outcome.is_late(loan)) == (30.0, is_late)
