"""Pollux: goodput shared out by a genetic search, once a round (`genetic_search`).

Qiao et al., OSDI'21, section 4. A job's goodput comes from its profile by worker count; the profile
of a job that tunes its batch size includes the tuning. The search is over workers per job, and
`placement` finds nodes for its answer. Where nodes give a job less than its answer, the round asks
for something else and keeps the best result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from common.model import JobId, NonNegativeInt
from coordinator.policies.contract.decisions import Allocation, PendingReason
from coordinator.policies.contract.free_gpus import FreeGpus, consolidated, present_workers
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.contract.text import counted, listed
from coordinator.policies.knobs import Period
from coordinator.policies.parts.blockers_for_all import answers
from coordinator.policies.parts.grants import Grant, Plan
from coordinator.policies.parts.memory import recalled
from coordinator.policies.parts.pooling import Pool, chosen_types, pools
from coordinator.policies.policy import Parts, joint
from coordinator.policies.schedulers.pollux.genetic_search import (
    Problem,
    SearchKnobs,
    search,
)
from coordinator.policies.schedulers.pollux.placement import (
    ApartFloor,
    Parted,
    apart,
    first_to_leave,
    keeping_away,
    parted,
)
from coordinator.policies.schedulers.pollux.rounds import Asking


class PolluxKnobs(SearchKnobs, frozen=True, kw_only=True):
    """Knobs of `pollux`: the search, and when it runs.

    grows_at_most: a job gets at most this many times the most workers it ever had, or times its
        smallest gang at first; null: no limit.
    spans_apart: each node has workers of at most one job that spans nodes.
    round_s: time between two divisions of the GPUs.
    rest_rounds: number of rounds to skip after a round that changed nothing, while jobs and GPUs
        stay the same.
    seed: seed of the search.
    """

    grows_at_most: Annotated[int, Meta(ge=2, le=10_000)] | None = 2
    spans_apart: bool = True
    round_s: Period = 60.0
    rest_rounds: NonNegativeInt = 10
    seed: NonNegativeInt = 0


class _Memory(Struct, frozen=True, kw_only=True):
    """When the next round is due, and how many there were.

    settled: jobs with their workers, and GPUs, at which the last search changed nothing.
    held: the most workers of its range that a job ever had, of those that had more than their
        smallest gang.
    """

    next_s: float = 0.0
    rounds: int = 0
    settled: str = ""
    settled_round: int = 0
    held: dict[JobId, int] = field(default_factory=dict[JobId, int])


def _held(memory: _Memory, snapshot: ClusterSnapshot) -> dict[JobId, int]:
    """The memory from now on; a hidden waiting job is not gone."""
    found = {job: count for job, count in memory.held.items() if job in snapshot.unseen}
    for job in snapshot.jobs:
        factor = job.gpu.worker_multiplier.get(job.gpu_type or "", 1)
        count = max(memory.held.get(job.job_id, 0), present_workers(job) // factor)
        if count > job.workers.min:
            found[job.job_id] = count
    return dict(sorted(found.items()))


def _most(knobs: PolluxKnobs, job: JobView, held: Mapping[JobId, int]) -> int:
    """Workers that a job may have: a curve is good only near the tried sizes (section 4.1)."""
    if knobs.grows_at_most is None:
        return job.workers.max
    count = held.get(job.job_id, job.workers.min)
    return min(job.workers.max, count if _is_new(job, held) else knobs.grows_at_most * count)


def _is_new(job: JobView, held: Mapping[JobId, int]) -> bool:
    """Whether it never had a worker."""
    return job.attempt.first_started_at_s is None and not job.placed and job.job_id not in held


class _Round:
    """One round over all pools, from a snapshot without clashes that a job could end."""

    def __init__(
        self, knobs: PolluxKnobs, snapshot: ClusterSnapshot, held: Mapping[JobId, int]
    ) -> None:
        self._knobs = knobs
        self._held = held
        self._seen = snapshot
        nobody = Parted(decisions=(), left=snapshot, gone=())
        self.parted = parted(snapshot) if knobs.spans_apart else nobody
        found = pools(self.parted.left, self._floor(), resizes=True)
        self.pools = [pool for pool in found if pool.jobs]

    def _floor(self) -> FreeGpus:
        floor = (ApartFloor if self._knobs.spans_apart else FreeGpus)(self._seen)
        floor.vacate(self.parted.gone)
        return floor

    def plan(self, random: np.random.Generator) -> Plan:
        """The best that the search and the nodes find."""
        left = self.parted.left
        problems = [
            Problem(
                self._knobs,
                pool,
                left.now_s,
                [_most(self._knobs, job, self._held) for job in pool.jobs],
            )
            for pool in self.pools
        ]
        asking = Asking(
            snapshot=left,
            pools=self.pools,
            problems=problems,
            floor=self._floor,
            place=apart if self._knobs.spans_apart else consolidated,
            grant=self._grant,
        )
        return asking.best([search(each, self._knobs, random) for each in problems]).plan

    def _grant(self, pool: Pool, job: JobView, count: int) -> Grant:
        most = ""
        if count == _most(self._knobs, job, self._held) < job.workers.max:
            most = f"; {_limit(self._knobs, job, self._held)}"
        workers = count * pool.factor(job)
        leaving = first_to_leave(job, max(0, present_workers(job) - workers))
        return Grant(
            job=job,
            workers=workers,
            leaving=leaving,
            gpu_type=pool.gpu_type,
            reason=f"{counted(count, 'worker is', 'workers are')} its share of this round: "
            f"most goodput for all{most}",
        )


def _limit(knobs: PolluxKnobs, job: JobView, held: Mapping[JobId, int]) -> str:
    """Why it may have no more workers, of a job that may have fewer than its range says."""
    if _is_new(job, held):
        return "it begins with its smallest gang"
    count = held.get(job.job_id, job.workers.min)
    return f"at most {knobs.grows_at_most} times the {count} that it ever had"


def _allocate(knobs: PolluxKnobs, snapshot: ClusterSnapshot, blob: bytes) -> Allocation:
    memory = recalled(blob, _Memory)
    if not snapshot.jobs:
        return Allocation(decisions=(), memory=blob)
    held = _held(memory, snapshot)
    if snapshot.now_s < memory.next_s:
        if held != memory.held:
            blob = msgspec.msgpack.encode(replace(memory, held=held))
        return Allocation(decisions=(), memory=blob, wake_at_s=memory.next_s)
    kept = replace(
        memory, next_s=snapshot.now_s + knobs.round_s, rounds=memory.rounds + 1, held=held
    )
    this = _Round(knobs, snapshot, held)
    here = _fingerprint(this.pools)
    is_settled = here == memory.settled and not this.parted.decisions
    if is_settled and memory.rounds - memory.settled_round <= knobs.rest_rounds:
        return Allocation(decisions=(), memory=msgspec.msgpack.encode(kept), wake_at_s=kept.next_s)
    plan = this.plan(np.random.default_rng([knobs.seed, memory.rounds]))
    decisions = (*this.parted.decisions, *plan.decisions)
    # A job that may not be resized yet may be by the next round.
    settled = "" if decisions or plan.wake_at_s is not None else here
    kept = replace(kept, settled=settled, settled_round=memory.rounds)
    return Allocation(
        decisions=decisions, memory=msgspec.msgpack.encode(kept), wake_at_s=kept.next_s
    )


def _fingerprint(shared: Sequence[Pool]) -> str:
    """The inputs of a search, ages aside."""
    parts = [
        f"{pool.gpu_type} {pool.gpus} "
        + " ".join(f"{job.job_id}:{present_workers(job)}" for job in pool.jobs)
        for pool in shared
    ]
    return sha256(";".join(parts).encode()).hexdigest()[:16]


def _hold(knobs: PolluxKnobs, snapshot: ClusterSnapshot, blob: bytes) -> tuple[PendingReason, ...]:
    memory = recalled(blob, _Memory)
    left_s = max(0.0, memory.next_s - snapshot.now_s)
    when = f"GPUs are shared out once in {knobs.round_s:g} s, next in {left_s:.0f} s"
    floor = ApartFloor(snapshot)
    chosen = chosen_types(snapshot, floor)

    def why(job: JobView) -> str:
        if away := _kept_away(knobs, floor, job):
            return away
        if job.submitted_at_s + knobs.round_s > memory.next_s:
            return "it came after the last round"
        return "the last round gave its GPUs to jobs that make more of them"

    notes = {job.job_id: f"{when}; {why(job)}" for job in snapshot.jobs if job.job_id in chosen}
    return answers(snapshot, (), (), notes)


def _kept_away(knobs: PolluxKnobs, floor: ApartFloor, job: JobView) -> str:
    """The jobs that keep a job from nodes for its gang or one more worker; empty: none by that
    rule.
    """
    kinds = (job.gpu_type,) if job.gpu_type else job.gpu.types or floor.gpu_types
    for kind in kinds if knobs.spans_apart else ():
        count = 1 if job.placed else job.workers_on(kind).min
        if others := keeping_away(floor, job, kind, count):
            return (
                f"{listed(others, 'has', 'have')} workers on several nodes where it would have "
                "some too, and at most one job over several nodes has workers on each"
            )
    return ""


def _tell(
    knobs: PolluxKnobs, snapshot: ClusterSnapshot, blob: bytes, job_id: JobId
) -> tuple[str, ...]:
    """What keeps a job that could grow from more workers, apart from their worth."""
    job = next((job for job in snapshot.jobs if job.job_id == job_id), None)
    if job is None or not job.is_resizable or job.gpu_type is None:
        return ()
    if present_workers(job) >= job.workers_on(job.gpu_type).max:
        return ()
    held, said = _held(recalled(blob, _Memory), snapshot), list[str]()
    if (most := _most(knobs, job, held)) < job.workers.max:
        limit = _limit(knobs, job, held)
        said.append(f"next round it may have {counted(most, 'worker')}: {limit}")
    if away := _kept_away(knobs, ApartFloor(snapshot), job):
        said.append(f"it has no room for more workers now: {away}")
    return tuple(said)


POLICIES = (
    joint(
        "pollux",
        "maximise goodput over that of a fair share, by genetic search, in rounds",
        knobs=PolluxKnobs(),
        allocate=_allocate,
        pending_reasons=_hold,
        standing=_tell,
        is_ordered=False,
        parts=Parts(
            order="none",
            size="genetic search over goodput",
            place="fewest nodes, at most one multi-node job on each",
        ),
    ),
)
