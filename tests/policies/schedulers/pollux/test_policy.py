"""Pollux: a search that is legal, deterministic and at least as good as a greedy share, and workers
that are counted by a job's range."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobState, NodeName
from common.profile import JobProfile
from coordinator.policies.contract.decisions import Placement, Resize, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.parts.blockers_for_all import NOWHERE
from coordinator.policies.parts.grants import Plan
from coordinator.policies.parts.pooling import Pool
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.pollux.genetic_search import (
    LEAST,
    Problem,
    SearchKnobs,
    search,
)
from coordinator.policies.schedulers.pollux.rounds import workers_after
from tests.draws import pick, whole, yes_or_no
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)

SMALL = SearchKnobs(population=20, generations=20)


def job(
    name: str, *, least: int = 1, most: int = 8, gpus: int = 1, gains: tuple[float, ...] = ()
) -> JobView:
    """A waiting elastic job whose n-th worker adds the n-th gain; linear without gains."""
    rates = [sum(gains[: number + 1]) for number in range(len(gains))]
    view = make_job_view(
        name, workers=(least, most), gpus_per_worker=gpus, submitted_at_s=NOW_S - 600.0
    )
    return replace(view, profile=JobProfile(speedup=tuple(enumerate(rates, start=1))))


def pool(gpus: int, *jobs: JobView) -> Pool:
    """GPUs that these jobs compete for."""
    return Pool(gpu_type="H100", gpus=gpus, jobs=jobs)


def found(problem: Problem, knobs: SearchKnobs = SMALL, seed: int = 1) -> list[int]:
    """What a search gives each job."""
    return [int(count) for count in search(problem, knobs, np.random.default_rng(seed))]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A few jobs of any range and curve on some GPUs, some of them running."""
    jobs: list[JobView] = []
    for number in range(draw(whole(1, 6))):
        least = draw(whole(1, 3))
        most = least + draw(whole(0, 5))
        gains = draw(st.lists(st.floats(0.05, 1.0), min_size=most, max_size=most))
        made = job(
            str(number),
            least=least,
            most=most,
            gpus=draw(pick(1, 2, 4)),
            gains=tuple(gains),
        )
        if draw(yes_or_no()):
            placed = tuple(make_worker_view(str(number), index, "n0") for index in range(least))
            made = job_with(
                made, state=JobState.RUNNING, gpu_type="H100", placed=placed, attempt_number=1
            )
        jobs.append(made)
    return Problem(SMALL, pool(draw(whole(1, 24)), *jobs), NOW_S)


@given(problems(), st.integers(0, 5))
def test_every_answer_is_legal(problem: Problem, seed: int) -> None:
    """NoMoreThanThere, WholeGangs: ranges hold, or none at all."""
    counts = np.array(found(problem, seed=seed))
    assert int((counts * problem.sizes).sum()) <= problem.gpus
    has = counts > 0
    assert bool(np.all(counts[has] >= problem.least[has]))
    assert bool(np.all(counts <= problem.most))


@given(problems())
def test_the_search_is_no_worse_than_its_first_generation(problem: Problem) -> None:
    """NeverLosesTheBest: neither the greedy share nor the present one is fitter."""
    counts = np.array([found(problem)])
    greedy = problem.filled(np.zeros(len(problem.sizes), dtype=np.int64))[None, :]
    present = problem.repaired(problem.now[None, :].copy(), np.random.default_rng(1))
    best = float(problem.fitness(counts)[0]) * (1 + 1e-9)
    assert best >= float(problem.fitness(greedy)[0])
    assert best >= float(problem.fitness(present)[0])


@given(problems())
def test_the_search_finds_the_optimum_of_small_problems(problem: Problem) -> None:
    """Against every legal allocation: with the paper's population within 5 % of the fittest."""
    ranges = [
        [0, *range(int(least), int(most) + 1)] if most else [0]
        for least, most in zip(problem.least, problem.most, strict=True)
    ]
    every = np.array(np.meshgrid(*ranges)).reshape(len(ranges), -1).T
    if len(every) > 20_000:
        return
    legal = every[(every * problem.sizes).sum(axis=1) <= problem.gpus]
    best = float(problem.fitness(legal).max())
    answer = np.array([found(problem, SearchKnobs())])
    assert float(problem.fitness(answer)[0]) >= 0.95 * best


def test_equal_linear_jobs_share_equally() -> None:
    """Four jobs, eight GPUs: two each, since the mean is harmonic."""
    assert found(Problem(SMALL, pool(8, *(job(str(n)) for n in range(4))), NOW_S)) == [2, 2, 2, 2]


def test_who_scales_badly_leaves_its_share_to_who_scales_well() -> None:
    """A second worker that adds 1 % is worth more to a linear job."""
    bad = job("bad", gains=(1.0, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01))
    assert found(Problem(SMALL, pool(8, bad, job("good")), NOW_S)) == [1, 7]


def test_a_job_pays_for_a_change_by_its_age() -> None:
    """(T - R delta) / (T + delta): after 60 s and one restart a change counts (60 - 30) / 90."""
    placed = tuple(make_worker_view("a", index, "n0") for index in range(2))
    young = job_with(
        job("a", most=4),
        state=JobState.RUNNING,
        gpu_type="H100",
        placed=placed,
        attempt_number=2,
        submitted_at_s=NOW_S - 60.0,
    )
    problem = Problem(SMALL, pool(4, young), NOW_S)
    assert problem.values[0].tolist() == pytest.approx([0.0, 0.25 / 3, 0.5, 0.75 / 3, 1.0 / 3])


def test_a_stop_costs_what_its_job_would_do_over() -> None:
    """Nothing of 1e-3 becomes nothing of 1e-3 (T + delta) / (T + delta + lost): 60 s of 150 s."""
    placed = tuple(make_worker_view("a", index, "n0") for index in range(2))
    young = job_with(
        job("a", least=2, most=4),
        state=JobState.RUNNING,
        gpu_type="H100",
        placed=placed,
        attempt_number=1,
        submitted_at_s=NOW_S - 60.0,
        as_of_s=NOW_S,
        unsaved_gpu_s=120.0,
        attained_gpu_s=120.0,
    )
    problem = Problem(SMALL, pool(4, young), NOW_S)
    assert problem.values[0, 0] + LEAST == pytest.approx(LEAST * 90.0 / 150.0)
    saves = Problem(SMALL, pool(4, job_with(young, saves_when_asked=True)), NOW_S)
    assert saves.values[0, 0] == 0.0


def test_nobody_is_stopped_for_an_equal_when_it_would_lose_its_work() -> None:
    """One gang of two gets the pool: the one that runs, if a stop would throw its hour away."""
    placed = [make_worker_view("a", index, "n0") for index in range(2)]
    slow = job_with(
        job("a", least=2, most=2),
        state=JobState.RUNNING,
        gpu_type="H100",
        placed=tuple(placed),
        attempt_number=1,
        submitted_at_s=NOW_S - 3600.0,
        as_of_s=NOW_S,
        attained_gpu_s=7200.0,
    )
    # A fair share of one GPU is half of what either needs; the other one makes more of its two.
    fast = job("b", least=2, most=2, gains=(0.1, 1.9))
    assert found(Problem(SMALL, pool(2, slow, fast), NOW_S)) == [0, 2]
    lossy = job_with(slow, unsaved_gpu_s=7200.0)
    assert found(Problem(SMALL, pool(2, lossy, fast), NOW_S)) == [2, 0]


def node_with(*jobs: JobView, now_s: float = NOW_S) -> ClusterSnapshot:
    """One node of eight GPUs."""
    workers = [worker for view in jobs for worker in view.placed]
    return make_snapshot(nodes=[make_node_view("n0", workers=workers)], jobs=jobs, now_s=now_s)


def test_between_rounds_nothing_changes() -> None:
    """A job that comes after a round waits for the next one, and is told so."""
    made = policy("pollux:generations=5:population=10")
    first = made.allocate(node_with(job("a")), b"")
    assert [type(decision) for decision in first.decisions] == [Start]
    assert first.wake_at_s == NOW_S + 60.0
    snapshot = node_with(job("a"), job("b"), now_s=NOW_S + 10.0)
    between = made.allocate(snapshot, first.memory)
    assert (between.decisions, between.wake_at_s) == ((), NOW_S + 60.0)
    assert "next in 50 s" in made.pending_reasons(snapshot, first.memory)[0].blockers[0]


def test_who_waits_is_told_whether_the_last_round_knew_it() -> None:
    """One was there at that instant, one came since, and one has no nodes: for it there is none."""
    made = policy("pollux:generations=5:population=10")
    at_s = NOW_S + 0.3
    whole = [replace(job(name, least=8), submitted_at_s=at_s) for name in ("a", "b")]
    memory = made.allocate(node_with(*whole, now_s=at_s), b"").memory
    since = replace(job("c"), submitted_at_s=at_s + 5.0)
    barred = job_with(job("d"), nodes_avoided=(NodeName("n0"),))
    snapshot = node_with(whole[0], since, barred, now_s=at_s + 10.0)
    known, came, nowhere = made.pending_reasons(snapshot, memory)
    assert "next in 50 s; the last round gave its GPUs" in known.blockers[0]
    assert came.blockers[0].endswith("next in 50 s; it came after the last round")
    assert nowhere.blockers[0] == NOWHERE


def test_a_round_that_changed_nothing_is_good_for_so_many_more() -> None:
    """`rest_rounds=2`: the two rounds after it search for nothing, the third does, and so on; a
    job that comes ends the rest."""
    made = policy("pollux:generations=2:population=4:rest_rounds=2")
    placed = [make_worker_view("a", index, "n0") for index in range(8)]
    whole = job_with(
        make_job_view("a", state=JobState.RUNNING, workers=(8, 8), placed=placed),
        submitted_at_s=NOW_S - 3600.0,
        attempt_number=1,
    )
    memory, searched = b"", list[bool]()
    for number in range(7):
        snapshot = node_with(whole, now_s=NOW_S + 60.0 * number)
        before = settled_round(memory)
        allocation = made.allocate(snapshot, memory)
        assert (allocation.decisions, allocation.wake_at_s) == ((), snapshot.now_s + 60.0)
        memory = allocation.memory
        searched.append(settled_round(memory) != before)
    assert searched == [True, False, False, True, False, False, True]
    other = node_with(whole, job("b", least=8), now_s=NOW_S + 420.0)
    assert settled_round(made.allocate(other, memory).memory) == 7


def settled_round(memory: bytes) -> int | None:
    """The last round that searched and changed nothing, as a pass remembers it."""
    return msgspec.msgpack.decode(memory)["settled_round"] if memory else None


def test_a_round_grows_a_job_into_gpus_that_came_free() -> None:
    """Two workers of a linear job become eight once it is old enough to pay for the change."""
    placed = [make_worker_view("a", index, "n0", is_flexible=index > 0) for index in range(2)]
    old = job_with(
        make_job_view("a", state=JobState.RUNNING, workers=(1, 8), placed=placed),
        submitted_at_s=NOW_S - 3600.0,
        attempt_number=1,
    )
    made = policy("pollux:generations=5:population=10:grows_at_most=null")
    [grow] = made.allocate(node_with(old), b"").decisions
    assert isinstance(grow, Resize)
    assert sum(placement.worker_count for placement in grow.added) == 6


def test_the_same_memory_gives_the_same_round() -> None:
    """The seed and the number of the round are all the chance there is."""
    snapshot = node_with(*(job(str(number), gains=(1.0, 0.5, 0.3)) for number in range(5)))
    made = policy("pollux:generations=5:population=10")
    once, again = (made.allocate(snapshot, b"") for _ in range(2))
    assert once == again


def double(*, most: int = 8) -> JobView:
    """It runs with four workers on a type of which two stand for one; its smallest gang is two."""
    return make_job_view(
        "double",
        state=JobState.RUNNING,
        workers=(1, most),
        multiplier={"H100": 2},
        placed=[make_worker_view("double", at, "n", is_flexible=at >= 2) for at in range(4)],
    )


def alone(job: JobView, *, gpus: int) -> ClusterSnapshot:
    """On a node with so many GPUs."""
    return make_snapshot(
        nodes=[make_node_view("n", gpus=gpus, workers=job.placed)], jobs=[job], now_s=NOW_S
    )


def test_a_search_counts_workers_of_the_range() -> None:
    """Each of two GPUs: what it has, what fits, and what its fair share is worth."""
    job = double()
    problem = Problem(SearchKnobs(), Pool(gpu_type="H100", gpus=12, jobs=(job,)), NOW_S)
    assert (problem.now.tolist(), problem.most.tolist()) == ([2], [6])
    assert problem.sizes.tolist() == [2]
    assert problem.values[0, 6] == pytest.approx(1.0, abs=0.05)
    assert problem.values[0, 2] == pytest.approx(2 / 6)


def test_what_a_plan_leaves_a_job_is_counted_by_its_range() -> None:
    """Two workers more are one."""
    job = double()
    more = Resize(
        job_id=job.job_id, reason="", added=(Placement(node=job.placed[0].node, worker_count=2),)
    )
    plan = Plan(decisions=(more,), holds=(), wake_at_s=None)
    pool = Pool(gpu_type="H100", gpus=12, jobs=(job,))
    assert workers_after(plan, pool).tolist() == [3]


def test_a_job_grows_to_twice_what_it_held_on_its_type() -> None:
    """From two of its range to four, which are eight workers; sixteen GPUs are there."""
    job = double()
    allocation = policy("pollux").allocate(alone(job, gpus=16), b"")
    [grown] = allocation.decisions
    assert isinstance(grown, Resize)
    assert sum(place.worker_count for place in grown.added) == 4
    assert msgspec.msgpack.decode(allocation.memory)["held"] == {"double": 2}


@pytest.mark.parametrize(("most", "is_told"), [(2, False), (8, True)])
def test_who_has_all_workers_of_its_range_is_told_of_no_limit(most: int, is_told: bool) -> None:
    """Four workers are two, and no more where two is its most."""
    job = double(most=most)
    snapshot = alone(job, gpus=16)
    found = policy("pollux")
    memory = found.allocate(snapshot, b"").memory
    assert bool(found.standing(snapshot, memory, job.job_id)) is is_told
