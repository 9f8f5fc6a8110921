"""Decisions: what a policy may propose, each with a reason; and the kinds of pending reasons."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from common.model import GpuUuid, JobId, NodeName, ServiceName

FAIR_SHARE = "fair_share"
"""A pending reason: its tenant already has its entitlement (Philly study, ATC'19, section 3.1)."""
FRAGMENTATION = "fragmentation"
"""Another: its tenant is below its due, but its gang has no place with the locality it asks for."""

OTHERS_GUARANTEE = "others_guarantee"
"""A pending reason: another tenant's guarantee covers the GPUs that it would take, and none covers
the job.
"""

GUARANTEE = "guarantee"
"""Another: its tenant's guarantee covers it, and what borrowers hold cannot be taken back now."""


class Wait(Struct, frozen=True, kw_only=True):
    """The pending reason of some jobs until the next pass: one word of the policy's own."""

    kind: str
    jobs: tuple[JobId, ...]


class Proposal(Struct, frozen=True, kw_only=True):
    """Base of all decisions; `reason` is a sentence for people, read by log, CLI and tests."""

    reason: str


class Placement(Struct, frozen=True, kw_only=True):
    """Workers of one job on one node.

    gpu_uuids: exactly these GPUs of it, which others have too; empty takes free ones.
    """

    node: NodeName
    worker_count: int
    is_flexible: bool = False
    gpu_uuids: tuple[GpuUuid, ...] = ()


def placed_count(placements: Iterable[Placement]) -> int:
    """Workers in all."""
    return sum(placement.worker_count for placement in placements)


def merge(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    """One placement per node and kind, base first, nodes in order of name; of free GPUs."""
    counts: dict[tuple[bool, NodeName], int] = {}
    for placement in placements:
        key = (placement.is_flexible, placement.node)
        counts[key] = counts.get(key, 0) + placement.worker_count
    return tuple(
        Placement(node=name, worker_count=counts[is_flexible, name], is_flexible=is_flexible)
        for is_flexible, name in sorted(counts)
    )


class Start(Proposal, frozen=True, kw_only=True, tag="start"):
    """Place the whole base gang (and perhaps flexible workers) of a waiting job."""

    job_id: JobId
    gpu_type: str
    placements: tuple[Placement, ...]
    estimated_runtime_s: float
    estimate_source: str
    is_packed: bool = False
    """On named GPUs: it may compute beside one other worker; else it computes there alone."""
    is_promised: bool = False
    """Its deadline was promised to it."""


class Resize(Proposal, frozen=True, kw_only=True, tag="resize"):
    """Change the flexible workers of a running job, all in one rendezvous.

    removed_workers: indices of flexible workers to give back.
    """

    job_id: JobId
    added: tuple[Placement, ...] = ()
    removed_workers: tuple[int, ...] = ()
    predicted_cost_gpu_s: float = 0.0


class Preempt(Proposal, frozen=True, kw_only=True, tag="preempt"):
    """Stop a whole job; it queues again with its attempt number grown."""

    job_id: JobId
    predicted_cost_gpu_s: float = 0.0
    beneficiary: str = ""
    """The service or job that gets the GPUs."""
    node: NodeName | None = None
    """The lent node that goes home for it: that loan bears the preemption. None: no loan does."""
    guarantee: str = ""
    """The tenant whose guarantee calls back what the job borrows; empty: none does."""


class Suspend(Proposal, frozen=True, kw_only=True, tag="suspend"):
    """Let a running job keep its place and not compute, so that others do on its GPUs."""

    job_id: JobId


class Resume(Proposal, frozen=True, kw_only=True, tag="resume"):
    """Let a suspended job compute again.

    is_packed: beside one other worker per GPU; else it computes alone on its GPUs.
    """

    job_id: JobId
    is_packed: bool = False


class Migrate(Proposal, frozen=True, kw_only=True, tag="migrate"):
    """Save and stop a job and start it again elsewhere, as one decision.

    It counts as a migration, not as a preemption: the GPUs that it goes to are held for it until
    its workers have left, and no other job gets its turn.
    """

    job_id: JobId
    placements: tuple[Placement, ...]
    predicted_cost_gpu_s: float = 0.0
    is_packed: bool = False


class Reject(Proposal, frozen=True, kw_only=True, tag="reject"):
    """Refuse a waiting job that has never run: its deadline cannot be promised.

    earliest_s: the earliest deadline that could be, in seconds after its submission; None: none.
    """

    job_id: JobId
    earliest_s: float | None = None


class Loan(Proposal, frozen=True, kw_only=True, tag="loan"):
    """Lend one node of a service to training."""

    node: NodeName
    service: ServiceName


class Reclaim(Proposal, frozen=True, kw_only=True, tag="reclaim"):
    """Take a lent node back; its workers must be gone and its server ready within the deadline.

    wait_s: it takes no more work at once, but its base workers are stopped only after this, unless
        they end before; the deadline counts from now.
    """

    node: NodeName
    service: ServiceName
    deadline_s: float
    predicted_preemptions: int = 0
    predicted_cost_gpu_s: float = 0.0
    released_workers: int = 0
    wait_s: float = 0.0


class Advice(StrEnum):
    """A decision in mode observe or recommend. A return is only ever recorded (mode observe)."""

    LEND = "lend"
    RECLAIM = "reclaim"


class Recommend(Proposal, frozen=True, kw_only=True, tag="recommend"):
    """A decision for a service in mode recommend, or a hypothetical one in mode observe."""

    action: Advice
    node: NodeName
    service: ServiceName


Decision = (
    Start | Resize | Preempt | Reject | Suspend | Resume | Migrate | Loan | Reclaim | Recommend
)


class Allocation(Struct, frozen=True, kw_only=True):
    """The decisions of one scheduling pass, and the memory that the policy wants to keep.

    wake_at_s: the next pass is wanted at this instant at the latest, for a change by time alone;
        None: no wish.
    waits: pending reasons of jobs, where the policy distinguishes them; the seconds are summed by
        kind.
    """

    decisions: tuple[Decision, ...]
    memory: bytes = b""
    wake_at_s: float | None = None
    waits: tuple[Wait, ...] = ()


def earliest(*at_s: float | None) -> float | None:
    """The first of some instants, in seconds; None where there is none."""
    return min((each_s for each_s in at_s if each_s is not None), default=None)


class PendingReason(Struct, frozen=True, kw_only=True):
    """Why a waiting job does not start now: every blocker, not the first."""

    job_id: JobId
    blockers: tuple[str, ...]
