"""The jobs that may move to make room for a promised share: each keeps its own promise. Pure.

A move is a stop; from then on its pause is part of the moved job's plan.
"""

from __future__ import annotations

from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.parts.restart_cost import loss_gpu_s
from coordinator.policies.schedulers.qos.admission import Book, Plans


class Bearing:
    """The books of one pass, of all GPU types."""

    def __init__(self, now_s: float) -> None:
        self._now_s = now_s
        self._books: list[Book] = []

    def add(self, book: Book) -> None:
        """The promises on GPUs of one more type."""
        self._books.append(book)

    @property
    def plans(self) -> Plans:
        """The plans of all books, with the pauses of moved jobs."""
        return {name: plan for book in self._books for name, plan in book.plans.items()}

    def may_move(self, job: JobView, pause_s: float) -> bool:
        """True if a job may stand still for this long; it is then planned so.

        No job loses work to make room for others.
        """
        if loss_gpu_s(job, self._now_s) > 0:
            return False
        return all(book.bears(job.job_id, pause_s) for book in self._books)
