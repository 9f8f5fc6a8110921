"""What a rule that keeps jobs away from nodes looks like. Must not know any such rule."""

from __future__ import annotations

from typing import Protocol

from coordinator.policies.snapshot import JobView


class Bar(Protocol):
    """A rule that keeps base workers of some jobs away from some nodes, flexible ones never."""

    def barred(self, job: JobView) -> int:
        """Places that base workers of a job must leave alone, as bits."""
        ...

    def may_use_loans(self, job: JobView) -> bool:
        """Whether nodes that were lent besides could be of use to a job that waits."""
        ...

    def why(self, job: JobView) -> str:
        """What keeps a job away, as a sentence; empty when nothing does."""
        ...
