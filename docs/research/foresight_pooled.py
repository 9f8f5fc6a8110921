"""What no policy can wait less than on the paper's traces: passes, and the line of the rare GPUs.

Pure: a workload in, seconds out. Must not know runs or policies.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from functools import cache
from math import ceil

from coordinator.workloads.named import named
from coordinator.workloads.paper import RARE_GPU
from coordinator.workloads.records import TraceJob, Workload


@cache
def least_queueing_s(workload: str) -> float | None:
    """No policy has a lower mean queueing on a named workload; None of a trace.

    A job waits for the next instant at which passes happen at all; and the jobs of the rare type
    share few GPUs. With all of these in one machine that runs the job with the least left first,
    at the speed of all together, the sum of times in the system is least (Schrage, 1968), and any
    schedule of whole jobs on the real nodes is one that this machine could imitate.
    """
    found = named("paper-overload" if workload == "paper-overload-1" else workload)
    if found is None:
        return None
    rare = [job for job in found.jobs if RARE_GPU in job.gpu_types]
    gpus = sum(group.count * group.gpus for group in found.nodes if group.gpu_type == RARE_GPU)
    alone_s = sum(job.duration_s for job in rare)
    waits_s = [to_next_pass_s(found, job) for job in found.jobs if RARE_GPU not in job.gpu_types]
    return (sum(waits_s) + pooled_s(rare, gpus) - alone_s) / len(found.jobs)


def to_next_pass_s(workload: Workload, job: TraceJob) -> float:
    """From a job's submission to the first instant at which a pass happens; 0 if any may."""
    grid_s = workload.pass_period_s or 0.0
    return ceil(job.submit_s / grid_s) * grid_s - job.submit_s if grid_s else 0.0


def pooled_s(jobs: Iterable[TraceJob], gpus: int) -> float:
    """Least sum of times in the system on one machine as fast as all GPUs, never below alone."""
    coming = sorted((job.submit_s, job.duration_s * job.gpus, job.duration_s) for job in jobs)
    line: list[tuple[float, float, float]] = []
    now_s, total_s, place = 0.0, 0.0, 0
    while place < len(coming) or line:
        if not line:
            now_s = max(now_s, coming[place][0])
        while place < len(coming) and coming[place][0] <= now_s:
            at_s, work, alone_s = coming[place]
            heapq.heappush(line, (work, at_s, alone_s))
            place += 1
        work, at_s, alone_s = heapq.heappop(line)
        until_s = now_s + work / gpus
        if place < len(coming) and coming[place][0] < until_s:
            left = work - (coming[place][0] - now_s) * gpus
            heapq.heappush(line, (left, at_s, alone_s))
            now_s = coming[place][0]
        else:
            now_s = until_s
            total_s += until_s - at_s
    return total_s
