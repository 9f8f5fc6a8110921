"""Every policy places jobs that select nodes by labels on nodes that they may use, on no others."""

from __future__ import annotations

from functools import cache

from msgspec.structs import replace

from common.model import JobId, JobState, Mode, NodeName, Pool, ServiceName
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from coordinator.sim.run.cluster import Delays, NodeSpec
from coordinator.sim.run.simulation import Simulation, Submission
from tests.harness.builders import make_spec
from tests.policies.families import FAMILIES
from tests.tables import each_row

RACKS, JOBS, CHAT = 3, 9, ServiceName("chat")
TIRED_S = 6000.0
"""Ten times what the jobs need one after the other in their racks."""


@cache
def _nodes() -> tuple[NodeSpec, ...]:
    """One training and one inference node in each rack."""
    return tuple(
        NodeSpec(
            name=NodeName(f"{pool[0]}{rack}"),
            home_pool=pool,
            gpu_type="H100",
            gpus=8,
            service=CHAT if pool == Pool.INFERENCE else None,
            labels={"rack": f"r{rack}"},
        )
        for pool in Pool
        for rack in range(RACKS)
    )


@each_row("policy", FAMILIES)
def test_jobs_end_in_the_racks_that_they_require(policy: str) -> None:
    """No decision is refused for a label, and no job is left out: of each rack some jobs fill
    whole nodes, some are elastic, and some need several workers."""
    service = ServiceSettings(
        name=CHAT, capacity_per_node=10.0, mode=Mode.ACT, reclaim_deadline_s=300.0
    )
    settings = EngineSettings(policy=policy, services=(service,))
    sim = Simulation(settings, _nodes(), delays=Delays(ready_s=1.0, start_s=1.0, stop_s=1.0))
    spec = make_spec("j", expected_runtime_s=60.0)
    sizes = (((1, 1), 8), ((1, 3), 4), ((2, 2), 2))
    jobs = [
        replace(
            spec,
            workers=replace(spec.workers, min=low, max=high),
            gpus_per_worker=gpus,
            require=(f"rack=r{number % RACKS}",),
        )
        for number in range(JOBS)
        for (low, high), gpus in (sizes[number // RACKS],)
    ]
    sim.submit(
        [
            Submission(at_s=float(n), job_id=JobId(f"j{n}"), spec=job, work_s=60.0, tenant="t")
            for n, job in enumerate(jobs)
        ]
    )
    sim.run(until_s=TIRED_S)
    state = sim.engine.state
    assert {job.state for job in state.jobs.values()} == {JobState.SUCCEEDED}
    assert state.counters.decisions_refused == 0
    for job in state.jobs.values():
        used = {worker.node for worker in job.ended.workers.values()}
        racks = {state.nodes[name].labels.now["rack"] for name in used}
        assert racks == {(job.spec.require or ("",))[0].removeprefix("rack=")}
