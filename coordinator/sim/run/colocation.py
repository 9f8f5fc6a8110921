"""Co-location: which workers really compute on which GPU, and what that costs them.

This is the truth of the simulator: a suspended worker does not count. Two that compute on one GPU
slow each other down by `common.profile.packed_speed_ratio`.
"""

from __future__ import annotations

from common.messages import WorkerOrder
from common.model import GpuUuid, JobId, WorkerKey
from common.profile import JobProfile, packed_speed_ratio


class Colocation:
    """GPUs by the workers that compute on them."""

    def __init__(self) -> None:
        self._on: dict[GpuUuid, dict[WorkerKey, JobProfile]] = {}
        self._gpus: dict[WorkerKey, tuple[GpuUuid, ...]] = {}
        self._shared_count = 0

    @property
    def is_shared(self) -> bool:
        """Whether any GPU has more than one that computes."""
        return self._shared_count > 0

    def enter(self, order: WorkerOrder) -> set[JobId]:
        """A worker begins to compute; the other jobs that it meets on its GPUs."""
        self._gpus[order.key] = order.gpu_uuids
        met: set[JobId] = set()
        for uuid in order.gpu_uuids:
            here = self._on.get(uuid)
            if here is None:
                self._on[uuid] = {order.key: order.spec.profile}
                continue
            met.update([key.job_id for key in here])
            here[order.key] = order.spec.profile
            self._shared_count += len(here) == 2
        met.discard(order.key.job_id)
        return met

    def leave(self, key: WorkerKey) -> set[JobId]:
        """A worker ceases to compute; the other jobs that have its GPUs to themselves now."""
        met: set[JobId] = set()
        for uuid in self._gpus.pop(key, ()):
            here = self._on[uuid]
            if len(here) == 1:
                del self._on[uuid]  # nearly always it had the GPU to itself
                continue
            self._shared_count -= len(here) == 2
            del here[key]
            met.update([other.job_id for other in here])
        met.discard(key.job_id)
        return met

    def share(self, key: WorkerKey) -> float:
        """Part of its GPUs' time that is a worker's own."""
        gpus = self._gpus.get(key, ())
        return sum(1.0 / len(self._on[uuid]) for uuid in gpus) / len(gpus) if gpus else 1.0

    def speed_ratio(self, key: WorkerKey) -> float:
        """Part of its speed alone that a worker makes; the fullest of its GPUs decides."""
        ratio = 1.0
        for uuid in self._gpus.get(key, ()):
            here = self._on[uuid]
            if len(here) > 1:
                others = [profile for other, profile in here.items() if other != key]
                ratio = min(ratio, packed_speed_ratio(here[key], others))
        return ratio
