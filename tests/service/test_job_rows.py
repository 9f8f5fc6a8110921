"""What `job list` and `job describe` show of a job: why it is where it is now, not where it was."""

from __future__ import annotations

from common.apirows import JobRow
from common.messages import WorkerPhase
from common.model import JobState
from coordinator.cli import columns
from coordinator.engine.events import OperatorAction, PassDue, WorkerFact
from coordinator.engine.state import JobEntry
from coordinator.service import rows
from tests.engine.black_hole import BACK_OFF_S, FAULT, BlackHole


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
    assert (shown.error, shown.exit_code, shown.blockers, columns.why(shown)) == ("", None, (), "")
    told = [line.reason for line in cell.engine.state.stories if line.subject == job.job_id]
    assert any(FAULT in reason for reason in told)


def test_a_job_that_waits_says_first_what_it_waits_for() -> None:
    """A fault is why it does not run any more; a node that is free now is not what is missing."""
    cell = BlackHole(nodes=1)
    job = cell.submit("j")
    cell.passes()
    assert columns.why(row(cell, job)) == f"tries again in {BACK_OFF_S:.0f} s: {FAULT} (t0)"
    cell.operate(OperatorAction.CORDON, "t0")
    cell.wait(BACK_OFF_S)
    shown = row(cell, job)
    assert (shown.state, shown.error) == (JobState.PENDING, FAULT)
    assert columns.why(shown) == shown.blockers[0] != FAULT


def test_a_job_that_ended_says_how() -> None:
    """What was missing on the only node is its last word."""
    cell = BlackHole(nodes=1)
    job = cell.submit("j")
    cell.handle(PassDue())
    [worker] = job.workers.values()
    error = "workdir '/x' is not a directory on this node"
    cell.report("t0", WorkerFact(key=worker.key, phase=WorkerPhase.REFUSED, error=error))
    shown = row(cell, job)
    assert shown.state == JobState.FAILED
    assert columns.why(shown) == shown.error
    assert shown.error.startswith(error)
