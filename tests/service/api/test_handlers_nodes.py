"""Orders about nodes through the API: drains with a deadline, and removal."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from common.api import (
    ApiError,
    ApiErrorCode,
    Describe,
    Description,
    Done,
    Events,
    GetEvents,
    GetStatus,
    ListNodes,
    NodeRow,
    Nodes,
    Operate,
    Status,
)
from common.messages import encode
from common.model import STORE_INDEX, JobId, JobState, NodeName, NodeRole, Pool, WorkerKey
from coordinator.engine.nodes.maintenance import REMOVED
from coordinator.engine.state.commands import Outcome
from coordinator.engine.state.events import Event, OperatorAction, OperatorAsked
from coordinator.engine.state.node_groups import DesiredEntry, LedgerEntry
from coordinator.engine.state.tables import NodeEntry
from coordinator.service.api import rows
from coordinator.service.coordinator import Coordinator
from coordinator.service.nodes.report_folding import Folder
from tests.harness.cluster.coordinator import Cell, job, make_settings, running, submit
from tests.tables import each_row

DEADLINE_S = 100.0
A = OperatorAction


async def drain(cell: Cell, node: str = "t0", deadline_s: float | None = DEADLINE_S) -> None:
    """Order it."""
    request = Operate(action=A.DRAIN, target=node, reason="a fan", deadline_s=deadline_s)
    within = "" if deadline_s is None else f" within {deadline_s:.0f} s"
    assert await cell.ask(request, tenant="ops") == Done(detail=f"drain {node}{within}")


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


async def test_a_drain_says_until_when_and_who_is_concerned() -> None:
    """The node, its row and each job on it; after the deadline nothing is left to wait for."""
    async with Cell(training=2) as cell:
        coordinator = await cell.lead()
        job_id = await running(cell, coordinator)
        [name] = {worker.node for worker in job(coordinator, job_id).workers.values()}
        assert (await row(cell, name)).is_draining is False
        await drain(cell, name)
        assert "drained by ops/ann: a fan; what runs there may go on for " in await said(
            cell, "node", name
        )
        assert f"{name} is drained by ops/ann: a fan: unless it ends in " in await said(
            cell, "job", job_id
        )
        found = await row(cell, name)
        assert found.drain_left_s is not None
        assert DEADLINE_S - 5.0 < found.drain_left_s <= DEADLINE_S
        assert (found.is_cordoned, found.is_draining, found.jobs) == (True, True, (job_id,))
        await cell.until(lambda: job(coordinator, job_id).attempt.number == 2)
        assert "may go on" not in await said(cell, "node", name)
        found = await row(cell, name)
        assert (found.is_draining, found.drain_left_s, found.jobs) == (True, None, ())
        assert "is drained" not in await said(cell, "job", job_id)


@each_row("step_s", [-3600.0, 3600.0])
@each_row("snapshot_records", [1, 500])
async def test_a_deadline_outlives_the_coordinator_that_took_it(
    snapshot_records: int, step_s: float
) -> None:
    """The next one, by snapshot or by journal, preempts at the instant of the order, whatever the
    wall clock says while it leads."""
    settings = make_settings(snapshot_records=snapshot_records)
    async with Cell() as cell:
        coordinator = await cell.lead(settings=settings)
        job_id = await running(cell, coordinator)
        began_s = cell.clock.now_s()
        await drain(cell)
        await cell.leaders[0].crash()
        second = await cell.lead("two", settings)
        cell.clock.step_wall(step_s)
        await cell.until(lambda: job(second, job_id).state == JobState.PREEMPTING)
        assert DEADLINE_S <= cell.clock.now_s() - began_s < DEADLINE_S + 2.0
        await cell.until(lambda: job(second, job_id).state == JobState.PENDING)
        assert (job(second, job_id).counts.preemptions, job(second, job_id).attempt.number) == (
            1,
            1,
        )
        assert not second.engine.check()


BAD: list[tuple[Any, str]] = [
    (0.0, "> 0.0"),
    (-1.0, "> 0.0"),
    (1e12, "<= 1000000000.0"),
    (float("nan"), "deadline_s"),
    ("soon", "Expected `float | null`"),
]


@each_row(("deadline_s", "why"), BAD)
async def test_a_deadline_that_is_none_is_refused_by_its_name(deadline_s: Any, why: str) -> None:
    """Nothing is ordered, and the answer says which field it was and what it expected."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        values = msgspec.to_builtins(Operate(action=A.DRAIN, target="t0"))
        data = msgspec.msgpack.encode({**values, "deadline_s": deadline_s})
        reply = await cell.ask_raw("operate", data, tenant="ops")
        assert isinstance(reply, ApiError), reply
        assert (reply.code, reply.field) == (ApiErrorCode.USAGE, "deadline_s")
        assert why in reply.message
        assert not coordinator.engine.state.nodes[cell.agents["t0"].name].cordon.is_cordoned


@each_row("action", [a for a in A if a not in (A.DRAIN, A.DRAIN_AT)])
async def test_only_a_drain_has_a_deadline(action: A) -> None:
    """Of any other order it would be forgotten in silence."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        before = coordinator.engine.encode_state()
        request = Operate(action=action, target="t0", deadline_s=DEADLINE_S)
        reply = await cell.ask_raw("operate", encode(request), tenant="ops")
        assert isinstance(reply, ApiError)
        assert (reply.code, reply.field) == (ApiErrorCode.USAGE, "deadline_s")
        assert "only drain" in reply.message
        assert coordinator.engine.encode_state() == before


def test_a_node_with_only_a_store_is_not_empty() -> None:
    """Whoever waits for a drain would else switch off what a gang meets at."""
    node = NodeEntry(
        name=NodeName("t0"),
        home_pool=Pool.TRAINING,
        role=NodeRole.TRAINING,
        boot_id="b",
        desired=DesiredEntry(role=NodeRole.TRAINING),
        ledger=LedgerEntry(stores=[WorkerKey(JobId("jmeets"), 1, STORE_INDEX)]),
    )
    folder = Folder(lost_after_s=1.0, load_period_s=1.0, progress_period_s=1.0)
    assert rows.node_row(node, folder, boot_now_s=0.0).jobs == ("jmeets",)


async def test_what_is_said_of_a_drain_is_as_old_as_its_row() -> None:
    """One answer has one instant, whenever something last happened in the cell."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        job_id = await running(cell, coordinator)
        await drain(cell)
        left_s = (await row(cell)).drain_left_s
        assert left_s is not None
        coordinator.engine.state.now_s -= 20.0  # as if nothing had happened for so long
        found = await cell.ask(Describe(kind="node", name="t0"))
        assert isinstance(found, Description)
        assert found.node is not None
        assert found.node.drain_left_s == pytest.approx(left_s, abs=1.0)
        assert f"may go on for {found.node.drain_left_s:.0f} s" in "\n".join(found.why)
        assert f"unless it ends in {left_s:.0f} s" in await said(cell, "job", job_id)


GONE = NodeName("t1")


async def remove(cell: Cell, *, tenant: str = "ops") -> object:
    """An operator's order, and the answer to it."""
    order = Operate(action=OperatorAction.REMOVE, target=GONE, reason="sold")
    return await cell.ask(order, tenant=tenant)


async def silent(cell: Cell, coordinator: Coordinator) -> None:
    """The node is lost."""
    cell.agents[GONE].is_silent = True
    nodes = coordinator.engine.state.nodes
    await cell.until(lambda: nodes[GONE].role == NodeRole.LOST)


async def test_it_is_in_no_list_and_in_no_count_any_more() -> None:
    """It would else stand there as lost for ever; its story stays, with who ordered it and why."""
    async with Cell(training=2) as cell:
        coordinator = await cell.lead()
        await silent(cell, coordinator)
        before = await cell.ask(Describe(kind="node", name=GONE))
        assert isinstance(before, Description)
        assert f"aryl node remove {GONE}" in "\n".join(before.why)
        assert await remove(cell) == Done(detail=f"remove {GONE}")
        nodes = await cell.ask(ListNodes())
        assert isinstance(nodes, Nodes)
        assert [row.node for row in nodes.rows] == ["t0"]
        status = await cell.ask(GetStatus())
        assert isinstance(status, Status)
        assert (status.nodes, status.nodes_heard) == (1, 1)
        assert GONE not in coordinator.folder.reports
        for subject in (GONE, f"node/{GONE}"):
            told = await cell.ask(GetEvents(subject=subject))
            assert isinstance(told, Events)
            assert told.subject == f"node/{GONE}"
            assert (told.rows[-1].what, told.rows[-1].reason) == (REMOVED, "by ops/ann: sold")
        again = await remove(cell)
        assert isinstance(again, ApiError)
        assert again.code == ApiErrorCode.NOT_FOUND


async def test_what_is_in_the_way_is_answered_and_nothing_is_journaled() -> None:
    """Heard, or lost with a worker that may still run: a conflict that says what to do first."""
    async with Cell(training=2) as cell:
        coordinator = await cell.lead()
        job_id = await running(cell, coordinator, workers=(2, 2))
        refused = await remove(cell)
        assert isinstance(refused, ApiError)
        assert (refused.code, refused.field) == (ApiErrorCode.CONFLICT, "node")
        assert f"aryl node drain {GONE}" in refused.message
        await silent(cell, coordinator)
        refused = await remove(cell)
        assert isinstance(refused, ApiError)
        assert refused.code == ApiErrorCode.CONFLICT
        assert f"may still run {job_id}" in refused.message
        assert f"aryl node confirm-dead {GONE}" in refused.message
        denied = await remove(cell, tenant="team")
        assert isinstance(denied, ApiError)
        assert denied.code == ApiErrorCode.DENIED
        journaled = [entry.event for _, record in cell.journal() for entry in record.entries]
        assert not [event for event in journaled if isinstance(event, OperatorAsked)]


async def test_it_stays_removed_when_another_coordinator_leads() -> None:
    """The order is in the journal, and nobody remembers the node from its last reports."""
    async with Cell(training=2) as cell:
        coordinator = await cell.lead()
        await silent(cell, coordinator)
        await remove(cell)
        await cell.leaders[0].crash()
        again = await cell.lead("two")
        await cell.clock.advance(30.0)
        assert list(again.engine.state.nodes) == ["t0"]
        assert again.engine.check() == []


async def test_one_that_speaks_again_joins_and_takes_work() -> None:
    """Its agent never knew of it and obeys no order that is older than its last."""
    async with Cell(training=2) as cell:
        coordinator = await cell.lead()
        await running(cell, coordinator, "first")
        for _ in range(2):
            for action in (OperatorAction.CORDON, OperatorAction.UNCORDON):
                await cell.ask(Operate(action=action, target=GONE), tenant="ops")
        await cell.until(lambda: cell.is_obeyed(coordinator))
        held_by = {
            worker.node
            for entry in coordinator.engine.state.live()
            for worker in entry.workers.values()
        }
        assert held_by == {"t0"}
        await silent(cell, coordinator)
        assert isinstance(await remove(cell), Done)
        waiting = await submit(cell, "second")
        cell.agents[GONE].is_silent = False
        await cell.until(lambda: job(coordinator, waiting).state == JobState.RUNNING)
        assert coordinator.engine.state.nodes[GONE].role == NodeRole.TRAINING
        assert coordinator.engine.check() == []


async def test_orders_to_it_in_the_same_record_are_dropped() -> None:
    """It is touched and removed before anything leaves: there is nobody to push to."""
    async with Cell(training=2) as cell:
        coordinator = await cell.lead()
        await silent(cell, coordinator)
        orders = [
            OperatorAsked(action=action, by="ops/ann", target=GONE)
            for action in (OperatorAction.CORDON, OperatorAction.REMOVE)
        ]
        await cell.meanwhile(asyncio.gather(*map(coordinator.record, orders)))
        assert GONE not in coordinator.engine.state.nodes
        await cell.clock.advance(10.0)
        assert coordinator.is_leading


async def test_one_that_is_heard_while_the_order_is_under_way_is_not_said_to_be_gone() -> None:
    """The order is checked when it is asked and again when it is carried out; both are told."""
    async with Cell(training=2) as cell:
        coordinator = await cell.lead()
        await silent(cell, coordinator)
        facts = coordinator.folder.say_again(
            coordinator.folder.reports[GONE], now_s=cell.clock.now_s()
        )
        record = coordinator.record

        async def heard_first(event: Event) -> Outcome:
            coordinator.decider.post(facts)
            return await record(event)

        coordinator.record = heard_first  # type: ignore[method-assign]  # a tap, not a mock
        refused = await remove(cell)
        assert isinstance(refused, ApiError)
        assert refused.code == ApiErrorCode.CONFLICT
        assert GONE in coordinator.engine.state.nodes
