"""Rows of jobs, nodes and tenants: why a job is where it is now, and why a node is closed."""

from __future__ import annotations

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

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
from common.apirows import JobRow
from common.faults import Fault
from common.model import GpuUuid, JobState, NodeName, NodeRole
from coordinator import plain_text
from coordinator.cli.columns import tenants
from coordinator.engine.nodes.start_failures import MOST
from coordinator.engine.state.events import OperatorAction, PassDue
from coordinator.engine.state.tables import JobEntry
from coordinator.plain_text import glance
from coordinator.policies.contract.snapshot import JobView, TenantView
from coordinator.service.api import explain_job, rows
from coordinator.service.api.rows import tenant_rows
from coordinator.service.nodes.report_folding import Folder
from tests.cli.fake_cell import FakeCell, aryl, node_row, status
from tests.engine.jobs.test_gpu_sharing import beside, resume, suspend
from tests.engine.jobs.test_stalls import FLOOR_S, quiet, tells, told
from tests.harness.builders import make_job_view, make_node_view, make_snapshot, make_worker_view
from tests.harness.cluster.engine import EngineHarness, state
from tests.harness.cluster.scripted_nodes import BACK_OFF_S, FAULT, BlackHole, Refusal


def row(cell: BlackHole, job: JobEntry) -> JobRow:
    """The job as a caller sees it."""
    return rows.job_row(cell.engine, job, now_s=cell.now_s)


def test_a_fault_of_the_attempt_before_is_no_reason_of_the_one_that_runs() -> None:
    """It is in the story; what runs now has neither an error nor an exit code."""
    cell = BlackHole()
    job = cell.submit("j")
    cell.passes()
    assert row(cell, job).error == FAULT
    cell.passes()
    shown = row(cell, job)
    assert shown.state == JobState.RUNNING
    assert (shown.error, shown.exit_code, shown.blockers, plain_text.why(shown)) == (
        "",
        None,
        (),
        "",
    )
    reasons = [line.reason for line in cell.engine.state.stories if line.subject == job.job_id]
    assert any(FAULT in reason for reason in reasons)


def test_a_job_that_waits_says_first_what_it_waits_for() -> None:
    """A fault is why it does not run any more; a node that is free now is not what is missing."""
    cell = BlackHole(nodes=1)
    job = cell.submit("j")
    cell.passes()
    assert plain_text.why(row(cell, job)) == f"tries again in {BACK_OFF_S:.0f} s: {FAULT} (t0)"
    cell.operate(OperatorAction.CORDON, "t0")
    cell.wait(BACK_OFF_S)
    shown = row(cell, job)
    assert (shown.state, shown.error) == (JobState.PENDING, FAULT)
    assert plain_text.why(shown) == shown.blockers[0] != FAULT


def test_a_job_that_ended_says_how() -> None:
    """What was missing on the only node is its last word."""
    cell = BlackHole(nodes=1)
    job = cell.submit("j")
    cell.handle(PassDue())
    [worker] = job.workers.values()
    error = "workdir '/x' is not a directory on this node"
    cell.report("t0", Refusal(error, Fault.JOB, "workdir").of(worker))
    shown = row(cell, job)
    assert shown.state == JobState.FAILED
    assert plain_text.why(shown) == shown.error
    assert shown.error.startswith(error)


def test_a_suspended_job_says_who_computes_in_its_place() -> None:
    """Its line has the words of `explain`, and none any more once it computes itself."""
    harness = EngineHarness()
    first = harness.submit("first", work_s=1000.0)
    harness.start(first, "t0")
    second = harness.submit("second", work_s=1000.0)
    harness.decide(suspend(first), beside(second, first))
    harness.wait(10.0)

    since_s = first.suspension.since_s or 0.0

    def said(after_s: float) -> str:
        return plain_text.why(rows.job_row(harness.engine, first, now_s=since_s + after_s))

    assert state(first) == JobState.SUSPENDED
    assert said(10.0) == (
        f"it keeps its GPUs and has been suspended for 10 s while {second.job_id} computes on them"
    )
    now_s = harness.engine.state.now_s
    assert said(now_s - since_s) == explain_job.reasons(harness.engine, first)[0]
    assert said(99.0) == explain_job.reasons(harness.engine, first, now_s=since_s + 99.0)[0]
    harness.decide(suspend(second), resume(first))
    assert said(20.0) == ""


def test_a_suspended_job_is_counted_apart_from_those_that_run() -> None:
    """Two have the same GPUs and one of them computes: the glance at a cell says one and one."""
    harness = EngineHarness()
    folder = Folder(lost_after_s=10.0, load_period_s=60.0, progress_period_s=60.0)
    first = harness.submit("first", work_s=1000.0)
    harness.start(first, "t0")

    def glanced() -> tuple[int, int, str]:
        found = rows.status(
            harness.engine, folder, cell="c", bad_messages=0, up_s=9.0, now_s=9.0, clock_warning=""
        )
        return found.running_jobs, found.suspended_jobs, dict(glance(found))["jobs"]

    assert glanced() == (1, 0, "1 running, 0 starting, 0 pending")
    second = harness.submit("second", work_s=1000.0)
    harness.decide(suspend(first), beside(second, first))
    harness.wait(10.0)
    assert state(second) == JobState.RUNNING
    assert glanced() == (1, 1, "1 running, 1 suspended, 0 starting, 0 pending")


def test_a_stalled_job_is_said_to_be_so_wherever_it_is_shown() -> None:
    """Its line, the glance at the cell and the explanation say so; its state stays what it is."""
    harness = EngineHarness()
    folder = Folder(lost_after_s=10.0, load_period_s=60.0, progress_period_s=60.0)
    job = stalled(harness)
    now_s = harness.engine.state.now_s
    shown = rows.job_row(harness.engine, job, now_s=now_s)
    assert (shown.state, shown.stalled_s) == (JobState.RUNNING, 120.0)
    assert plain_text.job_state(shown) == "STALLED"
    assert plain_text.why(shown) == "no step after 5 for 120 s; its usual interval is 10 s"
    assert explain_job.reasons(harness.engine, job)[0] == f"STALLED: {plain_text.why(shown)}"
    found = rows.status(
        harness.engine, folder, cell="c", bad_messages=0, up_s=9.0, now_s=now_s, clock_warning=""
    )
    assert (found.running_jobs, found.stalled_jobs) == (1, 1)
    assert dict(glance(found))["jobs"] == "1 running (1 STALLED), 0 starting, 0 pending"
    tells(harness, job, 6)
    over = rows.job_row(harness.engine, job, now_s=now_s)
    assert (over.stalled_s, plain_text.job_state(over)) == (UNSET, "running")


def stalled(harness: EngineHarness) -> JobEntry:
    """A job that has told steps and then none, as its nodes show."""
    job = told(harness)
    harness.wait(FLOOR_S)
    quiet(harness, job, FLOOR_S)
    return job


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


def job(name: str, tenant: str, gpus: int, *, runs: bool) -> JobView:
    """One worker, that waits or runs."""
    made = make_job_view(
        name,
        gpus_per_worker=gpus,
        state=JobState.RUNNING if runs else JobState.PENDING,
        placed=[make_worker_view(name, 0, "n0", gpus=gpus)] if runs else (),
    )
    return replace(made, tenant=tenant)


def test_a_row_counts_all_below_a_tenant() -> None:
    """Use, waiting demand and fair share of a division are those of its teams."""
    running = job("r", "team", 6, runs=True)
    snapshot = replace(
        make_snapshot(
            nodes=[make_node_view("n0", workers=running.placed)],
            jobs=[running, job("w", "team", 4, runs=False), job("x", "other", 8, runs=False)],
        ),
        tenants=(
            TenantView(name="division", guarantee_gpus=4),
            TenantView(name="team", parent="division", guarantee_gpus=2),
        ),
    )
    rows = {row.tenant: row for row in tenant_rows(snapshot)}
    assert list(rows) == ["division", "other", "team"]
    division = rows["division"]
    assert (division.used_gpus, division.borrowed_gpus, division.waiting_gpus) == (6, 2, 4)
    assert (division.fair_share_gpus, rows["other"].fair_share_gpus) == (6.0, 2.0)
    assert (rows["team"].borrowed_gpus, rows["other"].waiting_gpus) == (4, 8)


def test_tenants_that_share_gpus_have_parts_of_them() -> None:
    """Three that take turns on two GPUs; a whole number stays one, also in JSON."""
    named = tuple(GpuUuid(f"GPU-{n}") for n in range(2))
    jobs = [job(name, name, 2, runs=True) for name in ("a", "b", "c")]
    shared = [replace(each, placed=(replace(each.placed[0], gpu_uuids=named),)) for each in jobs]
    own = replace(job("d", "d", 4, runs=True))
    snapshot = make_snapshot(nodes=[make_node_view("n0", free_gpus=2)], jobs=[*shared, own])
    used = {row.tenant: row.used_gpus for row in tenant_rows(snapshot)}
    assert used == {"a": 2 / 3, "b": 2 / 3, "c": 2 / 3, "d": 4}
    assert isinstance(used["d"], int)
    table = [column.value(row) for row in tenant_rows(snapshot)[:1] for column in tenants()]
    assert "0.7" in table
