"""How many flexible workers jobs get: value per job, one knapsack per pool, resizes that pay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest
from msgspec.structs import replace

from common.model import JobState, NodeName, NodeRole, Preemptibility
from common.profile import JobProfile
from coordinator.policies.aryl.elastic_jobs import Share, shares_of, that_may_grow
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.aryl.scaling import give_back, share_flexible
from coordinator.policies.contract.estimates import work_on
from coordinator.policies.contract.snapshot import JobView, NodeView
from tests.harness.builders import (
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
    make_worker_view,
)
from tests.tables import each_row


def running(
    name: str,
    *,
    workers: tuple[int, int],
    on: Sequence[str],
    fastest_s: float = 1000.0,
    gpus: int = 1,
    gpu_type: str = "H100",
    multiplier: Mapping[str, int] | None = None,
    preemptibility: Preemptibility = Preemptibility.FULL,
) -> JobView:
    """A running elastic job as the paper writes it, one worker per named node, base first."""
    base = workers[0] * (multiplier or {}).get(gpu_type, 1)
    placed = [
        make_worker_view(name, index, node, gpus=gpus, is_flexible=index >= base)
        for index, node in enumerate(on)
    ]
    return make_job_view(
        name,
        state=JobState.RUNNING,
        workers=workers,
        gpus_per_worker=gpus,
        remaining_work_s=fastest_s * workers[1],
        gpu_type=gpu_type,
        multiplier=multiplier,
        preemptibility=preemptibility,
        placed=placed,
    )


def nodes_of(
    sizes: Mapping[str, int], jobs: Iterable[JobView], *, role: NodeRole = NodeRole.TRAINING
) -> list[NodeView]:
    """Nodes of that many GPUs with the workers that the jobs have there."""
    workers = [worker for job in jobs for worker in job.placed]
    return [
        make_node_view(name, gpus=gpus, role=role, workers=[w for w in workers if w.node == name])
        for name, gpus in sizes.items()
    ]


def phase_2(
    nodes: Iterable[NodeView], jobs: Sequence[JobView], *, resize_cost_s: float = 5.0
) -> tuple[dict[str, Share], PlacementState]:
    """Flexible demand alone, re-solved."""
    snapshot = make_snapshot(nodes=nodes, jobs=jobs, services=[make_service_view()])
    room, shares = PlacementState(snapshot), shares_of(snapshot.jobs, now_s=0.0)
    share_flexible(room, list(shares.values()), resize_cost_s=resize_cost_s)
    give_back(room, shares.values())
    return {str(job_id): share for job_id, share in shares.items()}, room


def counts(shares: Mapping[str, Share]) -> dict[str, int]:
    """Workers per job after the pass, base gang included."""
    return {
        name: share.job.workers_on(share.gpu_type).min + share.count
        for name, share in shares.items()
    }


EIGHT = {"n1": 8}
LIKE_3 = {"a": ((2, 6), 50.0), "b": ((2, 6), 20.0)}
LIKE_4 = {"a": ((2, 3), 100.0), "b": ((2, 6), 20.0)}
"""Worker range and minimum running time of the jobs in the paper's tables 3 and 4."""


def average_jct_s(
    jobs: Mapping[str, tuple[tuple[int, int], float]], at_first: Mapping[str, int]
) -> float:
    """Mean completion time on eight GPUs; whenever a job ends, phase 2 is solved again."""
    left_s = {name: fastest_s * workers[1] for name, (workers, fastest_s) in jobs.items()}
    have = dict(at_first)
    now_s, ends_s = 0.0, list[float]()
    while left_s:
        step_s = min(left_s[name] / have[name] for name in left_s)
        now_s += step_s
        left_s = {name: work_s - step_s * have[name] for name, work_s in left_s.items()}
        ends_s += [now_s for work_s in left_s.values() if work_s < 1e-9]
        left_s = {name: work_s for name, work_s in left_s.items() if work_s >= 1e-9}
        views = [
            running(
                name,
                workers=jobs[name][0],
                on=["n1"] * have[name],
                fastest_s=work_s / jobs[name][0][1],
            )
            for name, work_s in left_s.items()
        ]
        shares, _ = phase_2(nodes_of(EIGHT, views), views, resize_cost_s=0.0)
        have = counts(shares)
    return sum(ends_s) / len(ends_s)


@each_row(
    ("jobs", "at_first", "average_s"),
    [
        (LIKE_3, {"a": 6, "b": 2}, 51.67),
        (LIKE_3, {"a": 2, "b": 6}, 41.67),
        (LIKE_3, {"a": 4, "b": 4}, 45.0),
        (LIKE_4, {"a": 3, "b": 5}, 62.0),
        (LIKE_4, {"a": 2, "b": 6}, 63.33),
    ],
)
def test_completion_times_of_tables_3_and_4(
    jobs: Mapping[str, tuple[tuple[int, int], float]],
    at_first: Mapping[str, int],
    average_s: float,
) -> None:
    """From each printed first allocation on, growing by phase 2 gives the printed average."""
    assert average_jct_s(jobs, at_first) == pytest.approx(average_s, abs=0.005)


def test_the_better_row_of_table_4_is_what_phase_2_chooses() -> None:
    """Two base gangs on eight GPUs: the longer job grows first, which the paper shows is better
    on average than the shortest first."""
    views = [
        running(name, workers=workers, on=["n1", "n1"], fastest_s=fastest_s)
        for name, (workers, fastest_s) in LIKE_4.items()
    ]
    shares, _ = phase_2(nodes_of(EIGHT, views), views)
    assert counts(shares) == {"a": 3, "b": 5}


def test_figure_6_through_shares() -> None:
    """The values that a job's share sees are the items that figure 6 prints."""
    a = Share(
        running("a", workers=(2, 3), on=["n1"] * 2, fastest_s=100.0, gpus=2), "H100", now_s=0.0
    )
    b = Share(running("b", workers=(2, 6), on=["n1"] * 2, fastest_s=20.0), "H100", now_s=0.0)
    assert [a.group(0.0).value_s(k) for k in (1,)] == pytest.approx([50.0])
    assert [b.group(0.0).value_s(k) for k in (1, 2, 3, 4)] == pytest.approx(
        [20.0, 30.0, 36.0, 40.0]
    )
    assert (a.group(0.0).gpus_per_worker, a.group(0.0).extra_max) == (2, 1)


def test_a_job_grows_into_what_is_free() -> None:
    """Up to its most workers and not beyond, on nodes with room."""
    job = running("a", workers=(1, 4), on=["n1"])
    shares, room = phase_2(nodes_of({"n1": 2, "n2": 8}, [job]), [job])
    assert counts(shares) == {"a": 4}
    assert (room.free[NodeName("n1")], room.free[NodeName("n2")]) == (0, 6)


def test_one_job_shrinks_for_another_only_for_a_net_gain() -> None:
    """The worker moves when the other saves more time than both rendezvous cost, else it stays."""
    rich = running("rich", workers=(1, 2), on=["n1", "n1"], fastest_s=100.0)  # a worker is 100 s
    for poor_s, moves in ((109.0, False), (111.0, True)):
        poor = running("poor", workers=(1, 2), on=["n1"], fastest_s=poor_s)
        jobs = [rich, poor]
        shares, _ = phase_2(nodes_of({"n1": 3}, jobs), jobs, resize_cost_s=5.0)
        assert counts(shares) == ({"rich": 1, "poor": 2} if moves else {"rich": 2, "poor": 1})


def test_a_growth_must_save_more_than_it_costs() -> None:
    """With the rendezvous dearer than the time saved, free GPUs stay free."""
    job = running("a", workers=(1, 2), on=["n1"], fastest_s=4.0)
    nodes = nodes_of({"n1": 8}, [job])
    assert counts(phase_2(nodes, [job], resize_cost_s=5.0)[0]) == {"a": 1}
    assert counts(phase_2(nodes, [job], resize_cost_s=3.0)[0]) == {"a": 2}


def test_a_new_job_pays_no_rendezvous() -> None:
    """A gang that starts in this pass gets its flexible workers with the start, at no cost."""
    job = make_job_view("a", workers=(1, 2), remaining_work_s=4.0)
    share = Share(job, "H100", now_s=0.0, is_new=True)
    room = PlacementState(make_snapshot(nodes=[make_node_view("n1")]))
    share_flexible(room, [share], resize_cost_s=5.0)
    assert share.count == 1


def test_a_pool_is_one_gpu_type() -> None:
    """GPUs of another type are no help, however many are free: jobs compete for their own."""
    jobs = [
        running("a", workers=(1, 4), on=["n1"], fastest_s=100.0),
        running("b", workers=(1, 4), on=["n1"], fastest_s=900.0),
    ]
    nodes = [*nodes_of({"n1": 3}, jobs), make_node_view("a1", gpu_type="A100")]
    assert counts(phase_2(nodes, jobs)[0]) == {"a": 1, "b": 2}
    jobs = [replace(job, gpu_type="A100") for job in jobs]
    nodes = [replace(node, gpu_type="A100") for node in nodes_of({"n1": 3}, jobs)]
    assert counts(phase_2([*nodes, make_node_view("h1")], jobs)[0]) == {"a": 1, "b": 2}


def test_the_worker_multiplier_scales_work_and_range() -> None:
    """On a type that counts half there are twice the workers and twice the worker-seconds, so
    that the running time of the gang is the same."""
    job = running("a", workers=(1, 2), on=["n1"] * 2, gpu_type="T4", multiplier={"T4": 2})
    group = Share(job, "T4", now_s=0.0).group(5.0)
    assert (group.base_workers, group.extra_max) == (2, 2)
    assert (
        work_on(job, "T4", 0.0) / group.base_workers
        == job.estimate.remaining_work_s / job.workers.min
    )


def test_flexible_workers_go_to_lent_nodes_first_and_leave_training_nodes_first() -> None:
    """Growing prefers the flexible group; shrinking gives back training GPUs before lent ones."""
    job = running("a", workers=(1, 2), on=["t1"])
    lent = make_node_view("l1", role=NodeRole.ON_LOAN)
    shares, _ = phase_2([*nodes_of({"t1": 8}, [job]), lent], [job])
    assert [placement.node for placement in shares["a"].added] == ["l1"]

    job = running("a", workers=(1, 3), on=["t1", "t1", "l1"], fastest_s=10.0)
    rival = running("b", workers=(1, 2), on=["t1"], fastest_s=9000.0)
    jobs = [job, rival]
    nodes = nodes_of({"t1": 3}, jobs) + nodes_of({"l1": 1}, jobs, role=NodeRole.ON_LOAN)
    shares, _ = phase_2(nodes, jobs)
    assert [worker.worker_index for worker in shares["a"].removed] == [1]
    assert counts(shares) == {"a": 2, "b": 2}


def test_nobody_shrinks_for_gpus_in_pieces() -> None:
    """Free GPUs on different nodes fit no large worker: a plan that counts on their sum, and
    lets somebody shrink for it, is dropped for one that only grows."""
    small = running("small", workers=(1, 2), on=["n1", "n0"], fastest_s=50.0)
    large = running("large", workers=(1, 2), on=["n0"], fastest_s=9000.0, gpus=2)
    other = running("other", workers=(1, 2), on=["n2"], fastest_s=100.0)
    jobs = [small, large, other]
    shares, room = phase_2(nodes_of({"n0": 3, "n1": 2, "n2": 2}, jobs), jobs)
    assert counts(shares) == {"large": 1, "other": 2, "small": 2}
    assert sum(room.free.values()) == 1


def test_no_job_gives_and_takes_in_one_pass() -> None:
    """Who lost a worker to base demand gets none back elsewhere in the same pass."""
    job = running("a", workers=(1, 3), on=["n1", "n1"])
    snapshot = make_snapshot(nodes=nodes_of({"n1": 2, "n2": 8}, [job]), jobs=[job])
    room, shares = PlacementState(snapshot), shares_of(snapshot.jobs, now_s=0.0)
    share = shares[job.job_id]
    share.removed.append(share.workers[0])
    room.release(share.workers[0])
    room.take(NodeName("n1"), 1)
    share_flexible(room, [share])
    assert (share.added, share.count) == ([], 0)


@pytest.mark.parametrize(("longer", "shorter"), [("a", "z"), ("z", "a")])
def test_a_removed_worker_stays_when_its_gpus_are_free_again(longer: str, shorter: str) -> None:
    """The most valuable one first, if there is room for one only; names decide nothing."""
    long = running(longer, workers=(1, 2), on=["n2", "n1"], fastest_s=900.0)
    short = running(shorter, workers=(1, 2), on=["n2", "n1"], fastest_s=10.0)
    jobs = [long, short]
    snapshot = make_snapshot(nodes=nodes_of({"n1": 2, "n2": 2}, jobs), jobs=jobs)
    room, shares = PlacementState(snapshot), shares_of(snapshot.jobs, now_s=0.0)
    for share in shares.values():
        share.removed.append(share.workers[0])
        room.release(share.workers[0])
    room.take(NodeName("n1"), 1)
    give_back(room, shares.values())
    assert [len(shares[job.job_id].removed) for job in jobs] == [0, 1]


@pytest.mark.parametrize("dips", ["a", "z"])
def test_who_finds_no_place_for_two_workers_at_once_keeps_nobody_from_one(dips: str) -> None:
    """Four GPUs in pieces of three and one are a single place: a job that only two workers more
    make faster has no use for it, and another one with workers of that size takes it."""
    dipping = running(dips, workers=(1, 3), on=["full"], gpus=2, fastest_s=9000.0)
    dipping = replace(dipping, profile=JobProfile(speedup=((1, 1.0), (2, 0.5), (3, 3.0))))
    linear = running("m", workers=(1, 3), on=["full"], gpus=2, fastest_s=100.0)
    jobs = [dipping, linear]
    shares, _ = phase_2(nodes_of({"full": 4, "n3": 3, "n1": 1}, jobs), jobs)
    assert counts(shares) == {dips: 1, "m": 2}


def test_only_jobs_that_can_be_resized_have_a_share() -> None:
    """Waiting, starting, resizing and inelastic jobs are left alone."""
    jobs = [
        running("yes", workers=(1, 2), on=["n1"]),
        running("inelastic", workers=(2, 2), on=["n1"] * 2),
        make_job_view("waits", workers=(1, 2)),
        make_job_view("starts", state=JobState.STARTING, workers=(1, 2)),
        make_job_view("resizes", state=JobState.RESIZING, workers=(1, 2)),
    ]
    assert list(shares_of(jobs, now_s=0.0)) == ["yes"]


def test_a_job_never_grows_where_its_rules_forbid() -> None:
    """Not preemptible: no flexible worker on a lent node, though nothing else is free."""
    job = running("a", workers=(1, 2), on=["n1"], preemptibility=Preemptibility.NON)
    lent = make_node_view("l1", role=NodeRole.ON_LOAN)
    shares, _ = phase_2([*nodes_of({"n1": 1}, [job]), lent], [job])
    assert counts(shares) == {"a": 1}


def test_only_pools_in_which_somebody_can_grow_are_shared_anew() -> None:
    """Full jobs beside one that is not may have to shrink for it; those of another type may not."""
    full = running("full", workers=(1, 2), on=["n", "n"], gpu_type="V100")
    short = running("short", workers=(1, 2), on=["n"], gpu_type="V100")
    other = running("other", workers=(1, 2), on=["n", "n"], gpu_type="T4")
    snapshot = make_snapshot(jobs=[full, other, short])
    shares = shares_of(snapshot.jobs, now_s=0.0)
    found = that_may_grow(snapshot, shares, [short], [])
    assert [share.job.job_id for share in found] == ["full", "short"]
    assert list(shares.made) == ["full", "short"]
    assert that_may_grow(snapshot, shares, [], []) == []
