"""GPUs kept for pre-runs: who starts there, who does not, and when they give way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.clock import SystemClock
from common.model import JobState
from coordinator.policies.contract.decisions import Preempt, Start
from coordinator.policies.contract.estimates import Source
from coordinator.policies.contract.free_gpus import FreeGpus
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.philly.prerun_pool import PrerunPool
from coordinator.sim.inputs.failure_sources import FailureSource
from coordinator.sim.inputs.inputs import parse_cluster
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import play
from coordinator.workloads.records import TraceJob, Workload
from tests.harness.builders import (
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)

POOL = "philly:prerun_gpus=4"


def waiting(name: str, gpus: int = 1, *, workers: int = 1, tenant: str = "vc") -> JobView:
    """A gang that waits."""
    job = make_job_view(name, workers=(workers, workers), gpus_per_worker=gpus)
    return replace(job, tenant=tenant)


def prerun(name: str, *, tenant: str = "vc", node: str | None = None) -> JobView:
    """The pre-run of a gang, which waits or runs on a node."""
    job = job_with(waiting(name, tenant=tenant), estimate_source=Source.PRERUN)
    return job if node is None else runs(job, node)


def runs(job: JobView, node: str) -> JobView:
    """The same job on a node since a while."""
    worker = make_worker_view(job.job_id, 0, node, gpus=job.gpus_per_worker)
    return job_with(
        job, state=JobState.RUNNING, gpu_type="H100", placed=(worker,), started_at_s=10.0
    )


def cell(*jobs: JobView, guarantees: dict[str, int] | None = None) -> ClusterSnapshot:
    """Two nodes of eight GPUs with those that run."""
    nodes = [
        make_node_view(name, workers=[w for job in jobs for w in job.placed if w.node == name])
        for name in ("n0", "n1")
    ]
    tenants = tuple(
        TenantView(name=name, guarantee_gpus=gpus) for name, gpus in (guarantees or {}).items()
    )
    return replace(make_snapshot(nodes=nodes, jobs=jobs, now_s=1000.0), tenants=tenants)


def started(snapshot: ClusterSnapshot, name: str = POOL) -> dict[str, list[str]]:
    """Nodes of each job that starts."""
    return {
        decision.job_id: [placement.node for placement in decision.placements]
        for decision in policy(name).allocate(snapshot, b"").decisions
        if isinstance(decision, Start)
    }


def test_only_pre_runs_start_in_the_pool() -> None:
    """One of four gangs of four finds no GPUs beside it; without a pool all of them do."""
    jobs = [waiting(f"j{number:02}", 4) for number in range(4)]
    assert len(started(cell(*jobs), "philly")) == 4
    assert sorted(started(cell(*jobs))) == ["j00", "j01", "j02"]


def test_a_job_of_one_gpu_that_found_nothing_hides_the_pool_from_no_pre_run() -> None:
    """Its tenant's next job asks for the same, and has another place to look for it."""
    full = [runs(waiting("a", 8), "n0"), runs(waiting("b", 4), "n1")]
    early = replace(waiting("w"), priority=1)
    assert started(cell(*full, early, prerun("p"))) == {"p": ["n1"]}


def test_a_pre_run_in_the_pool_is_used_of_its_tenant_s_quota() -> None:
    """Of two tenants with nothing in use the one whose pre-run just started comes after the other,
    though its job waits for longer: one GPU is left."""
    full = [runs(waiting("a", 8, tenant="c"), "n0"), runs(waiting("b", 3, tenant="c"), "n1")]
    p = replace(prerun("p"), submitted_at_s=0.0)
    mine = [p, replace(waiting("x"), submitted_at_s=1.0)]
    theirs = replace(waiting("y", tenant="other"), submitted_at_s=2.0)
    quotas = {"vc": 4, "other": 4, "c": 11}
    found = started(cell(*full, *mine, theirs, guarantees=quotas))
    assert found == {"p": ["n1"], "y": ["n1"]}


def test_a_pre_run_starts_there_whatever_its_tenant_has_in_use() -> None:
    """All other GPUs are taken, by its own tenant, which is far beyond its quota."""
    full = [runs(waiting("a", 8), "n0"), runs(waiting("b", 4), "n1")]
    quotas = {"vc": 1, "other": 15}
    assert started(cell(*full, prerun("p"), waiting("w"), guarantees=quotas)) == {"p": ["n1"]}


def test_a_pre_run_that_finds_the_pool_full_takes_its_turn_elsewhere() -> None:
    """Four stand there; the fifth starts as any job of one GPU."""
    inside = [prerun(f"p{number}", node="n1") for number in range(4)]
    assert started(cell(*inside, prerun("late"))) == {"late": ["n1"]}
    full = [*inside, runs(waiting("a", 8), "n0")]
    assert started(cell(*full, runs(waiting("b", 4), "n1"), prerun("late"))) == {}
    # A pool that is in use keeps nothing besides.
    assert started(cell(*full, waiting("w", 4))) == {"w": ["n1"]}


def test_the_pool_gives_way_to_a_gang_that_needs_it() -> None:
    """Sixteen GPUs are all that the cell has; one more than are left beside the pool are, too."""
    assert started(cell(waiting("wide", 8, workers=2))) == {"wide": ["n0", "n1"]}
    assert started(cell(waiting("most", 1, workers=13)))["most"]
    assert started(cell(waiting("fits", 1, workers=12), waiting("more"))) == {"fits": ["n0", "n1"]}


def test_nobody_is_stopped_in_the_pool() -> None:
    """A job within its quota has a gang of the other tenant stopped, not its younger pre-run."""
    full = [
        job_with(prerun("p", node="n1"), started_at_s=900.0),
        runs(waiting("a", 8), "n0"),
        runs(waiting("b", 4), "n1"),
        waiting("w", tenant="other"),
    ]
    made = policy(POOL).allocate(cell(*full, guarantees={"vc": 4, "other": 12}), b"")
    assert [each.job_id for each in made.decisions if isinstance(each, Preempt)] == ["a"]


def test_who_waits_is_told_of_no_gpu_in_the_pool() -> None:
    """Idle GPUs of it are none for a gang: it waits for its place."""
    full = [runs(waiting("a", 8), "n0"), runs(waiting("b", 4), "n1"), waiting("w")]
    [hold] = policy(POOL).pending_reasons(cell(*full), b"")
    assert hold.job_id == "w"


@given(
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    used=st.lists(st.integers(0, 8), min_size=4, max_size=4),
    gpus=st.integers(0, 40),
)
def test_the_pool_and_the_rest_are_the_cell(sizes: list[int], used: list[int], gpus: int) -> None:
    """Conservation: no GPU is lost or in both, neither of those that are there nor of free ones."""
    nodes = [
        make_node_view(f"n{at}", gpus=size, free_gpus=max(0, size - used[at]))
        for at, size in enumerate(sizes)
    ]
    snapshot = make_snapshot(nodes=nodes, jobs=[])
    whole, rest = FreeGpus(snapshot), FreeGpus(snapshot)
    pool = PrerunPool(snapshot, rest, gpus)
    assert pool.gpus == min(gpus, sum(sizes))
    assert pool.floor.total_gpus() + rest.total_gpus() == whole.total_gpus()
    assert pool.floor.free_gpus() + rest.free_gpus() == whole.free_gpus()
    for name, node in rest.nodes.items():
        assert 0 <= rest.free[name] <= whole.free[name]
        assert 0 <= node.gpus <= whole.nodes[name].gpus


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [0, 4])
def test_every_gang_ends_or_fails_by_itself_beside_a_pool(gpus: int) -> None:
    """No invariant breaks, and no gang waits for ever, not even one as large as the cell."""
    jobs = tuple(
        TraceJob(
            job_id=f"j{number}",
            submit_s=200.0 * number,
            duration_s=1500.0,
            gpus=(2, 4, 8, 16)[number % 4],
            user=f"u{number % 9}",
        )
        for number in range(40)
    )
    workload = Workload(
        name="gangs", jobs=jobs, loads=(), nodes=parse_cluster("2x8+0x8"), length_s=8000.0
    )
    options = RunOptions(
        policy=f"philly:prerun_gpus={gpus}",
        failures=FailureSource.PHILLY,
        prerun_s=300.0,
        check=True,
    )
    result = play(workload, options, clock=SystemClock()).result
    assert result.jobs == len(jobs)
    assert 0 < result.jobs_failed < len(jobs)
