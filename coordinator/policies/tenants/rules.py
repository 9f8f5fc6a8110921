"""A pass under the rules of tenants: what every policy's decisions go through. Knows no policy.

Must not know the engine. Without tenants nothing is looked at. With them a policy does not see the
waiting jobs whose tenant has no room, so that they block nobody; what it decides is guarded; and
tenants below their guarantee get GPUs back from those that borrow.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TypeVar

from msgspec.structs import replace

from common.model import JobId
from coordinator.policies.blockers import Hold
from coordinator.policies.decisions import Allocation, Start
from coordinator.policies.snapshot import ClusterSnapshot
from coordinator.policies.tenants.guarding import blocked, guarded
from coordinator.policies.tenants.takeback import taken_back
from coordinator.policies.tenants.tenancy import Tenancy
from coordinator.policies.waits import FAIR_SHARE, Wait

MOST_TRIES = 4
"""So often a pass is taken anew without the jobs that quotas refused; then what is left is kept.

Two do in nearly all cases: the first tells which jobs of a tenant the policy prefers, the second
gives what the others would have had to other tenants.
"""

T = TypeVar("T")


def allocated(
    decide: Callable[[ClusterSnapshot, bytes], Allocation],
    snapshot: ClusterSnapshot,
    memory: bytes,
) -> Allocation:
    """One scheduling pass of a policy, as far as tenants allow it."""
    if not snapshot.tenants or snapshot.is_frozen:
        return decide(snapshot, memory)
    hidden = set(blocked(snapshot, Tenancy(snapshot)))
    tries = 0
    while True:
        tries += 1
        allocation = decide(without(snapshot, hidden), memory)
        kept, dropped = guarded(snapshot, allocation.decisions)
        refused = {
            each.decision.job_id
            for each in dropped
            if each.is_quota and isinstance(each.decision, Start)
        }
        refused -= {each.job_id for each in kept if isinstance(each, Start)}
        if not refused or tries == MOST_TRIES:
            break
        hidden |= refused
    kept, _ = guarded(snapshot, taken_back(snapshot, kept))
    waits = allocation.waits
    hidden -= {each.job_id for each in kept if isinstance(each, Start)}
    if hidden:  # of them the policy could say nothing
        waits = (*waits, Wait(kind=FAIR_SHARE, jobs=tuple(sorted(hidden))))
    return replace(allocation, decisions=kept, waits=waits)


def held(
    explain: Callable[[ClusterSnapshot, bytes], tuple[Hold, ...]],
    snapshot: ClusterSnapshot,
    memory: bytes,
) -> tuple[Hold, ...]:
    """Why each job that waits would not start in a pass now: quotas, then the policy's reasons."""
    if not snapshot.tenants:
        return explain(snapshot, memory)
    why = blocked(snapshot, Tenancy(snapshot))
    return (
        *explain(without(snapshot, why), memory),
        *(Hold(job_id=job_id, blockers=(reason,)) for job_id, reason in why.items()),
    )


def without(snapshot: ClusterSnapshot, hidden: Container[JobId]) -> ClusterSnapshot:
    """The snapshot as if these jobs were not there."""
    jobs = tuple(job for job in snapshot.jobs if job.job_id not in hidden)
    if len(jobs) == len(snapshot.jobs):
        return snapshot
    return replace(snapshot, jobs=jobs, index=None)
