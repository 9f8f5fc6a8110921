"""What `job list` and `job describe` show of a job: why it is where it is now, not where it was."""

from __future__ import annotations

from msgspec import UNSET

from common.apirows import JobRow
from common.faults import Fault
from common.model import JobState
from coordinator import plain_text
from coordinator.engine.state.events import OperatorAction, PassDue
from coordinator.engine.state.tables import JobEntry
from coordinator.plain_text import glance
from coordinator.service.api import explain, rows
from coordinator.service.nodes.report_folding import Folder
from tests.engine.house import House, state
from tests.engine.jobs.test_gpu_sharing import beside, resume, suspend
from tests.engine.jobs.test_stalls import FLOOR_S, quiet, tells, told
from tests.engine.scripted_nodes import BACK_OFF_S, FAULT, BlackHole, Refusal


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
    house = House()
    first = house.submit("first", work_s=1000.0)
    house.start(first, "t0")
    second = house.submit("second", work_s=1000.0)
    house.decide(suspend(first), beside(second, first))
    house.wait(10.0)

    since_s = first.suspension.since_s or 0.0

    def said(after_s: float) -> str:
        return plain_text.why(rows.job_row(house.engine, first, now_s=since_s + after_s))

    assert state(first) == JobState.SUSPENDED
    assert said(10.0) == (
        f"it keeps its GPUs and has been suspended for 10 s while {second.job_id} computes on them"
    )
    now_s = house.engine.state.now_s
    assert said(now_s - since_s) == explain.job(house.engine, first)[0]
    assert said(99.0) == explain.job(house.engine, first, now_s=since_s + 99.0)[0]
    house.decide(suspend(second), resume(first))
    assert said(20.0) == ""


def test_a_suspended_job_is_counted_apart_from_those_that_run() -> None:
    """Two have the same GPUs and one of them computes: the glance at a cell says one and one."""
    house = House()
    folder = Folder(lost_after_s=10.0, load_period_s=60.0, progress_period_s=60.0)
    first = house.submit("first", work_s=1000.0)
    house.start(first, "t0")

    def glanced() -> tuple[int, int, str]:
        found = rows.status(
            house.engine, folder, cell="c", bad_messages=0, up_s=9.0, now_s=9.0, clock_warning=""
        )
        return found.running_jobs, found.suspended_jobs, dict(glance(found))["jobs"]

    assert glanced() == (1, 0, "1 running, 0 starting, 0 pending")
    second = house.submit("second", work_s=1000.0)
    house.decide(suspend(first), beside(second, first))
    house.wait(10.0)
    assert state(second) == JobState.RUNNING
    assert glanced() == (1, 1, "1 running, 1 suspended, 0 starting, 0 pending")


def test_a_stalled_job_is_said_to_be_so_wherever_it_is_shown() -> None:
    """Its line, the glance at the cell and the explanation say so; its state stays what it is."""
    house = House()
    folder = Folder(lost_after_s=10.0, load_period_s=60.0, progress_period_s=60.0)
    job = stalled(house)
    now_s = house.engine.state.now_s
    shown = rows.job_row(house.engine, job, now_s=now_s)
    assert (shown.state, shown.stalled_s) == (JobState.RUNNING, 120.0)
    assert plain_text.job_state(shown) == "STALLED"
    assert plain_text.why(shown) == "no step after 5 for 120 s; its usual interval is 10 s"
    assert explain.job(house.engine, job)[0] == f"STALLED: {plain_text.why(shown)}"
    found = rows.status(
        house.engine, folder, cell="c", bad_messages=0, up_s=9.0, now_s=now_s, clock_warning=""
    )
    assert (found.running_jobs, found.stalled_jobs) == (1, 1)
    assert dict(glance(found))["jobs"] == "1 running (1 STALLED), 0 starting, 0 pending"
    tells(house, job, 6)
    over = rows.job_row(house.engine, job, now_s=now_s)
    assert (over.stalled_s, plain_text.job_state(over)) == (UNSET, "running")


def stalled(house: House) -> JobEntry:
    """A job that has told steps and then none, as its nodes show."""
    job = told(house)
    house.wait(FLOOR_S)
    quiet(house, job, FLOOR_S)
    return job
