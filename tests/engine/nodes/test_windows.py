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
from tests.engine.house import CHAT, House, start, state

IN_S = 1000.0
START_S, GRACE_S = 15.0, 30.0  # start_p99_s, and the grace of a job of the house
FITS_S = IN_S - START_S - GRACE_S
"""The longest time limit of a job that starts when the window is ordered."""
RECLAIM_S, TTL_S = 60.0, 30.0  # of the service of the house, and the TTL of its leases
QUICK = Delays(stop_s=3.0, device_free_s=1.0, warm_up_s=10.0)
T0, I0 = NodeName("t0"), NodeName("i0")
A = OperatorAction


def ask(
    house: House,
    action: A = A.DRAIN_AT,
    *,
    node: str = "t0",
    in_s: float | None = IN_S,
    deadline_s: float | None = None,
) -> None:
    """An operator's order to one node, by default a window."""
    is_at = action == A.DRAIN_AT
    house.sim.handle(
        OperatorAsked(
            action=action,
            by="ops/me",
            target=node,
            reason="a fan",
            in_s=in_s if is_at else None,
            deadline_s=deadline_s,
        )
    )
    house.settle()


def lines(house: House, subject: str) -> list[tuple[str, str]]:
    """What was told of a job or a node."""
    return [(s.what, s.reason) for s in house.engine.state.stories if s.subject == subject]


def lend(house: House, node: str = "i0") -> None:
    """The next loan pass would lend this node."""
    house.decide(Loan(node=NodeName(node), service=CHAT, reason="test"), lend=True)


def avoids(house: House, job: JobEntry) -> tuple[str, ...]:
    """The nodes that policies see as left alone by a job."""
    return next(
        seen.avoid_nodes for seen in house.engine.snapshot().jobs if seen.job_id == job.job_id
    )


@pytest.mark.parametrize(
    ("limit_s", "does_start"), [(FITS_S, True), (FITS_S + 1.0, False), (None, False)]
)
def test_only_a_job_that_is_over_in_time_starts(limit_s: float | None, does_start: bool) -> None:
    """The start before its time limit and the grace after it count; an estimate is no limit."""
    house = House(delays=QUICK)
    ask(house)
    job = house.submit("j", work_s=10.0, time_limit_s=limit_s)
    assert avoids(house, job) == (() if does_start else ("t0",))
    whys = house.refusals(start(job, "t0"))
    assert (state(job) == JobState.STARTING) == does_start == (not whys)
    if not does_start:
        over = "has no time limit" if limit_s is None else "may run until 1 s after that"
        assert whys[0].startswith("t0 closes in 1000 s, and j ")
        assert over in whys[0]
        assert not house.refusals(start(job, "t1"))
    assert not house.engine.check()


def test_the_longer_a_job_waits_the_fewer_nodes_it_may_use() -> None:
    """Time alone closes a node to it, without any event about the job or the node."""
    house = House(delays=QUICK)
    ask(house)
    job = house.submit("j", time_limit_s=FITS_S - 100.0)
    house.wait(100.0)
    assert avoids(house, job) == ()
    house.wait(1.0)
    house.sim.handle(PassDue())
    assert avoids(house, job) == ("t0",)
    assert not house.engine.check()


def test_an_explanation_names_the_window() -> None:
    """And not a fault of the job, although it leaves the node alone as after one."""
    house = House(training=1, inference=0, delays=QUICK)
    house.engine.policy = policy("aryl")
    ask(house)
    job = house.submit("j")
    whys = house.engine.explain.blockers(job.job_id)
    assert "t0 closes in 1000 s, and j has no time limit" in whys
    assert not any("failed there" in why for why in whys)


def test_an_explanation_names_no_window_that_does_not_concern_the_job() -> None:
    """Of a node that the job may not use, or that is too small for a worker, none is named."""
    house = House(inference=0, delays=QUICK)
    house.engine.policy = policy("aryl")
    house.sim.handle(OperatorAsked(action=A.LABEL, by="ops/me", target="t0", value="rack=r1"))
    for node in ("t0", "t1"):
        ask(house, node=node)
    blockers = house.engine.explain.blockers
    mine = blockers(house.submit("mine", require=("rack",)).job_id)
    assert "t0 closes in 1000 s, and mine has no time limit" in mine
    assert not any("t1" in why for why in mine)
    large = blockers(house.submit("large", gpus_per_worker=16).job_id)
    assert not any("close" in why for why in large)
    any_node = blockers(house.submit("any").job_id)
    assert "t0, t1 close in 1000 s, and any has no time limit" in any_node


@pytest.mark.parametrize(("busy", "is_first"), [(("t1",), True), (("t0", "t1"), False)])
def test_a_window_is_the_first_reason_where_it_alone_bars_a_job(
    busy: tuple[str, ...], is_first: bool
) -> None:
    """Lists show one reason: not one of labels where the fitting node is free and closes, and not a
    window where the node is busy anyway."""
    house = House(inference=0, delays=QUICK)
    house.sim.handle(OperatorAsked(action=A.LABEL, by="ops/me", target="t0", value="rack=r1"))
    for node in busy:
        house.start(house.submit(f"on-{node}", work_s=1e6), node)
    house.engine.policy = policy("aryl")
    ask(house)
    for job in (house.submit("picky", require=("rack",)), house.submit("any")):
        whys = house.engine.explain.blockers(job.job_id)
        named = [why.startswith("t0 closes in 1000 s, and ") for why in whys]
        assert any(named)
        assert named[0] == is_first


def test_what_is_left_of_its_limit_decides_whether_a_job_grows() -> None:
    """Its attempt has run for a while; one that moves there has its whole limit before it again."""
    house = House(training=3, delays=QUICK)
    job = house.submit("j", workers=(1, 2), time_limit_s=FITS_S + 100.0, work_s=1e6)
    house.start(job, "t1")
    rigid = house.submit("rigid", time_limit_s=FITS_S + 100.0, work_s=1e6)
    house.start(rigid, "t2")
    house.wait(300.0)
    ask(house)
    assert (avoids(house, job), avoids(house, rigid)) == ((), ("t0",))
    grow = Resize(
        job_id=job.job_id,
        added=(Placement(node=T0, worker_count=1, is_flexible=True),),
        removed_workers=(),
        reason="test",
    )
    move = Migrate(
        job_id=job.job_id, placements=(Placement(node=T0, worker_count=1),), reason="test"
    )
    assert "may run until" in house.refusals(move)[0]
    assert not house.refusals(grow)


def test_what_runs_goes_on_until_the_window_and_is_drained_then() -> None:
    """As by a drain of that instant, with the same words and the same deadline."""
    house = House(delays=QUICK)
    job = house.submit("stays", work_s=2 * IN_S)
    house.start(job, "t0")
    house.wait(1.0)
    ask(house, deadline_s=50.0)
    assert ("drain in 1000 s within 50 s", "by ops/me: a fan") in lines(house, "t0")
    house.wait(IN_S - 1.0)
    assert not house.node("t0").cordon.is_cordoned
    house.wait(1.0)
    cordon = house.node("t0").cordon
    assert (cordon.is_cordoned, cordon.is_draining, cordon.reason) == (
        True,
        True,
        "by ops/me: a fan",
    )
    assert (state(job), house.engine.state.windows) == (JobState.RUNNING, {})
    house.wait(50.0)
    assert (state(job), house.engine.check()) == (JobState.PREEMPTING, [])


def test_a_window_holds_while_the_cell_is_frozen() -> None:
    """It is an order, and no decision of a policy: a loan comes home for it as well."""
    house = House(delays=QUICK)
    lend(house)
    house.wait(1.0)
    ask(house)
    ask(house, node="i0")
    ask(house, A.FREEZE, node="")
    house.wait(IN_S)
    assert house.node("t0").cordon.is_draining
    assert house.node("i0").cordon.is_draining
    assert house.node("i0").role == NodeRole.SERVING


@pytest.mark.parametrize(
    ("action", "again_s", "is_drained"),
    [(A.UNCORDON, None, False), (A.DRAIN, None, True), (A.DRAIN_AT, 2 * IN_S, False)],
)
def test_a_later_order_replaces_a_window(
    action: A, again_s: float | None, is_drained: bool
) -> None:
    """It ends, begins at once, or begins later."""
    house = House(delays=QUICK)
    ask(house)
    ask(house, action, in_s=again_s)
    house.wait(IN_S + 1.0)
    assert house.node("t0").cordon.is_draining == is_drained
    job = house.submit("j", time_limit_s=100.0)
    house.start(job, "t0")
    assert (state(job) == JobState.PENDING) == is_drained
    assert not house.engine.check()


def test_a_drained_node_gets_no_window() -> None:
    """It is closed already, and would be opened until then by nobody."""
    house = House(delays=QUICK)
    ask(house, A.DRAIN)
    ask(house)
    assert not house.engine.state.windows
    assert lines(house, "t0")[-1][0] == "no window"


def test_a_lent_node_is_home_when_its_window_begins() -> None:
    """It is called home one reclaim deadline before, whatever limits its jobs have, and is told
    why; nothing starts on it in the lease TTL before that."""
    house = House(delays=QUICK)
    lend(house)
    house.wait(1.0)
    ask(house, node="i0")
    job = house.submit("j")
    house.start(job, "i0")
    house.wait(IN_S - RECLAIM_S - TTL_S)
    assert house.refusals(start(house.submit("late"), "i0")) == ["i0 takes no workers now"]
    house.wait(TTL_S - 1.0)
    assert state(job) == JobState.RUNNING
    house.wait(1.0)
    assert state(job) == JobState.PREEMPTING
    [loan] = house.engine.state.loans.values()
    assert loan.reclaim_reason == "i0 closes in 60 s, ordered by ops/me: a fan"
    house.wait(RECLAIM_S - 1.0)
    assert house.node("i0").role == NodeRole.SERVING
    assert not house.node("i0").cordon.is_cordoned
    house.wait(1.0)
    assert (house.node("i0").role, loan.is_drain_late) == (NodeRole.SERVING, False)
    assert house.node("i0").cordon.is_draining
    assert not house.engine.check()


@pytest.mark.parametrize("left_s", [1.0, 0.0])
def test_a_node_is_lent_while_the_loan_can_come_home_in_time(left_s: float) -> None:
    """One lease TTL and the reclaim deadline must be left; policies see it, and do not ask."""
    house = House(delays=QUICK)
    ask(house, node="i0")
    house.wait(IN_S - RECLAIM_S - TTL_S - left_s)
    seen = {node.name: node.takes_nothing for node in house.engine.snapshot().nodes}
    assert seen[I0] == (left_s == 0.0)
    lend(house)
    assert (house.node("i0").lease is not None) == (left_s > 0.0)


def test_other_settings_of_a_service_move_the_call_home() -> None:
    """A new leader keeps the window, and reckons by its own settings."""
    house = House(delays=QUICK)
    lend(house)
    house.wait(1.0)
    ask(house, node="i0")
    before = house.engine.settings
    services = tuple(replace(service, reclaim_deadline_s=500.0) for service in before.services)
    longer = replace(before, services=services)
    house.sim.handle(LeaderStarted(epoch=9, holder="new", settings=longer))
    for node in house.sim.nodes.values():
        node.report_soon()
    house.wait(IN_S - 500.0)
    [loan] = house.engine.state.loans.values()
    assert loan.reclaim_reason.startswith("i0 closes in 500 s")


def test_a_window_survives_a_snapshot_and_a_replay() -> None:
    """It is in the state, and its instants are engine time: the same facts give the same state."""
    journal: list[tuple[float, Event, Outcome]] = []
    house = House(delays=QUICK)
    real = house.engine.handle

    def recording(event: Event, *, now_s: float) -> Outcome:
        outcome = real(event, now_s=now_s)
        journal.append((now_s, event, outcome))
        return outcome

    blob = house.engine.encode_state()
    house.engine.handle = recording  # type: ignore[method-assign]  # a tap, not a mock
    ask(house)
    ask(house, node="i0", deadline_s=10.0)
    job = house.submit("j", time_limit_s=100.0)
    house.start(job, "t0")
    house.wait(IN_S / 2)
    assert decode_state(house.engine.encode_state()).windows == house.engine.state.windows
    house.wait(IN_S)
    again = Engine(house.engine.settings, decode_state(blob))
    again.policy = house.engine.policy
    for now_s, event, outcome in journal:
        house.script(outcome)
        entries = (Entry(now_s, event),)
        record = Record(
            number=1, after=0, epoch=1, writer="w", entries=entries, decisions=outcome.decisions
        )
        assert replay(again, record)
    assert again.encode_state() == house.engine.encode_state()


def test_a_removed_node_takes_its_window_along() -> None:
    """The name may join again, as a new node that no order is about."""
    house = House(delays=QUICK)
    ask(house)
    job = house.submit("j")
    assert avoids(house, job) == ("t0",)
    house.sim.nodes[T0].crash()
    house.sim.handle(NodeSilent(node=T0, silent_s=60.0))
    assert house.node("t0").role == NodeRole.LOST
    ask(house, A.CONFIRM_DEAD)
    ask(house, A.REMOVE)
    assert (avoids(house, job), house.engine.state.windows) == ((), {})
    house.sim.handle(PassDue())
    assert not house.engine.check()
