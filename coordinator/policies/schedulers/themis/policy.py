"""Themis (NSDI'20): GPUs on lease, auctioned to the apps with the worst finish-time fairness.

Two levels: the agent of each app bids (`bids`), the arbiter commits (`arbiter`) by a
partial-allocation auction. `themis-simple` is the form without one that others evaluate.
"""

from __future__ import annotations

import msgspec

from common.model import JobId, JobState
from coordinator.policies.contract.decisions import Allocation, PendingReason
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.parts.memory import recalled
from coordinator.policies.parts.restart_cost import told
from coordinator.policies.policy import Parts, Policy, joint
from coordinator.policies.schedulers.themis.app_standing import Standing
from coordinator.policies.schedulers.themis.arbiter import Arbiter
from coordinator.policies.schedulers.themis.finish_time_fairness import rho_text
from coordinator.policies.schedulers.themis.knobs import ThemisKnobs
from coordinator.policies.schedulers.themis.leases import Memory


def allocate(knobs: ThemisKnobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """One pass: auction the free GPUs and those whose lease is over."""
    arbiter = Arbiter(knobs, snapshot, recalled(memory, Memory))
    arbiter.run()
    plan = arbiter.plan()
    return Allocation(
        decisions=plan.decisions,
        memory=msgspec.msgpack.encode(arbiter.memory),
        wake_at_s=arbiter.wake_at_s(),
    )


def hold(knobs: ThemisKnobs, snapshot: ClusterSnapshot, memory: bytes) -> tuple[PendingReason, ...]:
    """Why each job that waits would be given nothing now, the worst off first."""
    arbiter = Arbiter(knobs, snapshot, recalled(memory, Memory))
    arbiter.run()
    plan = arbiter.plan()
    missed = {hold.job_id: hold for hold in plan.holds}
    ranked = sorted(
        arbiter.standings.values(), key=lambda s: (-s.rho(snapshot.now_s, knobs.lease_s), s.app)
    )
    found: list[PendingReason] = []
    for standing in ranked:
        for job in standing.jobs:
            if job.state != JobState.PENDING:
                continue
            if job.job_id in missed:
                found.append(missed[job.job_id])
            elif job.job_id not in arbiter.sale.given:
                found.append(
                    PendingReason(job_id=job.job_id, blockers=_why(arbiter, standing, knobs))
                )
    return tuple(found)


def _why(arbiter: Arbiter, standing: Standing, knobs: ThemisKnobs) -> tuple[str, ...]:
    now_s = arbiter.memory.attendance.at_s
    rho = standing.rho(now_s, knobs.lease_s)
    incentive = standing.measure.rho(standing.measure.share_left_s)
    next_at_s = arbiter.next_lease_end_s()
    when = "" if next_at_s is None else f"; the next lease ends in {next_at_s - now_s:.0f} s"
    return (
        f"rho of its {standing.app} is {rho_text(rho)} now, {rho_text(incentive)} if it had its "
        f"share of {standing.measure.share_gpus:.1f} GPUs from now on (above 1 it is worse off "
        "than with a private share)",
        arbiter.sale.outcome.get(standing.app, "it is not among the bidders that are worst off")
        + when,
    )


def tell(
    knobs: ThemisKnobs, snapshot: ClusterSnapshot, memory: bytes, job_id: JobId
) -> tuple[str, ...]:
    """rho of a job's app with its held GPUs, and the end of its lease."""
    arbiter = Arbiter(knobs, snapshot, recalled(memory, Memory))
    for standing in arbiter.standings.values():
        for job in standing.jobs:
            if job.job_id == job_id:
                left_s = arbiter.memory.leases.get(job_id, snapshot.now_s) - snapshot.now_s
                return (
                    f"rho of its {standing.app} is "
                    f"{rho_text(standing.rho(snapshot.now_s, knobs.lease_s))} with what it holds; "
                    f"its lease ends in {left_s:.0f} s",
                    *told(job, snapshot.now_s),
                )
    return ()


POLICIES: tuple[Policy, ...] = (
    joint(
        "themis",
        "auctions of leased GPUs to the apps with the worst finish-time fairness",
        knobs=ThemisKnobs(),
        allocate=allocate,
        pending_reasons=hold,
        standing=tell,
        is_ordered=False,
        parts=Parts(
            order="finish-time fairness, worst first",
            size="partial-allocation auction",
            place="bids by placement level",
        ),
    ),
)
