"""A job's spec during its pre-run, and afterwards."""

from __future__ import annotations

from msgspec.structs import replace

from common.model import JobSpec, PrerunGang, WorkerRange
from coordinator.engine.jobs import estimates
from coordinator.engine.jobs import retry as jobs_retry
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import JobEntry


def begun(ctx: Context, tenant: str, spec: JobSpec) -> JobSpec:
    """The spec with which a job waits first; the same where no pre-run is asked for or of use."""
    asked = spec.prerun
    gpus = min(asked.gpus, spec.gpus_per_worker)
    if not asked.time_s or spec.base_demand_gpus <= gpus or _has_succeeded(ctx, tenant, spec):
        return spec
    gang = PrerunGang(workers=spec.workers, gpus_per_worker=spec.gpus_per_worker)
    return replace(
        spec,
        workers=WorkerRange(min=1, max=1),
        gpus_per_worker=gpus,
        prerun=replace(asked, gang=gang),
    )


def _has_succeeded(ctx: Context, tenant: str, spec: JobSpec) -> bool:
    """Whether a job of this name and command ended well for this tenant."""
    return estimates.history_key(tenant, spec) in ctx.state.history


def is_on(job: JobEntry) -> bool:
    """Whether the job is in its pre-run, or waits for it."""
    return job.spec.prerun.gang is not None


def computed_s(job: JobEntry, now_s: float) -> float:
    """Seconds that its present attempt has computed until now: none while it was suspended."""
    if job.attempt.ran_at_s is None:
        return 0.0
    until_s = now_s if job.suspension.since_s is None else job.suspension.since_s
    paused_s = job.suspension.total_s - job.suspension.before_attempt_s
    return max(0.0, until_s - job.attempt.ran_at_s - paused_s)


def settled(ctx: Context, job: JobEntry) -> None:
    """The last worker of a finished pre-run has ended: the job is a gang again.

    Measurements of one worker on a few GPUs do not apply to the gang: neither its length, nor its
    steps, nor the nodes on which it fits. Its saves are kept.
    """
    if not job.retry.is_prerun_over:
        return
    job.retry.is_prerun_over = False
    job.retry.prerun_attempts = job.attempt.number
    job.spec = submitted(job)
    estimates.forget_measured(job)
    jobs_retry.asks_for_more(ctx, job)


def submitted(job: JobEntry) -> JobSpec:
    """The spec as its user gave it, whether or not a pre-run is on."""
    spec, gang = job.spec, job.spec.prerun.gang
    if gang is None:
        return spec
    return replace(
        spec,
        workers=gang.workers,
        gpus_per_worker=gang.gpus_per_worker,
        prerun=replace(spec.prerun, gang=None),
    )
