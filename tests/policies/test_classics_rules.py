"""DRF, Tetris, YARN and Mesos: whom they stop, whom they serve next, one rule each."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from common.model import NodeName
from coordinator.policies.contract.decisions import Preempt, Resize, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.schedulers.drf.policy import fewest_victims
from coordinator.policies.schedulers.mesos.policy import Memory
from tests.builders import NOW_S
from tests.policies.machines import (
    cell,
    decide,
    full,
    job,
    machine,
    started,
    stopped,
    with_weights,
)

# --- DRF ----------------------------------------------------------------------------------------


def test_drf_stops_nobody_for_an_equal_share_after_the_move() -> None:
    """A would come to 4/8 and B down to 4/8: the preemptor must stay below (Volcano's rule)."""
    theirs = [job(f"b{n}", "B", gpus=2, nodes=("n0",)) for n in range(3)]
    mine = job("a0", "A", gpus=2, nodes=("n0",))
    assert stopped("drf:preempts=true", full(*theirs, mine, job("a1", "A", gpus=2))) == []
    smaller = job("a0", "A", gpus=1, nodes=("n0",))
    assert len(stopped("drf:preempts=true", full(*theirs, smaller, job("a1", "A", gpus=2)))) == 1


def test_drf_stops_the_gang_that_loses_least() -> None:
    """Of one tenant's jobs the one whose last checkpoint is nearest, not the first by name."""
    lost = {"b0": 900.0, "b1": 100.0, "b2": 500.0}
    theirs = [
        replace(job(name, "B", gpus=2, nodes=("n0",)), lost_if_preempted_gpu_s=gpu_s)
        for name, gpu_s in lost.items()
    ]
    snapshot = full(*theirs, job("a", "A", gpus=2), gpus=6)
    assert stopped("drf:preempts=true", snapshot) == ["b1"]


def test_drf_stops_a_gang_for_its_cpus_alone() -> None:
    """B's two gangs have all CPUs of their nodes and two of eight GPUs: no gang of A's starts there
    beside both of them."""
    theirs = tuple(job(f"b{n}", "B", gpus=2, cpus=64, nodes=(f"n{n}",)) for n in range(2))
    nodes = [machine(f"n{n}", gpus=8, cpus=64, memory_gb=64, jobs=theirs) for n in range(2)]
    snapshot = cell(*nodes, jobs=(*theirs, job("a", "A", gpus=2, cpus=8)))
    assert started(decide("drf", snapshot)) == []
    assert started(decide("drf:preempts=true", snapshot)) == ["a"]
    assert stopped("drf:preempts=true", snapshot) == ["b0"]


def test_drf_stops_nobody_whose_place_is_free_after_a_later_stop() -> None:
    """A's first gang takes four GPUs of the node that B's two share; for its second, B's wide one
    has to leave the other node, and with it enough of this one for the narrow one to stay."""
    narrow = job("narrow", "B", gpus=4, nodes=("n0",))
    wide = job("wide", "B", gpus=4, workers=(3, 3), nodes=("n0", "n1", "n1"))
    wide = replace(wide, lost_if_preempted_gpu_s=100.0)
    asks = [job(f"a{n}", "A", gpus=gpus, submitted_at_s=n) for n, gpus in enumerate((4, 8))]
    held = [job(f"b{n}", "B", gpus=8, nodes=(f"n{n}",)) for n in (2, 3, 4, 5)]
    held = [replace(each, lost_if_preempted_gpu_s=1e6) for each in held]
    jobs = (narrow, wide, *held)
    nodes = [machine(f"n{n}", gpus=8, jobs=jobs) for n in range(6)]
    snapshot = cell(*nodes, jobs=(*jobs, *asks))
    assert started(decide("drf:preempts=true", snapshot)) == ["a0", "a1"]
    assert stopped("drf:preempts=true", snapshot) == ["wide"]


def test_drf_stops_jobs_of_the_tenant_with_most() -> None:
    """B has 6/12 and C 4/12: B gives, though C's jobs have lost nothing and come first by name."""
    theirs = [job(f"z{n}", "B", gpus=2, nodes=("n0",)) for n in range(3)]
    others = [job(f"c{n}", "C", gpus=2, nodes=("n0",)) for n in range(2)]
    theirs = [replace(each, lost_if_preempted_gpu_s=100.0) for each in theirs]
    snapshot = full(*theirs, *others, job("a", "A", gpus=2), gpus=10)
    assert stopped("drf:preempts=true", snapshot) == ["z0"]


def test_drf_stops_the_richest_of_those_that_may_be_stopped() -> None:
    """C would stay above A after the stop as well: B has 8 of 16 and C 6, so B gives."""
    theirs = [job(f"z{n}", "B", gpus=2, nodes=("n0",)) for n in range(4)]
    others = [job(f"c{n}", "C", gpus=2, nodes=("n0",)) for n in range(3)]
    mine = job("r", "A", gpus=2, nodes=("n0",))
    snapshot = full(*theirs, *others, mine, job("a", "A"), gpus=16)
    assert stopped("drf:preempts=true", snapshot) == ["z0"]
    alone = full(*theirs[:1], *others, mine, job("a", "A"), gpus=10)
    assert stopped("drf:preempts=true", alone) == ["c0"], "it would have been allowed"


def test_drf_shrinks_jobs_of_the_tenant_with_most() -> None:
    """B has five of nine GPUs and C three: B gives a flexible worker, though C comes by name."""
    jobs = (
        job("c", "C", workers=(1, 8), nodes=("n0",) * 3),
        job("z", "B", workers=(1, 8), nodes=("n0",) * 5),
        job("a", "A"),
    )
    found = decide("drf", full(*jobs))
    assert [each.job_id for each in found.decisions if isinstance(each, Resize)] == ["z"]


def test_drf_stops_elastic_gangs_like_rigid_ones() -> None:
    """B's two gangs hold all GPUs and have nobody flexible: one of them goes for A's single GPU.

    Flexible workers go first, so that a gang that gives one goes on.
    """
    theirs = [job(f"b{n}", "B", workers=(4, 8), nodes=("n0",) * 4) for n in range(2)]
    assert stopped("drf:preempts=true", full(*theirs, job("a", "A"))) == ["b0"]
    assert stopped("drf", full(*theirs, job("a", "A"))) == []
    grown = job("b1", "B", workers=(3, 8), nodes=("n0",) * 4)
    found = decide("drf:preempts=true", full(theirs[0], grown, job("a", "A")))
    assert [type(each) for each in found.decisions] == [Resize, Start]


def test_drf_counts_an_elastic_gang_as_gone_with_its_flexible_workers() -> None:
    """All five GPUs of a gang of three come free with it: for A's three, and for two after it."""
    kept = replace(job("b", "B", gpus=7, nodes=("n0",)), lost_if_preempted_gpu_s=900.0)
    elastic = job("e", "B", workers=(3, 5), nodes=("n0",) * 5)
    asks = (job("a0", "A", gpus=3), job("a1", "A", submitted_at_s=1.0))
    snapshot = full(kept, elastic, *asks, gpus=12)
    assert stopped("drf:preempts=true", snapshot) == ["e"]
    assert started(decide("drf:preempts=true", snapshot)) == ["a0", "a1"]


def test_drf_deals_what_a_stopped_gang_leaves_to_those_who_stay() -> None:
    """The gang that goes gets no flexible worker; another one of its tenant gets the GPU."""
    gone = job("e", "B", workers=(3, 8), nodes=("n0",) * 3)
    stays = job("g", "B", workers=(7, 8), nodes=("n0",) * 7, submitted_at_s=1.0)
    found = decide("drf:preempts=true", full(gone, stays, job("a", "A", gpus=2), gpus=10))
    of_jobs = [each for each in found.decisions if isinstance(each, Preempt | Resize | Start)]
    assert len(of_jobs) == len(found.decisions)
    assert {each.job_id: type(each) for each in of_jobs} == {"e": Preempt, "g": Resize, "a": Start}


def test_drf_stops_nobody_in_vain() -> None:
    """Whose GPUs the gang does not need after all goes on, though it was the first to be asked."""
    theirs = [
        replace(job(name, "B", gpus=gpus, nodes=("n0",)), lost_if_preempted_gpu_s=float(gpus))
        for name, gpus in (("b0", 1), ("b1", 4), ("b2", 11))
    ]
    snapshot = full(*theirs, job("a", "A", gpus=4), gpus=16)
    assert stopped("drf:preempts=true", snapshot) == ["b1"]


def test_drf_takes_the_newest_flexible_workers_and_no_more_than_it_needs() -> None:
    """Five stand beyond B's base worker: A's gang of two takes the last two of them."""
    grown = job("b", "B", workers=(1, 8), nodes=("n0",) * 6)
    found = decide("drf", full(grown, job("a", "A", workers=(2, 2)), gpus=6))
    resizes = [each for each in found.decisions if isinstance(each, Resize)]
    assert [each.removed_workers for each in resizes] == [(4, 5)]


def test_drf_lets_nobody_pass_the_first_of_its_tenant() -> None:
    """One whose job does not fit is blocked for the pass; another tenant goes on."""
    jobs = (
        job("runs", "C", gpus=6, nodes=("n0",)),
        job("a0", "A", gpus=4),
        job("a1", "A", gpus=1, submitted_at_s=1.0),
        job("b0", "B", gpus=1, submitted_at_s=2.0),
    )
    assert started(decide("drf", full(*jobs))) == ["b0"]


def test_drf_counts_what_it_starts_at_once() -> None:
    """Equal tenants take turns within one pass, by what they were just given."""
    jobs = tuple(
        job(f"{tenant}{n}", tenant, gpus=2, submitted_at_s=float(n))
        for tenant in ("A", "B")
        for n in range(4)
    )
    assert started(decide("drf", full(*jobs))) == ["A0", "B0", "A1", "B1"]


def test_nobody_makes_room_in_vain() -> None:
    """Of victims in order those without whom it would fit as well stay: the last that is needed."""
    sizes = {"one": 1, "four": 4, "two": 2}
    free = [0]

    def move(name: str, sign: int) -> None:
        free[0] += sign * sizes[name]

    def found(need: int) -> list[str] | None:
        free[0] = 0
        return fewest_victims(sizes, may_go=lambda _: True, move=move, fits=lambda: free[0] >= need)

    for need, expected in ((4, ["four"]), (5, ["four", "one"]), (7, ["two", "four", "one"])):
        assert found(need) == expected
        assert free[0] == sum(sizes[name] for name in expected)
    assert found(8) is None
    assert free[0] == 0, "everybody is where it was"


# --- Tetris -------------------------------------------------------------------------------------

EVEN = "tetris:fairness=0"
LEFT_ONLY = f"{EVEN}:srtf_weight=1000"


def test_tetris_weighs_what_is_left_by_what_a_worker_takes_of_the_cluster() -> None:
    """Remaining work is time x resources: 4 GPUs for 1,000 s are more than 2 for 1,500 s."""
    wide = job("wide", gpus=4, work_s=1000.0)
    narrow = job("narrow", gpus=2, work_s=1500.0, submitted_at_s=1.0)
    assert started(decide(LEFT_ONLY, full(wide, narrow, gpus=4))) == ["narrow"]


def test_tetris_adds_up_the_parts_of_all_resources() -> None:
    """Half of the GPUs and half of the CPUs are more than five eighths of the GPUs alone."""
    two = job("two", gpus=4, cpus=32, memory_gb=1, work_s=1000.0)
    one = job("one", gpus=5, cpus=1, memory_gb=1, work_s=1000.0, submitted_at_s=1.0)
    snapshot = cell(machine("n0", cpus=64, memory_gb=100), jobs=(two, one))
    assert started(decide(LEFT_ONLY, snapshot)) == ["one"]


def test_tetris_lets_alignment_and_work_left_weigh_alike() -> None:
    """eps is the ratio of the means: neither term is decided by the unit of the other.

    Mean alignment over mean work left makes the sum of both terms' means 0: a job that aligns twice
    as well goes first unless it has more than that more to do, in seconds as in years.
    """
    for unit_s in (1.0, 1e6):
        aligned = job("aligned", gpus=4, work_s=3.0 * unit_s)
        short = job("short", gpus=2, work_s=5.0 * unit_s, submitted_at_s=1.0)
        assert started(decide(EVEN, full(aligned, short, gpus=4)))[0] == "aligned"
        long = replace(aligned, remaining_work_s=9.0 * unit_s)
        assert started(decide(EVEN, full(long, short, gpus=4)))[0] == "short"


def test_tetris_counts_what_it_starts_to_its_tenant() -> None:
    """With f near 1 the worst off goes next, and a tenant that was just served is not."""
    jobs = tuple(
        job(f"{tenant}{n}", tenant, gpus=2, submitted_at_s=float(n + 10 * (tenant == "B")))
        for tenant in ("A", "B")
        for n in range(4)
    )
    found = started(decide("tetris:fairness=0.99", full(*jobs, gpus=8)))
    assert sorted(found) == ["A0", "A1", "B0", "B1"]


def test_tetris_divides_shares_by_weights() -> None:
    """Weight 3 against 1: of eight jobs that start, A has six."""
    jobs = tuple(job(f"{tenant}{n}", tenant) for tenant in ("A", "B") for n in range(8))
    snapshot = with_weights(full(*jobs), {"A": 3.0, "B": 1.0})
    found = started(decide("tetris:fairness=0.99", snapshot))
    assert sum(name.startswith("A") for name in found) == 6


# --- YARN's fair queues -------------------------------------------------------------------------


def after_timeout(snapshot: ClusterSnapshot, knobs: str = "") -> list[str]:
    """Who is stopped by the fair queues a timeout later, in order of names."""
    name = f"yarn-fair:preempts=true{knobs}"
    memory = decide(name, snapshot).memory
    return sorted(stopped(name, replace(snapshot, now_s=snapshot.now_s + 60.0), memory))


def queue(name: str, gpus: int, begun: Mapping[str, float]) -> list[JobView]:
    """Jobs of a queue that run since then, each on so many GPUs."""
    return [
        replace(job(each, name, gpus=gpus, nodes=("n0",)), started_at_s=at_s)
        for each, at_s in begun.items()
    ]


def test_a_queue_above_half_of_its_fair_share_is_not_starved() -> None:
    """Three of four GPUs are more than the threshold: it waits as long as it takes."""
    jobs = [
        *queue("A", 1, {f"a{n}": float(n) for n in range(5)}),
        *queue("B", 1, {f"b{n}": float(n) for n in range(3)}),
        job("wants", "B", gpus=1),
    ]
    assert after_timeout(full(*jobs)) == []
    assert after_timeout(full(*jobs), ":threshold=1") == ["a4"]


def test_the_newest_jobs_of_a_queue_above_its_share_go_and_only_down_to_it() -> None:
    """Of seven GPUs A keeps its fair four; the three that began last are stopped."""
    begun = {"a0": 50.0, "a1": 10.0, "a2": 70.0, "a3": 20.0, "a4": 60.0, "a5": 30.0, "a6": 40.0}
    jobs = [*queue("A", 1, begun), *queue("B", 1, {"b": 0.0}), job("wants", "B", gpus=3)]
    assert after_timeout(full(*jobs)) == ["a0", "a2", "a4"]


def test_a_job_is_not_stopped_where_its_queue_would_fall_below_its_share() -> None:
    """A has six of eight in jobs of three: without one of them it would have three of its four."""
    jobs = [*queue("A", 3, {"a0": 1.0, "a1": 2.0}), *queue("B", 1, {"b": 0.0})]
    assert after_timeout(full(*jobs, job("wants", "B", gpus=2))) == []


# --- Mesos' offers ------------------------------------------------------------------------------


def two_nodes(
    *jobs: JobView, names: tuple[str, ...] = ("n0", "n1"), gpus: int = 8
) -> ClusterSnapshot:
    """Nodes of eight GPUs with these jobs."""
    return cell(*(machine(name, gpus=gpus, jobs=jobs) for name in names), jobs=jobs)


def test_a_framework_hoards_only_nodes_that_its_gang_can_use() -> None:
    """Two GPUs are too few for a worker of four: they are declined, and offered to another."""
    jobs = (
        job("r0", "B", gpus=4, nodes=("n0",)),
        job("r1", "B", gpus=6, nodes=("n1",)),
        job("a", "A", gpus=4, workers=(2, 2)),
        job("b", "B", gpus=2),
    )
    snapshot = two_nodes(*jobs)
    first = decide("mesos", snapshot)
    assert started(first) == []
    second = decide("mesos", replace(snapshot, now_s=NOW_S + 1.0), first.memory)
    assert started(second) == ["b"]


def hoarding(**since_s: float) -> bytes:
    """A memory in which A hoards n0 and B n1, since so long ago."""
    return msgspec.msgpack.encode(
        Memory(
            hoards={"A": {NodeName("n0"): 8}, "B": {NodeName("n1"): 8}},
            since_s={name: NOW_S - ago_s for name, ago_s in since_s.items()},
        )
    )


def test_of_two_that_hoarded_too_long_the_first_gives_back() -> None:
    """If both did they would swap what they have; the one that began first lets the other start."""
    for first, other in (("A", "B"), ("B", "A")):
        jobs = (job("A", "A", gpus=8, workers=(2, 2)), job("B", "B", gpus=8, workers=(2, 2)))
        snapshot = two_nodes(*jobs)
        memory = hoarding(**{first: 130.0, other: 125.0})
        gives = decide("mesos", snapshot, memory)
        assert started(gives) == []
        assert msgspec.msgpack.decode(gives.memory, type=Memory).hoards.keys() == {other}
        later = decide("mesos", replace(snapshot, now_s=NOW_S + 1.0), gives.memory)
        assert started(later) == [other]


def test_what_is_hoarded_counts_by_weight() -> None:
    """A and B hoard one node each: of weight 4 B has the smaller share, and is offered the next."""
    jobs = (job("A", "A", gpus=8, workers=(2, 2)), job("B", "B", gpus=8, workers=(2, 2)))
    nodes = ("n0", "n1", "n2")
    for weight, first in ((4.0, "B"), (1.0, "A")):
        snapshot = with_weights(two_nodes(*jobs, names=nodes), {"A": 1.0, "B": weight})
        assert started(decide("mesos", snapshot, hoarding(A=10.0, B=10.0))) == [first]
