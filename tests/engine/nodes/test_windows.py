"""Maintenance windows: what may start before one, when loans come home, and what ends one."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import JobState, NodeName, NodeRole
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.record import Entry, Record, replay
from coordinator.engine.state.commands import Outcome
from coordinator.engine.state.events import (
    Event,
    LeaderStarted,
    NodeSilent,
    OperatorAction,
    OperatorAsked,
    PassDue,
)
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Loan, Migrate, Placement, Resize
from coordinator.policies.registry import policy
from coordinator.sim.run.cluster import Delays
from tests.harness.cluster.engine import CHAT, EngineHarness, start, state

IN_S = 1000.0
START_S, GRACE_S = 15.0, 30.0  # start_p99_s, and the grace of a job of the harness
FITS_S = IN_S - START_S - GRACE_S
"""The longest time limit of a job that starts when the window is ordered."""
RECLAIM_S, TTL_S = 60.0, 30.0  # of the service of the harness, and the TTL of its leases
QUICK = Delays(stop_s=3.0, device_free_s=1.0, warm_up_s=10.0)
T0, I0 = NodeName("t0"), NodeName("i0")
A = OperatorAction


def ask(
    harness: EngineHarness,
    action: A = A.DRAIN_AT,
    *,
    node: str = "t0",
    in_s: float | None = IN_S,
    deadline_s: float | None = None,
) -> None:
    """An operator's order to one node, by default a window."""
    is_at = action == A.DRAIN_AT
    harness.sim.handle(
        OperatorAsked(
            action=action,
            by="ops/me",
            target=node,
            reason="a fan",
            in_s=in_s if is_at else None,
            deadline_s=deadline_s,
        )
    )
    harness.settle()


def lines(harness: EngineHarness, subject: str) -> list[tuple[str, str]]:
    """What was told of a job or a node."""
    return [(s.what, s.reason) for s in harness.engine.state.stories if s.subject == subject]


def lend(harness: EngineHarness, node: str = "i0") -> None:
    """The next loan pass would lend this node."""
    harness.decide(Loan(node=NodeName(node), service=CHAT, reason="test"), lend=True)


def avoids(harness: EngineHarness, job: JobEntry) -> tuple[str, ...]:
    """The nodes that policies see as left alone by a job."""
    return next(
        seen.nodes.avoided for seen in harness.engine.snapshot().jobs if seen.job_id == job.job_id
    )


@pytest.mark.parametrize(
    ("limit_s", "does_start"), [(FITS_S, True), (FITS_S + 1.0, False), (None, False)]
)
def test_only_a_job_that_is_over_in_time_starts(limit_s: float | None, does_start: bool) -> None:
    """The start before its time limit and the grace after it count; an estimate is no limit."""
    harness = EngineHarness(delays=QUICK)
    ask(harness)
    job = harness.submit("j", work_s=10.0, time_limit_s=limit_s)
    assert avoids(harness, job) == (() if does_start else ("t0",))
    whys = harness.refusals(start(job, "t0"))
    assert (state(job) == JobState.STARTING) == does_start == (not whys)
    if not does_start:
        over = "has no time limit" if limit_s is None else "may run until 1 s after that"
        assert whys[0].startswith("t0 closes in 1000 s, and j ")
        assert over in whys[0]
        assert not harness.refusals(start(job, "t1"))
    assert not harness.engine.check()


def test_the_longer_a_job_waits_the_fewer_nodes_it_may_use() -> None:
    """Time alone closes a node to it, without any event about the job or the node."""
    harness = EngineHarness(delays=QUICK)
    ask(harness)
    job = harness.submit("j", time_limit_s=FITS_S - 100.0)
    harness.wait(100.0)
    assert avoids(harness, job) == ()
    harness.wait(1.0)
    harness.sim.handle(PassDue())
    assert avoids(harness, job) == ("t0",)
    assert not harness.engine.check()


def test_an_explanation_names_the_window() -> None:
    """And not a fault of the job, although it leaves the node alone as after one."""
    harness = EngineHarness(training=1, inference=0, delays=QUICK)
    harness.engine.policy = policy("aryl")
    ask(harness)
    job = harness.submit("j")
    whys = harness.engine.explain.blockers(job.job_id)
    assert "t0 closes in 1000 s, and j has no time limit" in whys
    assert not any("failed there" in why for why in whys)


def test_an_explanation_names_no_window_that_does_not_concern_the_job() -> None:
    """Of a node that the job may not use, or that is too small for a worker, none is named."""
    harness = EngineHarness(inference=0, delays=QUICK)
    harness.engine.policy = policy("aryl")
    harness.sim.handle(OperatorAsked(action=A.LABEL, by="ops/me", target="t0", value="rack=r1"))
    for node in ("t0", "t1"):
        ask(harness, node=node)
    blockers = harness.engine.explain.blockers
    mine = blockers(harness.submit("mine", require=("rack",)).job_id)
    assert "t0 closes in 1000 s, and mine has no time limit" in mine
    assert not any("t1" in why for why in mine)
    large = blockers(harness.submit("large", gpus_per_worker=16).job_id)
    assert not any("close" in why for why in large)
    any_node = blockers(harness.submit("any").job_id)
    assert "t0, t1 close in 1000 s, and any has no time limit" in any_node


@pytest.mark.parametrize(("busy", "is_first"), [(("t1",), True), (("t0", "t1"), False)])
def test_a_window_is_the_first_reason_where_it_alone_bars_a_job(
    busy: tuple[str, ...], is_first: bool
) -> None:
    """Lists show one reason: not one of labels where the fitting node is free and closes, and not a
    window where the node is busy anyway."""
    harness = EngineHarness(inference=0, delays=QUICK)
    harness.sim.handle(OperatorAsked(action=A.LABEL, by="ops/me", target="t0", value="rack=r1"))
    for node in busy:
        harness.start(harness.submit(f"on-{node}", work_s=1e6), node)
    harness.engine.policy = policy("aryl")
    ask(harness)
    for job in (harness.submit("picky", require=("rack",)), harness.submit("any")):
        whys = harness.engine.explain.blockers(job.job_id)
        named = [why.startswith("t0 closes in 1000 s, and ") for why in whys]
        assert any(named)
        assert named[0] == is_first


def test_what_is_left_of_its_limit_decides_whether_a_job_grows() -> None:
    """Its attempt has run for a while; one that moves there has its whole limit before it again."""
    harness = EngineHarness(training=3, delays=QUICK)
    job = harness.submit("j", workers=(1, 2), time_limit_s=FITS_S + 100.0, work_s=1e6)
    harness.start(job, "t1")
    rigid = harness.submit("rigid", time_limit_s=FITS_S + 100.0, work_s=1e6)
    harness.start(rigid, "t2")
    harness.wait(300.0)
    ask(harness)
    assert (avoids(harness, job), avoids(harness, rigid)) == ((), ("t0",))
    grow = Resize(
        job_id=job.job_id,
        added=(Placement(node=T0, worker_count=1, is_flexible=True),),
        removed_workers=(),
        reason="test",
    )
    move = Migrate(
        job_id=job.job_id, placements=(Placement(node=T0, worker_count=1),), reason="test"
    )
    assert "may run until" in harness.refusals(move)[0]
    assert not harness.refusals(grow)


def test_what_runs_goes_on_until_the_window_and_is_drained_then() -> None:
    """As by a drain of that instant, with the same words and the same deadline."""
    harness = EngineHarness(delays=QUICK)
    job = harness.submit("stays", work_s=2 * IN_S)
    harness.start(job, "t0")
    harness.wait(1.0)
    ask(harness, deadline_s=50.0)
    assert ("drain in 1000 s within 50 s", "by ops/me: a fan") in lines(harness, "t0")
    harness.wait(IN_S - 1.0)
    assert not harness.node("t0").cordon.is_cordoned
    harness.wait(1.0)
    cordon = harness.node("t0").cordon
    assert (cordon.is_cordoned, cordon.is_draining, cordon.reason) == (
        True,
        True,
        "by ops/me: a fan",
    )
    assert (state(job), harness.engine.state.windows) == (JobState.RUNNING, {})
    harness.wait(50.0)
    assert (state(job), harness.engine.check()) == (JobState.PREEMPTING, [])


def test_a_window_holds_while_the_cell_is_frozen() -> None:
    """It is an order, and no decision of a policy: a loan comes home for it as well."""
    harness = EngineHarness(delays=QUICK)
    lend(harness)
    harness.wait(1.0)
    ask(harness)
    ask(harness, node="i0")
    ask(harness, A.FREEZE, node="")
    harness.wait(IN_S)
    assert harness.node("t0").cordon.is_draining
    assert harness.node("i0").cordon.is_draining
    assert harness.node("i0").role == NodeRole.SERVING


@pytest.mark.parametrize(
    ("action", "again_s", "is_drained"),
    [(A.UNCORDON, None, False), (A.DRAIN, None, True), (A.DRAIN_AT, 2 * IN_S, False)],
)
def test_a_later_order_replaces_a_window(
    action: A, again_s: float | None, is_drained: bool
) -> None:
    """It ends, begins at once, or begins later."""
    harness = EngineHarness(delays=QUICK)
    ask(harness)
    ask(harness, action, in_s=again_s)
    harness.wait(IN_S + 1.0)
    assert harness.node("t0").cordon.is_draining == is_drained
    job = harness.submit("j", time_limit_s=100.0)
    harness.start(job, "t0")
    assert (state(job) == JobState.PENDING) == is_drained
    assert not harness.engine.check()


def test_a_drained_node_gets_no_window() -> None:
    """It is closed already, and would be opened until then by nobody."""
    harness = EngineHarness(delays=QUICK)
    ask(harness, A.DRAIN)
    ask(harness)
    assert not harness.engine.state.windows
    assert lines(harness, "t0")[-1][0] == "no window"


def test_a_lent_node_is_home_when_its_window_begins() -> None:
    """It is called home one reclaim deadline before, whatever limits its jobs have, and is told
    why; nothing starts on it in the lease TTL before that."""
    harness = EngineHarness(delays=QUICK)
    lend(harness)
    harness.wait(1.0)
    ask(harness, node="i0")
    job = harness.submit("j")
    harness.start(job, "i0")
    harness.wait(IN_S - RECLAIM_S - TTL_S)
    assert harness.refusals(start(harness.submit("late"), "i0")) == ["i0 takes no workers now"]
    harness.wait(TTL_S - 1.0)
    assert state(job) == JobState.RUNNING
    harness.wait(1.0)
    assert state(job) == JobState.PREEMPTING
    [loan] = harness.engine.state.loans.values()
    assert loan.reclaim_reason == "i0 closes in 60 s, ordered by ops/me: a fan"
    harness.wait(RECLAIM_S - 1.0)
    assert harness.node("i0").role == NodeRole.SERVING
    assert not harness.node("i0").cordon.is_cordoned
    harness.wait(1.0)
    assert (harness.node("i0").role, loan.is_drain_late) == (NodeRole.SERVING, False)
    assert harness.node("i0").cordon.is_draining
    assert not harness.engine.check()


@pytest.mark.parametrize("left_s", [1.0, 0.0])
def test_a_node_is_lent_while_the_loan_can_come_home_in_time(left_s: float) -> None:
    """One lease TTL and the reclaim deadline must be left; policies see it, and do not ask."""
    harness = EngineHarness(delays=QUICK)
    ask(harness, node="i0")
    harness.wait(IN_S - RECLAIM_S - TTL_S - left_s)
    seen = {node.name: node.takes_nothing for node in harness.engine.snapshot().nodes}
    assert seen[I0] == (left_s == 0.0)
    lend(harness)
    assert (harness.node("i0").lease is not None) == (left_s > 0.0)


def test_other_settings_of_a_service_move_the_call_home() -> None:
    """A new leader keeps the window, and reckons by its own settings."""
    harness = EngineHarness(delays=QUICK)
    lend(harness)
    harness.wait(1.0)
    ask(harness, node="i0")
    before = harness.engine.settings
    services = tuple(replace(service, reclaim_deadline_s=500.0) for service in before.services)
    longer = replace(before, services=services)
    harness.sim.handle(LeaderStarted(epoch=9, holder="new", settings=longer))
    for node in harness.sim.nodes.values():
        node.report_soon()
    harness.wait(IN_S - 500.0)
    [loan] = harness.engine.state.loans.values()
    assert loan.reclaim_reason.startswith("i0 closes in 500 s")


def test_a_window_survives_a_snapshot_and_a_replay() -> None:
    """It is in the state, and its instants are engine time: the same facts give the same state."""
    journal: list[tuple[float, Event, Outcome]] = []
    harness = EngineHarness(delays=QUICK)
    real = harness.engine.handle

    def recording(event: Event, *, now_s: float) -> Outcome:
        outcome = real(event, now_s=now_s)
        journal.append((now_s, event, outcome))
        return outcome

    blob = harness.engine.encode_state()
    harness.engine.handle = recording  # type: ignore[method-assign]  # a tap, not a mock
    ask(harness)
    ask(harness, node="i0", deadline_s=10.0)
    job = harness.submit("j", time_limit_s=100.0)
    harness.start(job, "t0")
    harness.wait(IN_S / 2)
    assert decode_state(harness.engine.encode_state()).windows == harness.engine.state.windows
    harness.wait(IN_S)
    again = Engine(harness.engine.settings, decode_state(blob))
    again.policy = harness.engine.policy
    for now_s, event, outcome in journal:
        harness.script(outcome)
        entries = (Entry(now_s, event),)
        record = Record(
            number=1, after=0, epoch=1, writer="w", entries=entries, decisions=outcome.decisions
        )
        assert replay(again, record)
    assert again.encode_state() == harness.engine.encode_state()


def test_a_removed_node_takes_its_window_along() -> None:
    """The name may join again, as a new node that no order is about."""
    harness = EngineHarness(delays=QUICK)
    ask(harness)
    job = harness.submit("j")
    assert avoids(harness, job) == ("t0",)
    harness.sim.nodes[T0].crash()
    harness.sim.handle(NodeSilent(node=T0, silent_s=60.0))
    assert harness.node("t0").role == NodeRole.LOST
    ask(harness, A.CONFIRM_DEAD)
    ask(harness, A.REMOVE)
    assert (avoids(harness, job), harness.engine.state.windows) == ((), {})
    harness.sim.handle(PassDue())
    assert not harness.engine.check()
