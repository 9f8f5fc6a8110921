"""Claims: nodes are kept for jobs that waited too long. Which jobs may claim, on which nodes, when
these are ready, and that no job starves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import Struct, structs
from msgspec.structs import replace

from common.model import JobId, JobState, NodeRole
from coordinator.policies.aryl.aged_claims import AGED_S, NARROW, Claim, Claims
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.aryl.rules import Rules
from coordinator.policies.contract.decisions import Preempt, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView, WorkerView
from coordinator.policies.registry import policy
from tests.harness.builders import (
    NOW_S,
    make_job_view,
    make_node_view,
    make_service_view,
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


LONG_AGO_S = 1e6
"""So long everybody waits here unless it is said otherwise: patience is no question."""


def aged(
    job_id: str,
    *,
    runtime_s: float = 600.0,
    workers: int = 1,
    gpus: int = 8,
    types: Sequence[str] = (),
    waited_s: float = LONG_AGO_S,
    priority: int = 0,
    multiplier: dict[str, int] | None = None,
) -> JobView:
    """A job that waits, of whole nodes unless it is said otherwise. runtime_s: on its gang."""
    return make_job_view(
        job_id,
        workers=(workers, workers),
        gpus_per_worker=gpus,
        types=tuple(types),
        remaining_work_s=runtime_s * workers,
        submitted_at_s=NOW_S - waited_s,
        priority=priority,
        multiplier=multiplier,
    )


def busy(
    node: str,
    *left_s: float,
    kind: str = "H100",
    gpus: int = 8,
    service: bool = False,
) -> tuple[NodeView, list[JobView]]:
    """A node, and on it one job per running time that is left, of so many GPUs each."""
    workers = [make_worker_view(f"{node}-{n}", 0, node, gpus=gpus) for n in range(len(left_s))]
    jobs = [
        make_job_view(
            worker.job_id,
            state=JobState.RUNNING,
            gpus_per_worker=gpus,
            remaining_work_s=each_s,
            gpu_type=kind,
            placed=[worker],
        )
        for worker, each_s in zip(workers, left_s, strict=True)
    ]
    role = NodeRole.ON_LOAN if service else NodeRole.TRAINING
    return make_node_view(node, role=role, gpu_type=kind, workers=workers), jobs


def with_nodes(
    there: Sequence[tuple[NodeView, list[JobView]]], *waiting: JobView
) -> ClusterSnapshot:
    """Those nodes with their jobs, and whoever waits."""
    jobs = [job for _, running in there for job in running]
    return make_snapshot(
        nodes=[node for node, _ in there], jobs=[*jobs, *waiting], services=[make_service_view()]
    )


def claimed(snapshot: ClusterSnapshot, *, most: int = 1) -> dict[str, Claim]:
    """What is kept for whom once all that may have claimed; in the order in which they did."""
    room, claims = PlacementState(snapshot), Claims(snapshot, ratio=1.0, stretch=0.0, most=most)
    for job in claims.aged(room):
        claims.claim(room, job)
    return {claim.job.job_id: claim for claim in claims.made}


def ready_s(claim: Claim) -> float:
    """In how many seconds it could run there."""
    return claim.ready_at_s - NOW_S


# --- who ----------------------------------------------------------------------------------------


def test_the_most_important_claims_first_and_then_who_came_first() -> None:
    """By priority, then by submission, whatever they are called."""
    snapshot = with_nodes(
        [busy("n1", 3600.0)],
        aged("a-late", waited_s=1000.0),
        aged("b-early", waited_s=2000.0),
        aged("c-urgent", waited_s=700.0, priority=1),
    )
    claims = Claims(snapshot, ratio=1.0, stretch=0.0, most=1)
    assert [job.job_id for job in claims.aged(PlacementState(snapshot))] == [
        "c-urgent",
        "b-early",
        "a-late",
    ]


def test_each_gpu_type_has_claims_of_its_own() -> None:
    """One at a time of each: who waits for another type is not in its way."""
    nodes = [busy("n1", 3600.0), busy("m1", 3600.0, kind="A100")]
    jobs = [aged("h", types=["H100"]), aged("a", types=["A100"]), aged("late", types=["H100"])]
    found = claimed(
        with_nodes(nodes, *(replace(job, submitted_at_s=n) for n, job in enumerate(jobs)))
    )
    assert {name: claim.gpu_type for name, claim in found.items()} == {"h": "H100", "a": "A100"}


def test_whoever_finds_all_claims_of_its_types_made_is_not_tried() -> None:
    """It takes its turn by the order alone, and not before all others."""
    jobs = [aged("first", waited_s=2000.0), aged("second", waited_s=1000.0)]
    snapshot = with_nodes([busy("n1", 600.0)], *jobs)
    room, claims = PlacementState(snapshot), Claims(snapshot, ratio=1.0, stretch=0.0, most=1)
    tried: list[JobId] = []
    for job in claims.aged(room):
        tried.append(job.job_id)
        claims.claim(room, job)
    assert tried == ["first"]


# --- where and when -----------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["H100", "A100"])
def test_the_type_that_is_ready_first_is_claimed(first: str) -> None:
    """Whichever of those that a job accepts it names first."""
    other = "A100" if first == "H100" else "H100"
    nodes = [busy("n1", 3600.0), busy("m1", 600.0, kind="A100")]
    claim = claimed(with_nodes(nodes, aged("j", types=[first, other])))["j"]
    assert (claim.gpu_type, claim.nodes, ready_s(claim)) == ("A100", ("m1",), 600.0)


def test_lent_nodes_are_nobodys_claim() -> None:
    """They go home when they are wanted; one that is ready sooner is left alone."""
    nodes = [busy("l1", 60.0, service=True), busy("n1", 3600.0)]
    assert claimed(with_nodes(nodes, aged("j")))["j"].nodes == ("n1",)


def test_who_claims_after_another_waits_until_that_one_is_over() -> None:
    """Of the one node, free in 600 s and then taken for 1,000 s: free again in 1,600 s, and not
    when what runs there now ends."""
    jobs = [aged("first", runtime_s=1000.0, waited_s=LONG_AGO_S + 1.0), aged("second")]
    found = claimed(with_nodes([busy("n1", 600.0)], *jobs), most=2)
    assert {name: ready_s(claim) for name, claim in found.items()} == {
        "first": 600.0,
        "second": 1600.0,
    }


def test_a_node_of_an_earlier_claim_is_not_free_now_either() -> None:
    """What is free there beside the jobs that run is the earlier claim's."""
    jobs = [
        aged("first", runtime_s=1000.0, workers=2, waited_s=LONG_AGO_S + 1.0),
        aged("second", gpus=4),
    ]
    nodes = [busy("n1", 600.0, gpus=4), busy("n2", 600.0)]
    found = claimed(with_nodes(nodes, *jobs), most=2)
    assert ready_s(found["second"]) == 1600.0


def on_two(*placed: WorkerView) -> JobView:
    """An elastic job that has grown: two hours of work for one worker."""
    return make_job_view(
        "wide",
        state=JobState.RUNNING,
        workers=(1, 2),
        gpus_per_worker=8,
        remaining_work_s=7200.0,
        placed=placed,
    )


def test_flexible_workers_are_in_nobodys_way() -> None:
    """A node that only they are on is ready now, and one with a base worker when that ends."""
    base = make_worker_view("wide", 0, "n1", gpus=8)
    more = make_worker_view("wide", 1, "n2", gpus=8, is_flexible=True)
    wide = on_two(base, more)
    nodes = [make_node_view("n1", workers=[base]), make_node_view("n2", workers=[more])]
    gang = aged("gang", workers=2)
    claim = claimed(make_snapshot(nodes=nodes, jobs=[wide, gang]))["gang"]
    assert ready_s(claim) == 3600.0  # as two workers run
    alone = claimed(make_snapshot(nodes=nodes, jobs=[wide, aged("alone")]))["alone"]
    assert (alone.nodes, ready_s(alone)) == (("n2",), 0.0)


def test_a_worker_that_leaves_no_longer_speeds_its_job_up() -> None:
    """Of two workers one is told to go: what is left takes as long as with the other alone."""
    base = make_worker_view("wide", 0, "n1", gpus=8)
    gone = make_worker_view("wide", 1, "n2", gpus=8, is_flexible=True, is_leaving=True)
    wide = on_two(base, gone)
    nodes = [make_node_view("n1", workers=[base])]
    claim = claimed(make_snapshot(nodes=nodes, jobs=[wide, aged("j")]))["j"]
    assert ready_s(claim) == 7200.0


def test_room_for_a_worker_may_come_of_several_ends() -> None:
    """A worker of six GPUs fits a node of eight once three jobs of two have gone, not after one;
    and once, not once for each."""
    nodes = [busy("n1", 600.0, 1200.0, 1800.0, 2400.0, gpus=2), busy("n2", 9000.0)]
    claim = claimed(with_nodes(nodes, aged("j", gpus=6)))["j"]
    assert (claim.nodes, ready_s(claim)) == (("n1",), 1800.0)
    pair = claimed(with_nodes(nodes, aged("pair", gpus=6, workers=2)))["pair"]
    assert (pair.nodes, ready_s(pair)) == (("n1", "n2"), 9000.0)


def test_a_gang_is_as_large_as_its_gpu_type_needs() -> None:
    """Of a type that needs twice the workers it claims twice the nodes."""
    nodes = [busy("m1", 600.0, kind="A100"), busy("m2", 1200.0, kind="A100")]
    job = aged("j", types=["A100"], multiplier={"A100": 2})
    claim = claimed(with_nodes(nodes, job))["j"]
    assert (claim.nodes, ready_s(claim)) == (("m1", "m2"), 1200.0)


def test_only_who_accepts_the_type_is_told_of_a_claim() -> None:
    """A job that runs on other nodes alone waits for something else."""
    snapshot = with_nodes(
        [busy("n1", 600.0), busy("m1", 600.0, kind="A100")], aged("j", types=["H100"])
    )
    room, claims = PlacementState(snapshot), Claims(snapshot, ratio=1.0, stretch=0.0, most=1)
    (job,) = claims.aged(room)
    claims.claim(room, job)
    assert "of type H100 are kept for j" in claims.why(aged("late", types=["H100"]))
    assert claims.why(aged("late", types=["A100"])) == ""
