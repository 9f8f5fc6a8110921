"""A line of jobs on real nodes: whoever stands before another gets the GPUs that both could use."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.model import JobState, NodeName
from coordinator.policies.aryl.shortest_first import submission_key
from coordinator.policies.contract.free_gpus import FreeGpus, best_fit, consolidated, first_fit
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.parts.priority_line import Turns, takes_turns
from tests.harness.builders import (
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.strategies import snapshots

often = settings(max_examples=100, deadline=None)


def why(job: JobView) -> str:
    """A reason for tests."""
    return f"place of {job.job_id}"


def line_of(snapshot: ClusterSnapshot) -> list[JobView]:
    """Everybody that takes turns, by submission."""
    return sorted(filter(takes_turns, snapshot.jobs), key=submission_key)


@often
@given(snapshot=snapshots())
def test_nobody_behind_keeps_what_a_job_before_could_start_on(snapshot: ClusterSnapshot) -> None:
    """A job that waits would not fit even if all behind it gave their GPUs back."""
    line = line_of(snapshot)
    turns = Turns(snapshot, line, why)
    granted = {grant.job.job_id: grant for grant in turns.grants}
    for job, _ in turns.held:
        floor = FreeGpus(snapshot)
        floor.avoided = job.nodes.avoided
        for other in line[: line.index(job)]:
            grant = granted.get(other.job_id)
            if grant is not None and grant.placements is not None:
                floor.take(grant.placements, other.gpus_per_worker)
        for other in line:
            if other.job_id not in granted or line.index(other) > line.index(job):
                floor.vacate(other.placed)
        for gpu_type in job.gpu.types or floor.gpu_types:
            need = job.workers_on(gpu_type).min
            room = sum(floor.rooms(gpu_type, job.gpus_per_worker).values())
            assert room < need


@often
@given(snapshot=snapshots())
def test_everybody_in_line_is_granted_dropped_or_held(snapshot: ClusterSnapshot) -> None:
    """Who waits is granted or held, who runs is granted where it is or not at all, in order."""
    line = line_of(snapshot)
    turns = Turns(snapshot, line, why)
    places = [line.index(grant.job) for grant in turns.grants]
    assert places == sorted(places)
    waits = [job.job_id for job in line if job.state == JobState.PENDING]
    started = [g.job.job_id for g in turns.grants if g.job.state == JobState.PENDING]
    assert sorted([*started, *(job.job_id for job, _ in turns.held)]) == sorted(waits)
    assert all((g.placements is None) == (g.job.state == JobState.RUNNING) for g in turns.grants)


@often
@given(
    sizes=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3)), min_size=2, max_size=9),
    gang=st.tuples(st.integers(1, 4), st.integers(1, 2)),
)
def test_the_last_in_line_make_room_and_none_of_them_in_vain(
    sizes: list[tuple[str, int]], gang: tuple[int, int]
) -> None:
    """Those behind the first who is stopped would not do without it, nor all who are stopped
    without any one of them."""
    workers = [
        make_worker_view(f"j{n}", 0, node, gpus=gpus) for n, (node, gpus) in enumerate(sizes)
    ]
    nodes = [
        make_node_view(name, gpus=32, free_gpus=0, workers=[w for w in workers if w.node == name])
        for name in "abc"
    ]
    line = [
        make_job_view(each.job_id, state=JobState.RUNNING, gpus_per_worker=each.gpus, placed=[each])
        for each in workers
    ]
    waits = make_job_view("waits", workers=(gang[0], gang[0]), gpus_per_worker=gang[1])
    snapshot = make_snapshot(nodes=nodes, jobs=[*line, waits])
    turns = Turns(snapshot, [waits, *line], why)
    granted = {grant.job.job_id for grant in turns.grants}
    stopped = [job for job in line if job.job_id not in granted]
    if stopped:
        behind = line[line.index(stopped[0]) + 1 :]
        without_one = ([job for job in stopped if job is not spared] for spared in stopped)
        assert not any(fits(snapshot, waits, gone) for gone in (behind, *without_one))


def fits(snapshot: ClusterSnapshot, waits: JobView, gone: list[JobView]) -> bool:
    """Whether a gang has room once these are gone."""
    floor = FreeGpus(snapshot)
    for job in gone:
        floor.vacate(job.placed)
    return first_fit(floor, waits) is not None


def test_whoever_stands_before_another_that_would_do_goes_on() -> None:
    """Both nodes would do for the one that waits: the job that is last in line leaves its own."""
    placed = {
        name: make_worker_view(name, 0, node, gpus=4) for name, node in (("a", "n0"), ("b", "n1"))
    }
    snapshot = make_snapshot(
        nodes=[make_node_view(each.node, gpus=4, workers=[each]) for each in placed.values()],
        jobs=[
            make_job_view(name, state=JobState.RUNNING, gpus_per_worker=4, placed=[each])
            for name, each in placed.items()
        ]
        + [make_job_view("waits", gpus_per_worker=4)],
    )
    a, b, waits = snapshot.jobs
    for first, last in ((a, b), (b, a)):
        turns = Turns(snapshot, [waits, first, last], why)
        assert [grant.job for grant in turns.grants] == [waits, first]


def test_what_one_that_goes_leaves_over_is_taken_before_another_goes() -> None:
    """Six of eight GPUs are for the first that waits, the two others for the second: the last in
    line, who has two elsewhere, goes on."""
    placed = {
        name: make_worker_view(name, 0, node, gpus=gpus)
        for name, node, gpus in (("goes", "n0", 8), ("last", "n1", 2), ("fixed", "n1", 6))
    }
    runs = {
        name: make_job_view(
            name, state=JobState.RUNNING, gpus_per_worker=worker.gpus, placed=[worker]
        )
        for name, worker in placed.items()
    }
    six, two = (make_job_view(f"w{gpus}", gpus_per_worker=gpus) for gpus in (6, 2))
    nodes = [
        make_node_view(name, gpus=8, workers=[w for w in placed.values() if w.node == name])
        for name in ("n0", "n1")
    ]
    snapshot = make_snapshot(nodes=nodes, jobs=[*runs.values(), six, two])
    line = [runs["fixed"], six, two, runs["goes"], runs["last"]]
    turns = Turns(snapshot, line, why)
    assert [grant.job.job_id for grant in turns.grants] == ["fixed", "w6", "w2", "last"]


def test_free_gpus_come_before_those_of_jobs_behind() -> None:
    """Nobody makes room while another node has it."""
    worker = make_worker_view("runs", 0, "n0", gpus=4)
    snapshot = make_snapshot(
        nodes=[make_node_view("n0", gpus=4, workers=[worker]), make_node_view("n1", gpus=4)],
        jobs=[
            make_job_view("runs", state=JobState.RUNNING, gpus_per_worker=4, placed=[worker]),
            make_job_view("waits", gpus_per_worker=4),
        ],
    )
    jobs = {job.job_id: job for job in snapshot.jobs}
    turns = Turns(snapshot, [jobs["waits"], jobs["runs"]], why)  # type: ignore[index]
    assert [grant.job.job_id for grant in turns.grants] == ["waits", "runs"]
    placements = turns.grants[0].placements
    assert placements is not None
    assert [placement.node for placement in placements] == [NodeName("n1")]


def test_jobs_of_one_shape_that_are_placed_otherwise_fail_apart() -> None:
    """That a gang finds no single node says nothing of its like that may be spread."""
    nodes = [make_node_view(name, gpus=2) for name in ("n0", "n1")]
    first, second = (make_job_view(name, workers=(3, 3)) for name in ("a", "b"))
    snapshot = make_snapshot(nodes=nodes, jobs=[first, second])

    def nowhere(floor: FreeGpus, job: JobView, gpu_type: str, count: int) -> tuple[()]:
        return ()

    turns = Turns(snapshot, [first, second], why, lambda job: nowhere if job is first else best_fit)
    assert [grant.job.job_id for grant in turns.grants] == ["b"]
    assert turns.held == [(first, 0)]


def test_a_placing_rule_is_asked_for_each_start() -> None:
    """Consolidated, a gang goes to the one node that holds it, past a fuller one."""
    held = make_worker_view("x", 0, "n0", gpus=1)
    nodes = [make_node_view("n0", gpus=4, workers=[held]), make_node_view("n1", gpus=4)]
    job = make_job_view("wide", workers=(4, 4))
    snapshot = make_snapshot(nodes=nodes, jobs=[job])
    for rule, count in ((best_fit, 2), (consolidated, 1)):
        [grant] = Turns(snapshot, [job], why, lambda _, rule=rule: rule).grants  # type: ignore[misc]
        assert grant.placements is not None
        assert len(grant.placements) == count


def test_room_is_told_of_the_types_that_a_job_accepts_alone() -> None:
    """Three GPUs are free, fewer than it needs: two of another type, and one of its own."""
    nodes = [make_node_view("n0", gpus=2, gpu_type="A100"), make_node_view("n1", gpus=1)]
    job = make_job_view("wide", workers=(4, 4), types=("H100",))
    turns = Turns(make_snapshot(nodes=nodes, jobs=[job]), [job], why)
    assert turns.held == [(job, 1)]


def test_nodes_that_a_job_avoids_have_no_room_for_it() -> None:
    """It waits for others rather than go where it failed; its like that avoids none starts."""
    nodes = [make_node_view("n0", gpus=2)]
    first, second = (make_job_view(name, gpus_per_worker=2) for name in ("a", "b"))
    first = job_with(first, nodes_avoided=(NodeName("n0"),))
    snapshot = make_snapshot(nodes=nodes, jobs=[first, second])
    turns = Turns(snapshot, [first, second], why)
    assert [grant.job.job_id for grant in turns.grants] == ["b"]
    assert turns.held == [(first, 0)]
