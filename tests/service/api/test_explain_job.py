"""Drains with a deadline as their operators see them: asked for, shown, kept over a restart."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from common.api import (
    ApiError,
    ApiErrorCode,
    Describe,
    Description,
    Done,
    ListNodes,
    NodeRow,
    Nodes,
    Operate,
)
from common.messages import encode
from common.model import STORE_INDEX, JobId, JobState, NodeName, NodeRole, Pool, WorkerKey
from coordinator.engine.state.events import OperatorAction
from coordinator.engine.state.node_groups import DesiredEntry, LedgerEntry
from coordinator.engine.state.tables import NodeEntry
from coordinator.service.api import rows
from coordinator.service.nodes.report_folding import Folder
from tests.service.cell import Cell, job, make_settings, running
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
