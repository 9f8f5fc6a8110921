"""A simulated cell under Gandiva, checked after every event. Must not know what a test is after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.model import (
    CheckpointSpec,
    JobId,
    JobState,
    NodeName,
    Pool,
    Preemptibility,
)
from common.profile import JobProfile
from coordinator.engine.state.settings import EngineSettings, TenantSettings
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Decision
from coordinator.sim.run.cluster import Delays, NodeSpec
from coordinator.sim.run.runtime import RunRules
from coordinator.sim.run.simulation import Simulation, Submission
from tests.harness.builders import make_spec

SLICE_S = 60.0
DELAYS = Delays(report_s=0.5, ready_s=1.0, start_s=5.0, suspend_s=0.5, resume_s=0.5, stop_s=5.0)


class Cell:
    """Nodes of one type under Gandiva, checked after every event."""

    def __init__(
        self,
        *,
        nodes: int = 1,
        gpus: int = 4,
        knobs: str = "",
        delays: Delays | None = None,
        gpu_memory_bytes: int = 0,
        weights: Mapping[str, float] | None = None,
        tenants: Sequence[TenantSettings] = (),
        cooldown_s: float = 0.0,
    ) -> None:
        specs = [
            NodeSpec(
                name=NodeName(f"t{number}"),
                home_pool=Pool.TRAINING,
                gpu_type="H100",
                gpus=gpus,
                gpu_memory_bytes=gpu_memory_bytes,
            )
            for number in range(nodes)
        ]
        options = EngineSettings(
            policy=f"gandiva{knobs}",
            resize_cooldown_s=cooldown_s,
            tenants=(
                *tenants,
                *(TenantSettings(name=name, weight=each) for name, each in (weights or {}).items()),
            ),
        )
        self.sim = Simulation(
            options, specs, delays=delays, rules=RunRules(progress_after_s=1.0), check=True
        )
        self.said: list[tuple[float, Decision]] = []
        self.sim.hear = lambda made: self.said.extend((self.sim.loop.now_s, each) for each in made)
        self.sim.begin()

    def submit(
        self,
        name: str,
        *,
        at_s: float = 1.0,
        gpus: int = 4,
        work_s: float = 600.0,
        gpus_per_worker: int | None = None,
        most: int | None = None,
        priority: int = 0,
        busy: float | None = None,
        memory_bytes: int | None = None,
        tenant: str = "research",
        saves: bool = True,
        preemptibility: Preemptibility = Preemptibility.FULL,
    ) -> None:
        """A job that saves on request, or never; its work is in seconds with its base gang."""
        each = gpus_per_worker or gpus
        least = gpus // each
        spec = make_spec(
            name,
            workers=(least, most or least),
            gpus_per_worker=each,
            priority=priority,
            preemptibility=preemptibility,
            expected_runtime_s=work_s,
            checkpoint=CheckpointSpec(path="/saves" if saves else None, grace_s=30.0),
            profile=JobProfile(gpu_busy_ratio=busy, gpu_memory_bytes=memory_bytes),
        )
        self.sim.submit(
            [
                Submission(
                    at_s=at_s,
                    job_id=JobId(name),
                    spec=spec,
                    work_s=work_s * least,
                    tenant=tenant,
                )
            ]
        )

    def until(self, at_s: float) -> None:
        """Let time pass."""
        self.sim.loop.run(until_s=at_s)

    def job(self, name: str) -> JobEntry:
        """A job as the engine sees it."""
        return self.sim.engine.state.jobs[JobId(name)]

    def state(self, name: str) -> JobState:
        """Where a job is in its life."""
        return self.job(name).state

    def nodes(self, name: str) -> list[str]:
        """Where a job's workers are."""
        return sorted({str(worker.node) for worker in self.job(name).workers.values()})

    def end_s(self, name: str) -> float:
        """When a job ended well."""
        job = self.job(name)
        assert job.state == JobState.SUCCEEDED, f"{name} is {job.state}"
        return job.finished_at_s or 0.0

    def made(self, kind: type[Decision]) -> list[tuple[float, Decision]]:
        """Decisions of one kind, with their instants."""
        return [(at_s, each) for at_s, each in self.said if isinstance(each, kind)]
