"""Drains with a deadline: who may go on until when, and what ends it."""

from __future__ import annotations

import pytest

from common.model import JobState, Launcher, NodeName, NodeRole
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.record import Entry, Record, replay
from coordinator.engine.state.commands import Outcome
from coordinator.engine.state.events import (
    Event,
    LeaderStarted,
    OperatorAction,
    OperatorAsked,
    PassDue,
)
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Loan
from coordinator.sim.run.cluster import Delays
from tests.engine.house import CHAT, House, state

DEADLINE_S = 60.0
QUICK = Delays(stop_s=3.0, device_free_s=1.0, warm_up_s=10.0)
A = OperatorAction


def ask(house: House, action: A, deadline_s: float | None = None, node: str = "t0") -> None:
    """An operator's order to one node."""
    house.sim.handle(
        OperatorAsked(
            action=action, by="ops/me", target=node, reason="a fan", deadline_s=deadline_s
        )
    )
    house.settle()


def running(house: House, *nodes: str, work_s: float = 1000.0) -> JobEntry:
    """A job that runs there."""
    job = house.submit("stays", workers=(len(nodes), len(nodes)), work_s=work_s)
    house.start(job, *nodes)
    house.wait(1.0)
    assert state(job) == JobState.RUNNING
    return job


def lines(house: House, subject: str) -> list[tuple[str, str]]:
    """What was told of a job or a node."""
    return [(s.what, s.reason) for s in house.engine.state.stories if s.subject == subject]


def test_what_runs_goes_on_until_the_deadline_and_then_leaves_in_good_order() -> None:
    """Nothing new comes meanwhile; then it is a preemption with its grace, told with whose order
    it was, and the job starts elsewhere as its next attempt."""
    house = House(delays=QUICK)
    job = running(house, "t0")
    ask(house, A.DRAIN, DEADLINE_S)
    assert ("drain within 60 s", "by ops/me: a fan") in lines(house, "t0")
    other = house.submit("other", gpus_per_worker=1)
    house.start(other, "t0")
    assert state(other) == JobState.PENDING
    house.wait(DEADLINE_S - 1.0)
    assert (state(job), job.counts.preemptions) == (JobState.RUNNING, 0)
    house.wait(1.0)
    assert state(job) == JobState.PREEMPTING
    assert ("drain deadline", f"still there: {job.job_id}") in lines(house, "t0")
    house.wait(5.0)
    assert (state(job), job.counts.preemptions, job.attempt.number) == (JobState.PENDING, 1, 1)
    whys = [reason for what, reason in lines(house, job.job_id) if "preempt" in what]
    assert any("t0 is drained by ops/me: a fan, and its deadline is over" in why for why in whys)
    house.start(job, "t1")
    house.wait(1.0)
    assert (state(job), job.attempt.number) == (JobState.RUNNING, 2)
    assert not house.engine.check()


def test_a_job_that_ends_in_time_is_not_stopped() -> None:
    """That is what the deadline is for."""
    house = House(delays=QUICK)
    job = running(house, "t0", work_s=20.0)
    ask(house, A.DRAIN, DEADLINE_S)
    house.wait(DEADLINE_S + 1.0)
    assert (state(job), job.counts.preemptions) == (JobState.SUCCEEDED, 0)
    assert ("drain deadline", "still there: nothing") in lines(house, "t0")
    assert house.node("t0").cordon.is_draining


def test_flexible_workers_leave_at_once() -> None:
    """They cost their job no restart, so the node need not wait for them."""
    house = House(delays=QUICK)
    job = house.submit("elastic", workers=(1, 2), gpus_per_worker=4)
    house.start(job, "t0", flexible=("t0",))
    house.wait(1.0)
    ask(house, A.DRAIN, DEADLINE_S)
    house.wait(4.0)
    assert [worker.is_flexible for worker in job.workers.values()] == [False]
    assert (state(job), job.counts.preemptions) == (JobState.RUNNING, 0)


def test_a_gang_leaves_a_node_that_has_only_its_store() -> None:
    """Without the rendezvous store it could not go on, as in a drain without a deadline."""
    house = House(training=3, delays=QUICK)
    job = house.submit("meets", workers=(1, 2), launcher=Launcher.TORCHRUN)
    house.start(job, "t0", flexible=("t1",))
    house.wait(1.0)
    assert job.store is not None
    name = job.store.node
    ask(house, A.DRAIN, DEADLINE_S, node=name)
    house.wait(DEADLINE_S - 1.0)
    assert state(job) == JobState.RUNNING
    house.wait(10.0)
    assert (state(job), job.counts.preemptions) == (JobState.PENDING, 1)
    assert not house.node(name).ledger.stores


def test_a_deadline_holds_while_the_cell_is_frozen() -> None:
    """It is an order, and no decision of a policy."""
    house = House(delays=QUICK)
    job = running(house, "t0")
    ask(house, A.DRAIN, DEADLINE_S)
    ask(house, A.FREEZE, node="")
    house.wait(DEADLINE_S + 5.0)
    assert state(job) == JobState.PENDING


def test_an_uncordoned_node_has_no_deadline_any_more() -> None:
    """Who runs there runs on."""
    house = House(delays=QUICK)
    job = running(house, "t0")
    ask(house, A.DRAIN, DEADLINE_S)
    ask(house, A.UNCORDON)
    house.wait(2 * DEADLINE_S)
    assert (state(job), job.counts.preemptions) == (JobState.RUNNING, 0)
    assert not house.node("t0").cordon.is_draining


@pytest.mark.parametrize(("again_s", "ends_s"), [(10.0, 10.0), (200.0, 200.0), (None, 0.0)])
def test_the_last_order_counts(again_s: float | None, ends_s: float) -> None:
    """Sooner, later or at once: a deadline that was given before is forgotten."""
    house = House(delays=QUICK)
    job = running(house, "t0")
    ask(house, A.DRAIN, DEADLINE_S)
    ask(house, A.DRAIN, again_s)
    if ends_s:
        house.wait(ends_s - 1.0)
        assert state(job) == JobState.RUNNING
        house.wait(1.0)
    assert state(job) == JobState.PREEMPTING
    house.wait(300.0)
    assert job.counts.preemptions == 1
    assert [what for what, _ in lines(house, "t0")].count("drain deadline") == bool(again_s)


def test_a_lent_node_that_is_drained_can_still_be_taken_back() -> None:
    """A reclaim waits for no drain: the service comes first, and the deadline finds nobody."""
    house = House(delays=QUICK)
    house.decide(Loan(node=NodeName("i0"), service=CHAT, reason="idle"), lend=True)
    house.wait(1.0)
    job = running(house, "i0")
    ask(house, A.DRAIN, DEADLINE_S, node="i0")
    ask(house, A.RECALL, node="")
    house.wait(30.0)
    assert (state(job), house.node("i0").role) == (JobState.PENDING, NodeRole.SERVING)
    house.wait(DEADLINE_S)
    assert job.counts.preemptions == 1
    assert not house.engine.check()


def test_a_lent_node_that_is_drained_stays_lent() -> None:
    """Who empties a machine to work on it wants no server to start there; a revocation ends it."""
    house = House(delays=QUICK)
    house.decide(Loan(node=NodeName("i0"), service=CHAT, reason="idle"), lend=True)
    house.wait(1.0)
    running(house, "i0")
    ask(house, A.DRAIN, None, node="i0")
    house.wait(40.0)
    assert (house.workers_on(NodeName("i0")), house.node("i0").role) == ([], NodeRole.ON_LOAN)
    [lease_id] = house.engine.state.loans
    ask(house, A.REVOKE_LOAN, node=lease_id)
    house.wait(40.0)
    assert house.node("i0").role == NodeRole.SERVING


def test_the_deadline_is_an_instant_to_wake_up_at() -> None:
    """Nothing else need happen then, and no period has to end."""
    house = House()
    running(house, "t0")
    now_s = house.engine.state.now_s
    asked = OperatorAsked(action=A.DRAIN, by="ops/me", target="t0", deadline_s=DEADLINE_S)
    assert house.engine.handle(asked, now_s=now_s).wake_at_s == now_s + DEADLINE_S


def test_the_deadline_is_saved_and_is_kept_by_the_next_leader() -> None:
    """It is in the snapshot, a new leader begins no new one, and the same events at the same
    instants give the same state and commands."""
    house = House(delays=QUICK)
    job = running(house, "t0")
    ask(house, A.DRAIN, DEADLINE_S)
    until_s = house.engine.state.now_s + DEADLINE_S
    blob = house.engine.encode_state()
    events: list[tuple[float, Event]] = [
        (until_s - 20.0, LeaderStarted(epoch=9, holder="two")),
        (until_s - 0.5, PassDue()),
        (until_s, PassDue()),
    ]
    engines = [Engine(house.engine.settings, decode_state(blob)) for _ in range(2)]
    found: list[list[Outcome]] = []
    states: list[list[JobState]] = []
    for engine in engines:
        found.append([])
        states.append([])
        for at_s, event in events:
            found[-1].append(engine.handle(event, now_s=at_s))
            states[-1].append(engine.state.jobs[job.job_id].state)
    assert found[0] == found[1]
    assert engines[0].encode_state() == engines[1].encode_state()
    assert states[0] == [JobState.RUNNING, JobState.RUNNING, JobState.PREEMPTING]
    third = Engine(house.engine.settings, decode_state(blob))
    decisions = tuple(d for outcome in found[0] for d in outcome.decisions)
    entries = tuple(Entry(at_s, event) for at_s, event in events)
    record = Record(number=1, after=0, epoch=9, writer="two", entries=entries, decisions=decisions)
    assert replay(third, record)
    assert third.encode_state() == engines[0].encode_state()
