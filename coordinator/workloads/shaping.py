"""From trace jobs to jobs of the simulator: elastic ranges, GPU types, checkpoints, speed-ups.

No public trace records elastic ranges or which jobs are fungible. The rules here are ours, are
stated with every result, and choose by seed alone (`choosing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from math import ceil

from msgspec import Struct, structs

from common.model import CheckpointSpec, GpuRequest, JobId, JobSpec, WorkerRange
from common.profile import JobProfile
from coordinator.workloads.choosing import Draw, choose
from coordinator.workloads.goodput import model_for, speedup_of
from coordinator.workloads.models import ModelFacts, facts_of
from coordinator.workloads.records import ScalingCurve, SpeedUp, TraceJob, WorkloadJob
from coordinator.workloads.sizes import NodeSizes, nodes_of

TRAINING_GPU = "V100"
INFERENCE_GPU = "T4"

OF_EIGHT = nodes_of(8)
"""Nodes of the paper's size."""

LOSS_PER_WORKER = 0.2
"""Lyra, EuroSys'23, sections 7.2 and 7.4: each worker beyond the base adds this much less."""

Curves = Mapping[tuple[str, int], ScalingCurve]
"""By (model, global batch size)."""


class RuntimeModel(StrEnum):
    """How throughput grows with workers."""

    LINEAR = "linear"
    """Lyra's assumption, section 5: within the range, running time times workers is constant."""
    LOSSY = "lossy"
    """The base is linear, each further worker contributes 20 % less."""
    TABLE = "table"
    """Measured scaling curves of the job's model and batch size; linear where there is none."""
    GOODPUT = "goodput"
    """Pollux's throughput model at the batch size that was submitted (OSDI'21, section 3)."""
    TUNED = "tuned"
    """As `GOODPUT`, each job with the batch size that is best for the GPUs that it has.

    Both are for elastic jobs; the others run at their own width, at their own batch size.
    """


class ShapeOptions(Struct, frozen=True, kw_only=True):
    """How trace rows become jobs.

    nodes: the nodes that workers are sized for, because no worker spans nodes.
    training_gpus: all types of the training pool, that of most GPUs first.
    inference_gpus: all types of the inference pool; empty: the cluster has none.
    inference_multiplier: workers on an inference GPU that stand for one on a training GPU, so that
        the global batch stays: 32 GB over 16 GB of memory in the paper's cluster. It is between the
        pools. A type that training has too stands for itself. So does an inference type for a job
        that accepts no type of training, because its GPUs were counted in that type.
    runtime: how elastic jobs speed up. curves: for `RuntimeModel.TABLE`.
    grace_s: how long a job may take to stop.
    is_oracle: declare true running times where the trace has no estimate. Results that read them
        are labelled oracle; without it the simulated cell has to learn them.
    has_locality: gangs of known models are slower where they are spread, see `models`.
    """

    nodes: NodeSizes = OF_EIGHT
    training_gpus: tuple[str, ...] = (TRAINING_GPU,)
    inference_gpus: tuple[str, ...] = (INFERENCE_GPU,)
    inference_multiplier: int = 2
    runtime: RuntimeModel = RuntimeModel.LINEAR
    curves: Curves | None = None
    grace_s: float = 30.0
    is_oracle: bool = True
    has_locality: bool = False


def with_elastic_share(
    jobs: Sequence[TraceJob], share: float, seed: int, *, nodes: NodeSizes = OF_EIGHT
) -> tuple[TraceJob, ...]:
    """Make a share of the jobs elastic, others inelastic.

    A job of n GPUs gets from max(1, n / 2) to 2n GPUs, in workers of its base or of whole nodes, so
    that it can really run at n: one GPU becomes 1 to 2, eight become 4 to 16 by fours. An odd n
    above 1 keeps n as its base, because half of it is no whole number of workers. Nothing else of
    the job changes: `duration_s` stays the running time on n GPUs.
    """
    chosen = choose(jobs, share, seed, draw=Draw.ELASTIC)
    return tuple(_elastic(job, nodes) if job.job_id in chosen else _inelastic(job) for job in jobs)


def _elastic(job: TraceJob, nodes: NodeSizes) -> TraceJob:
    base = job.gpus // 2 if job.gpus % 2 == 0 else job.gpus
    size = nodes.worker_gpus(job.gpu_types, base)
    return structs.replace(
        job,
        gpus_per_worker=size,
        min_workers=base // size,
        max_workers=2 * job.gpus // size,
    )


def with_any_size(jobs: Sequence[TraceJob], *, most: int) -> tuple[TraceJob, ...]:
    """Let every job run with 1 to `most` GPUs, one per worker.

    Measured curves cut the range to the measured part, see `from_curve`.
    """
    return tuple(
        structs.replace(job, gpus_per_worker=1, min_workers=1, max_workers=max(most, job.gpus))
        for job in jobs
    )


def _inelastic(job: TraceJob) -> TraceJob:
    return structs.replace(job, gpus_per_worker=None, min_workers=None, max_workers=None)


def with_fungible_share(
    jobs: Sequence[TraceJob],
    share: float,
    seed: int,
    *,
    training_gpu: str = TRAINING_GPU,
    inference_gpu: str = INFERENCE_GPU,
    other_gpus: Sequence[str] = (),
    draw: Draw = Draw.FUNGIBLE,
) -> tuple[TraceJob, ...]:
    """Let a share of the jobs accept the inference type too, one type per run (Lyra, section 2.1).

    Without it a job that names no type accepts all of the training pool: which of these it runs on
    was no choice of its own. One that names the first type alone keeps to that one. A job that asks
    for other types keeps them and counts for no share. Where the inference type is one of those of
    training, a job that accepts it runs in both pools anyway.

    inference_gpu: empty: there is no inference node, and being chosen changes nothing.
    other_gpus: further types of the training pool.
    """
    lent = (inference_gpu,) if inference_gpu else ()
    every = (training_gpu, *other_gpus)

    @cache  # of a trace's jobs few ask for types that no other asks for
    def at_home(asked: tuple[str, ...]) -> tuple[str, ...] | None:
        if not asked:
            return every
        told = (every, (training_gpu,))
        return next((each for each in told if asked in {each, both(each)}), None)

    @cache
    def both(plain: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*plain, *lent)))

    def with_types(job: TraceJob, *, is_chosen: bool) -> TraceJob:
        plain = at_home(job.gpu_types)
        if plain is None:
            return job
        accepted = both(plain) if is_chosen else plain
        return job if accepted == job.gpu_types else structs.replace(job, gpu_types=accepted)

    def may_be(job: TraceJob) -> bool:
        return at_home(job.gpu_types) is not None

    chosen = choose(jobs, share, seed, draw=draw, among=may_be)
    return tuple([with_types(job, is_chosen=job.job_id in chosen) for job in jobs])


def with_checkpoint_share(
    jobs: Sequence[TraceJob], share: float, seed: int
) -> tuple[TraceJob, ...]:
    """Let a share of the jobs resume where they were; others start again (Lyra, Figure 13)."""
    chosen = choose(jobs, share, seed, draw=Draw.SAVING)
    return tuple(structs.replace(job, has_checkpoints=job.job_id in chosen) for job in jobs)


# --- runtime models -----------------------------------------------------------------------------


def linear(workers: WorkerRange) -> SpeedUp:
    """n workers do n workers' work."""
    counts = range(workers.min, workers.max + 1)
    return SpeedUp(min_workers=workers.min, rates=tuple(float(count) for count in counts))


def lossy(workers: WorkerRange, loss: float = LOSS_PER_WORKER) -> SpeedUp:
    """The base gang is whole; each worker beyond it contributes `loss` less."""
    more = range(workers.max - workers.min + 1)
    return SpeedUp(
        min_workers=workers.min, rates=tuple(workers.min + (1.0 - loss) * extra for extra in more)
    )


def from_curve(
    workers: WorkerRange, gpus_per_worker: int, curve: ScalingCurve
) -> tuple[WorkerRange, SpeedUp]:
    """The speeds of a curve, relative to the base gang, and the range cut to the measured part.

    Raises:
        ValueError: the base gang itself was not measured.
    """
    base = curve.iterations_per_s(workers.min * gpus_per_worker)
    most = min(workers.max, curve.points[-1][0] // gpus_per_worker)
    rates = (
        workers.min * curve.iterations_per_s(count * gpus_per_worker) / base
        for count in range(workers.min, most + 1)
    )
    cut = WorkerRange(min=workers.min, max=most)
    return cut, SpeedUp(min_workers=workers.min, rates=tuple(rates))


# --- jobs of the simulator ----------------------------------------------------------------------


def to_workload_jobs(
    jobs: Iterable[TraceJob], options: ShapeOptions | None = None
) -> tuple[WorkloadJob, ...]:
    """Each trace job as one that a simulator can submit, in order of submission, ties by id.

    A job with a range keeps it; one without runs with the GPUs that it had. True work is set so
    that on `gpus` GPUs the job takes `duration_s` under its own runtime model, before any tuning.
    """
    options = options or ShapeOptions()
    ordered = sorted(jobs, key=lambda job: (job.submit_s, job.job_id))
    return tuple(_workload_job(job, options) for job in ordered)


def _workload_job(job: TraceJob, options: ShapeOptions) -> WorkloadJob:
    size = job.gpus_per_worker or options.nodes.worker_gpus(job.gpu_types, job.gpus)
    had = max(1, job.gpus // size)
    workers = WorkerRange(min=job.min_workers or had, max=job.max_workers or had)
    workers, speedup = _speedup(job, workers, size, options)
    reference = _untuned(job, workers, size, options, speedup).rate(
        min(max(had, workers.min), workers.max)
    )
    duration_s = _duration_s(job, speedup, options)
    estimate_s = job.estimate_s
    if estimate_s is None and options.is_oracle:
        estimate_s = duration_s
    return WorkloadJob(
        at_s=job.submit_s,
        job_id=JobId(job.job_id),
        spec=_spec(
            job,
            workers,
            size,
            options,
            _at_base(estimate_s, reference, speedup),
            _profile(job, speedup, options),
        ),
        work_s=duration_s * reference,
        speedup=speedup,
        tenant=job.tenant,
        user=job.user,
        heterogeneous_speed_ratio=job.heterogeneous_speed_ratio,
    )


def _duration_s(job: TraceJob, speedup: SpeedUp, options: ShapeOptions) -> float:
    """Running time on `gpus`; by the curve, where it is what the job runs by and counts iterations.

    Traces round their durations to seconds, which is much of a job of half a minute.
    """
    curve = (options.curves or {}).get((job.model, job.batch_size or 0))
    if curve is None or not job.iterations or not job.is_elastic or len(speedup.rates) == 1:
        return job.duration_s
    if options.runtime != RuntimeModel.TABLE or not _is_measured(curve, job.gpus):
        return job.duration_s
    return job.iterations / curve.iterations_per_s(job.gpus)


def _at_base(estimate_s: float | None, reference: float, speedup: SpeedUp) -> float | None:
    """`JobSpec.expected_runtime_s` is with the fewest workers, and positive."""
    if not estimate_s:
        return None
    return estimate_s * reference / speedup.rates[0]


def _speedup(
    job: TraceJob, workers: WorkerRange, size: int, options: ShapeOptions
) -> tuple[WorkerRange, SpeedUp]:
    match options.runtime:
        case RuntimeModel.LOSSY:
            return workers, lossy(workers)
        case RuntimeModel.GOODPUT | RuntimeModel.TUNED if workers.min < workers.max:
            is_tuned = options.runtime == RuntimeModel.TUNED
            model = model_for(job.model, job.job_id)
            of_node = options.nodes.gpus_for(job.gpu_types, job.gpus)
            return workers, speedup_of(model, workers, size, of_node, is_tuned=is_tuned)
        case RuntimeModel.LINEAR | RuntimeModel.GOODPUT | RuntimeModel.TUNED:
            return workers, linear(workers)
        case RuntimeModel.TABLE:
            curve = (options.curves or {}).get((job.model, job.batch_size or 0))
            asked = (workers.min * size, job.gpus)
            if curve is None or not all(_is_measured(curve, gpus) for gpus in asked):
                return workers, linear(workers)
            return from_curve(workers, size, curve)


def _untuned(
    job: TraceJob, workers: WorkerRange, size: int, options: ShapeOptions, speedup: SpeedUp
) -> SpeedUp:
    """How it went when the trace was taken: with the batch size that it was submitted with."""
    if options.runtime != RuntimeModel.TUNED:
        return speedup
    as_submitted = structs.replace(options, runtime=RuntimeModel.GOODPUT)
    return _speedup(job, workers, size, as_submitted)[1]


def _is_measured(curve: ScalingCurve, gpus: int) -> bool:
    return bool(curve.points) and curve.points[0][0] <= gpus <= curve.points[-1][0]


def _spec(
    job: TraceJob,
    workers: WorkerRange,
    size: int,
    options: ShapeOptions,
    expected_runtime_s: float | None,
    profile: JobProfile,
) -> JobSpec:
    path = f"/checkpoints/{job.job_id}" if job.has_checkpoints else None
    had = max(1, job.gpus // size)
    return JobSpec(
        name=token(job.name or job.job_id),
        command=("train",),
        workers=workers,
        gpus_per_worker=size,
        gpu=GpuRequest(
            types=job.gpu_types,
            worker_multiplier=_multiplier(job, options),
            heterogeneous_speed_ratio=job.heterogeneous_speed_ratio,
        ),
        priority=job.priority,
        expected_runtime_s=expected_runtime_s,
        deadline_s=job.deadline_s or None,
        app=token(job.app) if job.app else None,
        profile=profile,
        cpus_per_worker=ceil(job.cpus / had),
        memory_bytes_per_worker=ceil(job.memory_bytes / had),
        checkpoint=CheckpointSpec(path=path, grace_s=options.grace_s),
    )


def _multiplier(job: TraceJob, options: ShapeOptions) -> dict[str, int]:
    """The types that do not count one for one; see `ShapeOptions`."""
    training, inference = set(options.training_gpus), set(options.inference_gpus)
    if training.isdisjoint(job.gpu_types) or options.inference_multiplier == 1:
        return {}
    lent = inference - training
    return {kind: options.inference_multiplier for kind in job.gpu_types if kind in lent}


def _profile(job: TraceJob, speedup: SpeedUp, options: ShapeOptions) -> JobProfile:
    """The profile that a job's user would declare: facts of its model, and its real scaling."""
    facts = facts_of(job.model) or ModelFacts()
    is_linear = options.runtime == RuntimeModel.LINEAR or len(speedup.rates) == 1
    points = enumerate(speedup.rates, start=speedup.min_workers)
    return JobProfile(
        model=job.model,
        speedup=() if is_linear else tuple(points),
        rack_speed_ratio=facts.rack_speed_ratio if options.has_locality else 1.0,
        far_speed_ratio=facts.far_speed_ratio if options.has_locality else 1.0,
        skew_ratio=facts.skew_ratio,
        gpu_busy_ratio=facts.gpu_busy_ratio,
        batch_size=job.batch_size,
    )


def token(text: str) -> str:
    """A name that fits `JobSpec.name`: other characters become dashes, 64 at most."""
    kept = "".join(
        mark if mark.isascii() and (mark.isalnum() or mark in "_-") else "-" for mark in text
    )
    return kept[:64]
