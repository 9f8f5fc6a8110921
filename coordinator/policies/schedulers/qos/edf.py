"""Earliest deadline first, as many GPUs as help: the baseline of ElasticFlow (ASPLOS 2023).

Jobs stand in order of deadline. Each gets the largest size that helps it from the GPUs that the
jobs before it leave; a job that gets none waits or is stopped. No job is refused, and late jobs run
on.
"""

from __future__ import annotations

from functools import partial

from msgspec import Struct

from common.model import JobId
from coordinator.policies.contract.decisions import Allocation, PendingReason
from coordinator.policies.contract.free_gpus import FreeGpus, consolidated
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.contract.text import counted
from coordinator.policies.parts.blockers_for_all import answers
from coordinator.policies.parts.grants import Grant, carry_out
from coordinator.policies.parts.pooling import Pool, by_deadline, pools
from coordinator.policies.policy import Parts, Policy, joint
from coordinator.policies.schedulers.qos.reach import Reach
from coordinator.policies.schedulers.qos.reasons import stopped_for
from coordinator.policies.schedulers.qos.sizes import least_in_time, sizes_of


class EdfKnobs(Struct, frozen=True, kw_only=True):
    """Knobs of `qos-edf`.

    powers_of_two: sizes are the base gang times powers of two; false: any size in the job's range.
    largest: give the largest size even if it is slower than a smaller one, as in the artefact of
        the authors, whose limit is the largest size that was measured.
    """

    powers_of_two: bool = True
    largest: bool = False


def _grants(knobs: EdfKnobs, pool: Pool, reach: Reach) -> tuple[list[Grant], dict[JobId, str]]:
    """The grants of one GPU type, and the jobs without one."""
    kept = pool.kept_gpus()
    left = pool.gpus - sum(kept.values())
    grants: list[Grant] = []
    notes: dict[JobId, str] = {}
    for job in sorted(pool.jobs, key=by_deadline):
        factor = pool.factor(job)
        each = job.gpus_per_worker * factor
        left += kept.get(job.job_id, 0)
        most = reach.most(job, each, left)
        sizes = sizes_of(job, most, powers_of_two=knobs.powers_of_two, largest=knobs.largest)
        if not sizes:
            why = f"jobs with earlier deadlines leave {counted(left, 'GPU')}, its base gang needs "
            notes[job.job_id] = f"{why}{job.workers.min * each}"
            continue
        left -= sizes[-1] * each
        reach.take(job, sizes[-1] * each)
        when = "no deadline" if job.deadline_at_s is None else f"deadline {job.deadline_at_s:.0f} s"
        grants.append(
            Grant(
                job=job,
                workers=sizes[-1] * factor,
                gpu_type=pool.gpu_type,
                reason=f"{when}: {counted(sizes[-1], 'worker is', 'workers are')} the most that "
                "speed it up on the free GPUs",
            )
        )
    return grants, notes


def _all(knobs: EdfKnobs, snapshot: ClusterSnapshot) -> tuple[list[Grant], dict[JobId, str]]:
    grants: list[Grant] = []
    notes: dict[JobId, str] = {}
    reach = Reach(snapshot)
    size = partial(least_in_time, now_s=snapshot.now_s)
    for pool in pools(snapshot, FreeGpus(snapshot), order=by_deadline, size=size, resizes=True):
        more, told = _grants(knobs, pool, reach)
        grants += more
        notes |= told
    return grants, notes


def _allocate(knobs: EdfKnobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    grants, _ = _all(knobs, snapshot)
    plan = carry_out(snapshot, grants, place=consolidated, why=stopped_for(snapshot))
    return Allocation(decisions=plan.decisions, memory=memory, wake_at_s=plan.wake_at_s)


def _hold(knobs: EdfKnobs, snapshot: ClusterSnapshot, memory: bytes) -> tuple[PendingReason, ...]:
    grants, notes = _all(knobs, snapshot)
    plan = carry_out(snapshot, grants, place=consolidated)
    return answers(snapshot, plan.decisions, plan.holds, notes)


EDF: Policy = joint(
    "qos-edf",
    "earliest deadline first, with as many GPUs as speed it up",
    knobs=EdfKnobs(),
    allocate=_allocate,
    pending_reasons=_hold,
    parts=Parts(order="deadline", size="the largest useful size", place="fewest nodes"),
)
