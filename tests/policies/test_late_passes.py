"""A live coordinator wakes a little late; what was due then is done all the same."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import JobState
from coordinator.policies.contract.decisions import Allocation, Decision, Preempt, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.registry import policy
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.tables import each_row

IN_TURNS = ("las", "themis-lp", "themis", "afs-p", "tiresias:limits=600")
LATE_S = 0.25
"""Above what coalescing and a busy machine add to a wake."""


def pool(running: tuple[str, ...], waiting: tuple[str, ...], *, now_s: float) -> ClusterSnapshot:
    """One node of two GPUs, all of them held by jobs that began at NOW_S."""
    workers = {name: make_worker_view(name, 0, "n1", gpus=1) for name in running}
    jobs = [
        job_with(
            make_job_view(name, state=JobState.RUNNING, gpu_type="H100", placed=[worker]),
            started_at_s=NOW_S,
            first_started_at_s=NOW_S,
            as_of_s=NOW_S,
            work_rate=1.0,
            computing_gpus=1.0,
            whole_work_s=7200.0,
            remaining_work_s=7200.0,
            submitted_at_s=NOW_S,
        )
        for name, worker in workers.items()
    ]
    jobs += [replace(make_job_view(name), submitted_at_s=NOW_S - 900.0) for name in waiting]
    node = make_node_view("n1", gpus=2, workers=list(workers.values()))
    return make_snapshot(nodes=[node], jobs=jobs, now_s=now_s)


def whom(decisions: tuple[Decision, ...]) -> list[tuple[type, str]]:
    """Kinds of decisions, and the jobs that they are about."""
    return [(type(each), each.job_id) for each in decisions if isinstance(each, Preempt | Start)]


def turns_at(name: str, late_s: float) -> tuple[str, list[tuple[type, str]], Allocation]:
    """Of three jobs for two GPUs: who waits at first, and what is decided when it is time."""
    made = policy(name)
    first = made.allocate(pool((), ("a", "b", "c"), now_s=NOW_S), b"")
    run = sorted(job_id for kind, job_id in whom(first.decisions) if kind is Start)
    (waits,) = {"a", "b", "c"} - set(run)
    held = made.allocate(pool(tuple(run), (waits,), now_s=NOW_S + 1.0), first.memory)
    assert held.wake_at_s is not None
    due = pool(tuple(run), (waits,), now_s=held.wake_at_s + late_s)
    found = made.allocate(due, held.memory)
    return waits, whom(found.decisions), found


@each_row("name", IN_TURNS)
def test_a_turn_that_is_due_is_taken_in_a_late_pass_too(name: str) -> None:
    """The one that waits gets its turn, as it would have at the very instant."""
    waits, in_time, _ = turns_at(name, 0.0)
    assert (Start, waits) in in_time
    _, late, found = turns_at(name, LATE_S)
    assert late == in_time
    assert found.wake_at_s is None or found.wake_at_s > NOW_S + LATE_S


@pytest.mark.parametrize("name", ["las", "themis-lp"])
def test_a_newcomer_does_not_begin_a_round_that_nobody_waited_for(name: str) -> None:
    """Rounds follow each other from the first one on, whenever somebody comes."""
    made = policy(name)
    before = made.allocate(pool((), ("a", "b"), now_s=NOW_S), b"")
    assert before.wake_at_s is not None
    length_s = before.wake_at_s - NOW_S
    alone = made.allocate(pool(("a", "b"), (), now_s=NOW_S + 1.0), before.memory)
    assert alone.wake_at_s is None
    mid_s = NOW_S + 2.5 * length_s
    found = made.allocate(pool(("a", "b"), ("c",), now_s=mid_s), alone.memory)
    assert found.decisions == ()
    assert found.wake_at_s == pytest.approx(NOW_S + 3.0 * length_s)
