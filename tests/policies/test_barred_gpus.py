"""GPUs that come free for nobody, as they are sick or a stranger computes on them: no job is
stopped for one that could not start there, and no rule counts them as room, gain or a job's own."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import GpuUuid, JobState, NodeName
from coordinator.policies.contract.decisions import Preempt, Start
from coordinator.policies.contract.free_gpus import FreeGpus, barred_gpus, fewest_nodes
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView, WorkerView
from coordinator.policies.parts.pooling import pools
from coordinator.policies.parts.resource_vectors import Bins
from coordinator.policies.registry import POLICIES, policy
from coordinator.policies.tenants.giveback import left_by
from coordinator.policies.tenants.gpu_flow import Flow, Left
from tests.draws import pick, whole, yes_or_no
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.policies.aryl.lending.test_odds import HOUR_S, cell, needed
from tests.policies.aryl.lending.test_odds import job as of_whole_nodes
from tests.policies.aryl.test_scaling import counts, nodes_of, phase_2, running
from tests.properties.safety import settle

N0 = NodeName("n0")


GPUS = tuple(GpuUuid(f"GPU-{number}") for number in range(8))


# --- what a worker leaves -----------------------------------------------------------------------


def named(name: str, *numbers: int, barred: int | None = None, **more: object) -> JobView:
    """A job of one worker on these GPUs of n0, of which one may be barred."""
    lost = () if barred is None else (GPUS[barred],)
    worker = make_worker_view(name, 0, "n0", gpus=len(numbers), barred_gpus=len(lost))
    mine = tuple(GPUS[number] for number in numbers)
    worker = replace(worker, gpu_uuids=mine, barred_uuids=lost)
    made = make_job_view(
        name, state=JobState.RUNNING, gpus_per_worker=len(numbers), placed=(worker,)
    )
    return job_with(made, **more)


def on_n0(*jobs: JobView, idle: int = 0) -> ClusterSnapshot:
    """One node of eight GPUs; of those that nobody has so many are barred."""
    workers = [worker for job in jobs for worker in job.placed]
    return make_snapshot(nodes=[make_node_view("n0", workers=workers, barred_gpus=idle)], jobs=jobs)


def test_what_comes_free_for_nobody_is_no_gain_of_a_stop() -> None:
    """Who leaves and who stays after all count the same, and never more than the node can give."""
    one, other = named("one", 0, 1, 2, 3, barred=3), named("other", 4, 5)
    floor = FreeGpus(on_n0(one, other, idle=1))
    assert floor.free == {N0: 1}
    floor.vacate(one.placed)
    assert floor.free == {N0: 4}
    assert floor.needed(one.placed) == {N0: 3}
    floor.vacate(other.placed)
    assert floor.free == {N0: 6}
    assert floor.goes_on(one.placed)
    assert floor.free == {N0: 3}
    floor.stay(other.placed)
    assert floor.free == {N0: 1}


def test_who_has_a_barred_gpu_goes_on_with_it_where_nobody_took_the_others() -> None:
    """It asks back only for what it would have left to others."""
    one = named("one", 0, 1, 2, 3, barred=0)
    floor = FreeGpus(on_n0(one))
    floor.vacate(one.placed)
    floor.free[N0] = 3
    assert floor.goes_on(one.placed)
    assert floor.free == {N0: 0}


def test_a_barred_gpu_that_jobs_share_comes_free_with_none_of_them() -> None:
    """The others of the seat come free with the last who has them."""
    jobs = [named(name, 0, 1, 2, 3, barred=1) for name in ("one", "other")]
    jobs[1] = replace(jobs[1], state=JobState.SUSPENDED)
    workers = [worker for job in jobs for worker in job.placed]
    node = make_node_view("n0", workers=workers, free_gpus=4)
    floor = FreeGpus(make_snapshot(nodes=[node], jobs=jobs))
    for job, free in zip(jobs, (4, 7), strict=True):
        floor.vacate(job.placed)
        assert floor.free == {N0: free}
    for job, free in zip(jobs, (4, 4), strict=True):
        floor.stay(job.placed)
        assert floor.free == {N0: free}
    assert left_by(workers) == Left(free={N0: 3}, used=4)


def test_a_tenant_uses_a_barred_gpu_that_its_job_has_and_leaves_it_to_nobody() -> None:
    """Its use falls by all that the job had; on the node so much is free as others can have."""
    job = named("one", 0, 1, 2, barred=2)
    flow = Flow(on_n0(job))
    stop = Preempt(job_id=job.job_id, reason="test")
    assert flow.lefts([stop]) == [Left(free={N0: 2}, used=3)]
    assert flow.own(job.placed[0]) == Left(free={N0: 2}, used=3)
    assert flow.parts(0, [stop]) == {N0: 2}
    assert left_by(job.placed) == Left(free={N0: 2}, used=3)
    assert barred_gpus(job) == 1


def test_what_can_be_shared_out_is_what_jobs_have_or_could_be_given() -> None:
    """A barred GPU counts as long as somebody has it, who may go on with it."""
    snapshot = on_n0(named("one", 0, 1, barred=1), idle=2)
    floor = FreeGpus(snapshot)
    [pool] = pools(snapshot, floor)
    assert (pool.gpus, floor.total_gpus()) == (6, 6)
    assert floor.free == {N0: 4}
    left = FreeGpus(on_n0(idle=2))
    assert (left.total_gpus(), left.free) == (6, {N0: 6})


def test_a_vector_of_what_a_worker_leaves_has_no_barred_gpu() -> None:
    """Its CPUs and memory come free all the same."""
    job = named("one", 0, 1, 2, 3, barred=0)
    snapshot = on_n0(job)
    bins = Bins(snapshot)
    bins.vacate(job, job.placed)
    assert bins.free[N0].gpus == 7.0
    bins.vacate(job, job.placed, -1.0)
    assert bins.free[N0].gpus == 4.0


def test_a_gang_needs_as_many_nodes_as_can_ever_hold_it() -> None:
    """Sixteen GPUs of three nodes of eight of which two have one that nobody gets: on all three."""
    nodes = [make_node_view(f"n{number}", barred_gpus=min(number, 1)) for number in range(3)]
    gang = make_job_view("gang", workers=(16, 16))
    floor = FreeGpus(make_snapshot(nodes=nodes, jobs=[gang]))
    assert len(fewest_nodes(floor, gang, "H100", 16)) == 3


# --- over generated clusters --------------------------------------------------------------------


@st.composite
def crowds(draw: st.DrawFn) -> ClusterSnapshot:
    """Full nodes, some with barred GPUs, and jobs before whom those that run must make room.

    Only one of them where something is promised: what a guarantee gives back is looked for job by
    job, and a later one can leave over what an earlier one got by a stop.
    """
    jobs: list[JobView] = []
    nodes: dict[str, list[WorkerView]] = {}
    tenant = st.sampled_from(("poor", "rich", "rich"))
    for number in range(draw(whole(1, 3))):
        name, left = f"n{number}", 8
        nodes[name], is_ill = [], draw(yes_or_no())
        while left:
            gpus = draw(st.sampled_from([size for size in (8, 4, 2, 1) if size <= left]))
            left -= gpus
            barred = draw(whole(0, min(2, gpus))) if is_ill else 0
            job_id = f"r{len(jobs)}"
            worker = make_worker_view(job_id, 0, name, gpus=gpus, barred_gpus=barred)
            nodes[name].append(worker)
            made = make_job_view(
                job_id,
                state=JobState.RUNNING,
                gpus_per_worker=gpus,
                placed=(worker,),
                remaining_work_s=1e6,
                submitted_at_s=0.0,
                unsaved_gpu_s=float(draw(whole(0, 3)) * 100),
            )
            since_s = NOW_S - 50000.0
            jobs.append(
                job_with(
                    made,
                    tenant=draw(tenant),
                    started_at_s=since_s,
                    first_started_at_s=since_s,
                    attained_gpu_s=50000.0 * gpus,
                    computing_gpus=gpus,
                    saves_when_asked=True,
                    has_saved=True,
                )
            )
    promised = draw(pick(None, 4, 8, 16))
    for number in range(draw(whole(1, 3)) if promised is None else 1):
        made = make_job_view(
            f"w{number}",
            workers=(draw(whole(1, 2)),) * 2,
            gpus_per_worker=draw(pick(1, 2, 4, 8)),
            remaining_work_s=60.0,
            submitted_at_s=1.0 + number,
            priority=draw(whole(0, 1)),
        )
        jobs.append(replace(made, tenant=draw(tenant), waiting_since_s=NOW_S - 1000.0))
    tenants = () if promised is None else (TenantView(name="poor", guarantee_gpus=promised),)
    snapshot = make_snapshot(
        nodes=[make_node_view(name, workers=workers) for name, workers in nodes.items()], jobs=jobs
    )
    return replace(snapshot, tenants=tenants)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=40, deadline=None)
@given(snapshot=crowds())
def test_no_victim_without_need(name: str, snapshot: ClusterSnapshot) -> None:
    """What is decided can be carried out, and of the GPUs that each victim leaves to others some
    are taken in the same pass."""
    ledger, decisions = settle(snapshot, POLICIES[name])
    stops = [decision for decision in decisions if isinstance(decision, Preempt)]
    assert not stops or any(isinstance(decision, Start) for decision in decisions)
    for stop in stops:
        freed: Counter[NodeName] = Counter()
        for worker in ledger.jobs[stop.job_id].placed:
            freed[worker.node] += worker.freed_gpus
        assert any(ledger.free[node] < gpus for node, gpus in freed.items())


def test_a_worker_that_has_one_is_not_exchanged_for_a_better_one() -> None:
    """Its job would lose two GPUs and the other gain one: it counts as fixed, also where each of
    the other's workers is worth more. Without such a GPU it is exchanged."""
    poor = running("poor", workers=(1, 2), on=("n0", "n0"), gpus=2, fastest_s=10.0)
    rich = running("rich", workers=(1, 3), on=("n1",), fastest_s=100000.0)
    nodes = {"n0": 4, "n1": 1}
    shares, _ = phase_2(nodes_of(nodes, [poor, rich]), [poor, rich])
    assert counts(shares) == {"poor": 1, "rich": 3}
    base, flexible = poor.placed
    poor = replace(poor, placed=(base, replace(flexible, freed_gpus=1)))
    shares, _ = phase_2(nodes_of(nodes, [poor, rich]), [poor, rich])
    assert counts(shares) == {"poor": 2, "rich": 1}


@pytest.mark.parametrize(("barred", "started"), [(0, ["wide"]), (1, ["a", "b"])])
def test_a_pool_does_not_give_way_to_a_gang_that_fits_nowhere_anyhow(
    barred: int, started: list[str]
) -> None:
    """The gang needs all GPUs of the cell, of which one is nobody's to have."""
    nodes = [make_node_view("n0", barred_gpus=barred), make_node_view("n1")]
    wide = make_job_view("wide", workers=(2, 2), gpus_per_worker=8, submitted_at_s=0.0)
    others = [make_job_view(n, gpus_per_worker=4, submitted_at_s=1.0) for n in ("a", "b", "c")]
    snapshot = make_snapshot(nodes=nodes, jobs=[wide, *others], now_s=1000.0)
    found = policy("philly:prerun_gpus=4").allocate(snapshot, b"").decisions
    assert [each.job_id for each in found if isinstance(each, Start)] == started


def test_an_idle_node_that_has_one_is_no_room_to_wait_for() -> None:
    """A job of whole nodes waits for the next one that comes free."""
    snapshot = cell([HOUR_S, 9 * HOUR_S], of_whole_nodes("j", 4.0))
    idle = make_node_view("idle", barred_gpus=1)
    snapshot = replace(snapshot, nodes=(*snapshot.nodes, idle))
    assert needed(snapshot, "j") == pytest.approx(4 / (4 + 2))


def test_a_job_that_has_one_keeps_what_it_runs_on() -> None:
    """All of its GPUs are its own, the barred one too: a job after it in line, for which what it
    leaves to others would do, waits."""
    worker = make_worker_view("j", 0, "n0", gpus=4, barred_gpus=1)
    job = make_job_view("j", state=JobState.RUNNING, gpus_per_worker=4, placed=(worker,))
    job = job_with(job, started_at_s=0.0, first_started_at_s=0.0, priority=1)
    after = make_job_view("after", gpus_per_worker=3)
    node = make_node_view("n0", gpus=4, workers=[worker])
    snapshot = make_snapshot(nodes=[node], jobs=[job, after], now_s=1e6)
    assert policy("themis-simple").allocate(snapshot, b"").decisions == ()
