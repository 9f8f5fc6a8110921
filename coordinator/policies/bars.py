"""What a rule that keeps jobs away from nodes looks like. Must not know any such rule."""

from __future__ import annotations

from typing import Protocol

from coordinator.policies.snapshot import JobView


class Bar(Protocol):
    """A rule that keeps base workers of some jobs away from some nodes, or stops growth there."""

    def barred(self, job: JobView) -> int:
        """Places that base workers of a job must leave alone, as bits."""
        ...

    def barred_flexible(self, job: JobView) -> int:
        """Places where no flexible worker of a job may be added, as bits; those there may stay."""
        ...

    def may_use_loans(self, job: JobView) -> bool:
        """Whether nodes that were lent besides could be of use to a job that waits."""
        ...

    def why(self, job: JobView) -> str:
        """What keeps a job away, as a sentence; empty when nothing does."""
        ...
