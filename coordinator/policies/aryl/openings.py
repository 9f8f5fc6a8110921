"""When nodes come free, by the estimated remaining time of their jobs.

Flexible workers count as room from the start, because they leave at once when they are asked to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

from common.model import JobId
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.contract.estimates import ends_at_s
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, Occupied

Opening = tuple[float, int]
"""An instant from which on a node has room for one worker more, and the node's place."""


def is_over_in_time(job: JobView, occupied: Occupied, at_s: float) -> bool:
    """Whether an attempt that starts at an instant is over, by its time limit, when a node closes;
    as the engine reckons it at that instant.
    """
    closes_at_s = occupied.node.closes_at_s
    if closes_at_s is None:
        return True
    return job.nodes.longest_s is not None and at_s + job.nodes.longest_s <= closes_at_s


class Openings:
    """Answers for one snapshot when training nodes have room for workers.

    Args:
        trusts_profiles: jobs are as fast as their profiles tell; else linear in their workers.
    """

    def __init__(self, snapshot: ClusterSnapshot, *, trusts_profiles: bool = True) -> None:
        self._snapshot = snapshot
        self._trusts_profiles = trusts_profiles
        self._ends_at_s: dict[JobId, float] | None = None

    def soonest(
        self,
        room: PlacementState,
        job: JobView,
        gpu_type: str,
        *,
        not_before_s: Callable[[int], float],
    ) -> list[Opening]:
        """The openings that a base gang could take first, one for each worker; none if it never
        finds enough.

        not_before_s: until when a place is reserved for another job, on the snapshot's clock.
        """
        size, count, avoided = job.gpus_per_worker, job.workers_on(gpu_type).min, room.avoided(job)
        found = [
            (at_s, place)
            for place, occupied in enumerate(room.index.nodes)
            if occupied is not None and occupied.service is None
            if occupied.node.gpu_type == gpu_type and not avoided >> place & 1
            for at_s in self._of(room, occupied, size, not_before_s(place))
        ]
        found.sort()
        while len(found) >= count:
            # The gang starts with the last of them, and then all of it has to be over in time.
            starts_at_s, taken = found[count - 1][0], found[:count]
            late = {place for _, place in taken if self._is_late(room, job, place, starts_at_s)}
            if not late:
                return taken
            found = [each for each in found if each[1] not in late]
        return []

    def _is_late(self, room: PlacementState, job: JobView, place: int, at_s: float) -> bool:
        occupied = room.index.nodes[place]
        return occupied is not None and not is_over_in_time(job, occupied, at_s)

    def _of(
        self, room: PlacementState, occupied: Occupied, size: int, not_before_s: float
    ) -> Iterator[float]:
        """When a node has room for a first worker, a second one, ..; in order of time."""
        name = occupied.node.name
        flexible = room.flexible.get(name, ())
        free = room.use(name)[0] + sum([worker.freed_gpus for worker in flexible])
        for _ in range(free // size):
            yield not_before_s
        for at_s, gpus in sorted(self.leaving(occupied)):
            if at_s == inf:
                return
            for _ in range((free + gpus) // size - free // size):
                yield max(at_s, not_before_s)
            free += gpus

    def leaving(self, occupied: Occupied) -> list[tuple[float, int]]:
        """When each base worker that stays on a node will be gone, and the GPUs that it frees."""
        ends_at_s = self.ends_at_s
        return [
            (ends_at_s.get(worker.job_id, inf), worker.freed_gpus)
            for worker in occupied.node.workers
            if not worker.is_flexible and not worker.is_leaving
        ]

    @property
    def ends_at_s(self) -> dict[JobId, float]:
        """As the function of this name; reckoned when it is asked for first."""
        if self._ends_at_s is None:
            self._ends_at_s = ends_at_s(self._snapshot, trusts_profiles=self._trusts_profiles)
        return self._ends_at_s
