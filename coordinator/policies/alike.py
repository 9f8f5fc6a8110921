"""What of a waiting job decides where its base gang has room. Must not know nodes."""

from __future__ import annotations

from coordinator.policies.snapshot import JobView

GangShape = tuple[object, ...]


def gang_shape(job: JobView) -> GangShape:
    """Of two jobs with the same one both have room on some GPUs, on nodes of one type, or none."""
    multipliers = job.gpu.worker_multiplier
    factors = tuple(sorted(multipliers.items())) if multipliers else ()
    return job.gpus_per_worker, job.workers.min, job.gpu.types, factors, job.avoid_nodes
