"""Flexible workers on GPUs that come free for nobody: none is released for a job that could not
start on what it leaves."""

from __future__ import annotations

import pytest

from common.messages import WorkerPhase
from coordinator.engine.state.events import PassDue
from coordinator.engine.state.tables import JobEntry, WorkerEntry
from tests.engine.scripted_nodes import BlackHole

WELL = ("x0", "x1", "x2")
"""GPUs of the one node."""


def says(cell: BlackHole, job: JobEntry, phase: WorkerPhase, **facts: tuple[str, ...]) -> None:
    """The node reports the job's workers."""
    cell.report("t0", *(cell.fact(worker, phase) for worker in job.workers.values()), **facts)


def flexible(cell: BlackHole, gpus: tuple[str, ...]) -> tuple[JobEntry, list[WorkerEntry]]:
    """An elastic job that has all GPUs of the node, and its flexible workers."""
    cell.bad = set()
    cell.report("t0", gpus=gpus)
    job = cell.submit("elastic", gpus=1, most=len(gpus))
    for _ in gpus:
        cell.handle(PassDue())
        for phase in (WorkerPhase.READY, WorkerPhase.RUNNING):
            says(cell, job, phase, gpus=gpus)
    found = [worker for worker in job.workers.values() if worker.is_flexible]
    assert len(found) == len(gpus) - 1
    return job, found


def own(worker: WorkerEntry) -> str:
    """Its GPU, as its node's report is written."""
    return worker.gpu_uuids[0].removeprefix("t0-")


@pytest.mark.parametrize("how", ["gone", "trespassed"])
def test_nobody_is_released_for_a_gpu_that_comes_free_for_nobody(how: str) -> None:
    """It fell out of its node, or a process of nobody's is on it: to the next job it is worth
    nothing, and its worker goes on as long as it can."""
    gpus = WELL[:2]
    cell = BlackHole(nodes=1)
    job, [worker] = flexible(cell, gpus)
    if how == "gone":
        left = tuple(gpu for gpu in gpus if gpu != own(worker))
        says(cell, job, WorkerPhase.RUNNING, gpus=left)
        assert any(slot.is_gone for slot in cell.node("t0").gpus)
    else:
        says(cell, job, WorkerPhase.RUNNING, gpus=gpus, trespassed=(own(worker),))
    cell.submit("base", gpus=1)
    cell.handle(PassDue())
    assert worker.stop is None


def test_of_two_the_one_is_released_whose_gpu_comes_free() -> None:
    """The other costs as much and gives nothing."""
    cell = BlackHole(nodes=1)
    job, [kept, released] = flexible(cell, WELL)
    says(cell, job, WorkerPhase.RUNNING, gpus=WELL, trespassed=(own(kept),))
    cell.submit("base", gpus=1)
    cell.handle(PassDue())
    assert kept.stop is None
    assert released.stop is not None
