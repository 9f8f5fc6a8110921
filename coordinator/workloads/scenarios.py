"""The paper's variations as pure functions: a workload in, a workload out.

FIFO or Aryl, with or without loans, is the caller's choice. Sections and figures are of Lyra,
EuroSys'23. Chosen jobs are nested (`choosing.choose`): 20 % is part of 40 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from random import Random

from msgspec import structs

from coordinator.workloads.choosing import Draw, choose
from coordinator.workloads.paper import DAY_S
from coordinator.workloads.pools import Pools, pools_of
from coordinator.workloads.records import LoadSeries, TraceJob, Workload
from coordinator.workloads.shaping import (
    with_fungible_share,
)
from coordinator.workloads.sizes import NodeSizes

HETEROGENEOUS_SHARE = 0.10
HETEROGENEOUS_SPEED = 0.7
"""Section 7.1, Advanced: 10 % of the jobs, at most 70 % of ideal speed."""

MOST_ERROR = 0.25
"""Table 9: a wrong estimate is off by at most a quarter."""

_IDEAL_FACTOR = 2
"""Section 7.1: a job without a range gets its request as the fewest and twice that as the most."""


class Scenario(StrEnum):
    """Section 7.1."""

    BASIC = "basic"
    """The trace as it is: 21 % fungible, about 5 % elastic, none heterogeneous."""
    ADVANCED = "advanced"
    """Basic, and 10 % of the jobs heterogeneous at 70 % of ideal speed."""
    HETEROGENEOUS = "heterogeneous"
    """Those 10 %, and no fungible job."""
    IDEAL = "ideal"
    """All jobs elastic, and heterogeneous at full speed; none fungible beside."""


def scenario(workload: Workload, name: Scenario, *, seed: int) -> Workload:
    """The workload as a scenario has it on its own cluster; its name says which."""
    jobs, pools = workload.jobs, pools_of(workload.nodes)
    match name:
        case Scenario.BASIC:
            return workload
        case Scenario.ADVANCED:
            jobs = with_heterogeneous_share(jobs, HETEROGENEOUS_SHARE, seed, pools)
        case Scenario.HETEROGENEOUS:
            jobs = heterogeneous_alone(workload, HETEROGENEOUS_SHARE, seed).jobs
        case Scenario.IDEAL:
            # Also where no job can span: then none accepts both types, whatever was drawn before.
            jobs = _none_fungible(jobs, seed, pools)
            jobs = with_ranges(jobs, 1.0, seed, nodes=pools.training_nodes)
            jobs = with_heterogeneous_share(jobs, 1.0, seed, pools, speed_ratio=1.0)
    return structs.replace(workload, name=f"{workload.name}-{name}", jobs=jobs)


def heterogeneous_alone(workload: Workload, share: float, seed: int) -> Workload:
    """This share of its jobs heterogeneous, and none fungible (section 7.1; Figure 11)."""
    pools = pools_of(workload.nodes)
    jobs = _none_fungible(workload.jobs, seed, pools)
    jobs = with_heterogeneous_share(jobs, share, seed, pools)
    return structs.replace(workload, jobs=jobs)


def _none_fungible(jobs: Sequence[TraceJob], seed: int, pools: Pools) -> tuple[TraceJob, ...]:
    return with_fungible_share(
        jobs,
        0.0,
        seed,
        training_gpu=pools.training_gpu,
        inference_gpu=pools.inference_gpu,
        other_gpus=pools.training_gpus[1:],
    )


def with_ranges(
    jobs: Sequence[TraceJob], share: float, seed: int, *, nodes: NodeSizes
) -> tuple[TraceJob, ...]:
    """This share of all jobs elastic (Figures 14 to 16): those that are, and others by draw.

    A job without a range gets [request, twice the request], in workers that fit a node. Where the
    share is below that of the jobs that are elastic already, some of these lose their range and
    keep their base.
    """
    elastic = [job for job in jobs if job.is_elastic]
    wanted = round(share * len(jobs))
    part = min(1.0, wanted / max(1, len(elastic)))
    kept = choose(elastic, part, seed, draw=Draw.ELASTIC)
    missing = max(0, wanted - len(elastic))
    others = len(jobs) - len(elastic)
    grown = choose(
        jobs,
        missing / max(1, others),
        seed,
        draw=Draw.ELASTIC,
        among=lambda job: not job.is_elastic,
    )
    return tuple(
        _grown(job, nodes) if job.job_id in grown else _kept(job, is_kept=job.job_id in kept)
        for job in jobs
    )


def _grown(job: TraceJob, nodes: NodeSizes) -> TraceJob:
    size = job.gpus_per_worker or nodes.worker_gpus(job.gpu_types, job.gpus)
    workers = job.gpus // size
    return structs.replace(
        job, gpus_per_worker=size, min_workers=workers, max_workers=_IDEAL_FACTOR * workers
    )


def _kept(job: TraceJob, *, is_kept: bool) -> TraceJob:
    if is_kept or not job.is_elastic:
        return job
    return structs.replace(job, max_workers=job.min_workers)


def with_heterogeneous_share(
    jobs: Sequence[TraceJob],
    share: float,
    seed: int,
    pools: Pools,
    *,
    speed_ratio: float = HETEROGENEOUS_SPEED,
) -> tuple[TraceJob, ...]:
    """Let a share of the jobs span GPU types of both pools in one run (section 6; Figure 11).

    They accept the inference type too, and get workers small enough for its nodes, where one stands
    for as many GPUs as the worker multiplier says: two of four GPUs instead of one of eight. A type
    that training has as well stands for itself in both pools. A job that names no type accepts all
    of the training pool, and may span these as well, GPU for GPU. A job that asks for a
    type of neither pool, or not for the main type of training, runs nowhere else and counts for no
    share; and where both pools have one main type, or an inference node has fewer GPUs than the
    least worker needs there, there is nothing to span.

    speed_ratio: part of its full speed that a job makes while it spans types.
    """
    known = {*pools.training_gpus, pools.inference_gpu}
    is_able = (
        pools.training_gpu != pools.inference_gpu
        and pools.inference_node_gpus >= pools.gpus_for_one
    )

    def may_span(job: TraceJob) -> bool:
        asked = job.gpu_types or pools.training_gpus
        return is_able and pools.training_gpu in asked and known.issuperset(asked)

    chosen = choose(jobs, share, seed, draw=Draw.SPANNING, among=may_span)
    return tuple(
        _spanning(job, pools, speed_ratio)
        if job.job_id in chosen
        else structs.replace(job, heterogeneous_speed_ratio=0.0)
        for job in jobs
    )


def _spanning(job: TraceJob, pools: Pools, speed_ratio: float) -> TraceJob:
    asked = job.gpu_types or pools.training_gpus
    at_home = [kind for kind in pools.training_gpus if kind in asked]
    size = job.gpus_per_worker or pools.training_nodes.worker_gpus(tuple(at_home), job.gpus)
    fewest = job.min_workers or max(1, job.gpus // size)
    most = max(fewest, job.max_workers or fewest)
    while size > 1 and (size * pools.gpus_for_one > pools.inference_node_gpus or fewest == 1):
        factor = next(n for n in range(2, size + 1) if size % n == 0)
        size, fewest, most = size // factor, fewest * factor, most * factor
    return structs.replace(
        job,
        gpu_types=tuple(dict.fromkeys((*at_home, pools.inference_gpu))),
        gpus_per_worker=size,
        min_workers=fewest,
        max_workers=most,
        heterogeneous_speed_ratio=speed_ratio,
    )


def with_wrong_estimates(
    jobs: Sequence[TraceJob], share: float, seed: int, *, most_error: float = MOST_ERROR
) -> tuple[TraceJob, ...]:
    """Give every job an estimate, and let a share of them be off by up to a part (Table 9).

    Errors are even between -most_error and +most_error; a job's error is the same at every share.
    """
    wrong = choose(jobs, share, seed, draw=Draw.WRONG)
    random = Random(seed + 1)  # not the draws that chose: else the first are off the most
    errors = {
        job_id: (2.0 * random.random() - 1.0) * most_error
        for job_id in sorted(job.job_id for job in jobs)
    }
    return tuple(
        structs.replace(
            job,
            estimate_s=job.duration_s * (1.0 + (errors[job.job_id] if job.job_id in wrong else 0)),
        )
        for job in jobs
    )


def bootstrapped(workload: Workload, *, days: int, seed: int) -> Workload:
    """A trace of whole days drawn with replacement (Figure 12: ten traces of ten days).

    Jobs and load of a day stay together. A day drawn twice gives two jobs with ids of their own.
    After the last day the load begins again, for jobs that still run. Work from before the source
    begins (`Workload.initial_jobs`) belongs to no day: it comes once, when the trace begins, as in
    the source. As a part of day 0 it would make each trace a measure of how often that day was
    drawn.

    Raises:
        ValueError: the workload has no whole day.
    """
    source_days = int(workload.length_s // DAY_S)
    if source_days < 1:
        raise ValueError(f"{workload.name}: {workload.length_s:g} s are no whole day")
    random = Random(seed)
    drawn = [int(random.random() * source_days) for _ in range(days)]
    by_day: dict[int, list[TraceJob]] = {}
    initial: list[TraceJob] = []
    for job in workload.jobs:
        if job.job_id in workload.initial_jobs:
            initial.append(structs.replace(job, job_id=f"{job.job_id}-0"))
        else:
            by_day.setdefault(int(job.submit_s // DAY_S), []).append(job)
    jobs = [
        structs.replace(
            job, job_id=f"{job.job_id}-{place}", submit_s=job.submit_s + (place - day) * DAY_S
        )
        for place, day in enumerate(drawn)
        for job in by_day.get(day, [])
    ]
    return structs.replace(
        workload,
        name=f"{workload.name}-bootstrap-{seed}",
        jobs=tuple(sorted([*initial, *jobs], key=lambda job: (job.submit_s, job.job_id))),
        initial_jobs=frozenset(job.job_id for job in initial),
        loads=tuple(_days_of(load, drawn) for load in workload.loads),
        length_s=days * DAY_S,
    )


def _days_of(load: LoadSeries, drawn: Sequence[int]) -> LoadSeries:
    per_day = round(DAY_S / load.step_s)
    source = [load.values[start : start + per_day] for start in range(0, len(load.values), per_day)]
    whole = [day for day in source if len(day) == per_day]
    picked = [value for day in drawn for value in whole[day % len(whole)]]
    times = -(-len(load.values) // len(picked))
    return structs.replace(load, values=tuple(picked * max(1, times)))
