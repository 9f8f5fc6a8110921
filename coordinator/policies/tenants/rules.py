"""A pass under the rules of tenants: what every policy's decisions go through. Knows no policy.

Must not know the engine. Without tenants nothing is looked at. With them a policy does not see the
waiting jobs whose tenant has no room, so that they block nobody; what it decides is guarded; by
weight tenants below their fair share start first; and those below their guarantee get GPUs back
from those that borrow.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Set
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from common.model import JobId
from coordinator.policies.blockers import Hold
from coordinator.policies.decisions import Allocation, Decision, Preempt, Reject, Start, earliest
from coordinator.policies.snapshot import ClusterSnapshot, JobView
from coordinator.policies.tenants.guarding import Dropped, blocked, guarded
from coordinator.policies.tenants.takeback import given_back
from coordinator.policies.tenants.tenancy import Tenancy
from coordinator.policies.tenants.weighing import Scale, are_weighed, why_behind
from coordinator.policies.waits import FAIR_SHARE, GUARANTEE, Wait

MOST_TRIES = 4
"""So often a pass is taken anew without the jobs that quotas refused; then what is left is kept.

Two do in nearly all cases: the first tells which jobs of a tenant the policy prefers, the second
gives what the others would have had to other tenants.
"""

SHARES_AGAIN_S = 1.0
"""Where tenants took turns by weight and GPUs are left, a pass follows after so many seconds."""

GIVEN_BACK_AGAIN_S = 10.0
"""While borrowers start, resize or rest that a guarantee waits for, a pass follows after so many
seconds: that they can be stopped now brings none by itself.
"""

Decide = Callable[[ClusterSnapshot, bytes], Allocation]
Guard = Callable[[tuple[Decision, ...]], tuple[tuple[Decision, ...], tuple[Dropped, ...]]]


class _Pass(Struct, frozen=True, kw_only=True):
    """A pass as it would be: `kept` of it is allowed, `hidden` jobs the policy did not see."""

    allocation: Allocation
    kept: tuple[Decision, ...]
    hidden: frozenset[JobId]

    def started(self) -> set[JobId]:
        """Jobs that start."""
        return {each.job_id for each in self.kept if isinstance(each, Start)}

    def stopped(self) -> set[JobId]:
        """Jobs that are preempted."""
        return {each.job_id for each in self.kept if isinstance(each, Preempt)}


def allocated(
    decide: Decide,
    snapshot: ClusterSnapshot,
    memory: bytes,
    *,
    by_weight: bool = True,
    keeps_quotas: bool = False,
    trusts_profiles: bool = True,
) -> Allocation:
    """One scheduling pass of a policy, as far as tenants allow it.

    by_weight: tenants take turns by their weights; not where the policy sees to that itself.
    keeps_quotas: the policy sees to quotas itself and has all jobs before it, as it remembers what
        it has promised to those that wait; what it gets wrong is refused all the same.
    trusts_profiles: the policy takes jobs for as fast as their profiles tell.
    """
    if not snapshot.tenants or snapshot.is_frozen:
        return decide(snapshot, memory)
    tenancy = Tenancy(snapshot)
    if keeps_quotas:
        return _kept_by_itself(decide(snapshot, memory), snapshot, tenancy)
    guard = partial(guarded, snapshot, trusts_profiles=trusts_profiles)
    within = partial(_within_quotas, decide, guard, snapshot, memory)
    best = within(frozenset(blocked(snapshot, tenancy)))
    if by_weight and are_weighed(tenancy):
        best = _by_weight(within, snapshot, best)
    return _given_back(best.allocation, guard, best.kept, best.hidden, snapshot)


def _kept_by_itself(
    allocation: Allocation, snapshot: ClusterSnapshot, tenancy: Tenancy
) -> Allocation:
    """A pass of a policy that keeps quotas itself."""
    guard = partial(guarded, snapshot)
    kept, _ = guard(allocation.decisions)
    gone = {each.job_id for each in kept if isinstance(each, Reject)}
    hidden = blocked(snapshot, tenancy).keys() - gone
    return _given_back(allocation, guard, kept, hidden, snapshot)


def _given_back(
    allocation: Allocation,
    guard: Guard,
    decisions: tuple[Decision, ...],
    hidden: Set[JobId],
    snapshot: ClusterSnapshot,
) -> Allocation:
    """With what tenants below their guarantee get back; `hidden` have no room by quota."""
    back = given_back(snapshot, decisions)
    kept, _ = guard(back.decisions)
    waits, again_s = allocation.waits, None
    told = {*hidden, *(job_id for wait in waits for job_id in wait.jobs)}
    if owed := tuple(sorted(back.waits.keys() - told)):
        waits = (*waits, Wait(kind=GUARANTEE, jobs=owed))
    if back.is_soon:
        again_s = snapshot.now_s + GIVEN_BACK_AGAIN_S
    hidden = hidden - {each.job_id for each in kept if isinstance(each, Start)}
    if hidden:  # of them the policy could say nothing
        waits = (*waits, Wait(kind=FAIR_SHARE, jobs=tuple(sorted(hidden))))
    wake_at_s = earliest(allocation.wake_at_s, again_s)
    return replace(allocation, decisions=kept, waits=waits, wake_at_s=wake_at_s)


def _within_quotas(
    decide: Decide,
    guard: Guard,
    snapshot: ClusterSnapshot,
    memory: bytes,
    hidden: frozenset[JobId],
) -> _Pass:
    """A pass that is taken anew without the jobs that quotas refuse."""
    tries = 0
    while True:
        tries += 1
        allocation = decide(without(snapshot, hidden), memory)
        kept, dropped = guard(allocation.decisions)
        refused = {
            each.decision.job_id
            for each in dropped
            if each.is_quota and isinstance(each.decision, Start)
        }
        refused -= {each.job_id for each in kept if isinstance(each, Start)}
        if not refused or tries == MOST_TRIES:
            return _Pass(allocation=allocation, kept=kept, hidden=hidden)
        hidden |= refused


def _by_weight(
    within: Callable[[frozenset[JobId]], _Pass], snapshot: ClusterSnapshot, first: _Pass
) -> _Pass:
    """The pass in which tenants below their shares start first, where that makes a difference.

    The policy does not see the jobs behind theirs; but where that neither starts one of theirs
    more nor leaves one running, it is no use, and the pass stays as it was. What is then still
    free, the others may have.
    """
    best, scale, behind = first, Scale(snapshot), dict[JobId, JobView]()
    for level in scale.levels:
        for _ in range(MOST_TRIES):
            found = scale.weighed(best.kept, best.hidden, level=level)
            if not (found.beyond and found.behind):
                break
            other = within(best.hidden | {job.job_id for job in found.behind})
            spared = best.stopped() - other.stopped()
            if found.short.isdisjoint(other.started() | spared):
                break
            behind |= {job.job_id: job for job in found.behind}
            best = other
    fits = scale.that_fit(best.kept, behind.values())
    if not fits:
        return best
    other = within(best.hidden - fits)
    if best.started() <= other.started() and other.stopped() <= best.stopped():
        return other
    again_s = snapshot.now_s + SHARES_AGAIN_S
    wake_at_s = earliest(best.allocation.wake_at_s, again_s)
    return replace(best, allocation=replace(best.allocation, wake_at_s=wake_at_s))


def held(
    explain: Callable[[ClusterSnapshot, bytes], tuple[Hold, ...]],
    snapshot: ClusterSnapshot,
    memory: bytes,
    *,
    by_weight: bool = True,
    keeps_quotas: bool = False,
) -> tuple[Hold, ...]:
    """Why each job that waits would not start in a pass now: quotas, or the policy's reasons, that
    others go first by weight, and what its tenant is due. by_weight, keeps_quotas: as for
    `allocated`.
    """
    if not snapshot.tenants:
        return explain(snapshot, memory)
    owed = given_back(snapshot, ()).waits
    why = blocked(snapshot, Tenancy(snapshot))
    if keeps_quotas:
        found = [
            _and(_and(hold, why.pop(hold.job_id, None)), owed.get(hold.job_id))
            for hold in explain(snapshot, memory)
        ]
        return (*found, *(Hold(job_id=each, blockers=(reason,)) for each, reason in why.items()))
    behind = why_behind(snapshot, why.keys()) if by_weight else {}
    holds = explain(without(snapshot, why), memory)
    return (
        *(_and(_and(hold, behind.get(hold.job_id)), owed.get(hold.job_id)) for hold in holds),
        *(Hold(job_id=job_id, blockers=(reason,)) for job_id, reason in why.items()),
    )


def _and(hold: Hold, reason: str | None) -> Hold:
    """With one reason more; whom the policy has no reason to hold starts, whatever its share."""
    if reason is None or not hold.blockers:
        return hold
    return replace(hold, blockers=(*hold.blockers, reason))


def without(snapshot: ClusterSnapshot, hidden: Container[JobId]) -> ClusterSnapshot:
    """The snapshot as if these jobs were not there."""
    jobs = tuple(job for job in snapshot.jobs if job.job_id not in hidden)
    if len(jobs) == len(snapshot.jobs):
        return snapshot
    return replace(snapshot, jobs=jobs, index=None)
