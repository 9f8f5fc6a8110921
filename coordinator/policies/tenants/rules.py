"""A pass under the rules of tenants: what every policy's decisions go through. Knows no policy.

Must not know the engine. Without tenants nothing is looked at. With them a policy does not see the
waiting jobs whose tenant has no room, so that they block nobody; what it decides is guarded; by
weight tenants below their fair share start first; those below their guarantee get GPUs back from
those that borrow; and where GPUs are free, their jobs do not wait for borrowers' that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from common.model import JobId, JobState
from coordinator.policies.blockers import Hold
from coordinator.policies.decisions import (
    Allocation,
    Decision,
    Preempt,
    Reject,
    Resize,
    Start,
    earliest,
)
from coordinator.policies.snapshot import ClusterSnapshot, JobView
from coordinator.policies.tenants.giving import Back
from coordinator.policies.tenants.guarding import Dropped, blocked, guarded
from coordinator.policies.tenants.takeback import given_back
from coordinator.policies.tenants.tenancy import Tenancy
from coordinator.policies.tenants.weighing import Scale, are_weighed, why_behind
from coordinator.policies.waits import FAIR_SHARE, GUARANTEE, OTHERS_GUARANTEE, Wait

MOST_TRIES = 4
"""So often a pass is taken anew without the jobs that quotas refused; then what is left is kept.

Two do in nearly all cases: the first tells which jobs of a tenant the policy prefers, the second
gives what the others would have had to other tenants.
"""

SHARES_AGAIN_S = 1.0
"""Where tenants took turns by weight, or jobs gave way to a guarantee, and GPUs are left, a pass
follows after so many seconds."""

GIVEN_BACK_AGAIN_S = 10.0
"""While borrowers start, resize or rest that a guarantee waits for, a pass follows after so many
seconds: that they can be stopped now brings none by itself.
"""

Decide = Callable[[ClusterSnapshot, bytes], Allocation]
Explain = Callable[[ClusterSnapshot, bytes], tuple[Hold, ...]]
Guard = Callable[[tuple[Decision, ...]], tuple[tuple[Decision, ...], tuple[Dropped, ...]]]

GO_FIRST = "jobs that another tenant's guarantee covers, and that fit on free GPUs, go first"
"""Why a borrower's job waits where the policy by itself would have had them wait for it."""


class _Pass(Struct, frozen=True, kw_only=True):
    """A pass as it would be: `kept` of it is allowed, `hidden` jobs the policy did not see."""

    allocation: Allocation
    kept: tuple[Decision, ...]
    hidden: frozenset[JobId]

    def started(self) -> set[JobId]:
        """Jobs that start."""
        return _starts(self.kept)

    def stopped(self) -> set[JobId]:
        """Jobs that are preempted."""
        return _stops(self.kept)


class _Tries:
    """The passes that one instant takes, each without the jobs that it hides from the policy.

    by_quota: why jobs were hidden for which their tenant has no room. yielding: the same of those
    that would take from another's guarantee, or that jobs within theirs precede.
    """

    def __init__(
        self, decide: Decide, guard: Guard, snapshot: ClusterSnapshot, memory: bytes
    ) -> None:
        self._decide = decide
        self.guard = guard
        self._snapshot = snapshot
        self._memory = memory
        self.by_quota = blocked(snapshot, Tenancy(snapshot))
        self.yielding: dict[JobId, str] = {}

    def first(self) -> _Pass:
        """Without those alone for which there is no room by quota, whatever else is decided."""
        return self.within(frozenset(self.by_quota))

    def within(self, hidden: frozenset[JobId]) -> _Pass:
        """A pass that is taken anew without the jobs whose start is refused, as what they would
        have had is then for others."""
        tries = 0
        while True:
            tries += 1
            allocation = self._decide(without(self._snapshot, hidden), self._memory)
            kept, dropped = self.guard(allocation.decisions)
            begun = {each.job_id for each in kept if isinstance(each, Start)}
            whys = {
                each.decision.job_id: each
                for each in dropped
                if isinstance(each.decision, Start)
                and (each.is_quota or each.is_taking)
                and each.decision.job_id not in begun
            }
            if not whys or tries == MOST_TRIES:
                return _Pass(allocation=allocation, kept=kept, hidden=hidden)
            for job_id, each in whys.items():
                (self.by_quota if each.is_quota else self.yielding)[job_id] = each.why
            hidden |= whys.keys()

    def due_first(self, best: _Pass) -> tuple[_Pass, Back]:
        """The pass in which jobs that a guarantee covers do not wait for borrowers' jobs that wait
        themselves, where that starts one of them more; and what comes back after it."""
        back = given_back(self._snapshot, best.kept, is_patient=True)
        for _ in range(MOST_TRIES):
            behind = back.behind - best.hidden
            if not behind:
                break
            other = self.within(best.hidden | behind)
            if back.fits.isdisjoint(other.started()):
                break
            self.yielding |= dict.fromkeys(behind, GO_FIRST)
            best = other
            back = given_back(self._snapshot, best.kept, is_patient=True)
        return best, given_back(self._snapshot, best.kept) if back.fits else back


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
    guard = partial(guarded, snapshot, trusts_profiles=trusts_profiles)
    tries = _Tries(decide, guard, snapshot, memory)
    if keeps_quotas:
        allocation = decide(snapshot, memory)
        kept, _ = guard(allocation.decisions)
        gone = {each.job_id for each in kept if isinstance(each, Reject)}
        hidden = frozenset(tries.by_quota.keys() - gone)
        best = _Pass(allocation=allocation, kept=kept, hidden=hidden)
        settled = _settled(best, given_back(snapshot, kept), guard, snapshot)
        return _told(settled, tries, snapshot, is_left=_is_left(settled, snapshot))
    best = tries.first()
    if by_weight and are_weighed(Tenancy(snapshot)):
        best = _by_weight(tries.within, snapshot, best)
    best, back = tries.due_first(best)
    settled, is_left = _without_those(_settled(best, back, guard, snapshot), tries, snapshot)
    return _told(settled, tries, snapshot, is_left=is_left)


class _Settled(Struct, frozen=True, kw_only=True):
    """A pass with what comes back after it: `kept` are its decisions in the end."""

    made: _Pass
    back: Back
    kept: tuple[Decision, ...]

    def gave_way(self) -> set[JobId]:
        """Jobs that the policy would start, and that give way to those that a guarantee covers."""
        return self.made.started() - _starts(self.kept)


def _settled(made: _Pass, back: Back, guard: Guard, snapshot: ClusterSnapshot) -> _Settled:
    back, kept = _allowed(made, back, guard, snapshot)
    return _Settled(made=made, back=back, kept=kept)


def _without_those(
    first: _Settled, tries: _Tries, snapshot: ClusterSnapshot
) -> tuple[_Settled, bool]:
    """The pass without the jobs that give way in it, where others start on what that leaves.

    It counts if those that start already do so again, and nobody more is stopped. Returns as well
    whether GPUs are left that somebody who waits would fit on.
    """
    best = first
    for _ in range(MOST_TRIES):
        gave_way = best.gave_way()
        if not _is_left(best, snapshot):
            break
        before = dict(tries.yielding)
        made, back = tries.due_first(tries.within(best.made.hidden | gave_way))
        other = _settled(made, back, tries.guard, snapshot)
        if not _starts(best.kept) < _starts(other.kept) or _stops(other.kept) - _stops(best.kept):
            tries.yielding = before
            return best, True
        tries.yielding |= dict.fromkeys(gave_way, GO_FIRST)
        best = other
    return best, _is_left(best, snapshot)


def _is_left(settled: _Settled, snapshot: ClusterSnapshot) -> bool:
    """Whether jobs gave way, and one that waits beside them fits on what is free after all."""
    gave_way = settled.gave_way()
    if not gave_way:
        return False
    gone = gave_way | _starts(settled.kept) | settled.made.hidden
    rest = (
        job
        for job in snapshot.jobs
        if job.state == JobState.PENDING and job.job_id not in gone and not job.is_resting
    )
    return bool(Scale(snapshot).that_fit(settled.kept, rest))


def _told(
    settled: _Settled, tries: _Tries, snapshot: ClusterSnapshot, *, is_left: bool
) -> Allocation:
    """A pass with what tenants below their guarantee get back, and what others wait for.

    is_left: GPUs are left that the policy gave to a job which gave way; it is asked again soon.
    """
    made, back, kept = settled.made, settled.back, settled.kept
    allocation, again_s = made.allocation, None
    waits = allocation.waits
    told = {*made.hidden, *(job_id for wait in waits for job_id in wait.jobs)}
    if back.is_soon:
        again_s = snapshot.now_s + GIVEN_BACK_AGAIN_S
    hidden = made.hidden - {each.job_id for each in kept if isinstance(each, Start)}
    yielding = hidden & tries.yielding.keys()
    kinds = {
        GUARANTEE: back.waits.keys() - told,
        FAIR_SHARE: hidden - yielding,  # of them the policy could say nothing
        OTHERS_GUARANTEE: yielding,
    }
    waits += tuple(Wait(kind=k, jobs=tuple(sorted(jobs))) for k, jobs in kinds.items() if jobs)
    left_s = snapshot.now_s + SHARES_AGAIN_S if is_left else None
    wake_at_s = earliest(allocation.wake_at_s, again_s, left_s, back.wake_at_s)
    return replace(allocation, decisions=kept, waits=waits, wake_at_s=wake_at_s)


def _allowed(
    made: _Pass, back: Back, guard: Guard, snapshot: ClusterSnapshot
) -> tuple[Back, tuple[Decision, ...]]:
    """What comes back, and what is allowed of it; no start of the pass gives way in vain.

    The guard counts by nodes what a guarantee loses, and may refuse who would be given GPUs. Then
    those whose decisions gave way for such jobs keep theirs, as borrowers that run may have enough;
    else the jobs get nothing.
    """
    aside = frozenset[JobId]()
    for _ in range(MOST_TRIES):
        kept, _ = guard(back.decisions)
        refused = _starts(back.decisions) - _starts(kept) - made.started()
        if not refused:
            return back, kept
        gone = {
            each.job_id
            for each in made.kept
            if isinstance(each, Start | Resize) and each not in back.decisions
        }
        aside |= gone - aside or refused
        back = given_back(snapshot, made.kept, aside=aside)
    return back, made.kept


def _starts(decisions: Iterable[Decision]) -> set[JobId]:
    return {each.job_id for each in decisions if isinstance(each, Start)}


def _stops(decisions: Iterable[Decision]) -> set[JobId]:
    return {each.job_id for each in decisions if isinstance(each, Preempt)}


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
    decide: Decide,
    explain: Explain,
    snapshot: ClusterSnapshot,
    memory: bytes,
    *,
    by_weight: bool = True,
    keeps_quotas: bool = False,
    trusts_profiles: bool = True,
) -> tuple[Hold, ...]:
    """Why each job that waits would not start in a pass now: quotas, or the policy's reasons, that
    others go first by weight or by their guarantee, and what its tenant is due.

    decide: the policy's pass, as some of that shows only in one. by_weight, keeps_quotas,
    trusts_profiles: as for `allocated`.
    """
    if not snapshot.tenants or snapshot.is_frozen:
        return explain(snapshot, memory)
    owed = given_back(snapshot, ()).waits
    guard = partial(guarded, snapshot, trusts_profiles=trusts_profiles)
    tries = _Tries(decide, guard, snapshot, memory)
    if keeps_quotas:
        holds, why = explain(snapshot, memory), dict(tries.by_quota)
        holds = tuple(_and(hold, why.pop(hold.job_id, None)) for hold in holds)
    else:
        behind = why_behind(snapshot, tries.by_quota.keys()) if by_weight else {}
        holds, why = _seen(explain, snapshot, memory, tries)
        holds = tuple(_and(hold, behind.get(hold.job_id)) for hold in holds)
    return (
        *(_and(hold, owed.get(hold.job_id)) for hold in holds),
        *(Hold(job_id=job_id, blockers=(reason,)) for job_id, reason in why.items()),
    )


def _seen(
    explain: Explain, snapshot: ClusterSnapshot, memory: bytes, tries: _Tries
) -> tuple[tuple[Hold, ...], dict[JobId, str]]:
    """What the policy says of the jobs that it sees in the end; and why it does not see others."""
    best, _ = tries.due_first(tries.first())
    after = tries.yielding.keys() & best.hidden
    why = {each: tries.by_quota.get(each) or tries.yielding[each] for each in best.hidden}
    soft = {each for each in after if tries.yielding[each] == GO_FIRST}
    holds = explain(without(snapshot, best.hidden - soft), memory)
    if soft:  # what it says of these by itself is true as well; of others what it says without them
        told = {hold.job_id: hold for hold in explain(without(snapshot, best.hidden), memory)}
        holds = tuple(told.get(hold.job_id, hold) for hold in holds)
        holds = tuple(_and(hold, why.get(hold.job_id)) for hold in holds)
    if after:
        holds = tuple(hold for hold in holds if hold.job_id not in best.started())
    said = {hold.job_id for hold in holds}
    return holds, {job_id: why[job_id] for job_id in sorted(why) if job_id not in said}


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
