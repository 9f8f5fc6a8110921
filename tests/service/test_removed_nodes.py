"""`aryl node remove` through the coordinator: what it answers, who hears of it, who comes back."""

from __future__ import annotations

import asyncio

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
    Nodes,
    Operate,
    Status,
)
from common.model import JobState, NodeName, NodeRole
from coordinator.engine.nodes.maintenance import REMOVED
from coordinator.engine.state.commands import Outcome
from coordinator.engine.state.events import Event, OperatorAction, OperatorAsked
from coordinator.service.coordinator import Coordinator
from tests.service.cell import Cell, job, running, submit

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
