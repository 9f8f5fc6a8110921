"""Themis (NSDI'20): GPUs on lease, auctioned to the apps with the worst finish-time fairness.

Two levels: the agent of each app bids (`themis_bids`), the arbiter commits (`themis_arbiter`) by a
partial-allocation auction (`themis_auction`). `themis-simple` is the form without an auction that
others evaluate. Must not know the engine.
"""

from __future__ import annotations

import msgspec

from common.model import JobState
from coordinator.policies.apps import rho_text
from coordinator.policies.blockers import Hold
from coordinator.policies.decisions import Allocation
from coordinator.policies.policy import Parts, Policy, joint
from coordinator.policies.snapshot import ClusterSnapshot
from coordinator.policies.systems.themis import simple
from coordinator.policies.systems.themis.arbiter import Arbiter, Standing, read
from coordinator.policies.systems.themis.knobs import ThemisKnobs


def allocate(knobs: ThemisKnobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """One pass: what is free, or whose lease is over, is auctioned."""
    arbiter = Arbiter(knobs, snapshot, read(memory))
    arbiter.run()
    plan = arbiter.plan()
    wakes = [at_s for at_s in (plan.wake_at_s, arbiter.wake_at_s()) if at_s is not None]
    return Allocation(
        decisions=plan.decisions,
        memory=msgspec.msgpack.encode(arbiter.memory),
        wake_at_s=min(wakes, default=None),
    )


def hold(knobs: ThemisKnobs, snapshot: ClusterSnapshot, memory: bytes) -> tuple[Hold, ...]:
    """Why each job that waits would be given nothing now, the worst off first."""
    arbiter = Arbiter(knobs, snapshot, read(memory))
    arbiter.run()
    plan = arbiter.plan()
    missed = {hold.job_id: hold for hold in plan.holds}
    ranked = sorted(
        arbiter.standings.values(), key=lambda s: (-s.rho(snapshot.now_s, knobs.lease_s), s.app)
    )
    found: list[Hold] = []
    for standing in ranked:
        for job in standing.jobs:
            if job.state != JobState.PENDING:
                continue
            if job.job_id in missed:
                found.append(missed[job.job_id])
            elif job.job_id not in arbiter.given:
                found.append(Hold(job_id=job.job_id, blockers=_why(arbiter, standing, knobs)))
    return tuple(found)


def _why(arbiter: Arbiter, standing: Standing, knobs: ThemisKnobs) -> tuple[str, ...]:
    now_s = arbiter.memory.attendance.at_s
    rho = standing.rho(now_s, knobs.lease_s)
    incentive = standing.measure.rho(standing.measure.share_left_s)
    next_at_s = arbiter.wake_at_s()
    when = "" if next_at_s is None else f"; the next lease ends in {next_at_s - now_s:.0f} s"
    return (
        f"rho of its {standing.app} is {rho_text(rho)} now, {rho_text(incentive)} if it had its "
        f"share of {standing.measure.share_gpus:.1f} GPUs from now on (above 1 it is worse off "
        "than with a private share)",
        arbiter.outcome.get(standing.app, "it is not among the bidders that are worst off") + when,
    )


POLICIES: tuple[Policy, ...] = (
    *simple.POLICIES,
    joint(
        "themis",
        "auctions of GPUs on lease to the apps with the worst finish-time fairness",
        knobs=ThemisKnobs(),
        allocate=allocate,
        hold=hold,
        parts=Parts(
            order="finish-time fairness, worst first",
            size="partial-allocation auction",
            place="bids by placement level",
        ),
    ),
)
