"""Maintenance windows as their operators see them: ordered, shown, kept over a change of leader."""

from __future__ import annotations

import msgspec
import pytest

from common.api import (
    MAX_WINDOW_S,
    ApiError,
    ApiErrorCode,
    Describe,
    Description,
    Done,
    ListNodes,
    NodeRow,
    Nodes,
    Operate,
    WindowRow,
)
from common.messages import encode
from common.model import JobState, NodeName
from coordinator.engine.state.events import OperatorAction, OperatorAsked
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Loan
from coordinator.service.api import explain_windows
from tests.harness.cluster.coordinator import Cell, job, make_settings, running
from tests.harness.cluster.engine import CHAT, EngineHarness
from tests.tables import each_row

IN_S = 100.0
A = OperatorAction


def window(node: str = "t0", in_s: float = IN_S) -> Operate:
    """The order."""
    return Operate(action=A.DRAIN_AT, target=node, reason="a fan", in_s=in_s)


async def said(cell: Cell, kind: str, name: str) -> str:
    """Why it is where it is, as one text."""
    found = await cell.ask(Describe(kind=kind, name=name))
    assert isinstance(found, Description)
    return "\n".join(found.why)


async def row(cell: Cell, name: str = "t0") -> NodeRow:
    """A node in the list."""
    found = await cell.ask(ListNodes())
    assert isinstance(found, Nodes)
    return next(row for row in found.rows if row.node == name)


async def test_the_answer_names_who_is_still_there_and_the_row_says_when() -> None:
    """So do the explanations of the node and of the job; an uncordon takes all of it away."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        job_id = await running(cell, coordinator)
        answer = await cell.ask(window(), tenant="ops")
        still = f"still there then: {job_id} (no time limit)"
        assert answer == Done(detail=f"drain_at t0 in 100 s; {still}")
        found = (await row(cell)).window
        assert isinstance(found, WindowRow)
        assert found.at_s - found.left_s == pytest.approx(cell.clock.wall_s(), abs=1.0)
        assert (IN_S - 5.0 < found.left_s <= IN_S, found.reason) == (True, "by ops/ann: a fan")
        assert "it closes in " in await said(cell, "node", "t0")
        assert "t0 closes, ordered by ops/ann: a fan: unless it ends in " in await said(
            cell, "job", job_id
        )
        await cell.ask(Operate(action=A.UNCORDON, target="t0"), tenant="ops")
        assert (await row(cell)).window is msgspec.UNSET
        assert "closes" not in await said(cell, "node", "t0") + await said(cell, "job", job_id)


async def test_a_drained_node_stays_drained_and_the_answer_says_so() -> None:
    """Whoever takes a whole rack down need not leave it out; a drain now replaces a window."""
    async with Cell() as cell:
        await cell.lead()
        await cell.ask(window(), tenant="ops")
        await cell.ask(Operate(action=A.DRAIN, target="t0"), tenant="ops")
        found = await row(cell)
        assert (found.window, found.is_draining) == (msgspec.UNSET, True)
        answer = await cell.ask(window(), tenant="ops")
        assert isinstance(answer, Done)
        assert answer.detail.startswith("drain_at t0: node t0 is drained already")
        assert (await row(cell)).window is msgspec.UNSET


def test_it_says_which_jobs_are_preempted_and_which_only_shrink() -> None:
    """On a training node at its window and after its deadline, on a lent one when the loan ends. A
    job with only flexible workers there runs on."""
    harness = EngineHarness()
    harness.decide(Loan(node=NodeName("i0"), service=CHAT, reason="test"), lend=True)
    harness.wait(60.0)
    base = harness.submit("base", gpus_per_worker=4, work_s=1e6)
    harness.start(base, "t0")
    grown = harness.submit("grown", gpus_per_worker=2, workers=(1, 3), work_s=1e6)
    harness.start(grown, "t1", flexible=("t0", "i0"))
    guest = harness.submit("guest", gpus_per_worker=4, work_s=1e6)
    harness.start(guest, "i0")
    harness.wait(60.0)
    answers: list[str] = []
    for node in ("t0", "i0"):
        order = OperatorAsked(
            action=A.DRAIN_AT, by="ops/me", target=node, in_s=500.0, deadline_s=50.0
        )
        harness.sim.handle(order)
        answers.append(explain_windows.ordered(harness.engine, node))
    shrinks = "grown (its flexible workers are released, and it runs on)"
    assert f"still there then: base (no time limit), {shrinks}" in answers[0]
    assert "is called home in 440 s; still there then: grown (its flexible" in answers[1]
    assert "guest (no time limit)" in answers[1]

    def of(job: JobEntry) -> list[str]:
        return explain_windows.of_job(harness.engine, job, harness.engine.state.now_s)

    assert of(base) == [
        "t0 closes, ordered by ops/me: unless it ends in 550 s, it is preempted and waits again"
    ]
    assert of(guest) == [
        "i0 closes, ordered by ops/me, and its loan ends in 440 s: unless it ends in 440 s, it is "
        "preempted and waits again"
    ]
    assert of(grown) == [
        "i0 closes, ordered by ops/me, and its loan ends in 440 s: its flexible workers there are "
        "released in 440 s, and it runs on",
        "t0 closes, ordered by ops/me: its flexible workers there are released in 500 s, and it "
        "runs on",
    ]


@each_row(
    ("lent", "closes", "in_s", "warns"),
    [
        ((), ("i0",), 500.0, ""),
        ((), ("i0", "i1"), 500.0, "0 nodes then: no lent node can replace it"),
        (("i1",), ("i0",), 500.0, ""),
        (("i1",), ("i0",), 50.0, "0 nodes then: lent nodes that are called home now may come"),
    ],
)
def test_the_answer_warns_when_a_service_has_too_few_nodes_then(
    lent: tuple[str, ...], closes: tuple[str, ...], in_s: float, warns: str
) -> None:
    """None is left to call home, or none can be home by then."""
    harness = EngineHarness(training=1)
    for node in lent:
        harness.decide(Loan(node=NodeName(node), service=CHAT, reason="test"), lend=True)
        harness.wait(30.0)
    for node in closes:
        harness.sim.handle(OperatorAsked(action=A.DRAIN_AT, by="ops/me", target=node, in_s=in_s))
    said = explain_windows.ordered(harness.engine, closes[-1])
    assert ("warning: chat needs 1 and has " in said) == bool(warns)
    assert warns in said


@each_row("later_s", [0.0, 0.02, -0.02])
def test_windows_of_one_instant_count_as_one_in_the_warning(later_s: float) -> None:
    """Orders for one instant reach the coordinator some milliseconds apart, in either direction."""
    harness = EngineHarness(training=1)
    for node, in_s in (("i0", 500.0), ("i1", 500.0 + later_s)):
        harness.sim.handle(OperatorAsked(action=A.DRAIN_AT, by="ops/me", target=node, in_s=in_s))
    said = explain_windows.ordered(harness.engine, "i1")
    assert "warning: chat needs 1 and has 0 nodes then" in said


@each_row("in_s", [0.0, -5.0, MAX_WINDOW_S + 1.0, float("nan"), "soon"])
async def test_a_window_that_is_past_or_too_far_is_refused(in_s: object) -> None:
    """The field is named, and nothing changes."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        values = {**msgspec.to_builtins(window()), "in_s": in_s}
        reply = await cell.ask_raw("operate", msgspec.msgpack.encode(values), tenant="ops")
        assert isinstance(reply, ApiError)
        assert (reply.code, reply.field) == (ApiErrorCode.USAGE, "in_s")
        assert not coordinator.engine.state.windows


@each_row(
    "request_",
    [
        Operate(action=A.DRAIN_AT, target="t0"),
        Operate(action=A.DRAIN, target="t0", in_s=5.0),
        Operate(action=A.CORDON, target="t0", in_s=5.0),
    ],
)
async def test_only_a_window_has_a_begin(request_: Operate) -> None:
    """And it has to have one: neither is guessed."""
    async with Cell() as cell:
        await cell.lead()
        reply = await cell.ask(request_, tenant="ops")
        assert isinstance(reply, ApiError)
        assert (reply.code, reply.field) == (ApiErrorCode.USAGE, "in_s")
        assert not (await row(cell)).is_cordoned


def test_any_other_order_is_what_older_coordinators_know() -> None:
    """They refuse a message with a field that they do not know."""
    assert b"in_s" not in encode(Operate(action=A.DRAIN, target="t0"))


@each_row("step_s", [-3600.0, 3600.0])
@each_row("snapshot_records", [1, 500])
async def test_a_window_outlives_the_coordinator_that_took_it(
    snapshot_records: int, step_s: float
) -> None:
    """The next one, by snapshot or by journal, drains at the instant of the order, whatever the
    wall clock says while it leads."""
    settings = make_settings(snapshot_records=snapshot_records)
    async with Cell() as cell:
        coordinator = await cell.lead(settings=settings)
        job_id = await running(cell, coordinator)
        began_s = cell.clock.now_s()
        await cell.ask(window(), tenant="ops")
        await cell.leaders[0].crash()
        second = await cell.lead("two", settings)
        cell.clock.step_wall(step_s)
        await cell.until(lambda: job(second, job_id).state == JobState.PREEMPTING)
        assert IN_S <= cell.clock.now_s() - began_s < IN_S + 2.0
        assert (await row(cell)).is_draining
