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
from tests.harness.cluster.engine import CHAT, EngineHarness, state

DEADLINE_S = 60.0
QUICK = Delays(stop_s=3.0, device_free_s=1.0, warm_up_s=10.0)
A = OperatorAction


def ask(
    harness: EngineHarness, action: A, deadline_s: float | None = None, node: str = "t0"
) -> None:
    """An operator's order to one node."""
    harness.sim.handle(
        OperatorAsked(
            action=action, by="ops/me", target=node, reason="a fan", deadline_s=deadline_s
        )
    )
    harness.settle()


def running(harness: EngineHarness, *nodes: str, work_s: float = 1000.0) -> JobEntry:
    """A job that runs there."""
    job = harness.submit("stays", workers=(len(nodes), len(nodes)), work_s=work_s)
    harness.start(job, *nodes)
    harness.wait(1.0)
    assert state(job) == JobState.RUNNING
    return job


def lines(harness: EngineHarness, subject: str) -> list[tuple[str, str]]:
    """What was told of a job or a node."""
    return [(s.what, s.reason) for s in harness.engine.state.stories if s.subject == subject]


def test_what_runs_goes_on_until_the_deadline_and_then_leaves_in_good_order() -> None:
    """Nothing new comes meanwhile; then it is a preemption with its grace, told with whose order
    it was, and the job starts elsewhere as its next attempt."""
    harness = EngineHarness(delays=QUICK)
    job = running(harness, "t0")
    ask(harness, A.DRAIN, DEADLINE_S)
    assert ("drain within 60 s", "by ops/me: a fan") in lines(harness, "t0")
    other = harness.submit("other", gpus_per_worker=1)
    harness.start(other, "t0")
    assert state(other) == JobState.PENDING
    harness.wait(DEADLINE_S - 1.0)
    assert (state(job), job.counts.preemptions) == (JobState.RUNNING, 0)
    harness.wait(1.0)
    assert state(job) == JobState.PREEMPTING
    assert ("drain deadline", f"still there: {job.job_id}") in lines(harness, "t0")
    harness.wait(5.0)
    assert (state(job), job.counts.preemptions, job.attempt.number) == (JobState.PENDING, 1, 1)
    whys = [reason for what, reason in lines(harness, job.job_id) if "preempt" in what]
    assert any("t0 is drained by ops/me: a fan, and its deadline is over" in why for why in whys)
    harness.start(job, "t1")
    harness.wait(1.0)
    assert (state(job), job.attempt.number) == (JobState.RUNNING, 2)
    assert not harness.engine.check()


def test_a_job_that_ends_in_time_is_not_stopped() -> None:
    """That is what the deadline is for."""
    harness = EngineHarness(delays=QUICK)
    job = running(harness, "t0", work_s=20.0)
    ask(harness, A.DRAIN, DEADLINE_S)
    harness.wait(DEADLINE_S + 1.0)
    assert (state(job), job.counts.preemptions) == (JobState.SUCCEEDED, 0)
    assert ("drain deadline", "still there: nothing") in lines(harness, "t0")
    assert harness.node("t0").cordon.is_draining


def test_flexible_workers_leave_at_once() -> None:
    """They cost their job no restart, so the node need not wait for them."""
    harness = EngineHarness(delays=QUICK)
    job = harness.submit("elastic", workers=(1, 2), gpus_per_worker=4)
    harness.start(job, "t0", flexible=("t0",))
    harness.wait(1.0)
    ask(harness, A.DRAIN, DEADLINE_S)
    harness.wait(4.0)
    assert [worker.is_flexible for worker in job.workers.values()] == [False]
    assert (state(job), job.counts.preemptions) == (JobState.RUNNING, 0)


def test_a_gang_leaves_a_node_that_has_only_its_store() -> None:
    """Without the rendezvous store it could not go on, as in a drain without a deadline."""
    harness = EngineHarness(training=3, delays=QUICK)
    job = harness.submit("meets", workers=(1, 2), launcher=Launcher.TORCHRUN)
    harness.start(job, "t0", flexible=("t1",))
    harness.wait(1.0)
    assert job.store is not None
    name = job.store.node
    ask(harness, A.DRAIN, DEADLINE_S, node=name)
    harness.wait(DEADLINE_S - 1.0)
    assert state(job) == JobState.RUNNING
    harness.wait(10.0)
    assert (state(job), job.counts.preemptions) == (JobState.PENDING, 1)
    assert not harness.node(name).ledger.stores


def test_a_deadline_holds_while_the_cell_is_frozen() -> None:
    """It is an order, and no decision of a policy."""
    harness = EngineHarness(delays=QUICK)
    job = running(harness, "t0")
    ask(harness, A.DRAIN, DEADLINE_S)
    ask(harness, A.FREEZE, node="")
    harness.wait(DEADLINE_S + 5.0)
    assert state(job) == JobState.PENDING


def test_an_uncordoned_node_has_no_deadline_any_more() -> None:
    """Who runs there runs on."""
    harness = EngineHarness(delays=QUICK)
    job = running(harness, "t0")
    ask(harness, A.DRAIN, DEADLINE_S)
    ask(harness, A.UNCORDON)
    harness.wait(2 * DEADLINE_S)
    assert (state(job), job.counts.preemptions) == (JobState.RUNNING, 0)
    assert not harness.node("t0").cordon.is_draining


@pytest.mark.parametrize(("again_s", "ends_s"), [(10.0, 10.0), (200.0, 200.0), (None, 0.0)])
def test_the_last_order_counts(again_s: float | None, ends_s: float) -> None:
    """Sooner, later or at once: a deadline that was given before is forgotten."""
    harness = EngineHarness(delays=QUICK)
    job = running(harness, "t0")
    ask(harness, A.DRAIN, DEADLINE_S)
    ask(harness, A.DRAIN, again_s)
    if ends_s:
        harness.wait(ends_s - 1.0)
        assert state(job) == JobState.RUNNING
        harness.wait(1.0)
    assert state(job) == JobState.PREEMPTING
    harness.wait(300.0)
    assert job.counts.preemptions == 1
    assert [what for what, _ in lines(harness, "t0")].count("drain deadline") == bool(again_s)


def test_a_lent_node_that_is_drained_can_still_be_taken_back() -> None:
    """A reclaim waits for no drain: the service comes first, and the deadline finds nobody."""
    harness = EngineHarness(delays=QUICK)
    harness.decide(Loan(node=NodeName("i0"), service=CHAT, reason="idle"), lend=True)
    harness.wait(1.0)
    job = running(harness, "i0")
    ask(harness, A.DRAIN, DEADLINE_S, node="i0")
    ask(harness, A.RECALL, node="")
    harness.wait(30.0)
    assert (state(job), harness.node("i0").role) == (JobState.PENDING, NodeRole.SERVING)
    harness.wait(DEADLINE_S)
    assert job.counts.preemptions == 1
    assert not harness.engine.check()


def test_a_lent_node_that_is_drained_stays_lent() -> None:
    """Who empties a machine to work on it wants no server to start there; a revocation ends it."""
    harness = EngineHarness(delays=QUICK)
    harness.decide(Loan(node=NodeName("i0"), service=CHAT, reason="idle"), lend=True)
    harness.wait(1.0)
    running(harness, "i0")
    ask(harness, A.DRAIN, None, node="i0")
    harness.wait(40.0)
    assert (harness.workers_on(NodeName("i0")), harness.node("i0").role) == ([], NodeRole.ON_LOAN)
    [lease_id] = harness.engine.state.loans
    ask(harness, A.REVOKE_LOAN, node=lease_id)
    harness.wait(40.0)
    assert harness.node("i0").role == NodeRole.SERVING


def test_the_deadline_is_an_instant_to_wake_up_at() -> None:
    """Nothing else need happen then, and no period has to end."""
    harness = EngineHarness()
    running(harness, "t0")
    now_s = harness.engine.state.now_s
    asked = OperatorAsked(action=A.DRAIN, by="ops/me", target="t0", deadline_s=DEADLINE_S)
    assert harness.engine.handle(asked, now_s=now_s).wake_at_s == now_s + DEADLINE_S


def test_the_deadline_is_saved_and_is_kept_by_the_next_leader() -> None:
    """It is in the snapshot, a new leader begins no new one, and the same events at the same
    instants give the same state and commands."""
    harness = EngineHarness(delays=QUICK)
    job = running(harness, "t0")
    ask(harness, A.DRAIN, DEADLINE_S)
    until_s = harness.engine.state.now_s + DEADLINE_S
    blob = harness.engine.encode_state()
    events: list[tuple[float, Event]] = [
        (until_s - 20.0, LeaderStarted(epoch=9, holder="two")),
        (until_s - 0.5, PassDue()),
        (until_s, PassDue()),
    ]
    engines = [Engine(harness.engine.settings, decode_state(blob)) for _ in range(2)]
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
    third = Engine(harness.engine.settings, decode_state(blob))
    decisions = tuple(d for outcome in found[0] for d in outcome.decisions)
    entries = tuple(Entry(at_s, event) for at_s, event in events)
    record = Record(number=1, after=0, epoch=9, writer="two", entries=entries, decisions=decisions)
    assert replay(third, record)
    assert third.encode_state() == engines[0].encode_state()
