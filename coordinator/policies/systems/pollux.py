"""Pollux: goodput shared out by a genetic search, once a round (`goodput_search`).

Qiao et al., OSDI'21, section 4.2. A job's goodput is what its profile says of so many workers: a
job that tunes its batch size tells a curve with that in it. The search is over workers per job;
nodes come after it, as consolidated as there is room, so that the paper's rules of interference (at
most one job over several nodes on each) hold only as far as that goes. Must not know the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from common.model import JobState, NonNegativeInt
from coordinator.policies.blockers import Hold
from coordinator.policies.decisions import Allocation
from coordinator.policies.dividing.goodput_search import Problem, SearchKnobs, search
from coordinator.policies.floor import Floor, Pool, consolidated, pools, present_workers
from coordinator.policies.granting import Grant, carry_out
from coordinator.policies.knob_types import Period
from coordinator.policies.policy import Parts, joint
from coordinator.policies.recall import recalled
from coordinator.policies.snapshot import ClusterSnapshot
from coordinator.policies.words import counted


class PolluxKnobs(SearchKnobs, frozen=True, kw_only=True):
    """The search, and when there is one.

    round_s: GPUs are shared out anew so often.
    rest_rounds: a round that changed nothing is good for so many more, while jobs and GPUs stay.
    seed: of the search.
    """

    round_s: Period = 60.0
    rest_rounds: NonNegativeInt = 10
    seed: NonNegativeInt = 0


class _Memory(Struct, frozen=True, kw_only=True):
    """When the next round is due, and how many there were.

    settled: jobs with their workers, and GPUs, at which the last search changed nothing.
    """

    next_s: float = 0.0
    rounds: int = 0
    settled: str = ""
    settled_round: int = 0


def _grants(
    knobs: PolluxKnobs, pool: Pool, now_s: float, random: np.random.Generator
) -> Sequence[Grant]:
    if not pool.jobs:
        return ()
    found = search(Problem(knobs, pool, now_s), knobs, random)
    return [
        Grant(
            job=job,
            workers=int(count),
            gpu_type=pool.gpu_type,
            reason=f"{counted(int(count), 'worker is', 'workers are')} its share of this round: "
            "most goodput for all",
        )
        for job, count in zip(pool.jobs, found, strict=True)
        if count
    ]


def _allocate(knobs: PolluxKnobs, snapshot: ClusterSnapshot, blob: bytes) -> Allocation:
    memory = recalled(blob, _Memory)
    if not snapshot.jobs:
        return Allocation(decisions=(), memory=blob)
    if snapshot.now_s < memory.next_s:
        return Allocation(decisions=(), memory=blob, wake_at_s=memory.next_s)
    floor = Floor(snapshot)
    shared = pools(snapshot, floor)
    kept = replace(memory, next_s=snapshot.now_s + knobs.round_s, rounds=memory.rounds + 1)
    here = _fingerprint(shared)
    is_settled = here == memory.settled
    if is_settled and memory.rounds - memory.settled_round <= knobs.rest_rounds:
        return Allocation(decisions=(), memory=msgspec.msgpack.encode(kept), wake_at_s=kept.next_s)
    random = np.random.default_rng([knobs.seed, memory.rounds])
    grants: list[Grant] = []
    for pool in shared:
        grants += _grants(knobs, pool, snapshot.now_s, random)
    plan = carry_out(snapshot, grants, floor=floor, place=consolidated)
    settled = "" if plan.decisions else here
    kept = replace(kept, settled=settled, settled_round=memory.rounds)
    return Allocation(
        decisions=plan.decisions, memory=msgspec.msgpack.encode(kept), wake_at_s=kept.next_s
    )


def _fingerprint(shared: Sequence[Pool]) -> str:
    """What a search answers to, ages aside."""
    parts = [
        f"{pool.gpu_type} {pool.gpus} "
        + " ".join(f"{job.job_id}:{present_workers(job)}" for job in pool.jobs)
        for pool in shared
    ]
    return sha256(";".join(parts).encode()).hexdigest()[:16]


def _hold(knobs: PolluxKnobs, snapshot: ClusterSnapshot, blob: bytes) -> tuple[Hold, ...]:
    memory = recalled(blob, _Memory)
    left_s = max(0.0, memory.next_s - snapshot.now_s)
    return tuple(
        Hold(
            job_id=job.job_id,
            blockers=(
                f"GPUs are shared out once in {knobs.round_s:g} s, next in {left_s:.0f} s; the "
                "last round gave its GPUs to jobs that make more of them",
            ),
        )
        for job in snapshot.jobs
        if job.state == JobState.PENDING
    )


POLICIES = (
    joint(
        "pollux",
        "shares that maximise goodput over a fair share's, by genetic search, in rounds",
        knobs=PolluxKnobs(),
        allocate=_allocate,
        hold=_hold,
        parts=Parts(order="none", size="genetic search over goodput", place="fewest nodes"),
    ),
)
