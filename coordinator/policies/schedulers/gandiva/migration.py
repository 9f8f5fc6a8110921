"""Migration: jobs move to better GPUs, or so that whole nodes come free. Pure.

Gandiva (OSDI'18), section 4.2: a suspended job moves to vacated GPUs, a spread gang to fewer nodes,
and the jobs of an almost empty node to others. Each job rests between its moves, because a move
costs a save and a start. A job that never saves starts over, so it is moved for defragmentation
only while it has next to nothing to lose.
"""

from __future__ import annotations

from common.model import JobState, NodeName
from coordinator.policies.contract.decisions import Migrate, Placement
from coordinator.policies.contract.free_gpus import GangShape, gang_shape
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.contract.text import unsaved
from coordinator.policies.parts.restart_cost import is_set_back, loss_gpu_s
from coordinator.policies.schedulers.gandiva.board import (
    Board,
    Place,
    is_willing,
    node_count,
)

NEGLIGIBLE_RATIO = 0.01
"""As a fraction of all that a job has computed. A tidier cell helps only jobs that may come later,
and a trial may not pay. The paper moves jobs whose work is saved, which costs some seconds in
many minutes.
"""


def loses_nothing(job: JobView, now_s: float) -> bool:
    """Whether a move costs a job no work to speak of."""
    return loss_gpu_s(job, now_s) <= NEGLIGIBLE_RATIO * job.attained_service_gpu_s(now_s)


class Moves:
    """The moves of one pass. rest_s: an attempt that runs for less is not moved."""

    def __init__(self, board: Board, *, rest_s: float) -> None:
        self._board = board
        self._rest_s = rest_s

    def _movable(self, *states: JobState) -> list[JobView]:
        now_s = self._board.now_s
        return [
            job
            for job in self._board.of(*states)
            if is_willing(job)
            and self._board.gpus.get(job.job_id)
            and job.attempt.started_at_s is not None
            and now_s >= job.attempt.started_at_s + self._rest_s
            and not any(worker.is_flexible for worker in job.placed)
        ]

    def spread_out(self) -> None:
        """Suspended jobs that waited longest take vacated GPUs, so that both compute."""
        now_s = self._board.now_s
        waiting = [job for job in self._movable(JobState.SUSPENDED) if not is_set_back(job, now_s)]
        in_vain = set[GangShape]()  # what a move takes leaves no more to the next one
        for job in sorted(waiting, key=lambda job: (job.attempt.suspended_at_s or 0.0, job.job_id)):
            shape = (*gang_shape(job), job.gpu_type)
            if shape in in_vain:
                continue
            place = self._find(job)
            if place is None:
                in_vain.add(shape)
            else:
                self._go(job, place, "GPUs were vacated: it no longer needs to take turns")

    def closer(self) -> None:
        """Gangs that stand on more nodes than they need go where they stand on fewer."""
        for job in self._movable(JobState.RUNNING):
            here = len(self._board.gpus[job.job_id])
            if here <= 1 or not loses_nothing(job, self._board.now_s):
                continue
            place = self._find(job)
            if place is not None and (there := node_count(place[1])) < here:
                self._go(job, place, f"it stands on {here} nodes and fits on {there}")

    def rested_s(self) -> list[float]:
        """When each of the gangs that stand on several nodes has rested."""
        return [
            job.attempt.started_at_s + self._rest_s
            for job in self._board.of(JobState.RUNNING)
            if job.attempt.started_at_s is not None
            and len(self._board.gpus.get(job.job_id, ())) > 1
        ]

    def tidy(self, free_ratio: float) -> None:
        """Empty the node with the most free GPUs, if all its jobs fit where fewer are free."""
        board = self._board
        free = board.floor.free
        used = [
            name
            for name, node in board.floor.nodes.items()
            if node.gpus * free_ratio <= free[name] < node.gpus - node.barred_gpus
        ]
        if not used:
            return
        source = min(used, key=lambda name: (-free[name], name))
        here = {worker.job_id for worker in board.floor.nodes[source].workers}
        movable = {
            job.job_id: job
            for job in self._movable(JobState.RUNNING)
            if job.job_id in here and loses_nothing(job, self._board.now_s)
        }
        if not here <= movable.keys() or any(len(board.gpus[job_id]) > 1 for job_id in here):
            return
        kept, places = dict(free), list[tuple[JobView, Place]]()
        for job_id in sorted(here):
            job = movable[job_id]
            target = self._fuller(job, source, kept[source])
            if target is None:
                break
            place: Place = (job.gpu_type or "", (target,))
            board.floor.take((target,), job.gpus_per_worker)
            places.append((job, place))
        free.update(kept)
        if len(places) == len(here):
            for job, place in places:
                self._go(job, place, f"{source} is almost empty and can be emptied")

    def _find(self, job: JobView) -> Place | None:
        """Free GPUs of its own type, on which an attempt stays."""
        return self._board.find(job, (job.gpu_type or "",))

    def _fuller(self, job: JobView, source: NodeName, most_free: int) -> Placement | None:
        """The fullest other node in use that takes the whole gang."""
        board, gpu_type = self._board, job.gpu_type or ""
        count = job.workers_on(gpu_type).min
        board.floor.avoided = job.nodes.avoided
        rooms = board.floor.rooms(gpu_type, job.gpus_per_worker)
        fits = [
            name
            for name, room in rooms.items()
            if room >= count and name != source and board.floor.free[name] < most_free
        ]
        if not fits:
            return None
        best = min(fits, key=lambda name: (board.floor.free[name], name))
        return Placement(node=best, worker_count=count)

    def _go(self, job: JobView, place: Place, why: str) -> None:
        self._board.take(job, place)
        lost_gpu_s = job.lost_gpu_s(self._board.now_s)
        self._board.decide(
            job,
            Migrate(
                job_id=job.job_id,
                placements=place[1],
                predicted_cost_gpu_s=lost_gpu_s,
                reason=f"{why}; {unsaved(lost_gpu_s)}",
            ),
        )
