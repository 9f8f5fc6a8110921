"""What borrowers could give back, and what comes of a pass: data only. Knows no policy."""

from __future__ import annotations

from msgspec import Struct

from common.model import JobId
from coordinator.policies.decisions import Decision
from coordinator.policies.snapshot import JobView, WorkerView
from coordinator.policies.tenants.flow import Gpus
from coordinator.policies.tenants.seats import Seat


class Source(Struct, frozen=True, kw_only=True):
    """What a borrower could give back in one piece.

    gpus: that others can have then, by node. used: that the borrower has less.
    decision: one of this pass that would not be; else the job's workers leave.
    seat: the job and all that share its GPUs, which are stopped, whole; None stops nobody.
    """

    job: JobView
    gpus: Gpus
    used: int
    decision: Decision | None = None
    workers: tuple[WorkerView, ...] = ()
    seat: Seat | None = None

    @property
    def jobs(self) -> tuple[JobView, ...]:
        """Whose it is."""
        return (self.job,) if self.seat is None else self.seat.jobs


class Back(Struct, frozen=True, kw_only=True):
    """What comes of a pass.

    decisions: of the pass, and those that give tenants below their guarantee theirs back.
    waits: jobs that a guarantee covers, that find no room, and that get none in this pass; and why.
    is_soon: some of what they are due can perhaps be taken back before anything else happens.
    fits: jobs that a guarantee covers and that find room, but were not started.
    behind: waiting jobs that none covers, of borrowers from those that the former are of.
    wake_at_s: when the first of `fits` has waited for long enough; None: none will have by itself.
    """

    decisions: tuple[Decision, ...]
    waits: dict[JobId, str]
    is_soon: bool
    fits: frozenset[JobId]
    behind: frozenset[JobId]
    wake_at_s: float | None
