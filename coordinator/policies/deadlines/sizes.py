"""Which worker counts help a job, and how fast each is: claims from views. Knows no policy."""

from __future__ import annotations

from math import inf

from coordinator.policies.deadlines.shares import Claim
from coordinator.policies.snapshot import JobView


def sizes_of(
    job: JobView, most: int, *, powers_of_two: bool = True, largest: bool = False
) -> tuple[int, ...]:
    """Worker counts of a job up to `most`, growing; empty when its base gang is above that.

    powers_of_two: its base gang, twice that, and so on (ElasticFlow, section 4.3: together with
        buddy allocation nothing is left over); else every count in its range.
    largest: also those that are no faster than a smaller one. Else the counts end where one more
        step makes the job slower, as far as its profile tells.
    """
    sizes: list[int] = []
    size = job.workers.min
    while size <= min(most, job.workers.max):
        if not largest and sizes and job.rate(size) <= job.rate(sizes[-1]):
            break
        sizes.append(size)
        size = size * 2 if powers_of_two else size + 1
    return tuple(sizes)


def claim_of(
    job: JobView, now_s: float, sizes: tuple[int, ...], *, margin: float, factor: int = 1
) -> Claim:
    """What a job needs: its work left times a margin, until its deadline.

    factor: workers on the GPU type at hand that stand for one.
    """
    return Claim(
        job_id=job.job_id,
        sizes=sizes,
        rates=tuple(job.rate(size) for size in sizes),
        gpus_per_worker=job.gpus_per_worker * factor,
        work_s=max(1e-6, job.estimate_left_s(now_s) * margin),
        deadline_s=inf if job.deadline_at_s is None else job.deadline_at_s,
    )
