"""Claims: nodes are kept for jobs that waited too long, and none starves."""

from __future__ import annotations

import pytest
from msgspec import Struct, structs
from msgspec.structs import replace

from common.model import JobState
from coordinator.policies.aryl.aged_claims import AGED_S, NARROW
from coordinator.policies.aryl.rules import Rules
from coordinator.policies.contract.decisions import Preempt, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.registry import policy
from tests.builders import (
    NOW_S,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)

RATIO = 0.1
ALONE = "aryl:reservation_after_s=null"
CLAIMING = f"{ALONE}:claim_ratio={RATIO}:claim_stretch=0"
"""Claims by themselves, and without them."""


def running(job_id: str, node: str, left_s: float, *, gpus: int = 8) -> tuple[NodeView, JobView]:
    """A node and the job on it."""
    worker = make_worker_view(job_id, 0, node, gpus=gpus)
    job = make_job_view(
        job_id,
        state=JobState.RUNNING,
        gpus_per_worker=gpus,
        remaining_work_s=left_s,
        placed=[worker],
    )
    return make_node_view(node, workers=[worker]), job


def waiting(
    job_id: str, *, runtime_s: float, waited_s: float = 0.0, workers: int = 1, priority: int = 0
) -> JobView:
    """A waiting job of 8 GPUs per worker."""
    return make_job_view(
        job_id,
        workers=(workers, workers),
        gpus_per_worker=8,
        remaining_work_s=runtime_s * workers,
        submitted_at_s=NOW_S - waited_s,
        priority=priority,
    )


def cell(*jobs: JobView) -> ClusterSnapshot:
    """Three nodes: one is free, one is busy for 20 minutes, one for ten hours."""
    busy = [running("minutes", "n2", 1200.0), running("hours", "n3", 36_000.0)]
    nodes = [make_node_view("n1"), *(node for node, _ in busy)]
    return make_snapshot(nodes=nodes, jobs=[*jobs, *(job for _, job in busy)])


def starts(snapshot: ClusterSnapshot, name: str = CLAIMING) -> list[str]:
    """Who starts."""
    decisions = policy(name).allocate(snapshot, b"").decisions
    assert not any(isinstance(decision, Preempt) for decision in decisions)
    return [decision.job_id for decision in decisions if isinstance(decision, Start)]


def gang(waited_s: float) -> JobView:
    """Two nodes for half an hour: it could start when the job of 20 minutes is over."""
    return waiting("gang", runtime_s=1800.0, waited_s=waited_s, workers=2)


def test_an_aged_gang_keeps_the_free_node() -> None:
    """What would be in its way when it can start does not start; without claims it does."""
    late = waiting("late", runtime_s=1500.0)
    assert starts(cell(gang(15_000.0), late)) == []
    assert starts(cell(gang(15_000.0), late), ALONE) == ["late"]


def test_who_is_over_by_then_may_go_before() -> None:
    """Work that ends before the claim is ready costs it nothing."""
    assert starts(cell(gang(15_000.0), waiting("quick", runtime_s=1000.0))) == ["quick"]


@pytest.mark.parametrize(("runtime_s", "is_kept"), [(1139.0, False), (1141.0, True)])
def test_a_minute_before_the_claim_is_ready_the_nodes_are_free_again(
    runtime_s: float, *, is_kept: bool
) -> None:
    """Who begins takes time to begin: a job must be over a minute before the 1,200 s are."""
    started = starts(cell(gang(15_000.0), waiting("quick", runtime_s=runtime_s)))
    assert (started == []) == is_kept


@pytest.mark.parametrize(("waited_s", "is_kept"), [(11_000.0, False), (12_500.0, True)])
def test_patience_grows_with_the_wait(waited_s: float, *, is_kept: bool) -> None:
    """Nodes are kept for 1,200 s by whom that is a tenth of the wait, and not by others."""
    late = waiting("late", runtime_s=1500.0)
    assert (starts(cell(gang(waited_s), late)) == []) == is_kept


@pytest.mark.parametrize(("stretch", "is_kept"), [(8.0, True), (9.0, False)])
def test_a_job_ages_by_its_own_length(stretch: float, *, is_kept: bool) -> None:
    """A job of half an hour has aged eight times its length in 15,000 s, and not nine times."""
    late = waiting("late", runtime_s=1500.0)
    started = starts(cell(gang(15_000.0), late), f"{ALONE}:claim_ratio=0.1:claim_stretch={stretch}")
    assert (started == []) == is_kept


@pytest.mark.parametrize(("stretch", "first"), [(1.0, "lone"), (1.01, "quick")])
def test_a_job_of_one_worker_ages_ten_times_as_slowly(stretch: float, first: str) -> None:
    """It waits for no room in many places: 1,500 s have aged in 15,000 s with a stretch of 1."""
    jobs = waiting("lone", runtime_s=1500.0, waited_s=15_000.0), waiting("quick", runtime_s=30.0)
    assert starts(cell(*jobs), f"{ALONE}:claim_ratio=0.1:claim_stretch={stretch}") == [first]


def test_only_the_claimed_nodes_are_kept() -> None:
    """A node that the gang does not need takes whatever comes."""
    snapshot = cell(gang(15_000.0), waiting("long", runtime_s=90_000.0))
    wider = replace(snapshot, nodes=(*snapshot.nodes, make_node_view("n4"), make_node_view("n5")))
    assert starts(wider) == ["gang", "long"]


def test_a_gang_that_fits_goes_before_shorter_jobs_once_it_has_aged() -> None:
    """An aged job is tried first: jobs that come later and are shorter do not take its room."""
    busy, job = running("hours", "n3", 36_000.0)
    nodes = [make_node_view("n1"), make_node_view("n2"), busy]
    quick = [waiting(f"quick{number}", runtime_s=30.0) for number in range(2)]
    aged = make_snapshot(nodes=nodes, jobs=[job, gang(700.0), *quick])
    fresh = make_snapshot(nodes=nodes, jobs=[job, gang(60.0), *quick])
    assert starts(aged) == ["gang"]
    assert starts(fresh) == ["quick0", "quick1"]


def test_a_more_important_job_passes() -> None:
    """A claim keeps nothing from jobs of a higher priority."""
    urgent = waiting("urgent", runtime_s=5000.0, priority=1)
    assert starts(cell(gang(15_000.0), urgent)) == ["urgent"]


def test_a_job_that_never_fits_keeps_nothing() -> None:
    """No number of nodes coming free would do: nobody waits for it."""
    monster = waiting("monster", runtime_s=60.0, waited_s=9e5, workers=4)
    assert starts(cell(monster, waiting("late", runtime_s=1500.0))) == ["late"]


def test_flexible_workers_use_claimed_nodes() -> None:
    """They go at once when they are told to, so a claim need not keep them away."""
    worker = make_worker_view("wide", 0, "n3", gpus=8)
    wide = make_job_view(
        "wide",
        state=JobState.RUNNING,
        workers=(1, 2),
        gpus_per_worker=8,
        remaining_work_s=36_000.0,
        placed=[worker],
    )
    minutes_node, minutes = running("minutes", "n2", 1200.0)
    snapshot = make_snapshot(
        nodes=[make_node_view("n1"), minutes_node, make_node_view("n3", workers=[worker])],
        jobs=[gang(15_000.0), minutes, wide],
    )
    (resize,) = policy(CLAIMING).allocate(snapshot, b"").decisions
    assert [placement.node for placement in resize.added] == ["n1"]  # type: ignore[union-attr]


class Contest(Struct, frozen=True, kw_only=True):
    """One job that needs many whole nodes, while jobs of one node come for ever.

    every_s, short_s: how often one of them comes, and how long it runs. gang_s, workers: of the
    job that waits. step_s: time between two passes.
    """

    nodes: int
    every_s: float
    short_s: float
    gang_s: float
    workers: int
    asked_at_s: float
    step_s: float

    def bound_s(self, *, ratio: float, stretch: float) -> float:
        """The longest wait by the bound that the module states, to the next pass."""
        ages_s = max(AGED_S, stretch * self.gang_s * (NARROW if self.workers == 1 else 1.0))
        return max(self.short_s / ratio, ages_s) + self.short_s + self.step_s


WIDE = Contest(
    nodes=4, every_s=1200.0, short_s=3600.0, gang_s=7200.0, workers=3, asked_at_s=7300.0, step_s=120
)
"""Three of four nodes are always busy."""


def play(name: str, contest: Contest, *, until_s: float) -> float:
    """How long the job waits under a policy; without end if it does not start in time."""
    step_s = contest.step_s
    coming = {
        f"j{number}": number * contest.every_s for number in range(int(until_s / contest.every_s))
    }
    ends: dict[str, tuple[str, float]] = {}
    at_s = 0.0
    while at_s < until_s:
        ends = {job: held for job, held in ends.items() if held[1] > at_s}
        nodes, views = _now(contest, ends, at_s)
        for job, came_s in coming.items():
            if came_s > at_s:
                break
            views.append(replace(waiting(job, runtime_s=contest.short_s), submitted_at_s=came_s))
        if contest.asked_at_s <= at_s:
            gang = waiting("gang", runtime_s=contest.gang_s, workers=contest.workers)
            views.append(replace(gang, submitted_at_s=contest.asked_at_s))
        snapshot = make_snapshot(nodes=nodes, jobs=views, now_s=at_s)
        for decision in policy(name).allocate(snapshot, b"").decisions:
            assert isinstance(decision, Start)
            if decision.job_id == "gang":
                return at_s - contest.asked_at_s
            del coming[decision.job_id]
            ends[decision.job_id] = (decision.placements[0].node, at_s + contest.short_s)
        at_s += step_s
    return float("inf")


def _now(
    contest: Contest, ends: dict[str, tuple[str, float]], at_s: float
) -> tuple[list[NodeView], list[JobView]]:
    on = {node: job for job, (node, _) in ends.items()}
    nodes, views = list[NodeView](), list[JobView]()
    for name in (f"n{index}" for index in range(contest.nodes)):
        if name in on:
            node, view = running(on[name], name, ends[on[name]][1] - at_s)
            nodes.append(node)
            views.append(view)
        else:
            nodes.append(make_node_view(name))
    return nodes, views


@pytest.mark.slow
def test_no_gang_waits_longer_than_the_bound() -> None:
    """With R the longest that a running job has left, a gang waits R / ratio + R at most.

    With shortest first alone it waits for ever: one of its three nodes is always taken again.
    """
    assert play(CLAIMING, WIDE, until_s=50_400.0) <= WIDE.bound_s(ratio=RATIO, stretch=0.0)
    assert play(ALONE, WIDE, until_s=50_400.0) == float("inf")


@pytest.mark.slow
@pytest.mark.parametrize(
    "contest",
    [
        structs.replace(WIDE, gang_s=600.0),
        Contest(
            nodes=1, every_s=50.0, short_s=50.0, gang_s=60.0, workers=1, asked_at_s=100.0, step_s=50
        ),
    ],
    ids=["wide", "one worker"],
)
def test_the_bound_holds_for_foresight_as_it_is_shipped(contest: Contest) -> None:
    """Of its claims alone, as a reservation may come sooner.

    A job waits 2 R or 30 times its length (300 times with one worker), whichever is the larger,
    and R more, with R as above: no longer, and no less than half of it."""
    alone = "foresight:reservation_after_s=null"
    rules = policy("foresight").knobs
    assert isinstance(rules, Rules)
    claiming = rules.claiming
    assert claiming is not None
    assert (claiming.ratio, claiming.stretch) == (0.5, 30.0)
    bound_s = contest.bound_s(ratio=claiming.ratio, stretch=claiming.stretch)
    waited_s = play(alone, contest, until_s=contest.asked_at_s + bound_s + contest.step_s)
    assert 0.5 * bound_s <= waited_s <= bound_s
    later_s = contest.asked_at_s + 2.0 * bound_s
    assert play(f"{alone}:claim_ratio=0", contest, until_s=later_s) == float("inf")
