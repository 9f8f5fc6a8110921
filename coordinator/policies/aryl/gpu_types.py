"""The GPU types that a job tries, and the GPUs per worker on each."""

from __future__ import annotations

from collections.abc import Iterable

from common.model import NodeName
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.contract.decisions import Placement
from coordinator.policies.contract.snapshot import JobView


def types_in_order(room: PlacementState, job: JobView) -> list[str]:
    """GPU types to try: the job's own order; for a fungible job, types of training nodes first.

    With `elastic_base_prefers_loan` an elastic job tries the types of lent nodes first, and where
    guests wait for a loan, one that was never preempted tries no other.
    Among equals the type that needs fewer workers comes first, then the name decides.
    """
    if room.waits_for_loan and not job.preemptions.count and (lent := _lent_types(room, job)):
        return lent
    if job.gpu.types:
        types = list(dict.fromkeys(job.gpu.types))
        if room.elastic_base_prefers_loan and job.is_elastic:
            types.sort(key=lambda gpu_type: gpu_type in room.home_types)
        return types
    return sorted(
        room.gpu_types,
        key=lambda gpu_type: (
            gpu_type not in room.home_types,
            job.gpu.worker_multiplier.get(gpu_type, 1),
            gpu_type,
        ),
    )


def _lent_types(room: PlacementState, job: JobView) -> list[str]:
    """The job's types that no training node has, lent now or not; none for a job of one pool."""
    if not any(gpu_type in room.home_types for gpu_type in job.gpu.types):
        return []
    return [gpu_type for gpu_type in job.gpu.types if gpu_type not in room.home_types]


def may_use(job: JobView, gpu_types: Iterable[str]) -> bool:
    """Whether workers of the job's present attempt, or else of its next one, fit one of them."""
    if job.gpu_type is None or job.gpu.heterogeneous_speed_ratio:
        return any(job.accepts(gpu_type) for gpu_type in gpu_types)
    return job.gpu_type in gpu_types


def gpus_per_worker(room: PlacementState, job: JobView, gpu_type: str, name: NodeName) -> int:
    """GPUs of a worker on a node, in an attempt of a GPU type that may use it."""
    each = job.gpu.gpus_for_one(room.node(name).node.gpu_type, gpu_type)
    return job.gpus_per_worker * (each or 1)


def hold(
    room: PlacementState, job: JobView, gpu_type: str, placements: Iterable[Placement]
) -> None:
    """Take the GPUs of placements of an attempt, which may span GPU types."""
    if not job.gpu.heterogeneous_speed_ratio:
        room.hold(placements, job.gpus_per_worker)
        return
    for placement in placements:
        room.hold([placement], gpus_per_worker(room, job, gpu_type, placement.node))
