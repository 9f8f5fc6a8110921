"""Reclaims that wait for jobs to end by themselves, and the promise of the first order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobState, NodeName, NodeRole
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.loans.lifecycle import note_order
from coordinator.engine.state import loan_outcome
from coordinator.engine.state.accounting import ReclaimTimes, figures, with_overdue
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import (
    LeaderStarted,
    LoadMeasured,
    NodeSilent,
    OperatorAction,
    OperatorAsked,
    PassDue,
)
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import LoanEntry
from coordinator.policies.contract.decisions import Loan, Reclaim
from coordinator.service.api.rows import loan_row
from coordinator.sim.run.cluster import Delays
from tests.engine.state.test_loan_outcome import says
from tests.harness.cluster.engine import CHAT, EngineHarness, state
from tests.tables import each_row

QUICK = Delays(stop_s=3.0, device_free_s=1.0, warm_up_s=10.0)


def lend(harness: EngineHarness) -> None:
    """Lend the first inference node."""
    harness.decide(Loan(node=NodeName("i0"), service=CHAT, reason="idle"), lend=True)
    harness.wait(1.0)


def waits(wait_s: float = 30.0) -> Reclaim:
    """A reclaim that waits, as a policy would write it."""
    return Reclaim(
        node=NodeName("i0"), service=CHAT, deadline_s=60.0, reason="load rose", wait_s=wait_s
    )


def waiting_harness(wait_s: float = 30.0) -> EngineHarness:
    """Its lent node was just called back, and waits for a long job with a base worker there."""
    harness = EngineHarness(delays=QUICK)
    lend(harness)
    harness.start(harness.submit("stays", work_s=1000.0), "i0")
    harness.wait(1.0)
    harness.decide(waits(wait_s), lend=True)
    return harness


def test_a_job_that_ends_in_time_is_not_stopped() -> None:
    """The node takes no other work meanwhile, counts as coming, and goes home when the job ends,
    within the deadline that runs from the order."""
    harness = EngineHarness(delays=QUICK)
    lend(harness)
    job = harness.submit("ends", work_s=20.0)
    harness.start(job, "i0")
    harness.wait(1.0)
    harness.decide(waits(), lend=True)
    (view,) = (node for node in harness.engine.snapshot().nodes if node.name == "i0")
    assert (view.is_schedulable, view.is_reclaimed) == (False, True)
    other = harness.submit("other", gpus_per_worker=1)
    harness.start(other, "i0")
    assert state(other) == JobState.PENDING
    harness.wait(59.0)
    assert (state(job), job.counts.preemptions) == (JobState.SUCCEEDED, 0)
    assert harness.node("i0").role == NodeRole.SERVING
    counters = harness.engine.state.counters
    assert (counters.reclaims, counters.reclaims_late, counters.preemptions) == (1, 0, 0)
    assert 20.0 < counters.reclaim_s[0] < 40.0  # not the whole wait and the way home
    assert not harness.engine.state.awaited
    assert not harness.node("i0").homecoming.is_awaited


def test_when_the_wait_is_over_the_job_stops() -> None:
    """An estimate was wrong: after wait_s the reclaim is one like any other, and in time."""
    harness = EngineHarness(delays=QUICK)
    lend(harness)
    job = harness.submit("stays", work_s=1000.0)
    harness.start(job, "i0")
    harness.wait(1.0)
    harness.decide(waits(), lend=True)
    harness.wait(29.0)
    assert state(job) == JobState.RUNNING
    harness.wait(25.0)
    assert (state(job), job.counts.preemptions) == (JobState.PENDING, 1)
    assert harness.node("i0").role == NodeRole.SERVING
    assert harness.engine.state.counters.reclaim_s == [pytest.approx(44.0)]  # 30 + 3 + 1 + 10


def test_flexible_workers_go_at_once() -> None:
    """Nobody waits for them: to release them costs nothing."""
    harness = EngineHarness(delays=QUICK)
    lend(harness)
    job = harness.submit("ends", workers=(1, 2), gpus_per_worker=4, work_s=20.0)
    harness.start(job, "i0", flexible=("i0",))
    harness.wait(1.0)
    harness.decide(waits(), lend=True)
    harness.wait(4.0)
    assert [worker.is_flexible for worker in job.workers.values()] == [False]
    assert state(job) == JobState.RUNNING


def test_a_recall_ends_the_wait() -> None:
    """What is ordered to come home now does not wait on."""
    harness = EngineHarness(delays=QUICK)
    lend(harness)
    job = harness.submit("stays", work_s=1000.0)
    harness.start(job, "i0")
    harness.wait(1.0)
    harness.decide(waits(), lend=True)
    harness.decide(replace(waits(), wait_s=0.0), lend=True)
    harness.wait(15.0)
    assert (state(job), harness.node("i0").role) == (JobState.PENDING, NodeRole.SERVING)
    assert not harness.engine.state.awaited


def test_only_a_lent_node_waits_and_only_once() -> None:
    """A second order to wait, or one for a node that serves, is refused and changes nothing."""
    harness = EngineHarness(delays=QUICK)
    harness.decide(waits(), lend=True)
    assert not harness.engine.state.awaited
    lend(harness)
    job = harness.submit("stays", work_s=1000.0)
    harness.start(job, "i0")
    harness.decide(waits(), lend=True)
    until_s = harness.engine.state.awaited[NodeName("i0")].until_s
    harness.wait(5.0)
    harness.decide(waits(), lend=True)
    assert harness.engine.state.awaited[NodeName("i0")].until_s == until_s
    assert harness.engine.state.counters.decisions_refused == 2


def test_a_wait_outlives_the_coordinator() -> None:
    """The state carries it: whoever leads next takes the node back at the same instant."""
    harness = EngineHarness(delays=QUICK)
    lend(harness)
    job = harness.submit("stays", work_s=1000.0)
    harness.start(job, "i0")
    harness.wait(1.0)
    harness.decide(waits(), lend=True)
    saved = decode_state(harness.engine.encode_state())
    assert saved.awaited == harness.engine.state.awaited
    fresh = Engine(harness.engine.settings, saved)
    fresh.policy = harness.engine.policy
    harness.sim.engine = fresh
    harness.engine = fresh
    harness.wait(55.0)
    assert fresh.state.jobs[job.job_id].state == JobState.PENDING
    assert harness.node("i0").role == NodeRole.SERVING


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
    harness = waiting_harness()
    ordered_at_s = harness.engine.state.now_s
    stages_s = WAY_S | {"unattended": unattended_s}
    report = replace(says(harness, NodeRole.SERVING, stages_s), home_ago_s=2.0)
    harness.engine.handle(report, now_s=ordered_at_s + home_s)
    [loan] = harness.engine.state.loans.values()
    found = figures(harness.engine.state)
    assert (found.reclaims, found.reclaims_late) == (1, int(is_late))
    assert (found.leases_lapsed, found.lapses_late, found.lapse_s) == (0, 0, ReclaimTimes())
    assert found.reclaim_s.max == home_s
    row = loan_row(loan, now_s=ordered_at_s + 1e6)
    assert (row.state, row.reclaim_s, row.lapse_s) == ("returned", home_s, None)
    assert row.is_late is is_late
    assert sum(row.stage_durations_s.values()) == pytest.approx(home_s)
    assert harness.engine.check() == []


@pytest.mark.parametrize("is_lapsing", [False, True])
def test_what_waits_and_never_comes_home_is_overdue_by_the_first_promise_that_ends(
    is_lapsing: bool,
) -> None:
    """60 s from the order, or 30 s from the end of its lease."""
    harness = waiting_harness()
    [loan] = harness.engine.state.loans.values()
    began_s = harness.engine.state.now_s
    if is_lapsing:
        harness.engine.handle(says(harness, NodeRole.VACATING), now_s=began_s + 5.0)
    assert loan_outcome.is_lapse(loan) is False
    due_s = began_s + (35.0 if is_lapsing else 60.0)
    assert (loan_outcome.overdue_s(loan, due_s), loan_outcome.overdue_s(loan, due_s + 7.0)) == (
        0.0,
        7.0,
    )


def test_a_wait_takes_its_time_of_the_deadline() -> None:
    """What its agent has left after it is what it is told to be home by."""
    harness = waiting_harness(20.0)
    ordered_at_s = harness.engine.state.now_s
    harness.wait(21.0)
    assert harness.node("i0").homecoming.reclaim_at_s == ordered_at_s + 60.0


def test_a_wait_goes_on_though_its_service_is_in_no_settings_any_more() -> None:
    """It was called back already: whoever leads next keeps what was promised to its jobs."""
    harness = waiting_harness()
    until_s = harness.engine.state.awaited[NodeName("i0")].until_s
    settings = EngineSettings(policy="fifo")
    now_s = harness.engine.state.now_s
    harness.engine.handle(LeaderStarted(epoch=9, holder="next", settings=settings), now_s=now_s)
    node = harness.node("i0")
    assert (node.homecoming.is_awaited, node.desired.role) == (True, NodeRole.ON_LOAN)
    assert harness.engine.check() == []
    harness.engine.handle(PassDue(), now_s=until_s)
    assert (node.homecoming.is_awaited, node.desired.role) == (False, NodeRole.SERVING)
    assert node.homecoming.reclaim_at_s == until_s + 30.0


@pytest.mark.parametrize(("unattended_s", "is_late"), [(16.0, False), (17.0, True)])
def test_a_lapse_is_held_to_the_last_promise_of_a_service_that_is_in_no_settings(
    unattended_s: float, is_late: bool
) -> None:
    """Its deadline was 60 s, and the TTL of the lease 30 s of it."""
    harness = waiting_harness()
    now_s = harness.engine.state.now_s
    started = LeaderStarted(epoch=9, holder="next", settings=EngineSettings(policy="fifo"))
    harness.engine.handle(started, now_s=now_s)
    stages_s = WAY_S | {"unattended": unattended_s}
    harness.engine.handle(says(harness, NodeRole.SERVING, stages_s), now_s=now_s + 50.0)
    [loan] = harness.engine.state.loans.values()
    assert (loan.lapse_deadline_s, loan_outcome.is_late(loan)) == (30.0, is_late)


I0 = NodeName("i0")
PROMISE_S = 60.0
SLOW = Delays(drain_s=5.0, stop_s=3.0, device_free_s=1.0, warm_up_s=10.0)
OVER_S = 1e-6
"""Two sums of the same seconds differ by less."""


def order(harness: EngineHarness, action: OperatorAction) -> None:
    """An operator's order of the lent node."""
    [loan] = harness.engine.state.loans.values()
    target = {
        OperatorAction.REVOKE_LOAN: str(loan.lease_id),
        OperatorAction.RECALL: str(CHAT),
    }.get(action, str(I0))
    harness.sim.handle(OperatorAsked(action=action, by="ops/ada", target=target))
    harness.settle()


def due_s(loan: LoanEntry) -> float:
    """When the node was promised to be home."""
    assert loan.reclaim_ordered_at_s is not None
    assert loan.reclaim_deadline_s is not None
    return loan.reclaim_ordered_at_s + loan.reclaim_deadline_s


@pytest.mark.parametrize("how", ["revoke", "recall", "policy"])
def test_an_order_during_a_wait_moves_no_promise(how: str) -> None:
    """The service asked when the wait began: what is left of that is what the node gets."""
    harness = waiting_harness()
    [loan] = harness.engine.state.loans.values()
    ordered_at_s, decide_s = harness.engine.state.now_s, loan.decide_s
    harness.wait(20.0)
    if how == "policy":
        harness.decide(replace(waits(), wait_s=0.0), lend=True)
    else:
        recall, revoke = OperatorAction.RECALL, OperatorAction.REVOKE_LOAN
        order(harness, recall if how == "recall" else revoke)
    assert (loan.reclaim_ordered_at_s, loan.reclaim_deadline_s) == (ordered_at_s, PROMISE_S)
    assert (loan.called_home_at_s, loan.decide_s) == (ordered_at_s + 20.0, decide_s)
    assert harness.node("i0").homecoming.reclaim_at_s == ordered_at_s + PROMISE_S
    assert harness.engine.desired(I0).reclaim_in_s == pytest.approx(PROMISE_S - 20.0)
    assert not harness.engine.state.awaited
    harness.wait(30.0)
    assert loan_outcome.reclaim_s(loan) == pytest.approx(20.0 + 3.0 + 1.0 + 10.0)
    assert not loan_outcome.is_late(loan)


def test_how_old_the_load_was_is_told_of_the_order_that_was_promised() -> None:
    """A second one does not make the decision look slower, nor quicker, than it was."""
    harness = EngineHarness(delays=QUICK)
    harness.decide(Loan(node=I0, service=CHAT, reason="idle"), lend=True)
    harness.wait(1.0)
    harness.start(harness.submit("stays", work_s=1000.0), "i0")
    harness.sim.handle(LoadMeasured(service=CHAT, load=1.0))
    harness.wait(3.0)
    harness.decide(waits(), lend=True)
    [loan] = harness.engine.state.loans.values()
    assert loan.decide_s == 3.0
    harness.wait(5.0)
    harness.decide(replace(waits(), wait_s=0.0), lend=True)
    assert (loan.decide_s, harness.engine.state.awaited) == (3.0, {})


def test_what_comes_home_after_the_first_order_s_deadline_is_late() -> None:
    """However soon after the last order that is."""
    harness = waiting_harness()
    [loan] = harness.engine.state.loans.values()
    harness.wait(20.0)
    harness.toggle_deaf(I0)
    order(harness, OperatorAction.REVOKE_LOAN)
    harness.wait(35.0)
    harness.toggle_deaf(I0)
    harness.wait(15.0)
    assert harness.node("i0").role == NodeRole.SERVING
    assert loan_outcome.is_late(loan)
    assert harness.engine.state.counters.reclaims_late == 1


def test_an_order_with_less_time_brings_the_promise_forward() -> None:
    """Its service may want nodes back sooner than it did when the wait began."""
    harness = waiting_harness()
    [loan] = harness.engine.state.loans.values()
    ordered_at_s = harness.engine.state.now_s
    harness.wait(10.0)
    harness.decide(replace(waits(), wait_s=0.0, deadline_s=15.0), lend=True)
    assert due_s(loan) == harness.node("i0").homecoming.reclaim_at_s == ordered_at_s + 25.0


@pytest.mark.parametrize("ends", ["lost", "dead"])
def test_an_order_that_waits_is_a_reclaim_wherever_it_is_counted(ends: str) -> None:
    """From the order on, also where its node falls silent, or never comes home by it."""
    harness = waiting_harness()
    assert (counted(harness), told(harness)) == ((1, 0), (1, 0))
    lose(harness)
    assert harness.node("i0").role == NodeRole.LOST
    assert (counted(harness), told(harness)) == ((1, 0), (1, 0))
    if ends == "dead":
        order(harness, OperatorAction.CONFIRM_DEAD)
        order(harness, OperatorAction.REMOVE)
    assert (counted(harness), told(harness)) == ((1, 0), (1, 0))
    now_s = harness.engine.state.now_s + PROMISE_S + 1.0
    assert counted(harness, now_s) == told(harness, now_s)


def test_an_order_that_waits_before_the_loan_is_heard_to_begin_is_a_reclaim_from_then_on() -> None:
    """It is none while nobody knows whether its node leaves, and one as soon as it has left."""
    harness = EngineHarness(delays=SLOW)
    harness.decide(Loan(node=I0, service=CHAT, reason="idle"), lend=True)
    harness.wait(1.0)
    assert harness.node("i0").role == NodeRole.DRAINING
    [loan] = harness.engine.state.loans.values()
    engine = harness.engine
    note_order(Context(engine.state, engine.settings, engine.state.now_s), loan, waits())
    assert (counted(harness), told(harness)) == ((0, 0), (0, 0))
    harness.wait(10.0)
    assert harness.node("i0").role == NodeRole.ON_LOAN
    assert (counted(harness), told(harness)) == ((1, 0), (1, 0))


def counted(harness: EngineHarness, now_s: float | None = None) -> tuple[int, int]:
    """Reclaims and late ones by the counters, as scripts and tables read them."""
    state = harness.engine.state
    found = with_overdue(figures(state), state, state.now_s if now_s is None else now_s)
    return found.reclaims, found.reclaims_late


def told(harness: EngineHarness, now_s: float | None = None) -> tuple[int, int]:
    """Reclaims and late ones by the loans themselves, as the rows of a service read them."""
    state = harness.engine.state
    found = loan_outcome.tally(state.loans.values(), state.now_s if now_s is None else now_s)
    return found.reclaims, found.reclaims_late


def lose(harness: EngineHarness) -> None:
    """The lent node is not heard any more."""
    harness.engine.handle(NodeSilent(node=I0, silent_s=20.0), now_s=harness.engine.state.now_s)


STEPS = st.one_of(
    st.tuples(st.just("wait"), st.floats(0.0, 40.0)),
    st.tuples(st.just("waits"), st.floats(1.0, 50.0)),
    st.tuples(st.sampled_from(["reclaim", "longer"]), st.floats(1.0, 300.0)),
    st.tuples(st.sampled_from(["revoke", "recall", "lost", "deaf", "leader"]), st.just(0.0)),
)


@given(steps=st.lists(STEPS, min_size=1, max_size=10), waits_s=st.floats(1.0, 50.0))
def test_the_promise_of_a_reclaim_never_moves_later(
    steps: list[tuple[str, float]], waits_s: float
) -> None:
    """Whatever is ordered, promised or heard after the first order; nor does a node get longer
    than is promised, and all who count reclaims count alike."""
    harness = EngineHarness(delays=QUICK)
    harness.decide(Loan(node=I0, service=CHAT, reason="idle"), lend=True)
    harness.wait(1.0)
    harness.start(harness.submit("stays", work_s=1000.0), "i0")
    harness.wait(1.0)
    harness.decide(waits(waits_s), lend=True)
    [loan] = harness.engine.state.loans.values()
    promised_s = due_s(loan)
    for what, value in steps:
        step(harness, what, value)
        assert due_s(loan) <= promised_s + OVER_S
        promised_s = due_s(loan)
        node = harness.node("i0")
        if loan.returned_at_s is None and node.homecoming.reclaim_at_s is not None:
            assert node.homecoming.reclaim_at_s <= promised_s + OVER_S
        assert counted(harness) == told(harness)


def step(harness: EngineHarness, what: str, value: float) -> None:
    """One thing that happens to a lent node that was called back."""
    engine = harness.engine
    match what:
        case "wait":
            harness.wait(value)
        case "waits":
            harness.decide(waits(value), lend=True)
        case "reclaim":
            harness.decide(replace(waits(), wait_s=0.0, deadline_s=value), lend=True)
        case "longer":
            (service,) = engine.settings.services
            longer = replace(service, reclaim_deadline_s=PROMISE_S + value)
            settings = replace(engine.settings, services=(longer,))
            lead(harness, LeaderStarted(epoch=0, holder="next", settings=settings))
        case "leader":
            lead(harness, LeaderStarted(epoch=0, holder="next"))
        case "lost":
            lose(harness)
        case "deaf":
            harness.toggle_deaf(I0)
        case "recall":
            order(harness, OperatorAction.RECALL)
            order(harness, OperatorAction.END_RECALL)
        case _:
            order(harness, OperatorAction.REVOKE_LOAN)


def lead(harness: EngineHarness, event: LeaderStarted) -> None:
    """Somebody begins to lead, and hears every node."""
    policy = harness.engine.policy
    harness.sim.handle(event)
    harness.engine.policy = policy
    for node in harness.sim.nodes.values():
        node.report_soon()
    harness.wait(1.0)
