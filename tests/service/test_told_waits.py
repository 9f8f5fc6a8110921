"""What keeps a node from making ready for a worker, from its report to the engine."""

from __future__ import annotations

from common.messages import NodeReport, WorkerPhase, WorkerReport
from common.model import JobId, NodeRole, Pool, WorkerKey
from coordinator.service.nodes.report_folding import Folder
from tests.tables import each_row

KEY = WorkerKey(JobId("j"), 1, 0)
BUSY = "GPU GPU-0 is used by process 4242"


def report(sequence: int, error: str, phase: WorkerPhase = WorkerPhase.RESERVING) -> NodeReport:
    """A training node that holds one worker."""
    return NodeReport(
        node="t0",
        boot_id="b",
        sequence=sequence,
        home_pool=Pool.TRAINING,
        role=NodeRole.TRAINING,
        epoch=1,
        generation=1,
        instance="one",
        period_s=1.0,
        workers=(WorkerReport(key=KEY, phase=phase, gpu_uuids=(), error=error),),
    )


def folder() -> Folder:
    """One that has heard the node wait for a process."""
    found = Folder(lost_after_s=9.0, load_period_s=9.0, progress_period_s=9.0)
    facts = found.fold(report(1, BUSY), now_s=1.0)
    assert facts is not None
    assert [worker.error for worker in facts.workers] == [BUSY]
    return found


@each_row(
    ("error", "phase"),
    [
        ("", WorkerPhase.RESERVING),
        ("GPU GPU-0 has 700 MiB in use", WorkerPhase.RESERVING),
        (BUSY, WorkerPhase.REFUSED),
        ("", WorkerPhase.READY),
    ],
)
def test_another_reason_is_news(error: str, phase: WorkerPhase) -> None:
    """Also that there is none any more."""
    facts = folder().fold(report(2, error, phase), now_s=2.0)
    assert facts is not None
    assert [worker.error for worker in facts.workers] == [error]


def test_the_same_reason_with_other_numbers_is_no_news() -> None:
    """Memory that is freed bit by bit would fill the journal, one record a second."""
    found = folder()
    assert found.fold(report(2, "GPU GPU-0 is used by process 4243"), now_s=2.0) is None
    assert found.fold(report(3, "GPU GPU-0 has 700 MiB in use"), now_s=3.0) is not None
    assert found.fold(report(4, "GPU GPU-0 has 650 MiB in use"), now_s=4.0) is None


def test_what_a_running_worker_has_to_say_is_its_own_matter() -> None:
    """Only what ends or begins is a fact for scheduling."""
    facts = folder().fold(report(2, "noise", WorkerPhase.RUNNING), now_s=2.0)
    assert facts is not None
    assert [worker.error for worker in facts.workers] == [""]
