"""When a job's last worker ended, whichever end is heard last."""

from __future__ import annotations

from common.model import JobId, NodeName, WorkerKey
from coordinator.engine.jobs.ended_workers import HEARD_LATE_S, left, waits_since_s
from coordinator.engine.state.job_groups import WaitEntry
from coordinator.engine.state.tables import JobEntry, WorkerEntry
from tests.builders import make_spec


def test_an_earlier_end_that_is_heard_later_moves_nothing_back() -> None:
    """A node that was cut off tells of an end long ago: the gang was not gone before its last
    worker was, and the job has waited since then."""
    job = JobEntry(
        job_id=JobId("j1"),
        spec=make_spec("train", workers=(2, 2)),
        tenant="t",
        user="u",
        submitted_at_s=0.0,
        wait=WaitEntry(pending_since_s=0.0),
    )
    for index, ended_at_s in enumerate((100.0, 50.0)):
        key = WorkerKey(job.job_id, 1, index)
        worker = WorkerEntry(key=key, node=NodeName("n1"), gpu_uuids=(), is_flexible=False)
        left(job, worker, ended_at_s)
    assert job.ended.at_s == 100.0
    now_s = 100.0 + 2 * HEARD_LATE_S
    job.attempt.ran_at_s = 10.0
    assert waits_since_s(job, now_s) == 100.0
