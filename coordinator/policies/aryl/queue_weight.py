"""The value for waiting jobs of an earlier end of a running job.

Lyra's knapsack (EuroSys'23, section 5.2) counts the time that one more worker saves the job itself.
But a job that ends a second sooner also frees the g GPUs of its base gang a second sooner. The
queue for the G GPUs of its type gets shorter by g / G seconds, for each of the n jobs in it.
Flexible workers delay no job themselves: they leave at once for a base gang that fits.
"""

from __future__ import annotations

from functools import cache

from coordinator.policies.aryl.elastic_jobs import Weigh
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.contract.snapshot import JobView


def queue_weight(room: PlacementState, part: float) -> Weigh | None:
    """How much a second of a job counts: 1 + part * n * g / G; None where `part` is 0: 1 for all.

    The line is counted as the pass began.
    """
    if not part:
        return None

    @cache
    def waiting_per_gpu(gpu_type: str) -> float:
        gpus = sum(
            occupied.node.gpus
            for occupied in room.index.nodes
            if occupied is not None and occupied.node.gpu_type == gpu_type
        )
        waiting = sum(len(line) for line in room.index.lines if line[0].accepts(gpu_type))
        return waiting / gpus if gpus else 0.0

    def weigh(job: JobView, gpu_type: str) -> float:
        gang_gpus = job.base_gpus_on(gpu_type)
        return 1.0 + part * waiting_per_gpu(gpu_type) * gang_gpus

    return weigh
