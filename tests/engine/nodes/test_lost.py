"""What the silence of a node proves, and when: `stop_after_s` as a lease on two clocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from common.messages import WorkerPhase
from common.model import CheckpointSpec, JobState, NodeName, NodeRole
from coordinator.engine.nodes.lost import certain_end_s
from coordinator.engine.state.events import (
    LeaderStarted,
    NodeSilent,
    OperatorAction,
    OperatorAsked,
    PassDue,
)
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Loan
from coordinator.service.api.explain_job import reasons as explain_job
from coordinator.service.api.rows import loan_row
from coordinator.sim.run.outages import LOST_AFTER_S, Crash
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import CHAT, EngineHarness, state

STOP_AFTER_S, GRACE_S = 60.0, 30.0
DAY_S = 86_400.0
MARGIN_S = EngineSettings().silence_margin_s
BOUND_S = (STOP_AFTER_S + GRACE_S) * 1.002 + MARGIN_S


def lost(harness: EngineHarness, *, stop_after_s: float | None = STOP_AFTER_S) -> JobEntry:
    """A job on two nodes, of which t0 fell silent for good at 10 s and t1 goes on."""
    job = harness.submit(
        "j", workers=(2, 2), stop_after_s=stop_after_s, grace_s=GRACE_S, work_s=1e6
    )
    harness.start(job, "t0", "t1")
    harness.sim.crash([Crash(node=NodeName("t0"), at_s=10.0, down_s=DAY_S)])
    return job


def say(harness: EngineHarness, *, silent_s: float, unanswered_s: float) -> None:
    """The driver says how long t0 was silent."""
    harness.sim.handle(
        NodeSilent(node=NodeName("t0"), silent_s=silent_s, unanswered_s=unanswered_s)
    )
    harness.wait(1.0)


def test_a_job_restarts_elsewhere_once_its_own_limit_has_certainly_ended_it() -> None:
    """Not a second before; it is a node fault, free of charge, with the reason in words."""
    harness = EngineHarness()
    job = lost(harness)
    harness.wait(10.0 + BOUND_S - 1.0)
    assert (state(job), job.counts.node_faults) == (JobState.RUNNING, 0)
    harness.wait(GRACE_S)
    assert (state(job), job.counts.node_faults, job.counts.own_faults) == (JobState.PENDING, 1, 0)
    assert "stop_after_s is 60 s" in job.error
    assert harness.sim.nodes[NodeName("t1")].keys(WorkerPhase.RUNNING) == []
    assert harness.engine.awaited_silence_s() == {}


def test_a_job_without_a_limit_waits_for_ever() -> None:
    """Silence proves nothing of it."""
    harness = EngineHarness()
    job = lost(harness, stop_after_s=None)
    harness.wait(DAY_S / 2)
    assert (state(job), job.counts.node_faults) == (JobState.RUNNING, 0)
    assert harness.engine.awaited_silence_s() == {}


def test_a_node_that_is_heard_in_time_keeps_its_job() -> None:
    """It was the network; the silence before counts no more."""
    harness = EngineHarness()
    job = harness.submit("j", stop_after_s=STOP_AFTER_S, grace_s=GRACE_S, work_s=1e6)
    harness.start(job, "t0")
    say(harness, silent_s=LOST_AFTER_S, unanswered_s=LOST_AFTER_S)
    harness.sim.nodes[NodeName("t0")].report_soon()
    harness.wait(1.0)
    assert harness.engine.awaited_silence_s() == {}
    say(harness, silent_s=LOST_AFTER_S, unanswered_s=LOST_AFTER_S)
    assert (state(job), job.attempt.number) == (JobState.RUNNING, 1)


def test_silence_that_another_leader_may_have_answered_proves_nothing() -> None:
    """The node was long silent here, but whoever led before may have kept its workers running."""
    harness = EngineHarness()
    job = lost(harness)
    harness.wait(30.0)
    say(harness, silent_s=10.0 * BOUND_S, unanswered_s=BOUND_S - 1.0)
    assert state(job) == JobState.RUNNING
    say(harness, silent_s=10.0 * BOUND_S, unanswered_s=BOUND_S)
    assert state(job) == JobState.PENDING


def test_a_job_that_ends_anyway_is_freed_of_its_silent_node() -> None:
    """Stopped for another reason it waits for the lost worker too, and no longer than that."""
    harness = EngineHarness()
    job = lost(harness)
    harness.wait(30.0)
    harness.sim.nodes[NodeName("t1")].crash()
    harness.sim.nodes[NodeName("t1")].boot()
    harness.wait(1.0)
    assert state(job) == JobState.PREEMPTING
    harness.wait(BOUND_S)
    assert (state(job), job.counts.node_faults) == (JobState.PENDING, 1)


def test_each_silent_node_is_judged_by_its_own_silence() -> None:
    """The job waits again when the last of them is certain."""
    harness = EngineHarness(training=3)
    job = lost(harness)
    harness.sim.crash([Crash(node=NodeName("t1"), at_s=50.0, down_s=DAY_S)])
    harness.wait(10.0 + BOUND_S + 1.0)
    assert state(job) == JobState.PREEMPTING
    harness.wait(40.0)
    assert state(job) == JobState.PENDING
    harness.start(job, "t2", "i0")
    assert harness.engine.check() == []


def test_explain_says_when_a_silent_worker_counts_as_ended() -> None:
    """The seconds left by then; and what to do where nothing will ever prove it."""
    harness = EngineHarness()
    job = lost(harness)
    harness.wait(40.0)
    harness.sim.handle(PassDue())
    assert any(
        f"count as ended in {BOUND_S - 30.0:.0f} s" in said
        for said in explain_job(harness.engine, job)
    )
    harness.sim.handle(LeaderStarted(epoch=2, holder="new"))
    assert any(
        f"count as ended in {BOUND_S:.0f} s" in said for said in explain_job(harness.engine, job)
    )
    other = EngineHarness()
    forever = lost(other, stop_after_s=None)
    other.wait(40.0)
    assert any("aryl node confirm-dead t0" in said for said in explain_job(other.engine, forever))


# --- never two -------------------------------------------------------------------------------


class Exchange(Struct, frozen=True):
    """One report of a node: when it was sent, how it fared, and who led then."""

    gap_s: float
    way_s: float
    back_s: float
    arrives: bool
    is_answered: bool
    leader_changes: bool


exchanges = st.lists(
    st.builds(
        Exchange,
        st.floats(0.01, 40.0),
        st.floats(0.0, 30.0),
        st.floats(0.0, 30.0),
        st.booleans(),
        st.booleans(),
        st.sampled_from([False, False, False, True]),
    ),
    max_size=30,
)
drifts = st.floats(-500e-6, 500e-6)


@given(
    exchanges, drifts, drifts, st.floats(0.1, 1e6), st.floats(0.0, 1e4), st.floats(0.0, MARGIN_S)
)
def test_nothing_counts_as_ended_before_its_shim_has_ended_it(
    story: list[Exchange],
    node_drift: float,
    leader_drift: float,
    stop_after_s: float,
    grace_s: float,
    late_s: float,
) -> None:
    """Whatever is lost or late, whoever leads, and however their clocks run within 500 ppm.

    All instants are those of a third, true clock. A shim counts from when the last answered report
    was sent; a leader from the last report that came to it, or from when it began to lead.
    """
    spec = make_spec(stop_after_s=stop_after_s, checkpoint=CheckpointSpec(grace_s=grace_s))
    bound_s = certain_end_s(EngineSettings(), spec)
    assert bound_s is not None
    contact_s = heard_s = leads_since_s = now_s = 0.0
    for one in story:
        now_s += one.gap_s
        if one.leader_changes:  # whoever led before answers no more
            leads_since_s = now_s
            heard_s = 0.0
        if one.arrives:
            heard_s = max(heard_s, now_s + one.way_s)
        if one.arrives and one.is_answered:
            contact_s = max(contact_s, now_s)  # however long the answer took
    ended_s = contact_s + (stop_after_s + grace_s) / (1.0 + node_drift) + late_s
    counted_s = max(heard_s, leads_since_s) + bound_s / (1.0 + leader_drift)
    assert counted_s >= ended_s


def test_the_engine_ends_nothing_below_the_bound_and_everything_at_it() -> None:
    """The rule above is the engine's: just below it nothing changes, at it the job is freed."""
    harness = EngineHarness(settings=EngineSettings(policy="fifo", silence_margin_s=7.0))
    job = harness.submit("j", stop_after_s=STOP_AFTER_S, grace_s=GRACE_S, work_s=1e6)
    harness.start(job, "t0")
    bound_s = certain_end_s(harness.engine.settings, job.spec)
    assert bound_s == pytest.approx(90.18 + 7.0)
    assert bound_s is not None
    say(harness, silent_s=bound_s, unanswered_s=bound_s - 1e-6)
    assert state(job) == JobState.RUNNING
    assert harness.engine.awaited_silence_s() == {NodeName("t0"): bound_s}
    say(harness, silent_s=bound_s, unanswered_s=bound_s)
    assert state(job) == JobState.PENDING


@pytest.mark.parametrize("is_heard_again", [False, True])
def test_a_lent_node_that_is_dead_for_certain_ends_its_loan(*, is_heard_again: bool) -> None:
    """Nobody waits for it for ever; should it be alive, it goes home without that loan."""
    harness = EngineHarness()
    node = NodeName("i0")
    harness.decide(Loan(node=node, service=CHAT, reason="idle"), lend=True)
    harness.wait(10.0)
    [loan] = harness.engine.state.loans.values()
    assert loan.begun_at_s is not None
    harness.sim.handle(NodeSilent(node=node, silent_s=20.0))
    dead = OperatorAsked(action=OperatorAction.CONFIRM_DEAD, by="ops/ada", target=node)
    harness.sim.handle(dead)
    row = loan_row(loan, now_s=DAY_S)
    assert (row.state, row.is_late) == ("ended", False)
    assert row.reclaim_reason == "its node was confirmed dead by ops/ada"
    assert harness.node("i0").lease is None
    if is_heard_again:
        harness.sim.nodes[node].report_soon()
        harness.wait(DAY_S / 24.0)
        assert harness.node("i0").role == NodeRole.SERVING
        assert len(harness.engine.state.loans) == 1
