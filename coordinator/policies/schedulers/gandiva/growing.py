"""Growing and shrinking: elastic jobs take idle GPUs of their node and give them back. Pure.

Gandiva (OSDI'18), section 3.4: an elastic job has agreed to grow on its own node while no job
waits, and to shrink at once when a job arrives.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.model import JobId, JobState, NodeName
from coordinator.policies.contract.cooldown import resizable_at_s
from coordinator.policies.contract.decisions import Placement, Resize
from coordinator.policies.contract.free_gpus import present_workers
from coordinator.policies.contract.snapshot import JobView, WorkerView
from coordinator.policies.contract.text import counted
from coordinator.policies.schedulers.gandiva.board import Board, Place, gang_of


def make_room(board: Board, job: JobView) -> Place | None:
    """Take flexible workers back, if the gang fits then; no more of them than it needs.

    For a gang that finds no room as it is.
    """
    grown = [
        other
        for other in board.of(JobState.RUNNING)
        if other.is_resizable and any(_may_go(worker) for worker in other.placed)
    ]
    if not grown:
        return None
    all_of_them = [worker for other in grown for worker in other.placed if _may_go(worker)]
    board.floor.vacate(all_of_them)
    place = board.find(job)
    if place is None:
        board.floor.stay(all_of_them)
        return None
    missing: dict[NodeName, int] = {}
    board.floor.stay(all_of_them)
    for placement in place[1]:
        gpus = placement.worker_count * job.gpus_per_worker
        missing[placement.node] = gpus - board.floor.free[placement.node]
    for other in grown:
        leaving: list[WorkerView] = []
        for worker in _that_may_go(other):
            if worker.freed_gpus and missing.get(worker.node, 0) > 0:
                missing[worker.node] -= worker.freed_gpus
                leaving.append(worker)
        _shrink(board, other, leaving, job.job_id)
    return place


def shrink_hosts(board: Board, job: JobView) -> None:
    """Gangs that it could take turns with give back their growth, for the next pass."""
    for other in board.of(JobState.RUNNING):
        if not other.is_resizable:
            continue
        is_alike = other.gpu_type is not None and job.accepts(other.gpu_type)
        is_alike = is_alike and board.may_share(job, other) and board.may_come(job, other)
        is_alike = is_alike and _is_base_well(other)
        if is_alike and gang_of(other) == job.base_gpus_on(other.gpu_type or ""):
            _shrink(board, other, _that_may_go(other), job.job_id)


def _is_base_well(job: JobView) -> bool:
    """True if all GPUs of its base gang can be given to other jobs that would share them."""
    base = (each for each in job.placed if not each.is_flexible and not each.is_leaving)
    return all(worker.freed_gpus == worker.gpus for worker in base)


def _may_go(worker: WorkerView) -> bool:
    return worker.is_flexible and not worker.is_leaving


def _that_may_go(job: JobView) -> list[WorkerView]:
    """The newest workers first: they stand farthest from the base gang."""
    return sorted(filter(_may_go, job.placed), key=lambda worker: -worker.worker_index)


def _shrink(board: Board, job: JobView, leaving: Sequence[WorkerView], beneficiary: JobId) -> None:
    if leaving:
        board.floor.vacate(leaving)
        indices = tuple(sorted(worker.worker_index for worker in leaving))
        why = f"{beneficiary} has come and needs their GPUs"
        board.decide(job, Resize(job_id=job.job_id, removed_workers=indices, reason=why))


def grow_all(board: Board) -> float | None:
    """Elastic jobs take the idle GPUs of the node that they stand on, up to all of it.

    When the first of those that could grow, and rest after their last change, may; None: none.
    """
    rested_s: list[float] = []
    for job in board.of(JobState.RUNNING):
        nodes = {worker.node for worker in job.placed if not worker.is_leaving}
        if not job.is_resizable or len(nodes) != 1 or job.gpu_type is None:
            continue
        node = next(iter(nodes))
        board.floor.avoided = job.nodes.avoided
        room = board.floor.rooms(job.gpu_type, job.gpus_per_worker).get(node, 0)
        more = min(room, job.workers_on(job.gpu_type).max - present_workers(job))
        if more <= 0:
            continue
        at_s = resizable_at_s(board.snapshot, job)
        if at_s is not None:
            rested_s.append(at_s)
            continue
        added = Placement(node=node, worker_count=more, is_flexible=True)
        board.floor.take((added,), job.gpus_per_worker)
        why = f"{counted(more, 'worker')} more: GPUs of {node} have been idle and no job waits"
        board.decide(job, Resize(job_id=job.job_id, added=(added,), reason=why))
    return min(rested_s, default=None)
