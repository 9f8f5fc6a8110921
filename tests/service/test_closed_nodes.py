"""A node that takes nothing new by itself shows in every list, as one that is cordoned does."""

from __future__ import annotations

import msgspec

from common.api import (
    ClosedRow,
    Describe,
    Description,
    GetStatus,
    ListJobs,
    ListLoans,
    ListNodes,
    Loans,
    NodeRow,
    Nodes,
)
from common.api import Jobs as JobRows
from common.model import NodeName, NodeRole
from coordinator.engine.nodes.start_failures import MOST
from coordinator.service.api import rows
from coordinator.service.nodes.report_folding import Folder
from tests.cli.fake_cell import FakeCell, aryl, node_row, status
from tests.engine.scripted_nodes import BlackHole

T0 = NodeName("t0")


def closed_cell() -> BlackHole:
    """t0 of two nodes refused so many starts that it is left alone for a while."""
    cell = BlackHole(nodes=1)
    for number in range(MOST):
        cell.submit(f"j{number}")
        cell.passes()
    assert cell.engine.state.nodes[T0].failed_starts.closed_reason
    return cell


def row_of(cell: BlackHole, *, after_s: float = 0.0) -> NodeRow:
    """What lists show of t0, some seconds after the last event."""
    engine = cell.engine
    folder = Folder(lost_after_s=10.0, load_period_s=60.0, progress_period_s=60.0)
    entry, now_s = engine.state.nodes[T0], engine.state.now_s + after_s
    closed = rows.closed(engine, entry, now_s=now_s)
    return rows.node_row(entry, folder, boot_now_s=0.0, closed=closed)


def test_a_row_tells_why_a_node_is_closed_and_for_how_long_yet() -> None:
    """Of one that refused too many starts: until it is tried again. An open one has no such part,
    as a caller of an older version would refuse it."""
    cell = closed_cell()
    left_s = cell.engine.state.closed_until_s[T0] - cell.engine.state.now_s
    row = row_of(cell, after_s=1.0)
    assert isinstance(row.closed, ClosedRow)
    assert row.closed.left_s == left_s - 1.0
    assert f"it refused {MOST} starts in a row" in row.closed.why
    assert row.detail == row.closed.why
    cell.engine.state.nodes[T0].failed_starts.closed_reason = ""
    assert row_of(cell).closed is msgspec.UNSET
    assert b"closed" not in msgspec.json.encode(row_of(cell))


def test_a_node_that_cannot_write_its_ledger_is_closed_until_that_is_mended() -> None:
    """It takes nothing new either, and nobody knows for how long; a lost node is only lost."""
    cell = closed_cell()
    node = cell.engine.state.nodes[T0]
    node.ledger.error = "disk full"
    assert row_of(cell).closed == ClosedRow(why="disk full", left_s=None)
    node.role = NodeRole.LOST
    assert row_of(cell).closed is msgspec.UNSET


def test_the_status_counts_closed_nodes() -> None:
    """And says nothing of them while there are none."""
    cell = closed_cell()
    folder = Folder(lost_after_s=10.0, load_period_s=60.0, progress_period_s=60.0)

    def counted() -> object:
        engine = cell.engine
        found = rows.status(
            engine, folder, cell="a", bad_messages=0, up_s=1.0, now_s=engine.state.now_s,
            clock_warning="",
        )  # fmt: skip
        return found.nodes_closed

    assert counted() == 1
    cell.engine.state.nodes[T0].failed_starts.closed_reason = ""
    assert counted() is msgspec.UNSET


def test_a_closed_node_shows_in_every_list_of_the_cli() -> None:
    """Table, wide, JSON, description, status and top."""
    why = "it refused 3 starts in a row, the last: no workers"
    closed = node_row(closed=ClosedRow(why=why, left_s=60.0), detail=why)
    cell = FakeCell(
        {
            ListNodes: Nodes(rows=(closed, node_row("t1"))),
            GetStatus: status(nodes_closed=1),
            Describe: Description(kind="node", name="t0", node=closed),
            ListJobs: JobRows(rows=()),
            ListLoans: Loans(rows=()),
        }
    )
    listed = aryl(cell, "node", "list").out.splitlines()
    assert "training (closed)" in listed[1]
    assert "closed" not in listed[2]
    assert why in aryl(cell, "node", "list", "-o", "wide").out
    assert '"left_s":60' in aryl(cell, "node", "list", "-o", "json").out.replace(" ", "")
    assert f"takes nothing new for 1m more: {why}" in aryl(cell, "node", "describe", "t0").out
    assert "1 CLOSED to new work" in aryl(cell, "status").out
    assert '"nodes_closed":1' in aryl(cell, "status", "-o", "json").out.replace(" ", "")
    top = aryl(cell, "top", "--once").out
    assert "training (closed)" in top
    assert "1 CLOSED to new work" in top
