"""How much work a job has left, and where that number comes from (design 3).

Live progress, else history of (tenant, name, command), else declared, else the size class's
median, else the configured default. Work is in worker-seconds. Must not know policies.
"""

from __future__ import annotations

from statistics import median

from common.messages import OrderPhase
from common.model import JobSpec
from coordinator.engine.settings import EngineSettings
from coordinator.engine.state import ClusterState, JobEntry

HISTORY_KEPT = 20
LEAST_REMAINING_RATIO = 0.05
"""A job that outlives its estimate still counts as having this share left of what an attempt began
with."""


def history_key(tenant: str, spec: JobSpec) -> str:
    """Jobs that look alike: same tenant, name and command."""
    return "\x00".join((tenant, spec.name, *spec.command))


def size_class(spec: JobSpec) -> str:
    """Base demand rounded up to a power of two."""
    return f"size:{1 << (spec.base_demand_gpus - 1).bit_length()}"


def whole_work(
    state: ClusterState, settings: EngineSettings, tenant: str, spec: JobSpec
) -> tuple[float, str]:
    """(worker-seconds, source) of a job that has not run."""
    seen = state.history.get(history_key(tenant, spec))
    if seen:
        return median(seen), f"history of {len(seen)} runs"
    if spec.expected_runtime_s is not None:
        return spec.expected_runtime_s * spec.workers.min, "declared"
    seen = state.history.get(size_class(spec))
    if seen:
        return median(seen), f"median of {len(seen)} jobs of this size"
    return settings.default_expected_runtime_s * spec.workers.min, "default"


def record(state: ClusterState, job: JobEntry, work_s: float, *, kept: int) -> None:
    """A job ended well: remember its work, of the last `kept` kinds of jobs that did."""
    for key in (history_key(job.tenant, job.spec), size_class(job.spec)):
        seen = state.history.pop(key, [])
        state.history[key] = [*seen, work_s][-HISTORY_KEPT:]
    while len(state.history) > kept:
        del state.history[next(iter(state.history))]


def pace(job: JobEntry) -> float:
    """Worker-seconds of work a second, in workers of the reference GPU type.

    A type that needs twice the workers has half the pace a worker; a gang that spans GPU types is
    slower than its workers.
    """
    multiplier = job.spec.gpu.worker_multiplier.get(job.gpu_type or "", 1)
    workers = job.running_workers if multiplier == 1 else job.running_workers / multiplier
    ratio = job.spec.gpu.heterogeneous_speed_ratio
    spans = ratio > 0 and any(
        worker.is_other_type and worker.order == OrderPhase.RUN and worker.stop is None
        for worker in job.workers.values()
    )
    return workers * ratio if spans else workers


def settle_work(job: JobEntry, now_s: float) -> None:
    """Bring `worker_s` up to now; call it before the number of running workers changes."""
    if job.attempt_ran_at_s is not None:
        job.worker_s += pace(job) * max(0.0, now_s - job.worker_s_at_s)
    job.worker_s_at_s = now_s


def attempt_worker_s(job: JobEntry, now_s: float) -> float:
    """Worker-seconds of this attempt until now, without changing anything."""
    if job.attempt_ran_at_s is None:
        return 0.0
    return job.worker_s + pace(job) * max(0.0, now_s - job.worker_s_at_s)


def _done_ratio(job: JobEntry) -> float:
    """Share of the job that the present attempt, or else the next one, does not do again."""
    progress, checkpoint = job.progress, job.checkpoint
    if progress is None or not progress.total_steps:
        return 0.0
    if job.attempt_ran_at_s is not None:
        step = job.progress_at_start
    else:
        step = checkpoint.step if checkpoint is not None and checkpoint.is_verified else 0
    return min(1.0, step / progress.total_steps)


def measure(job: JobEntry, now_s: float) -> None:
    """A running attempt said how far it is: what is left follows from its pace so far.

    The pace since its first word, as soon as there is one: what came before was warming up too.
    """
    settle_work(job, now_s)
    progress = job.progress
    if job.attempt_ran_at_s is None or progress is None or not progress.total_steps:
        return
    steps = progress.step - job.progress_at_start
    if steps <= 0 or job.worker_s <= 0:
        return
    spent_s = job.worker_s
    if job.measured_left_s is None:
        job.first_step, job.first_worker_s = progress.step, job.worker_s
    elif progress.step > job.first_step and job.worker_s > job.first_worker_s:
        steps, spent_s = progress.step - job.first_step, job.worker_s - job.first_worker_s
    job.measured_left_s = (progress.total_steps - progress.step) * spent_s / steps
    job.measured_worker_s = job.worker_s


def remaining_work(job: JobEntry, now_s: float) -> tuple[float, str]:
    """(worker-seconds left, source); it falls with time by the number of running workers."""
    done_s = attempt_worker_s(job, now_s)
    if job.measured_left_s is not None:
        left_s, source = job.measured_left_s - (done_s - job.measured_worker_s), "live progress"
    else:
        left_s, source = (
            job.expected_work_s * (1.0 - _done_ratio(job)) - done_s,
            job.estimate_source,
        )
    return max(least_work_s(job), left_s), source


def least_work_s(job: JobEntry) -> float:
    """What counts as left of a job that has outlived its estimate; 0 when it says how far it is.

    What was done before this attempt is known, so it is a share of the rest only.
    """
    if job.measured_left_s is not None:
        return 0.0
    return job.expected_work_s * (1.0 - _done_ratio(job)) * LEAST_REMAINING_RATIO


def lost_if_preempted(job: JobEntry, now_s: float) -> float:
    """GPU-seconds that a preemption now throws away: since the last verified checkpoint."""
    if job.attempt_ran_at_s is None:
        return 0.0
    since_s = job.attempt_ran_at_s
    if job.checkpoint is not None and job.checkpoint.is_verified and job.checkpoint_at_s:
        since_s = max(since_s, job.checkpoint_at_s)
    return max(0.0, now_s - since_s) * unsaved_gpus(job)


def unsaved_gpus(job: JobEntry) -> int:
    """GPUs whose work a preemption would throw away."""
    if job.attempt_ran_at_s is None:
        return 0
    return sum(len(worker.gpu_uuids) for worker in job.workers.values() if worker.stop is None)
