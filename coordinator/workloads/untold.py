"""Properties of jobs that the paper's trace has and a public one lacks, drawn by seed.

A named scenario states that 21 % of the jobs are fungible and about 5 % elastic (Lyra, EuroSys'23,
section 7.1). On a trace without these properties its jobs would not be those of its name.
Properties that a trace has stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from coordinator.workloads.paper import ELASTIC_SHARE, FUNGIBLE_SHARE
from coordinator.workloads.pools import gpu_types, node_sizes
from coordinator.workloads.records import TraceJob, Workload
from coordinator.workloads.scenarios import with_ranges
from coordinator.workloads.shaping import with_fungible_share


def untyped(jobs: Sequence[TraceJob]) -> tuple[TraceJob, ...]:
    """Jobs that name no GPU type."""
    return tuple(job for job in jobs if not job.gpu_types)


def has_no_ranges(jobs: Sequence[TraceJob]) -> bool:
    """Whether no job states with how many workers it may run."""
    return all(job.min_workers is None for job in jobs)


def with_untold(workload: Workload, seed: int, *, draws_ranges: bool = True) -> Workload:
    """Its jobs with types and ranges, where the trace has none.

    Of the jobs that name no GPU type 21 % are fungible, the same that `with_fungible_share` chooses
    of them; the others keep to the training pool. Where no job has a range 5 % get one, as every
    job that a scenario makes elastic: from its request to twice that.

    Args:
        draws_ranges: false where elastic jobs are chosen apart from the trace.
    """
    training, inference = gpu_types(workload.nodes)
    typed = {
        job.job_id: job
        for job in with_fungible_share(
            untyped(workload.jobs),
            FUNGIBLE_SHARE,
            seed,
            training_gpu=training[0],
            inference_gpu=inference,
            other_gpus=training[1:],
        )
    }
    jobs = tuple(typed.get(job.job_id, job) for job in workload.jobs)
    if draws_ranges and has_no_ranges(jobs):
        jobs = with_ranges(jobs, ELASTIC_SHARE, seed, nodes=node_sizes(workload.nodes))
    return structs.replace(workload, jobs=jobs)
