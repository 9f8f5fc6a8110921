"""EDF, QoS and ElasticFlow: which job is served first, which is promised first, and when a plan is
looked at again."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from common.model import JobState
from coordinator.policies.contract.decisions import Reject, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import policy
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)

FLOW = "qos-elasticflow:margin=1"


def wants(
    name: str,
    work_s: float,
    deadline_s: float | None,
    *,
    waited_s: float = 100.0,
    workers: tuple[int, int] = (1, 8),
    gpus: int = 1,
) -> JobView:
    """A job that waits; its deadline is so far from now."""
    job = make_job_view(
        name,
        workers=workers,
        gpus_per_worker=gpus,
        remaining_work_s=work_s,
        submitted_at_s=NOW_S - waited_s,
    )
    return job_with(
        job,
        deadline_at_s=None if deadline_s is None else NOW_S + deadline_s,
        estimated_left_s=work_s,
        as_of_s=NOW_S,
    )


def idle(jobs: Iterable[JobView], *, gpus: int = 8, at_s: float = NOW_S) -> ClusterSnapshot:
    """One idle node, and these jobs."""
    return make_snapshot(nodes=[make_node_view("n0", gpus=gpus)], jobs=jobs, now_s=at_s)


def started(name: str, *jobs: JobView, gpus: int = 8) -> list[str]:
    """Who starts in a pass."""
    found = policy(name).allocate(idle(jobs, gpus=gpus), b"").decisions
    return [each.job_id for each in found if isinstance(each, Start)]


def rejected(name: str, *jobs: JobView, gpus: int = 8) -> list[str]:
    """Who is refused in a pass."""
    found = policy(name).allocate(idle(jobs, gpus=gpus), b"").decisions
    return [each.job_id for each in found if isinstance(each, Reject)]


# --- EDF ----------------------------------------------------------------------------------------


def test_edf_serves_the_earliest_deadline_whoever_came_first() -> None:
    """Submission parts equal deadlines only, and who has none is last."""
    late = wants("a", 10.0, 300.0, waited_s=900.0, gpus=8)
    soon = wants("b", 10.0, 100.0, waited_s=1.0, gpus=8)
    never = wants("c", 10.0, None, waited_s=9999.0, gpus=8)
    assert started("qos-edf", late, soon, never) == ["b"]
    assert started("qos-edf", late, never) == ["a"]
    first = wants("z", 10.0, 300.0, waited_s=901.0, gpus=8)
    assert started("qos-edf", late, first) == ["z"]


# --- QoS ----------------------------------------------------------------------------------------


def test_what_is_left_goes_first_to_who_can_still_be_in_time() -> None:
    """Two want all eight GPUs for their deadlines and one is left out: it, and not the hopeless
    one or the one without a deadline, has the first of what others leave."""
    rigid = (4, 4)
    admitted = wants("admitted", 400.0, 150.0, workers=rigid)
    left_out = wants("z-left-out", 1600.0, 450.0, workers=(8, 8))
    hopeless = wants("a-hopeless", 9e6, 10.0, workers=rigid)
    free = wants("b-free", 10.0, None, workers=rigid)
    assert started("qos:margin=1", admitted, hopeless, free) == ["admitted", "a-hopeless"]
    small = wants("z-left-out", 2400.0, 350.0, workers=(4, 8))
    # It needs seven GPUs to be in time, so not beside the other; four of them are its base gang.
    found = started("qos:margin=1", admitted, small, hopeless, free)
    assert found == ["admitted", "z-left-out"]
    assert started("qos:margin=1", left_out, hopeless, free) == ["z-left-out"]


def test_of_those_that_cannot_be_in_time_who_runs_goes_on() -> None:
    """A hopeless job that waits stops nobody, though its deadline is older than the other's."""
    runs = wants("runs", 9e6, 50.0, workers=(8, 8))
    placed = tuple(make_worker_view("runs", number, "n0") for number in range(8))
    runs = replace(runs, state=JobState.RUNNING, gpu_type="H100", placed=placed)
    waits = wants("waits", 9e8, 5.0, workers=(8, 8))
    node = make_node_view("n0", workers=placed)
    snapshot = make_snapshot(nodes=[node], jobs=[runs, waits])
    assert policy("qos:margin=1").allocate(snapshot, b"").decisions == ()


# --- ElasticFlow --------------------------------------------------------------------------------


def test_newcomers_are_admitted_in_order_of_submission() -> None:
    """Either of two fits alone: the one that came first is promised, the other is refused."""
    early = wants("z", 80.0, 10.5, waited_s=50.0, workers=(8, 8))
    late = wants("a", 80.0, 10.4, waited_s=5.0, workers=(8, 8))
    assert rejected(FLOW, early, late) == ["a"]
    assert rejected(FLOW, early) == rejected(FLOW, late) == []


def test_jobs_without_a_promise_stand_by_their_deadline() -> None:
    """Where nobody is refused, the nearest deadline that cannot be met comes before the next."""
    text = f"{FLOW}:rejects=false"
    jobs = [
        wants("a", 9e6, None, workers=(8, 8)),
        wants("b", 9e6, 90.0, workers=(8, 8)),
        wants("c", 9e6, 30.0, workers=(8, 8)),
    ]
    assert started(text, *jobs) == ["c"]
    assert started(text, *jobs[:2]) == ["b"]


def test_a_round_ends_early_where_a_plan_says_that_something_changes() -> None:
    """A promised start in the midst of a round is kept: the pass at that instant settles anew."""
    text = f"{FLOW}:round_s=100000"
    first = wants("a", 400.0, 50.5, workers=(8, 8))
    second = wants("b", 400.0, 105.0, workers=(8, 8))
    made = policy(text)
    before = made.allocate(idle([first, second]), b"")
    assert before.wake_at_s is not None
    assert before.wake_at_s < NOW_S + 100_000.0
    between = made.allocate(idle([second], at_s=before.wake_at_s - 0.1), before.memory)
    assert between.decisions == ()
    due = made.allocate(idle([second], at_s=before.wake_at_s), before.memory)
    assert [each.job_id for each in due.decisions if isinstance(each, Start)] == ["b"]
