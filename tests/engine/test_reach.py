"""What a submitter may choose costs no more than what the fleet has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import (
    GpuRequest,
    GpuUuid,
    JobId,
    Mode,
    NodeName,
    NodeRole,
    Pool,
    WorkerRange,
)
from common.profile import JobProfile
from coordinator.engine.reach import shortened
from coordinator.engine.state.events import GpuFact
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from coordinator.service.api import explain_job
from coordinator.sim.run.cluster import NodeSpec
from coordinator.sim.run.simulation import Simulation, Submission
from coordinator.workloads.records import SpeedUp
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import CHAT, EngineHarness
from tests.policies.counted_calls import calls
from tests.policies.families import FAMILIES
from tests.tables import each_row

GPUS = 8
JOBS = 6


def _settings(name: str) -> EngineSettings:
    service = ServiceSettings(name=CHAT, capacity_per_node=10.0, mode=Mode.ACT)
    return EngineSettings(policy=name, services=(service,), min_runtime_s=0.0)


def _node(name: str, home_pool: Pool) -> NodeSpec:
    service = CHAT if home_pool == Pool.INFERENCE else None
    return NodeSpec(
        name=NodeName(name), home_pool=home_pool, gpu_type="H100", gpus=GPUS, service=service
    )


def _submit(
    sim: Simulation, index: int, *, most: int, points: int = 0, gpu: GpuRequest | None = None
) -> None:
    """An elastic job of 1 to `most` workers; each other one has a deadline, and is of an app."""
    spec = make_spec(
        f"j{index}",
        workers=(1, most),
        gpu=gpu or GpuRequest(),
        expected_runtime_s=5000.0,
        deadline_s=20_000.0 if index % 2 else None,
        app="search" if index % 2 else None,
        profile=JobProfile(speedup=tuple((k, float(k)) for k in range(1, points + 1))),
    )
    speedup = SpeedUp(min_workers=1, rates=tuple(float(k) for k in range(1, GPUS + 1)))
    submission = Submission(
        at_s=sim.loop.now_s, job_id=JobId(f"j{index}"), spec=spec, work_s=5000.0,
        speedup=speedup, tenant="team",
    )  # fmt: skip
    sim.submit([submission])


def _played(name: str, *, most: int, points: int) -> tuple[int, dict[str, object]]:
    """Calls that some passes and explanations take, and what each job has then."""
    sim = Simulation(_settings(name), [_node("t0", Pool.TRAINING)])
    jobs = sim.engine.state.jobs

    def act() -> None:
        for index in range(JOBS):
            _submit(sim, index, most=most, points=points if index % 3 else 0)
        sim.run(until_s=60.0)
        for job in tuple(jobs.values()):
            explain_job.reasons(sim.engine, job)

    count = calls(act)
    return count, {job_id: (job.state, job.running_workers) for job_id, job in jobs.items()}


@each_row("name", FAMILIES)
def test_a_job_costs_a_policy_no_more_than_the_gpus_that_there_are(name: str) -> None:
    """Under every policy jobs of 1:100000 workers with long speed-up tables cost a cell of 8 GPUs
    hardly more calls than jobs of 1:8, and are decided alike."""
    thin, decided = _played(name, most=GPUS, points=GPUS)
    fat, decided_fat = _played(name, most=100_000, points=199)
    assert fat < 1.5 * thin
    assert decided_fat == decided


def test_a_job_is_seen_as_large_as_the_fleet_may_let_it_become() -> None:
    """Nodes that serve count as well, a node that joins lets jobs grow, and a job whose range fits
    is seen as it was submitted."""
    harness = EngineHarness(training=1, inference=1)
    _submit(harness.sim, 0, most=100_000)
    _submit(harness.sim, 1, most=12)
    harness.settle()
    seen = {job.job_id: job.workers.max for job in harness.engine.snapshot().jobs}
    assert seen == {"j0": 16, "j1": 12}
    late = replace(harness.report("t0", NodeRole.TRAINING), node=NodeName("late"), boot_id="other")
    late = replace(late, gpus=tuple(GpuFact(GpuUuid(f"late-{n}"), "H100") for n in range(GPUS)))
    harness.engine.handle(late, now_s=harness.sim.loop.now_s)
    assert harness.engine.check() == []
    seen = {job.job_id: job.workers.max for job in harness.engine.snapshot().jobs}
    assert seen == {"j0": 24, "j1": 12}


def test_a_multiplier_makes_no_range_longer_than_the_gpus_of_its_type() -> None:
    """A job that takes 64 workers for one is seen with no more workers of the type than fit."""
    harness = EngineHarness(training=1, inference=0)
    _submit(harness.sim, 0, most=100_000, gpu=GpuRequest(worker_multiplier={"H100": 64}))
    harness.settle()
    (job,) = harness.engine.snapshot().jobs
    assert job.workers == WorkerRange(min=1, max=2)  # it stays elastic
    assert job.workers_on("H100") == WorkerRange(min=64, max=65)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=12, unique=True).map(sorted),
    st.integers(1, 60),
)
def test_a_shortened_profile_is_as_fast_at_each_size_that_is_asked_for(
    sizes: list[int], most: int
) -> None:
    """Up to the largest size that fits, a speed-up table tells the same with and without the rest,
    and keeps at most one point beyond."""
    whole = JobProfile(speedup=tuple((size, float(size % 7 + 1)) for size in sizes))
    cut = shortened(whole, most)
    assert [cut.speed(n) for n in range(1, most + 1)] == [
        whole.speed(n) for n in range(1, most + 1)
    ]
    assert sum(size > most for size, _ in cut.speedup) <= 1
