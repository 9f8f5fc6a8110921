"""A pass that nobody needs is cut short, and nothing else is: the long way decides the same."""

from __future__ import annotations

from hypothesis import given
from msgspec.structs import replace

from common.model import JobState
from coordinator.policies.contract.decisions import Allocation
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.registry import POLICIES, Policy
from tests.harness.builders import (
    NOW_S,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.strategies import snapshots

ARYL = POLICIES["aryl"]


STRANGER = make_job_view("z", types=("no such type",), submitted_at_s=NOW_S)
"""Waits, can start nowhere and is in nobody's way: with it no pass is cut short."""


def the_long_way(policy: Policy, snapshot: ClusterSnapshot) -> Allocation:
    """What a pass decides that looks at everything."""
    return policy.allocate(replace(snapshot, jobs=(*snapshot.jobs, STRANGER)), b"")


def wide(flexible: int, *, resized_at_s: float | None = None) -> tuple[NodeView, JobView]:
    """A running job of one base worker and up to two flexible ones, on a node with room."""
    workers = [
        make_worker_view("wide", number, "n1", gpus=2, is_flexible=number > 0)
        for number in range(1 + flexible)
    ]
    node = make_node_view("n1", gpus=8, workers=workers)
    job = make_job_view(
        "wide",
        state=JobState.RUNNING,
        workers=(1, 3),
        gpus_per_worker=2,
        remaining_work_s=10_000.0,
        gpu_type=node.gpu_type,
        placed=workers,
        resizes_latest_at_s=resized_at_s,
    )
    return node, job


@given(snapshots())
def test_a_pass_that_is_cut_short_decides_the_same(snapshot: ClusterSnapshot) -> None:
    """Nobody waits: the decisions, and when the next pass is wanted, are those of the long way."""
    running = tuple(job for job in snapshot.jobs if job.state != JobState.PENDING)
    quiet = replace(snapshot, jobs=running)
    for policy in (ARYL, POLICIES["fifo"], POLICIES["aryl-elastic"]):
        assert policy.allocate(quiet, b"") == the_long_way(policy, quiet)


def test_a_job_that_can_grow_does() -> None:
    """Nobody waits, one flexible worker is missing and there is room: it is added."""
    node, job = wide(1)
    [resize] = ARYL.allocate(make_snapshot(nodes=[node], jobs=[job]), b"").decisions
    assert resize.reason.startswith("grows")


def test_a_job_that_has_all_still_says_when_it_has_rested() -> None:
    """A pass that is cut short asks for the next one at the end of a cooldown."""
    node, job = wide(2, resized_at_s=NOW_S - 10.0)
    snapshot = make_snapshot(nodes=[node], jobs=[job], resize_cooldown_s=60.0)
    found = ARYL.allocate(snapshot, b"")
    assert (found.decisions, found.wake_at_s) == ((), NOW_S + 50.0)
    assert found == the_long_way(ARYL, snapshot)
