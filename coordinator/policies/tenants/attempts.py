"""Attempts: repeated passes of a policy at one instant, each with some waiting jobs hidden.

A settled pass also holds what tenants below their guarantee get back in it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from msgspec import Struct
from msgspec.structs import replace

from common.model import JobId, JobState, WorkerRange
from coordinator.policies.contract.decisions import (
    Allocation,
    Decision,
    Migrate,
    Preempt,
    Reject,
    Resize,
    Start,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.tenants.fair_share import Scale
from coordinator.policies.tenants.giveback import GiveBack
from coordinator.policies.tenants.gpu_flow import Flow
from coordinator.policies.tenants.pointless_stops import in_vain
from coordinator.policies.tenants.quota_guard import Dropped, blocked, narrowed
from coordinator.policies.tenants.reclaim import given_back
from coordinator.policies.tenants.tenancy import Tenancy


class Settled(Struct, frozen=True, kw_only=True):
    """A pass with its give-back: `kept` are its decisions in the end."""

    made: Pass
    back: GiveBack
    kept: tuple[Decision, ...]

    def displaced(self) -> set[JobId]:
        """Jobs that the policy would start, and that give way to those that a guarantee covers."""
        return self.made.started() - starts_of(self.kept)

    def own_stops(self) -> set[JobId]:
        """Jobs that the policy stops for others in the end, not a guarantee."""
        return self.made.stopped() & stops_of(self.kept)

    def has_growth_given_way(self) -> bool:
        """True if a running job would have grown by workers that due jobs get now."""
        grown = (each for each in self.made.kept if isinstance(each, Resize) and each.added)
        return any(each not in self.back.decisions for each in grown)


def settle(made: Pass, back: GiveBack, guard: Guard, snapshot: ClusterSnapshot) -> Settled:
    """The allowed part of a give-back; no start of the pass gives way without use.

    The guard counts a guarantee's loss by nodes, and may refuse a job that would be given GPUs.
    Then the decisions that gave way for that job are restored, because running borrowers may have
    enough. Otherwise jobs that would take from a guarantee get nothing; and where there are none of
    these, all refused jobs get nothing: stops for the others may have left over what those would
    take. The guard may also refuse decisions of the policy, because the ones that gave way leave a
    tenant within its guarantee. That counts as one more pass: a job that does not start after all
    may be due GPUs.
    """
    aside, before = frozenset[JobId](), made.kept
    for _ in range(MOST_TRIES):
        kept, dropped = guard(back.decisions)
        if not dropped:
            return Settled(made=made, back=back, kept=kept)
        if refused := starts_of(back.decisions) - starts_of(kept) - starts_of(before):
            gone = {
                each.job_id
                for each in before
                if isinstance(each, Start | Resize) and each not in back.decisions
            }
            taking = starts_of(each.decision for each in dropped if each.is_taking)
            aside |= gone - aside or refused & taking or refused
        else:
            before = kept
        back = given_back(snapshot, before, aside=aside)
    return Settled(made=made, back=back, kept=before)


def stripped(
    found: Settled, gone: Container[JobId], guard: Guard, snapshot: ClusterSnapshot
) -> Settled:
    """The pass without what the policy decided about some jobs, and without the stops that were
    for that."""
    made = found.made
    rest = [None if _is_about(each, gone) else each for each in made.kept]
    vain = set(in_vain(Flow(snapshot), made.kept, rest))
    left = (each for n, each in enumerate(rest) if each is not None and n not in vain)
    kept, _ = guard(tuple(left))
    made = replace(made, kept=kept)
    return settle(made, given_back(snapshot, kept), guard, snapshot)


def _is_about(decision: Decision, jobs: Container[JobId]) -> bool:
    return isinstance(decision, Start | Resize | Migrate | Preempt) and decision.job_id in jobs


def leaves_room(found: Settled, snapshot: ClusterSnapshot) -> bool:
    """True if jobs gave way and another waiting job fits on the free GPUs, or if workers gave way
    and their jobs may grow on the rest of these.
    """
    if found.has_growth_given_way():
        return True
    displaced = found.displaced()
    if not displaced:
        return False
    gone = displaced | starts_of(found.kept) | found.made.hidden
    rest = (
        job
        for job in snapshot.jobs
        if job.state == JobState.PENDING and job.job_id not in gone and not job.is_resting
    )
    return bool(Scale(snapshot).fitting_jobs(found.kept, rest))


MOST_TRIES = 4
"""The limit of repeated passes without jobs that quotas refused; then the result is kept. Two are
enough in nearly all cases: the first shows which jobs of a tenant the policy prefers, the second
gives other tenants the GPUs of the refused ones.
"""

Decide = Callable[[ClusterSnapshot, bytes], Allocation]
Guard = Callable[[tuple[Decision, ...]], tuple[tuple[Decision, ...], tuple[Dropped, ...]]]

GO_FIRST = "jobs that another tenant's guarantee covers, and that fit on free GPUs, go first"
"""Why a borrower's job waits where the policy by itself would have had them wait for it."""

COMES_AND_GOES = "a stop for it would begin stops in turns that do not end by themselves"
"""Why a job waits for which the policy would stop others, and later them or others for these."""

CALLED_BACK = "guarantees would call back at once what it would take by a stop"
"""Why a job waits for which the policy would stop others: it would be stopped again itself."""


class Pass(Struct, frozen=True, kw_only=True):
    """A pass as it would be: `kept` of it is allowed, `hidden` jobs the policy did not see."""

    allocation: Allocation
    kept: tuple[Decision, ...]
    hidden: frozenset[JobId]

    def started(self) -> set[JobId]:
        """Jobs that start."""
        return starts_of(self.kept)

    def stopped(self) -> set[JobId]:
        """Jobs that are preempted."""
        return stops_of(self.kept)


class Tries:
    """The passes of one instant, each with some jobs hidden from the policy.

    by_quota: why jobs were hidden for which their tenant has no room.
    yielding: the same for jobs that would take from another's guarantee, or that jobs within theirs
        precede.
    refused: of all these, jobs hidden because their start was refused.
    brief: jobs hidden because a guarantee would reclaim their GPUs.
    shown: the jobs that the policy sees, but for the hidden. by_type: why a job may not use all its
        GPU types.
    """

    def __init__(
        self, decide: Decide, guard: Guard, snapshot: ClusterSnapshot, memory: bytes
    ) -> None:
        self._decide = decide
        self.guard = guard
        self.snapshot = snapshot
        self._memory = memory
        self._tenancy = tenancy = Tenancy(snapshot)
        self.by_quota = blocked(snapshot, tenancy)
        self.shown, self.by_type = narrowed(snapshot, tenancy, tenancy.room)
        self.yielding: dict[JobId, str] = {}
        self.refused: set[JobId] = set()
        self.brief: set[JobId] = set()

    def lean(self) -> Tries:
        """The attempts of the same policy if it can stop no job."""
        return Tries(self._decide, self.guard, _for_free_gpus(self.snapshot, ()), self._memory)

    def hide_brief(self, jobs: set[JobId], why: str) -> None:
        """The policy no longer sees these, as it would stop others for what does not last."""
        self.brief |= jobs
        self.yielding |= dict.fromkeys(jobs, why)

    def of_all(self) -> Pass:
        """The pass of a policy that has all jobs before it and sees to quotas itself."""
        own = self._tenancy.most  # what else there is room for changes with time, as its plans do
        self.shown, self.by_type = narrowed(self.snapshot, self._tenancy, own)
        allocation = self._decide(self.shown, self._memory)
        kept, _ = self.guard(allocation.decisions)
        gone = {each.job_id for each in kept if isinstance(each, Reject)}
        return Pass(allocation=allocation, kept=kept, hidden=frozenset(self.by_quota.keys() - gone))

    def first(self) -> Pass:
        """Without those alone for which there is no room by quota, whatever else is decided, and
        those that would not run for long."""
        return self.within(frozenset(self.by_quota) | self.brief)

    def within(self, hidden: frozenset[JobId], *, lean: Container[JobId] | None = None) -> Pass:
        """A pass without the jobs whose start is refused, repeated until none is: their GPUs are
        for others.

        lean: these are for free GPUs alone: no job can be stopped, and they ask for no more than
            their base gangs; None: the policy may stop jobs for others.
        """
        snapshot = self.shown if lean is None else _for_free_gpus(self.shown, lean)
        tries = 0
        while True:
            tries += 1
            allocation = self._decide(without(snapshot, hidden), self._memory)
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
                return Pass(allocation=allocation, kept=kept, hidden=hidden)
            for job_id, each in whys.items():
                (self.by_quota if each.is_quota else self.yielding)[job_id] = each.why
            self.refused |= whys.keys()
            hidden |= whys.keys()

    def due_first(self, best: Pass) -> tuple[Pass, GiveBack]:
        """The pass in which guaranteed jobs do not wait for waiting jobs of borrowers, if that
        starts one of them more; and the give-back after it.
        """
        back = given_back(self.snapshot, best.kept, is_patient=True)
        for _ in range(MOST_TRIES):
            behind = back.behind - best.hidden
            if not behind:
                break
            other = self.within(best.hidden | behind)
            if back.fits.isdisjoint(other.started()):
                break
            self.yielding |= dict.fromkeys(behind, GO_FIRST)
            best = other
            back = given_back(self.snapshot, best.kept, is_patient=True)
        return best, given_back(self.snapshot, best.kept) if back.fits else back


def without(snapshot: ClusterSnapshot, hidden: Container[JobId]) -> ClusterSnapshot:
    """The snapshot without these jobs; `unseen` has them, so that the policy does not take them for
    ended.
    """
    jobs = tuple(job for job in snapshot.jobs if job.job_id not in hidden)
    if len(jobs) == len(snapshot.jobs):
        return snapshot
    gone = {job.job_id for job in snapshot.jobs if job.job_id in hidden}
    return replace(snapshot, jobs=jobs, index=None, unseen=snapshot.unseen | gone)


def _for_free_gpus(snapshot: ClusterSnapshot, lean: Container[JobId]) -> ClusterSnapshot:
    """The snapshot as if all jobs with GPUs had been stopped a moment ago, and these jobs could
    not have more than their base gangs."""

    def seen(job: JobView) -> JobView:
        if job.placed:
            return replace(job, is_resting=True)
        if job.job_id in lean:
            return replace(job, workers=WorkerRange(min=job.workers.min, max=job.workers.min))
        return job

    return replace(snapshot, jobs=tuple(map(seen, snapshot.jobs)), index=None)


def starts_of(decisions: Iterable[Decision]) -> set[JobId]:
    return {each.job_id for each in decisions if isinstance(each, Start)}


def stops_of(decisions: Iterable[Decision]) -> set[JobId]:
    return {each.job_id for each in decisions if isinstance(each, Preempt)}
