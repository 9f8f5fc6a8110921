"""AFS: elastic sharing that weighs shortness against efficiency, pair by pair.

AFS-L knows how long jobs are, AFS-P does not (Hwang et al., NSDI'21, "Elastic Resource Sharing for
Distributed Deep Learning", section 4; the rules as its author's simulator has them). A greedy rule
is too sure that what it gives away comes back, so two jobs are compared as if it never did. The
unit is one worker, the first share a whole base gang. Must not know the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

import msgspec
import numpy as np
from msgspec import Struct, field

from common.model import JobId, JobState, NonNegativeInt, PositiveFloat
from coordinator.policies.blockers import Hold
from coordinator.policies.decisions import Allocation
from coordinator.policies.floor import Floor, pools
from coordinator.policies.granting import Grant, carry_out
from coordinator.policies.policy import NoKnobs, Parts, joint
from coordinator.policies.snapshot import ClusterSnapshot, JobView

LEASE_S = 7200.0


class Share(Struct):
    """A job and the workers that it has been given so far."""

    job: JobView
    left_s: float
    """Worker-seconds left."""
    workers: int = 0

    @property
    def rate(self) -> float:
        """Speed at its present share."""
        return self.job.rate(self.workers) if self.workers else 0.0

    @property
    def gain(self) -> float:
        """Speed that one worker more adds."""
        return self.job.rate(self.workers + 1) - self.rate

    @property
    def remaining_s(self) -> float:
        """Running time left at its present share."""
        return self.left_s / self.rate

    def may_grow(self, gpus: int) -> bool:
        """Whether one worker more fits its range and what is left, and makes it faster."""
        job = self.job
        return self.workers < job.workers.max and job.gpus_per_worker <= gpus and self.gain > 0


Wins = Callable[[Share, Share], bool]
"""Whether the second one takes the place of the first as candidate for the next worker."""


def beats_by_length(candidate: Share, other: Share) -> bool:
    """AFS-L: the shorter one takes it if its relative gain now exceeds what the longer one's is.

    With l the one with less running time left at its present share, h the other:
    (p_l(n+1) - p_l(n)) / p_l(n) > (p_h(n+1) - p_h(n)) / p_h(n+1).
    """
    is_shorter = (other.remaining_s, other.job.job_id) < (
        candidate.remaining_s,
        candidate.job.job_id,
    )
    low, high = (other, candidate) if is_shorter else (candidate, other)
    low_wins = low.gain / low.rate > high.gain / (high.rate + high.gain)
    return low_wins == is_shorter


def beats_by_gain(random: np.random.Generator) -> Wins:
    """AFS-P: who would win even if it were the longer one; chance where neither would."""

    def beats(candidate: Share, other: Share) -> bool:
        if (other.rate + other.gain) / other.gain <= candidate.rate / candidate.gain:
            return True
        if (candidate.rate + candidate.gain) / candidate.gain <= other.rate / other.gain:
            return False
        return bool(random.random() < 0.5)

    return beats


def base_shares(jobs: Sequence[JobView], gpus: int, now_s: float) -> tuple[list[Share], int]:
    """A base gang each, in this order, skipping what does not fit; and the GPUs left."""
    shares: list[Share] = []
    for job in jobs:
        need = job.workers.min * job.gpus_per_worker
        if need <= gpus:
            gpus -= need
            shares.append(Share(job=job, left_s=job.work_left_s(now_s), workers=job.workers.min))
    return shares, gpus


def share_out(shares: Sequence[Share], gpus: int, wins: Wins) -> None:
    """Give one worker after the other to whoever is left of all pairwise comparisons."""
    while True:
        growing = [share for share in shares if share.may_grow(gpus)]
        if not growing:
            return
        candidate = growing[0]
        for other in growing[1:]:
            if wins(candidate, other):
                candidate = other
        candidate.workers += 1
        gpus -= candidate.job.gpus_per_worker


def share_by_throughput(shares: Sequence[Share], gpus: int) -> None:
    """Lyra's cut-down AFS (EuroSys'23, section 7.4): always the most throughput per GPU."""

    def value(share: Share) -> float:
        # Relative to its base gang, so that the units of profiles do not matter.
        return share.gain / (share.job.workers.min * share.job.gpus_per_worker)

    queue = [(-value(share), place) for place, share in enumerate(shares) if share.may_grow(gpus)]
    heapify(queue)
    while queue:
        _, place = heappop(queue)
        share = shares[place]
        if not share.may_grow(gpus):
            continue
        share.workers += 1
        gpus -= share.job.gpus_per_worker
        if share.may_grow(gpus):
            heappush(queue, (-value(share), place))


# --- the policies ---------------------------------------------------------------------------


def _grants(shares: Sequence[Share], why: str) -> list[Grant]:
    return [
        Grant(
            job=share.job,
            workers=share.workers,
            reason=f"{share.workers} workers are its share: {why}",
        )
        for share in shares
    ]


def _known(snapshot: ClusterSnapshot, *, is_exact: bool) -> Allocation:
    """AFS-L, or where it is not exact Lyra's cut of it, which stops nobody for another job."""
    floor, now_s = Floor(snapshot), snapshot.now_s
    grants: list[Grant] = []
    for pool in pools(snapshot, floor):
        ordered = sorted(
            pool.jobs,
            key=lambda job: (
                not is_exact and job.state == JobState.PENDING,
                job.runtime_s(job.workers.min, now_s),
                job.job_id,
            ),
        )
        shares, gpus = base_shares(ordered, pool.gpus, now_s)
        if is_exact:
            share_out(shares, gpus, beats_by_length)
        else:
            share_by_throughput(shares, gpus)
        grants += _grants(shares, "short and efficient jobs first")
    plan = carry_out(snapshot, grants, floor=floor)
    return Allocation(decisions=plan.decisions, wake_at_s=plan.wake_at_s)


class _Turn(Struct, frozen=True):
    """How often a job's lease ended, and when the present one does; None while it waits."""

    count: int = 0
    ends_at_s: float | None = None


class _Memory(Struct, frozen=True, kw_only=True):
    """What AFS-P remembers."""

    turns: dict[JobId, _Turn] = field(default_factory=dict[JobId, _Turn])
    passes: int = 0


class UnknownKnobs(Struct, frozen=True, kw_only=True):
    """lease_s: a job that has run for so long goes behind those that had fewer turns.

    seed: of the choice between two jobs of which neither would surely win.
    """

    lease_s: PositiveFloat = LEASE_S
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
    return found


def _unknown(knobs: UnknownKnobs, snapshot: ClusterSnapshot, blob: bytes) -> Allocation:
    memory = msgspec.msgpack.decode(blob, type=_Memory) if blob else _Memory()
    turns = _turns(knobs, snapshot, memory)
    random = np.random.default_rng([knobs.seed, memory.passes])
    floor = Floor(snapshot)
    grants: list[Grant] = []

    def rank(job: JobView) -> tuple[object, ...]:
        first_s = job.first_started_at_s
        return (
            turns[job.job_id].count,
            first_s is None,
            first_s or 0.0,
            job.submitted_at_s,
            job.job_id,
        )

    for pool in pools(snapshot, floor):
        shares, gpus = base_shares(sorted(pool.jobs, key=rank), pool.gpus, snapshot.now_s)
        share_out(shares, gpus, beats_by_gain(random))
        grants += _grants(shares, "fewest turns first, then efficiency")
    plan = carry_out(snapshot, grants, floor=floor)
    ends_s = [turn.ends_at_s for turn in turns.values() if turn.ends_at_s is not None]
    kept = _Memory(turns=turns, passes=memory.passes + 1)
    wakes_s = [*ends_s, *([plan.wake_at_s] if plan.wake_at_s is not None else [])]
    return Allocation(
        decisions=plan.decisions,
        memory=msgspec.msgpack.encode(kept),
        wake_at_s=min(wakes_s, default=None),
    )


def _held(snapshot: ClusterSnapshot, started: Allocation) -> tuple[Hold, ...]:
    """Jobs that wait and would not start: others have the GPUs as their base gangs."""
    starting = {getattr(decision, "job_id", None) for decision in started.decisions}
    return tuple(
        Hold(
            job_id=job.job_id,
            blockers=(
                f"its base gang of {job.workers.min} workers of {job.gpus_per_worker} GPUs is "
                "behind those of jobs that come before it, which leave too few GPUs",
            ),
        )
        for job in snapshot.jobs
        if job.state == JobState.PENDING and job.job_id not in starting
    )


_PARTS = Parts(
    order="least remaining time", size="pairwise: shortness against efficiency", place="best fit"
)

POLICIES = (
    joint(
        "afs",
        "AFS-L: base gangs of the shortest, then worker by worker to whom pairs favour",
        knobs=NoKnobs(),
        allocate=lambda _, snapshot, __: _known(snapshot, is_exact=True),
        hold=lambda _, snapshot, __: _held(snapshot, _known(snapshot, is_exact=True)),
        parts=_PARTS,
    ),
    joint(
        "afs-p",
        "AFS-P: as AFS without knowing how long jobs are: fewest turns first, leases of two hours",
        knobs=UnknownKnobs(),
        allocate=_unknown,
        hold=lambda knobs, snapshot, memory: _held(snapshot, _unknown(knobs, snapshot, memory)),
        parts=Parts(
            order="fewest leases, then first start",
            size="pairwise by efficiency, chance where open",
            place="best fit",
        ),
    ),
    joint(
        "afs-lyra",
        "AFS as Lyra compares with it: base demand of all, then the most throughput per GPU",
        knobs=NoKnobs(),
        allocate=lambda _, snapshot, __: _known(snapshot, is_exact=False),
        hold=lambda _, snapshot, __: _held(snapshot, _known(snapshot, is_exact=False)),
        parts=Parts(order="least remaining time", size="throughput per GPU", place="best fit"),
    ),
)
