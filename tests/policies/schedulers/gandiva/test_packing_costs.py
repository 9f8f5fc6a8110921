"""What packing trials of Gandiva cost a pass, in calls, where many wait beside many: no job is held
against each other one, and nothing else comes of that."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId
from common.profile import JobProfile
from coordinator.policies.contract.decisions import Decision, Migrate, Resume
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.schedulers.gandiva.packing import Mark, Pair, pair_key
from coordinator.policies.schedulers.gandiva.policy import Knobs, Memory, allocate
from tests.draws import pick, together, whole, yes_or_no
from tests.harness.builders import job_with
from tests.policies.counted_calls import calls
from tests.policies.schedulers.gandiva.test_policy_costs import GPUS, apart, cell, seated

HAS_BYTES = 80
"""Of each GPU where it is known."""


def measured(job: JobView, *, busy: float = 0.5, needs_bytes: int | None = None) -> JobView:
    """One of which all is known that a trial asks for."""
    profile = JobProfile(gpu_busy_ratio=busy, gpu_memory_bytes=needs_bytes)
    return job_with(job, profile=profile, progress_step=100, progress_step_gpu_s=100.0)


def memory_of(snapshot: ClusterSnapshot, tried: Sequence[tuple[JobView, JobView]] = ()) -> bytes:
    """What was measured of all jobs alone, and which two did not go together."""
    marks = {
        job.job_id: Mark(attempt=0, step=100, gpu_s=100.0, is_packed=False, alone_rate=1.0)
        for job in snapshot.jobs
    }
    pairs = {
        pair_key(one.job_id, other.job_id): Pair(since_s=0.0, gain=0.5) for one, other in tried
    }
    return msgspec.msgpack.encode(Memory(marks=marks, pairs=pairs))


def trials(snapshot: ClusterSnapshot, memory: bytes, knobs: Knobs) -> dict[JobId, Decision]:
    """Who is packed, and how."""
    return {
        made.job_id: made
        for made in allocate(knobs, snapshot, memory).decisions
        if isinstance(made, Resume | Migrate) and made.is_packed
    }


# --- cost ---------------------------------------------------------------------------------------


def crowd(nodes: int, *, rested: bool, needs_bytes: int) -> ClusterSnapshot:
    """On each GPU one that computes and one that waits for its turn."""
    jobs = [
        measured(
            seated(f"{name}{node}-{gpu}", [(f"n{node}", gpu)], computes=name == "r", rested=rested),
            needs_bytes=needs_bytes,
        )
        for node in range(nodes)
        for gpu in range(GPUS)
        for name in "rs"
    ]
    found = cell(jobs, nodes)
    has = tuple(replace(node, gpu_memory_bytes=HAS_BYTES) for node in found.nodes)
    return replace(found, nodes=has)


def cost(nodes: int, knobs: Knobs, *, rested: bool, needs_bytes: int) -> int:
    """Calls of a pass where the two of each GPU were tried in vain."""
    snapshot = crowd(nodes, rested=rested, needs_bytes=needs_bytes)
    jobs = {job.job_id: job for job in snapshot.jobs}
    tried = [
        (job, jobs[JobId(name.replace("r", "s"))])
        for name, job in jobs.items()
        if name.startswith("r")
    ]
    memory = memory_of(snapshot, tried)
    assert not trials(snapshot, memory, knobs)
    return calls(lambda: allocate(knobs, snapshot, memory))


@pytest.mark.parametrize(
    ("knobs", "rested", "needs_bytes"),
    [
        (Knobs(), False, 10),
        (Knobs(migrates=False), True, 10),
        (Knobs(), True, HAS_BYTES - 10),
    ],
    ids=["who rests", "who is never moved", "who has no room"],
)
def test_a_trial_that_nobody_may_have_is_not_looked_for_on_every_gpu(
    knobs: Knobs, rested: bool, needs_bytes: int
) -> None:
    """On twice as many GPUs with twice as many jobs a pass costs about twice as much."""

    def needed(nodes: int) -> int:
        return cost(nodes, knobs, rested=rested, needs_bytes=needs_bytes)

    needed(2)  # once whatever is only made once was made
    assert needed(32) < 2.5 * needed(16)


# --- nothing else comes of it -------------------------------------------------------------------


MEASURED = together((True, False), ("a", "b"), (0.1, 0.5, 0.9), (10, 30, 50, 70, None))
SEATS = together((1, 1, 2), (True, False))
TRIED_EACH = [(False, False, False, True)] * 30
TRIED = together(*TRIED_EACH)
"""Of 30 pairs each: whether they were tried already."""


@st.composite
def halls(draw: st.DrawFn) -> tuple[ClusterSnapshot, bytes]:
    """Gangs of one and two workers on GPUs of their own or of others, some of which were tried."""
    count, tenants = draw(whole(1, 3)), draw(yes_or_no())

    def one(name: str, seat: Sequence[tuple[str, int]], *, computes: bool) -> JobView:
        rested, tenant, busy, needs = draw(MEASURED)
        job = seated(name, seat, computes=computes, rested=rested, tenant=tenant)
        return measured(job, busy=busy, needs_bytes=needs)

    jobs: list[JobView] = []
    for node in range(count):
        left = [(f"n{node}", gpu) for gpu in range(GPUS)]
        while left:
            size, is_shared = draw(SEATS)
            seat, left = left[:size], left[size:]
            jobs.append(one(f"r{len(jobs):02}", seat, computes=True))
            if is_shared:
                jobs.append(one(f"s{len(jobs):02}", seat, computes=False))
    found = cell(jobs, count, tenants=("a", "b") if tenants else ())
    has = tuple(replace(node, gpu_memory_bytes=draw(pick(HAS_BYTES, 0))) for node in found.nodes)
    pairs = list(combinations(jobs, 2))
    drawn = [was for _ in range(-(-len(pairs) // len(TRIED_EACH))) for was in draw(TRIED)]
    tried = [pair for pair, was in zip(pairs, drawn, strict=False) if was]
    return replace(found, nodes=has), memory_of(found, tried)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(halls())
def test_jobs_of_one_shape_are_tried_as_if_each_looked_at_every_gpu(
    hall: tuple[ClusterSnapshot, bytes],
) -> None:
    """What is remembered of a shape holds for all of it and as long as it is true."""
    snapshot, memory = hall
    together = trials(snapshot, memory, Knobs())
    assume(together)
    assert together == trials(apart(snapshot), memory, Knobs())
