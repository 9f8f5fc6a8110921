"""AFS: elastic sharing that weighs shortness against efficiency in pairwise comparisons.

AFS-L knows how long jobs are, AFS-P does not (Hwang et al., NSDI'21, section 4); `worker_shares`
has the comparison. Their base gangs come first, in an order that counts the work a stop would lose;
the papers' jobs lose nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256

import msgspec
from msgspec import Struct, field

from common.model import JobId, JobState, NonNegativeInt
from coordinator.policies.contract.decisions import Allocation, PendingReason, earliest
from coordinator.policies.contract.free_gpus import FreeGpus
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.contract.text import counted
from coordinator.policies.knobs import Period
from coordinator.policies.parts.blockers_for_all import answers
from coordinator.policies.parts.grants import Grant, carry_out
from coordinator.policies.parts.memory import recalled
from coordinator.policies.parts.pooling import Pool, pools, stays
from coordinator.policies.parts.restart_cost import keeps_gang, loss_s, told
from coordinator.policies.policy import NoKnobs, Parts, joint
from coordinator.policies.schedulers.afs.worker_shares import (
    Share,
    Wins,
    base_shares,
    beats_by_gain,
    beats_by_length,
    share_by_throughput,
    share_out,
)

LEASE_S = 7200.0


def _grants(pool: Pool, shares: Sequence[Share], why: str) -> list[Grant]:
    return [
        Grant(
            job=share.job,
            workers=share.workers * share.factor,
            gpu_type=pool.gpu_type,
            reason=f"{counted(share.workers, 'worker is', 'workers are')} its share: {why}",
        )
        for share in shares
    ]


_Pass = tuple[Allocation, tuple[PendingReason, ...], list[JobView]]
"""The resulting worker counts, the barred nodes of each job, and all jobs in the order of their
base gangs.
"""


def _known(snapshot: ClusterSnapshot, *, is_exact: bool) -> _Pass:
    """AFS-L, or if it is not exact Lyra's form, which stops no job for another."""
    floor, now_s = FreeGpus(snapshot), snapshot.now_s
    line: list[JobView] = []
    grants: list[Grant] = []

    def rank(job: JobView) -> tuple[object, ...]:
        # A job stopped for a shorter one must also make up its loss. For the mean of both it makes
        # room only where its remaining time exceeds the other's by more than that.
        left_s = job.runtime_s(job.workers.min, now_s) - loss_s(job, now_s)
        keeps = job.state != JobState.PENDING and not is_exact
        return not (keeps or stays(job)), -job.priority, left_s, job.job_id

    for pool in pools(snapshot, floor, order=rank, resizes=True):
        ordered = sorted(pool.jobs, key=rank)
        shares, gpus = base_shares(ordered, pool.gpus, now_s, factor=pool.factor)
        if is_exact:
            share_out(shares, gpus, beats_by_length)
        else:
            share_by_throughput(shares, gpus)
        grants += _grants(pool, shares, "short and efficient jobs first")
        line += ordered
    plan = carry_out(snapshot, grants, floor=floor)
    made = Allocation(decisions=plan.decisions, wake_at_s=plan.wake_at_s)
    return made, plan.holds, sorted(line, key=rank)


class _Turn(Struct, frozen=True):
    """How often a job's lease ended, and when the present one does; None while it waits."""

    count: int = 0
    ends_at_s: float | None = None


class _Memory(Struct, frozen=True, kw_only=True):
    """The memory of AFS-P.

    passes: earlier releases tossed their coin by it; kept for a return to one of these.
    """

    turns: dict[JobId, _Turn] = field(default_factory=dict[JobId, _Turn])
    passes: int = 0


class UnknownKnobs(Struct, frozen=True, kw_only=True):
    """lease_s: a job that has run for this long goes behind jobs that had fewer turns.

    seed: seed of the choice between two jobs when neither is clearly better.
    """

    lease_s: Period = LEASE_S
    seed: NonNegativeInt = 0


def _turns(knobs: UnknownKnobs, snapshot: ClusterSnapshot, memory: _Memory) -> dict[JobId, _Turn]:
    """Leases that have ended are counted, running jobs without one begin one."""
    found: dict[JobId, _Turn] = {}
    for job in snapshot.jobs:
        turn = memory.turns.get(job.job_id, _Turn())
        if turn.ends_at_s is not None and turn.ends_at_s <= snapshot.now_s:
            turn = _Turn(turn.count + 1)
        if job.state == JobState.PENDING:
            turn = _Turn(turn.count)
        elif turn.ends_at_s is None:
            turn = _Turn(turn.count, snapshot.now_s + knobs.lease_s)
        found[job.job_id] = turn
    return found | _unseen(snapshot, memory)


def _unseen(snapshot: ClusterSnapshot, memory: _Memory) -> dict[JobId, _Turn]:
    """For hidden waiting jobs: a job that had its turns does not come back as one without any."""
    had = {name: turn for name, turn in memory.turns.items() if name in snapshot.unseen}
    return {
        name: _Turn(turn.count + (turn.ends_at_s is not None and turn.ends_at_s <= snapshot.now_s))
        for name, turn in had.items()
    }


def _toss(seed: int, turns: Mapping[JobId, _Turn]) -> Wins:
    """A coin for each pair and their workers, tossed again when a lease of theirs has ended. Tossed
    in each pass, a worker would alternate between equals.
    """

    def beats(candidate: Share, other: Share) -> bool:
        first, second = sorted((candidate, other), key=lambda share: share.job.job_id)
        sides = [
            (share.job.job_id, turns[share.job.job_id].count, share.workers)
            for share in (first, second)
        ]
        is_heads = sha256(f"{seed} {sides}".encode()).digest()[0] % 2 == 0
        return is_heads == (other is first)

    return beats


def _unknown(knobs: UnknownKnobs, snapshot: ClusterSnapshot, blob: bytes) -> _Pass:
    memory = recalled(blob, _Memory)
    turns = _turns(knobs, snapshot, memory)
    wins = beats_by_gain(_toss(knobs.seed, turns))
    floor = FreeGpus(snapshot)
    line: list[JobView] = []
    grants: list[Grant] = []

    def rank(job: JobView) -> tuple[object, ...]:
        first_s = job.attempt.first_started_at_s
        return (
            not (stays(job) or keeps_gang(job, snapshot.now_s)),
            -job.priority,
            turns[job.job_id].count,
            first_s is None,
            first_s or 0.0,
            job.submitted_at_s,
            job.job_id,
        )

    for pool in pools(snapshot, floor, order=rank, resizes=True):
        ordered = sorted(pool.jobs, key=rank)
        shares, gpus = base_shares(ordered, pool.gpus, snapshot.now_s, factor=pool.factor)
        share_out(shares, gpus, wins)
        grants += _grants(pool, shares, "fewest turns first, then efficiency")
        line += ordered
    plan = carry_out(snapshot, grants, floor=floor)
    made = Allocation(
        decisions=plan.decisions,
        memory=msgspec.msgpack.encode(_Memory(turns=turns, passes=memory.passes + 1)),
        wake_at_s=earliest(plan.wake_at_s, *(turn.ends_at_s for turn in turns.values())),
    )
    return made, plan.holds, sorted(line, key=rank)


def _told(
    knobs: UnknownKnobs, snapshot: ClusterSnapshot, blob: bytes, job_id: JobId
) -> tuple[str, ...]:
    """How many turns a job had, and until when it has its present one."""
    turn = _turns(knobs, snapshot, recalled(blob, _Memory)).get(job_id)
    if turn is None or turn.ends_at_s is None:
        return ()
    job = next(job for job in snapshot.jobs if job.job_id == job_id)
    left_s = turn.ends_at_s - snapshot.now_s
    said = f"it had {counted(turn.count, 'turn')} before this one, which ends in {left_s:.0f} s"
    return (said, *told(job, snapshot.now_s))


def _held(
    snapshot: ClusterSnapshot,
    made: Allocation,
    roomless: Sequence[PendingReason],
    line: Sequence[JobView],
) -> tuple[PendingReason, ...]:
    """Why jobs wait: others have the GPUs as their base gangs, or theirs are free in pieces."""
    behind = {
        job.job_id: (
            f"its base gang of {counted(job.workers.min, 'worker')} of "
            f"{counted(job.gpus_per_worker, 'GPU')} is behind those of jobs that come "
            "before it, which leave too few GPUs"
        )
        for job in line
    }
    return answers(snapshot, made.decisions, roomless, behind)


_PARTS = Parts(
    order="least remaining time",
    size="pairwise: remaining time against efficiency",
    place="best fit",
)

POLICIES = (
    joint(
        "afs",
        "AFS-L: start minimum gangs shortest first, then add workers one at a time to the "
        "winner of a pairwise comparison",
        knobs=NoKnobs(),
        allocate=lambda _, snapshot, __: _known(snapshot, is_exact=True)[0],
        pending_reasons=lambda _, snapshot, __: _held(snapshot, *_known(snapshot, is_exact=True)),
        parts=_PARTS,
    ),
    joint(
        "afs-p",
        "AFS-P: AFS without known running times: jobs with the fewest turns first, leases "
        "of two hours",
        knobs=UnknownKnobs(),
        allocate=lambda knobs, snapshot, memory: _unknown(knobs, snapshot, memory)[0],
        pending_reasons=lambda knobs, snapshot, memory: _held(
            snapshot, *_unknown(knobs, snapshot, memory)
        ),
        standing=_told,
        parts=Parts(
            order="fewest leases, then first start",
            size="pairwise by efficiency, random when undecided",
            place="best fit",
        ),
    ),
    joint(
        "afs-lyra",
        "AFS as in Lyra's evaluation: base demand of all jobs first, then the most "
        "throughput per GPU",
        knobs=NoKnobs(),
        allocate=lambda _, snapshot, __: _known(snapshot, is_exact=False)[0],
        pending_reasons=lambda _, snapshot, __: _held(snapshot, *_known(snapshot, is_exact=False)),
        parts=Parts(
            order="running jobs, then least remaining time",
            size="throughput per GPU",
            place="best fit",
        ),
    ),
)
