"""Policy bundles by name, in one explicit table. Must not know the engine."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from common.errors import ConfigError
from common.model import JobState
from coordinator.policies.decisions import Decision, Placement, Start
from coordinator.policies.snapshot import ClusterSnapshot, JobView, Trial


class Allocation(Struct, frozen=True, kw_only=True):
    """What one scheduling pass decided, and what the policy wants to remember."""

    decisions: tuple[Decision, ...]
    memory: bytes = b""
    wake_at_s: float | None = None


class Policy(Struct, frozen=True, kw_only=True):
    """A bundle: who starts where (`allocate`), and what is lent or taken back (`lend`)."""

    name: str
    description: str
    allocate: Callable[[ClusterSnapshot, bytes], Allocation]
    lend: Callable[[ClusterSnapshot], tuple[Decision, ...]]


def _place(trial: Trial, job: JobView) -> Start | None:
    for gpu_type in sorted({node.gpu_type for node in trial.nodes.values()}):
        if not job.accepts(gpu_type):
            continue
        left = job.workers_on(gpu_type).min
        placements: list[Placement] = []
        for name, node in trial.nodes.items():
            count = min(left, trial.free[name] // job.gpus_per_worker)
            if node.gpu_type == gpu_type and count > 0:
                placements.append(Placement(node=name, worker_count=count))
                left -= count
        if left == 0:
            return Start(
                job_id=job.job_id,
                gpu_type=gpu_type,
                placements=tuple(placements),
                estimated_runtime_s=job.remaining_work_s / job.workers.min,
                estimate_source=job.estimate_source,
                reason="head of the line",
            )
    return None


def fifo(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """Start jobs in order of submission until the first that does not fit."""
    trial = Trial(snapshot.nodes)
    starts: list[Decision] = []
    waiting = [job for job in snapshot.jobs if job.state == JobState.PENDING]
    for job in sorted(waiting, key=lambda job: (job.submitted_at_s, job.job_id)):
        start = None if snapshot.is_frozen else _place(trial, job)
        if start is None:
            break  # head-of-line blocking is what FIFO means
        for placement in start.placements:
            trial.take(placement.node, placement.worker_count * job.gpus_per_worker)
        starts.append(start)
    return Allocation(decisions=tuple(starts), memory=memory)


POLICIES: dict[str, Policy] = {
    "fifo": Policy(
        name="fifo", description="strict order of submission", allocate=fifo, lend=lambda _: ()
    ),
}


def policy(name: str) -> Policy:
    """A policy by name; `ConfigError` lists the valid ones."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ConfigError(f"policy: {name!r} is not one of {', '.join(sorted(POLICIES))}") from None
