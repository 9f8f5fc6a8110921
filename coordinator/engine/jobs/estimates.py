"""Estimates of the work that a job has left, with the source of each.

Sources in order: live progress, progress of an earlier attempt, history of (tenant, name, command),
the declared runtime, the size class's median, the configured default. Work is in worker-seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from statistics import median
from typing import NamedTuple

from common.messages import OrderPhase
from common.model import JobSpec, JobState
from coordinator.engine.jobs.ended_workers import HEARD_LATE_S
from coordinator.engine.jobs.resize_costs import ResizeCosts
from coordinator.engine.jobs.step_gaps import StepGaps
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import ClusterState, JobEntry, StepTimes, WorkerEntry
from coordinator.policies.contract.estimates import Source

HISTORY_KEPT = 20
TELLING_S = 10.0
"""Two progress reports give the pace once the base gang has computed this long between them."""
LEAST_REMAINING_RATIO = 0.05
"""A job at the end of its estimate still counts as having this share left of what an attempt began
with. A job beyond that has as much left again as it ran over. Lifetimes have heavy tails: half
of the processes of an age live as long again (Harchol-Balter and Downey, Exploiting Process
Lifetime Distributions, TOCS 15(3), 1997, whose distribution is Pareto's with exponent 1). Here
the overrun stands for the age. An estimate that is a little short is therefore off by little,
and a meaningless one soon counts for nothing.
"""


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
        return median(seen), f"{Source.HISTORY} of {len(seen)} runs"
    if spec.expected_runtime_s is not None:
        return spec.expected_runtime_s * spec.workers.min, Source.DECLARED
    seen = state.history.get(size_class(spec))
    if seen:
        return median(seen), f"{Source.SIZE} of {len(seen)} jobs of this size"
    return settings.default_expected_runtime_s * spec.workers.min, Source.DEFAULT


def record(state: ClusterState, job: JobEntry, work_s: float, *, kept: int) -> None:
    """A job ended well: remember its work, of the last `kept` kinds of jobs that did.

    Jobs that look alike are gangs: one that ended in its pre-run did what so much work of a gang's
    workers would have done, in proportion to their GPUs.
    """
    gang = job.spec.prerun.gang
    ratio = 1.0 if gang is None else job.spec.gpus_per_worker / gang.gpus_per_worker
    found = {history_key(job.tenant, job.spec): work_s * ratio, size_class(job.spec): work_s}
    for key, seen_s in found.items():
        seen = state.history.pop(key, [])
        state.history[key] = [*seen, seen_s][-HISTORY_KEPT:]
    while len(state.history) > kept:
        del state.history[next(iter(state.history))]


def pace(job: JobEntry) -> float:
    """Worker-seconds of work per second, in workers of the reference GPU type.

    A job with a profile scales by it, counted in workers of its base gang; any other job scales in
    proportion. A type that needs twice the workers has half the pace per worker. A gang that spans
    GPU types is slower than its workers. A suspended job makes no progress, and packed jobs slow
    each other down.
    """
    return 0.0 if job.state == JobState.SUSPENDED else _pace_of(job, _computing(job))


def _computing(job: JobEntry, at_s: float = inf) -> list[WorkerEntry]:
    """Its workers that were ordered to run, less those ordered to stop before `at_s`; without it
    those that compute now.
    """
    run = OrderPhase.RUN
    return [
        worker
        for worker in job.workers.values()
        if worker.order == run and (worker.stop is None or worker.stop_ordered_at_s >= at_s)
    ]


def _pace_of(job: JobEntry, computing: Sequence[WorkerEntry]) -> float:
    """As `pace`, of these workers of a job."""
    multiplier = job.spec.gpu.worker_multiplier.get(job.attempt.gpu_type or "", 1)
    workers = len(computing) if multiplier == 1 else len(computing) / multiplier
    if job.spec.profile.speedup:
        workers = job.spec.profile.rate(workers, base=job.spec.workers.min)
    ratio = job.spec.gpu.heterogeneous_speed_ratio
    spans = ratio > 0 and any(worker.is_other_type for worker in computing)
    if job.attempt.packed_speed_ratio != 1.0:
        workers *= job.attempt.packed_speed_ratio
    return workers * ratio if spans else workers


def settle_work(job: JobEntry, now_s: float) -> None:
    """Bring the clock of a job up to now; call it before the number of running workers changes."""
    clock = job.clock
    elapsed_s = now_s - clock.at_s
    if job.attempt.ran_at_s is not None and elapsed_s > 0:  # a gang's workers end together
        clock.worker_s += pace(job) * elapsed_s
        clock.attained_gpu_s += computing_gpus(job) * elapsed_s
        held = _held_workers(job)
        clock.held_worker_s += held * elapsed_s
        clock.most_workers = max(clock.most_workers, held)
    clock.at_s = now_s


def _held_workers(job: JobEntry) -> int:
    """Its workers that were ordered to run, also those that end now; none while it is suspended."""
    if job.attempt.ran_at_s is None or job.state == JobState.SUSPENDED:
        return 0
    return sum(worker.order == OrderPhase.RUN for worker in job.workers.values())


def held_worker_s(job: JobEntry, now_s: float) -> float:
    """Worker-seconds that its present or latest attempt has used until now."""
    return job.clock.held_worker_s + _held_workers(job) * max(0.0, now_s - job.clock.at_s)


def computes_no_more(job: JobEntry, worker: WorkerEntry, now_s: float, ended_at_s: float) -> None:
    """Take a worker from its job, all of whose work was counted up to now.

    The report of its end may be late, because no coordinator led or its node was cut off. Work
    counted since the order to stop is then subtracted again, and none is counted from then on. See
    `ended_workers.HEARD_LATE_S`.
    """
    until_s = now_s if worker.stop is None else min(now_s, worker.stop_ordered_at_s)
    counted = _computing(job, until_s)
    del job.workers[worker.key.worker_index]
    if job.attempt.ran_at_s is None or worker.order != OrderPhase.RUN:
        return
    began_s = max(ended_at_s, job.attempt.ran_at_s)
    if now_s - ended_at_s < HEARD_LATE_S or job.state == JobState.SUSPENDED:
        return
    job.clock.held_worker_s = max(0.0, job.clock.held_worker_s - max(0.0, now_s - began_s))
    over_s = until_s - began_s
    if over_s <= 0:
        return
    over_gpu_s = len(worker.gpu_uuids) * worker.share * over_s
    job.clock.attained_gpu_s = max(0.0, job.clock.attained_gpu_s - over_gpu_s)
    others = [other for other in counted if other is not worker]
    over_pace = _pace_of(job, counted) - _pace_of(job, others)
    job.clock.worker_s = max(0.0, job.clock.worker_s - over_pace * over_s)


def worked_before(job: JobEntry, worker: WorkerEntry, seconds: float) -> None:
    """Count what a worker of a rebuilt job computed before its job's clock was set up."""
    computing = _computing(job)
    others = [other for other in computing if other is not worker]
    job.clock.worker_s += (_pace_of(job, computing) - _pace_of(job, others)) * seconds
    job.clock.attained_gpu_s += len(worker.gpu_uuids) * worker.share * seconds
    job.clock.held_worker_s += seconds


def computing_gpus(job: JobEntry) -> float:
    """GPUs of the workers that compute now; of GPUs on which others compute too, its part."""
    if job.attempt.ran_at_s is None or job.state == JobState.SUSPENDED:
        return 0
    gpus = 0.0
    for worker in _computing(job):
        gpus += len(worker.gpu_uuids) * worker.share
    return gpus


def attained_gpu_s(job: JobEntry, now_s: float) -> float:
    """GPU-seconds of computing in all attempts until now (attained service; Tiresias, NSDI'19)."""
    elapsed_s = now_s - job.clock.at_s
    if elapsed_s <= 0:
        return job.clock.attained_gpu_s
    return job.clock.attained_gpu_s + computing_gpus(job) * elapsed_s


def attempt_worker_s(job: JobEntry, now_s: float) -> float:
    """Worker-seconds of this attempt until now, without changing anything."""
    if job.attempt.ran_at_s is None:
        return 0.0
    return job.clock.worker_s + pace(job) * max(0.0, now_s - job.clock.at_s)


def _done_ratio(job: JobEntry) -> float:
    """The share of the job that its present (or else its next) attempt does not repeat."""
    progress = job.progress
    if progress is None or not progress.total_steps:
        return 0.0
    step = job.saves.step if job.attempt.ran_at_s is None else job.attempt.start_step
    return min(1.0, step / progress.total_steps)


def measure(job: JobEntry, now_s: float) -> None:
    """A running attempt reported progress: the remaining work follows from its pace so far.

    Progress is reported seconds after it was made. So the pace is taken between two reports of one
    gang alone, once they are far enough apart; the time before the first report includes the
    warm-up. Until then the pace is that of the whole attempt, which can only be too slow, or an
    earlier measurement.
    """
    settle_work(job, now_s)
    progress, estimate = job.progress, job.estimate
    if job.attempt.ran_at_s is None or progress is None or not progress.total_steps:
        return
    is_same_gang = job.steps.told(
        progress.step,
        now_s,
        of=(job.attempt.number, job.counts.resizes + job.counts.suspensions),
        workers=job.running_workers if job.state == JobState.RUNNING else 0,
        gpu_type=job.attempt.gpu_type or "",
    )
    steps, spent_s = progress.step - job.attempt.start_step, job.clock.worker_s
    if steps <= 0 or spent_s <= 0:
        return
    is_declared = job.spec.expected_runtime_s is not None
    if job.state == JobState.PREEMPTING:
        if is_declared or estimate.measured_work_s is not None:
            return
        # It may have computed since the order to stop.
        spent_s = max(spent_s, (now_s - job.attempt.ran_at_s) * job.spec.workers.min)
    is_first = estimate.measured_left_s is None
    if is_first:
        _measured_from(job, progress.step, estimate.measured_work_s)
    told_steps = progress.step - estimate.first_step
    told_s = job.clock.worker_s - estimate.first_worker_s
    is_told = told_steps > 0 and told_s >= TELLING_S * job.spec.workers.min
    if is_told:
        work_s = progress.total_steps * told_s / told_steps
    else:
        work_s = progress.total_steps * spent_s / steps
        work_s = work_s if estimate.first_work_s is None else min(work_s, estimate.first_work_s)
    if not (is_first or is_same_gang):
        _measured_from(job, progress.step, work_s)
    estimate.measured_left_s = work_s * (1.0 - progress.step / progress.total_steps)
    estimate.measured_worker_s = job.clock.worker_s
    # Warming up counts as work until then. For later attempts that is better than a guess by other
    # jobs, and worse than the declared runtime.
    if is_told or not is_declared:
        estimate.measured_work_s = work_s


def _measured_from(job: JobEntry, step: int, work_s: float | None) -> None:
    """From here on its pace is that of this gang; what the job takes by its pace before."""
    estimate = job.estimate
    estimate.first_step, estimate.first_worker_s = step, job.clock.worker_s
    estimate.first_work_s = work_s


def steps_left(job: JobEntry, now_s: float) -> float | None:
    """Steps left by the last progress report and the measured pace; None without a measurement."""
    progress, measured = job.progress, job.steps
    if measured.step_time_s is None or progress is None or not progress.total_steps:
        return None
    if job.attempt.ran_at_s is None:
        return (1.0 - _done_ratio(job)) * progress.total_steps
    since_s = max(0.0, now_s - max(measured.told_at_s, job.attempt.ran_at_s))
    return max(0.0, progress.total_steps - progress.step - since_s / measured.step_time_s)


def attempt_ended(job: JobEntry) -> None:
    """An attempt is over and the job is not: its measured length holds for the next attempt.

    Otherwise the job would be as short again as its first estimate, and orders by remaining time
    would stop two jobs for each other for ever.
    """
    if job.attempt.ran_at_s is not None:
        done_s = job.clock.worker_s + _work_s(job) * _done_ratio(job)
        job.estimate.longest_work_s = max(job.estimate.longest_work_s, done_s)
    job.attempt.ran_at_s = None
    job.estimate.measured_left_s = None


def forget_measured(job: JobEntry) -> None:
    """Forget the measured length, because the next attempt has another gang."""
    job.estimate.measured_work_s, job.estimate.longest_work_s, job.steps = None, 0.0, StepTimes()
    job.resizes, job.gaps = ResizeCosts(lost_gpu_s=job.resizes.lost_gpu_s), StepGaps()


def _work_s(job: JobEntry) -> float:
    """Worker-seconds of the whole job: by the latest progress of an attempt, else by its estimate.
    Not less than an attempt took that did not end it.
    """
    if job.estimate.measured_work_s is not None:
        return job.estimate.measured_work_s
    return max(job.estimate.expected_work_s, job.estimate.longest_work_s)


def estimated_left(job: JobEntry, now_s: float) -> float:
    """Worker-seconds left by the estimate alone; below zero when the job has outlived it."""
    done_s = attempt_worker_s(job, now_s)
    if job.estimate.measured_left_s is not None:
        return job.estimate.measured_left_s - (done_s - job.estimate.measured_worker_s)
    return _work_s(job) * (1.0 - _done_ratio(job)) - done_s


def remaining_work(job: JobEntry, now_s: float) -> tuple[float, str]:
    """(worker-seconds left, source). It falls with time by the number of running workers, and grows
    by it once the job has outlived its estimate.
    """
    return max(least_work_s(job), abs(estimated_left(job, now_s))), _source(job)


def _source(job: JobEntry) -> str:
    if job.estimate.measured_left_s is not None:
        return Source.LIVE
    if job.estimate.measured_work_s is not None:
        return Source.EARLIER
    if job.estimate.longest_work_s > job.estimate.expected_work_s:
        return f"{Source.OUTLIVED} ({job.estimate.source})"
    return job.estimate.source


def outlived_s(job: JobEntry, now_s: float) -> float:
    """Worker-seconds by which an attempt has outlived its estimate, where that counts as the
    remaining work; else 0.
    """
    over_s = -estimated_left(job, now_s)
    return over_s if over_s > least_work_s(job) else 0.0


def least_work_s(job: JobEntry) -> float:
    """The least remaining work of a job: one step, if it reports that it has some left.

    Work before this attempt is known, so this is a share of the rest only.
    """
    if job.estimate.measured_left_s is not None:
        progress = job.progress
        steps = 0 if progress is None else (progress.total_steps or 0) - progress.step
        return job.estimate.measured_left_s / steps if steps > 0 else 0.0
    return _work_s(job) * (1.0 - _done_ratio(job)) * LEAST_REMAINING_RATIO


class Stake(NamedTuple):
    """Work computed and not saved at an instant, in GPU-seconds, and the GPUs that did it."""

    gpu_s: float
    gpus: float
    at_s: float


def stake(job: JobEntry, now_s: float, at_s: float) -> Stake:
    """Work computed up to `at_s` and not saved, by the GPUs that the job really had.

    at_s: not after `now_s`; from then until now it had as many GPUs as now.
    """
    if job.attempt.ran_at_s is None:
        return Stake(0.0, 0.0, at_s)
    gpu_s = _attained_at(job, now_s, at_s) - job.saves.attained_gpu_s
    return Stake(max(0.0, gpu_s), _held_gpus(job), at_s)


def saved(job: JobEntry, now_s: float, at_s: float) -> None:
    """A verified save was made at an instant: it contains all work attained until then."""
    job.saves.attained_gpu_s = max(job.saves.attained_gpu_s, _attained_at(job, now_s, at_s))


def _attained_at(job: JobEntry, now_s: float, at_s: float) -> float:
    attained = attained_gpu_s(job, now_s)
    return attained if at_s == now_s else attained - computing_gpus(job) * (now_s - at_s)


def lost_if_preempted(job: JobEntry, now_s: float) -> float:
    """GPU-seconds that a preemption now throws away: since the last verified checkpoint."""
    if job.attempt.ran_at_s is None:
        return 0.0
    return max(0.0, attained_gpu_s(job, now_s) - job.saves.attained_gpu_s)


def has_saved(job: JobEntry) -> bool:
    """Whether its present attempt has verified a checkpoint."""
    if (
        job.attempt.ran_at_s is None
        or job.saves.checkpoint is None
        or not job.saves.checkpoint.is_verified
    ):
        return False
    return (job.saves.at_s or 0.0) > job.attempt.ran_at_s


def is_all_saved(job: JobEntry) -> bool:
    """Whether a verified checkpoint holds every step that the job says it did."""
    progress, checkpoint = job.progress, job.saves.checkpoint
    if progress is None or checkpoint is None or not checkpoint.is_verified:
        return False
    return progress.step <= checkpoint.step


def _held_gpus(job: JobEntry) -> float:
    if job.attempt.ran_at_s is None:
        return 0
    gpus = 0.0
    for worker in job.workers.values():
        if worker.stop is None:
            gpus += len(worker.gpu_uuids) * worker.share
    return gpus
