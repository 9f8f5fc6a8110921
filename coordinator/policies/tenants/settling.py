"""A pass with what tenants below their guarantee get back in it. Must not know a policy, nor the
engine."""

from __future__ import annotations

from collections.abc import Container

from msgspec import Struct
from msgspec.structs import replace

from common.model import JobId, JobState
from coordinator.policies.decisions import Decision, Migrate, Preempt, Resize, Start
from coordinator.policies.snapshot import ClusterSnapshot
from coordinator.policies.tenants.flow import Flow
from coordinator.policies.tenants.giving import Back
from coordinator.policies.tenants.takeback import given_back
from coordinator.policies.tenants.tries import MOST_TRIES, Guard, Pass, starts_of, stops_of
from coordinator.policies.tenants.vain import in_vain
from coordinator.policies.tenants.weighing import Scale


class Settled(Struct, frozen=True, kw_only=True):
    """A pass with what comes back after it: `kept` are its decisions in the end."""

    made: Pass
    back: Back
    kept: tuple[Decision, ...]

    def gave_way(self) -> set[JobId]:
        """Jobs that the policy would start, and that give way to those that a guarantee covers."""
        return self.made.started() - starts_of(self.kept)

    def own_stops(self) -> set[JobId]:
        """Jobs that the policy stops for others in the end, not a guarantee."""
        return self.made.stopped() & stops_of(self.kept)

    def has_growth_given_way(self) -> bool:
        """Whether a job that runs would have had workers that are for such jobs now."""
        grown = (each for each in self.made.kept if isinstance(each, Resize) and each.added)
        return any(each not in self.back.decisions for each in grown)


def settle(made: Pass, back: Back, guard: Guard, snapshot: ClusterSnapshot) -> Settled:
    """What is allowed of what comes back; no start of the pass gives way in vain.

    The guard counts by nodes what a guarantee loses, and may refuse who would be given GPUs. Then
    those whose decisions gave way for such jobs keep theirs, as borrowers that run may have enough;
    else those get nothing that would take from a guarantee, and where there are none all that it
    refuses: stops for the others may have left over what those would take. Or it refuses what the
    policy decided beside them, as what gave way leaves a tenant within its guarantee. That is
    looked at as one more pass: who does not start after all may be due GPUs.
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
    """Whether jobs gave way, and one that waits beside them fits on what is free after all; or
    whether workers did, so that their jobs may grow by what is left of these."""
    if found.has_growth_given_way():
        return True
    gave_way = found.gave_way()
    if not gave_way:
        return False
    gone = gave_way | starts_of(found.kept) | found.made.hidden
    rest = (
        job
        for job in snapshot.jobs
        if job.state == JobState.PENDING and job.job_id not in gone and not job.is_resting
    )
    return bool(Scale(snapshot).that_fit(found.kept, rest))
