"""The rules of tenants around a policy's pass: every policy's decisions go through here.

Theory of operation
===================

    snapshot --> hide jobs --> policy's pass --> guard --> give back --> stable? --> decisions
                     ^                                         |            |
                     |        a job must be hidden after all   |            |
                     +-----------------------------------------+------------+
                                at most MOST_TRIES times each

A policy decides by its own order and need not know tenants. This module calls it on a filtered
snapshot, checks the result, and calls it again with more jobs hidden until the pass keeps all
rules. Each of these calls is a `Pass`; `attempts.Tries` makes it, and keeps why each job is hidden.

1. Quotas. Waiting jobs whose tenant has no room are hidden, so that they block no other job.
2. Guard (`quota_guard`). A decision that breaks a quota or takes GPUs of another tenant's guarantee
   is dropped.
3. Fair share (`fair_share`, `_by_weight`). Tenants below their share by weight start first: jobs
   behind theirs are hidden. Weights stop no running job.
4. Guarantees (`reclaim.given_back`). A tenant below its guarantee gets GPUs back from borrowers:
   first GPUs that they would take in this pass, then flexible workers, then jobs. Its job is
   *due*; a decision that loses its GPUs to a due job is *displaced*.
5. Displaced jobs are hidden where that lets other jobs start (`_without_those`) or saves a
   preemption that has lost its purpose (`_for_those_that_start`).
6. Stability (`stability`). A preemption by the policy counts only if the following passes would
   not undo it; else the two orders would undo each other for ever (livelock). Jobs on this cycle
   are hidden, or after MOST_TRIES their preemptions are dropped (`_that_ends`).

Two kinds of policies differ in the middle part. One that keeps quotas itself sees all jobs
(`_of_all`, steps 2, 4 and 6). Any other one goes through all steps (`_for_what_lasts`).

Guarantees:

- Quotas hold, and no tenant within its guarantee loses GPUs to another, whatever the policy
  decides.
- A job that is due starts as soon as borrowers can be stopped, unless the policy itself delays it.
- No GPU stays idle for a hidden job: GPUs that a pass leaves free go to hidden jobs that fit there
  without a preemption (`_with_those_that_fit`, `_of_free_gpus`).
- Each loop is bounded, so a pass ends. Without tenants, or in a frozen cell, the policy's pass is
  returned unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeGuard

from msgspec.structs import replace

from common.model import JobId, JobState
from coordinator.policies.contract.decisions import (
    FAIR_SHARE,
    GUARANTEE,
    OTHERS_GUARANTEE,
    Allocation,
    Decision,
    PendingReason,
    Resize,
    Start,
    Wait,
    earliest,
    placed_count,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.contract.text import counted
from coordinator.policies.tenants.attempts import (
    CALLED_BACK,
    COMES_AND_GOES,
    GO_FIRST,
    MOST_TRIES,
    Decide,
    Pass,
    Settled,
    Tries,
    leaves_room,
    settle,
    starts_of,
    stops_of,
    stripped,
    without,
)
from coordinator.policies.tenants.borrowing import ends_at_s
from coordinator.policies.tenants.fair_share import Scale, are_weighed, why_behind
from coordinator.policies.tenants.quota_guard import guarded
from coordinator.policies.tenants.reclaim import given_back
from coordinator.policies.tenants.stability import Follow, beneficiaries, in_turns, short_lived
from coordinator.policies.tenants.tenancy import Tenancy

SHARES_AGAIN_S = 1.0
"""Where tenants took turns by weight, or jobs gave way to a guarantee, and GPUs are left, a pass
follows after this many seconds.
"""

GIVEN_BACK_AGAIN_S = 10.0
"""While a guarantee waits for borrowers that start, resize or are in a cooldown, a pass follows
after this many seconds. That they can now be stopped triggers none by itself.
"""

BY_WEIGHT = "jobs of tenants below their share by weight go first"
GAVE_WAY = "what it would take is for jobs that a guarantee covers, which go first"

Explain = Callable[[ClusterSnapshot, bytes], tuple[PendingReason, ...]]
ExplainSize = Callable[[ClusterSnapshot, bytes, JobId], tuple[str, ...]]


def allocated(
    decide: Decide,
    snapshot: ClusterSnapshot,
    memory: bytes,
    *,
    by_weight: bool = True,
    keeps_quotas: bool = False,
    trusts_profiles: bool = True,
) -> Allocation:
    """One scheduling pass of a policy, within the tenants' rules.

    by_weight: tenants take turns by their weights; false if the policy does that itself.
    keeps_quotas: the policy keeps quotas itself and sees all jobs, because it remembers its
        promises to waiting jobs; its mistakes are refused all the same.
    trusts_profiles: the policy takes jobs to be as fast as their profiles state.
    """
    if not snapshot.tenants or snapshot.is_frozen:
        return decide(snapshot, memory)
    settles = _of_all if keeps_quotas else partial(_for_what_lasts, by_weight=by_weight)
    made = _told(*_that_ends(decide, settles, snapshot, memory, trusts_profiles=trusts_profiles))
    waiting = (job for job in snapshot.jobs if job.state == JobState.PENDING)
    again_s = ends_at_s(snapshot, waiting)
    return replace(made, wake_at_s=earliest(made.wake_at_s, again_s)) if again_s else made


Settles = Callable[[Tries], tuple[Settled, bool]]
"""A pass for what lasts; and whether GPUs are left, see `_without_those`."""


def _that_ends(
    decide: Decide,
    settles: Settles,
    snapshot: ClusterSnapshot,
    memory: bytes,
    *,
    trusts_profiles: bool,
) -> tuple[Settled, Tries, bool]:
    """The pass, keeping only those preemptions of the policy that later passes would not undo; see
    `stability`.
    """

    def tries_of(cell: ClusterSnapshot, remembered: bytes) -> Tries:
        guard = partial(guarded, cell, trusts_profiles=trusts_profiles)
        return Tries(decide, guard, cell, remembered)

    def follow(cell: ClusterSnapshot, remembered: bytes) -> Settled:
        return settles(tries_of(cell, remembered))[0]

    tries = tries_of(snapshot, memory)
    found, is_left = settles(tries)
    for _ in range(MOST_TRIES):
        own = _of_circle(found, snapshot, follow)
        if not own:
            return found, tries, is_left
        brief = found.made.started() & beneficiaries(found, snapshot, own)
        if brief <= tries.brief:
            break
        tries.hide_brief(brief, COMES_AND_GOES)
        found, is_left = settles(tries)
    for left in reversed(range(MOST_TRIES)):
        own = _of_circle(found, snapshot, follow) if left else found.own_stops()
        if not own:
            break
        gone = own | beneficiaries(found, snapshot, own)
        found = stripped(found, gone, tries.guard, snapshot)
    return found, tries, leaves_room(found, snapshot)


def _of_circle(found: Settled, snapshot: ClusterSnapshot, follow: Follow) -> set[JobId]:
    """Jobs that the policy stops in a pass and that come and go in those after it. Where these lead
    to a circle of others, it is one of them that is not made."""
    own = found.own_stops()
    return own & in_turns(snapshot, found, follow) if own else own


def _of_all(tries: Tries) -> tuple[Settled, bool]:
    """The pass of a policy that has all jobs before it."""
    made = tries.of_all()
    back = given_back(tries.snapshot, made.kept)
    found = _lasting(settle(made, back, tries.guard, tries.snapshot), tries)
    return found, leaves_room(found, tries.snapshot)


def _for_what_lasts(tries: Tries, *, by_weight: bool) -> tuple[Settled, bool]:
    """The pass of a policy whose preemptions are for starts that last; jobs for which it would
    preempt otherwise are hidden from it.
    """
    snapshot = tries.snapshot
    found, is_left = _in_turn(tries, by_weight=by_weight)
    for _ in range(MOST_TRIES):
        brief = starts_of(short_lived(snapshot, found.made.kept, found.kept))
        if not brief:
            break
        tries.hide_brief(brief, CALLED_BACK)
        found, is_left = _in_turn(tries, by_weight=by_weight)
    lasting = _with_those_that_fit(_lasting(found, tries), tries)
    if lasting is not found:
        is_left = leaves_room(lasting, snapshot)
    return _of_free_gpus(lasting, tries, by_weight=by_weight) if is_left else (lasting, False)


def _in_turn(tries: Tries, *, by_weight: bool) -> tuple[Settled, bool]:
    """The pass without short-lived jobs, by weight, with due jobs first."""
    best, snapshot = tries.first(), tries.snapshot
    if by_weight and are_weighed(Tenancy(snapshot)):
        best = _by_weight(tries.within, snapshot, best)
    best, back = tries.due_first(best)
    found = _for_those_that_start(settle(best, back, tries.guard, snapshot), tries)
    return _without_those(found, tries)


def _for_those_that_start(first: Settled, tries: Tries) -> Settled:
    """The pass without jobs that the policy preempts others for but that give way in it.

    A job that gives way is no reason for a preemption, and jobs that start with it may be none by
    themselves. The repeated pass counts if the policy then stops a proper subset of jobs, and no
    start of the one pass gives way in the other. A job that is due whatever is stopped gets its
    GPUs in both.
    """
    best, snapshot = first, tries.snapshot
    for _ in range(MOST_TRIES):
        displaced = best.displaced() & beneficiaries(best, snapshot, best.own_stops())
        if not displaced:
            break
        made, back = tries.due_first(tries.within(best.made.hidden | displaced))
        other = settle(made, back, tries.guard, snapshot)
        lost = other.displaced() & starts_of(best.kept)
        if lost or not other.own_stops() < best.own_stops():
            break
        tries.hide_brief(displaced, CALLED_BACK)
        best = other
    return best


def _with_those_that_fit(found: Settled, tries: Tries) -> Settled:
    """The pass with hidden jobs that fit on its free GPUs: they need no preemption and take no
    workers, whatever the policy would have done for them.

    A job that would have used up its tenant's room may then not start.
    """
    snapshot, hidden = tries.snapshot, (tries.brief | tries.refused) & found.made.hidden
    jobs = [job for job in snapshot.jobs if job.job_id in hidden]
    fits = Scale(snapshot).fitting_jobs(found.kept, jobs) if jobs else set[JobId]()
    if not fits:
        return found
    made = tries.within(found.made.hidden - fits, lean=fits)
    other = settle(made, given_back(snapshot, made.kept), tries.guard, snapshot)
    is_more = starts_of(found.kept) < starts_of(other.kept)
    return other if is_more and stops_of(other.kept) <= stops_of(found.kept) else found


def _of_free_gpus(first: Settled, tries: Tries, *, by_weight: bool) -> tuple[Settled, bool]:
    """The pass of a policy that can stop no job, if that starts more: its preferred jobs gave way
    and left GPUs on which a waiting job fits.
    """
    snapshot, lean = tries.snapshot, tries.lean()
    made = _in_turn(lean, by_weight=by_weight)[0].made
    other = settle(made, given_back(snapshot, made.kept), tries.guard, snapshot)
    is_more = starts_of(first.kept) < starts_of(other.kept)
    if not is_more or stops_of(other.kept) - stops_of(first.kept):
        return first, True
    tries.by_quota |= lean.by_quota
    tries.yielding |= lean.yielding
    return other, leaves_room(other, snapshot)


def _lasting(found: Settled, tries: Tries) -> Settled:
    """The pass without what would not last, and without the stops that were for that."""
    while brief := short_lived(tries.snapshot, found.made.kept, found.kept):
        gone = {each.job_id for each in brief}
        found = stripped(found, gone, tries.guard, tries.snapshot)
    return found


def _without_those(first: Settled, tries: Tries) -> tuple[Settled, bool]:
    """The pass without jobs that give way in it, if others start on what they leave.

    It counts if all present starts remain and no further job is stopped. Also returns whether GPUs
    are left on which a waiting job would fit.
    """
    best, snapshot = first, tries.snapshot
    for _ in range(MOST_TRIES):
        displaced = best.displaced()
        if not leaves_room(best, snapshot):
            break
        if not displaced:
            return best, True
        before = dict(tries.yielding)
        made, back = tries.due_first(tries.within(best.made.hidden | displaced))
        other = settle(made, back, tries.guard, snapshot)
        if not starts_of(best.kept) < starts_of(other.kept) or stops_of(other.kept) - stops_of(
            best.kept
        ):
            tries.yielding = before
            return best, True
        tries.yielding |= dict.fromkeys(displaced, GO_FIRST)
        best = other
    return best, leaves_room(best, snapshot)


def _told(settled: Settled, tries: Tries, is_left: bool) -> Allocation:
    """A pass with the give-back, and the pending reasons of the others.

    is_left: GPUs are left that the policy gave to a job which gave way; it is asked again soon.
    """
    snapshot = tries.snapshot
    made, back, kept = settled.made, settled.back, settled.kept
    allocation, again_s = made.allocation, None
    waits = allocation.waits
    told = {*made.hidden, *(job_id for wait in waits for job_id in wait.jobs)}
    if back.is_soon:
        again_s = snapshot.now_s + GIVEN_BACK_AGAIN_S
    hidden = made.hidden - {each.job_id for each in kept if isinstance(each, Start)}
    yielding = hidden & tries.yielding.keys()
    crowded = hidden & tries.by_quota.keys() & back.waits.keys()
    kinds = {
        GUARANTEE: back.waits.keys() - told | crowded,
        FAIR_SHARE: hidden - yielding - crowded,  # of them the policy could say nothing
        OTHERS_GUARANTEE: yielding,
    }
    waits += tuple(Wait(kind=k, jobs=tuple(sorted(jobs))) for k, jobs in kinds.items() if jobs)
    # A pass after one that decides nothing would find the same.
    left_s = snapshot.now_s + SHARES_AGAIN_S if is_left and kept else None
    wake_at_s = earliest(allocation.wake_at_s, again_s, left_s, back.wake_at_s)
    return replace(allocation, decisions=kept, waits=waits, wake_at_s=wake_at_s)


def _by_weight(
    within: Callable[[frozenset[JobId]], Pass], snapshot: ClusterSnapshot, first: Pass
) -> Pass:
    """The pass in which tenants below their shares start first, if that makes a difference.

    The policy does not see the jobs behind theirs. Where that neither starts one of their jobs nor
    spares one, the pass stays as it was. The same holds if an outer level would get less by the new
    split between siblings. GPUs that are still free then go to the other jobs.
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
            if scale.is_less_outside(best.kept, other.kept, level=level):
                break
            behind |= {job.job_id: job for job in found.behind}
            best = other
    fits = scale.fitting_jobs(best.kept, behind.values())
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
) -> tuple[PendingReason, ...]:
    """Why each job that waits would not start in a pass now: quotas, or the policy's reasons, that
    others go first by weight or by their guarantee, and what its tenant is due.

    decide: the policy's pass, as some of that shows only in one. by_weight, keeps_quotas,
    trusts_profiles: as for `allocated`.
    """
    if not snapshot.tenants or snapshot.is_frozen:
        return explain(snapshot, memory)
    owed = given_back(snapshot, ()).waits
    settles = _of_all if keeps_quotas else partial(_for_what_lasts, by_weight=by_weight)
    found, tries, _ = _that_ends(decide, settles, snapshot, memory, trusts_profiles=trusts_profiles)
    behind: dict[JobId, str] = {}
    if keeps_quotas:
        holds, why = explain(tries.shown, memory), dict(tries.by_quota)
        holds = tuple(_and(hold, why.pop(hold.job_id, None)) for hold in holds)
    else:
        if by_weight:
            behind = why_behind(snapshot, tries.by_quota.keys())
        tries.brief -= starts_of(found.kept)
        holds, why = _seen(explain, snapshot, memory, tries)
        holds = tuple(_and(hold, behind.get(hold.job_id)) for hold in holds)
    holds = tuple(_and(hold, tries.by_type.get(hold.job_id)) for hold in holds)
    hidden = (PendingReason(job_id=job_id, blockers=(reason,)) for job_id, reason in why.items())
    # A try that was made for the words alone may have refused one that starts, and started others.
    starts = starts_of(found.kept)
    told = {hold.job_id: hold for hold in (*holds, *hidden) if hold.job_id not in starts}
    for job_id in sorted((found.displaced() | found.made.hidden) - told.keys() - starts):
        reason = _why_others_first(job_id, found, tries, behind)
        told[job_id] = PendingReason(job_id=job_id, blockers=(reason,))
    return tuple(_and(hold, owed.get(hold.job_id)) for hold in told.values())


def sized(
    decide: Decide,
    explain: ExplainSize,
    snapshot: ClusterSnapshot,
    memory: bytes,
    job_id: JobId,
    *,
    trusts_profiles: bool = True,
) -> tuple[str, ...]:
    """Why a running job has no more workers: the policy's reasons, about the jobs that it sees in
    the end, as far as tenants let the job grow.

    decide, trusts_profiles: as for `held`.
    """
    if not snapshot.tenants or snapshot.is_frozen:
        return explain(snapshot, memory, job_id)
    settles = partial(_for_what_lasts, by_weight=True)
    found, tries, _ = _that_ends(decide, settles, snapshot, memory, trusts_profiles=trusts_profiles)
    by_policy = found.made.allocation.decisions
    wanted, granted = _workers_more(by_policy, job_id), _workers_more(found.kept, job_id)
    if granted >= wanted:
        return explain(without(tries.shown, found.made.hidden), memory, job_id)
    _, dropped = tries.guard(by_policy)
    whys = (each.why for each in dropped if _is_resize(each.decision, job_id))
    said = f"it does not grow by {counted(wanted, 'worker')}: {next(whys, GAVE_WAY)}"
    return (f"the next pass gives it {counted(granted, 'worker')} more", said)[not granted :]


def _is_resize(decision: Decision, job_id: JobId) -> TypeGuard[Resize]:
    return isinstance(decision, Resize) and decision.job_id == job_id


def _workers_more(decisions: Iterable[Decision], job_id: JobId) -> int:
    """Workers that a job is given in a pass."""
    return sum(placed_count(each.added) for each in decisions if _is_resize(each, job_id))


def _why_others_first(
    job_id: JobId, found: Settled, tries: Tries, behind: Mapping[JobId, str]
) -> str:
    """Why a job waits that the policy by itself would have started."""
    said = tries.by_quota.get(job_id) or tries.yielding.get(job_id) or behind.get(job_id)
    return said or (BY_WEIGHT if job_id in found.made.hidden else GAVE_WAY)


def _seen(
    explain: Explain, snapshot: ClusterSnapshot, memory: bytes, tries: Tries
) -> tuple[tuple[PendingReason, ...], dict[JobId, str]]:
    """The policy's reasons for the jobs that it sees in the end; and why it does not see others."""
    best, _ = tries.due_first(tries.first())
    after = tries.yielding.keys() & best.hidden
    why = {each: tries.by_quota.get(each) or tries.yielding[each] for each in best.hidden}
    soft = {each for each in after if tries.yielding[each] == GO_FIRST}
    holds = explain(without(tries.shown, best.hidden - soft), memory)
    if soft:  # the policy's reasons hold for these too; for others those without these
        told = {hold.job_id: hold for hold in explain(without(tries.shown, best.hidden), memory)}
        holds = tuple(told.get(hold.job_id, hold) for hold in holds)
        holds = tuple(_and(hold, why.get(hold.job_id)) for hold in holds)
    if after:
        holds = tuple(hold for hold in holds if hold.job_id not in best.started())
    said = {hold.job_id for hold in holds}
    return holds, {job_id: why[job_id] for job_id in sorted(why) if job_id not in said}


def _and(hold: PendingReason, reason: str | None) -> PendingReason:
    """Add one reason; a job that the policy has no reason to hold starts, whatever its share."""
    if reason is None or not hold.blockers:
        return hold
    return replace(hold, blockers=(*hold.blockers, reason))
