"""Time slices: gangs on the same GPUs compute in turns, round robin. Pure.

Gandiva (OSDI'18), sections 3.1 and 4.1. A turn ends on a grid of slices, after half a slice at
least, so that all nodes change at one instant and no turn is cut short. A job of higher priority
never gives way to one of lower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from common.model import JobId, JobState
from coordinator.policies.contract.decisions import Resume, Suspend
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.schedulers.gandiva.board import Board, is_willing

EARLY_S = 1e-6
"""Instants on the grid are met despite rounding."""


def tick(now_s: float, slice_s: float) -> int:
    """Number of the slice that an instant is in."""
    return int((now_s + EARLY_S) // slice_s)


class Slices:
    """The jobs that go on and those that give way, in one pass.

    began_s: when each job's turn began. goes_with: whether two may compute side by side.
    keeps: jobs that stay on their GPUs though their turn is over.
    """

    def __init__(
        self,
        board: Board,
        slice_s: float,
        *,
        began_s: Mapping[JobId, float],
        goes_with: Callable[[JobId, JobId], bool],
        keeps: set[JobId],
    ) -> None:
        self._board = board
        self._slice_s = slice_s
        self._began_s = began_s
        self._goes_with = goes_with
        self._keeps = keeps

    def is_over(self, job: JobView, *, for_priority: int) -> bool:
        """Whether a job that computes may be suspended now for another one."""
        if job.state != JobState.RUNNING or not is_willing(job) or job.priority > for_priority:
            return False
        if job.job_id in self._keeps or job.job_id in self._board.decided:
            return False
        began_s = max(self._began_s.get(job.job_id, 0.0), job.attempt.started_at_s or 0.0)
        half = self._slice_s / 2
        return tick(self._board.now_s, self._slice_s) > tick(began_s + half, self._slice_s)

    def take_idle(self) -> None:
        """The job that has waited longest goes first, on GPUs without a computing job."""
        for job in self._suspended():
            if not self._board.rivals(self._board.seat(job)):
                self._go_on(job)

    def take(self) -> None:
        """The longest waiting job goes first: on GPUs that are idle, or whose turn is over."""
        for job in self._suspended():
            self._go_on(job)

    def _suspended(self) -> list[JobView]:
        waiting = self._board.of(JobState.SUSPENDED)
        return sorted(
            waiting, key=lambda job: (-job.priority, job.attempt.suspended_at_s or 0.0, job.job_id)
        )

    def _go_on(self, job: JobView) -> None:
        board, seat = self._board, self._board.seat(job)
        rivals = [board.jobs[job_id] for job_id in sorted(board.rivals(seat))]
        is_packed = False
        if len(rivals) == 1 and self._goes_with(job.job_id, rivals[0].job_id):
            is_packed, why = True, f"it runs well with {rivals[0].job_id}"
        elif all(self.is_over(rival, for_priority=job.priority) for rival in rivals):
            why = "its turn: no job computes on its GPUs"
            for rival in rivals:
                self.put_aside(rival, f"its turn is over; {job.job_id} has waited longest")
                why = f"its turn after {rival.job_id}"
        else:
            return
        board.computing(job, seat)
        board.decide(job, Resume(job_id=job.job_id, is_packed=is_packed, reason=why))

    def put_aside(self, job: JobView, why: str) -> None:
        """Suspend a job that computes."""
        self._board.suspended(job)
        self._board.decide(job, Suspend(job_id=job.job_id, reason=why))
