"""Leases of Themis: which jobs hold GPUs until when, and which are auctioned when they end. Pure.

A job whose lease is over gives its GPUs back to be auctioned. A job that a stop would set back
keeps its base gang for another lease and gives its flexible workers back. Its app's rho counts the
GPUs held, so that it wins fewer others (ours: the paper's jobs save at the end of a lease).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

from msgspec import Struct, field

from common.model import JobId, NodeName
from coordinator.policies.contract.free_gpus import FreeGpus, is_movable
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, WorkerView
from coordinator.policies.parts.restart_cost import is_set_back
from coordinator.policies.schedulers.themis.finish_time_fairness import Attendance
from coordinator.policies.schedulers.themis.seeded_chance import Chance

Room = Mapping[NodeName, int]
"""GPUs by node."""


class Memory(Struct):
    """The arbiter's memory. draws: how often it has drawn at random.

    meets_at_s: new leases end at this instant at the latest, for a gang that needs it.
    """

    attendance: Attendance = field(default_factory=Attendance)
    leases: dict[JobId, float] = field(default_factory=dict[JobId, float])
    draws: int = 0
    meets_at_s: float = 0.0


class Leases:
    """The leases of one pass.

    lease_s: the mean length of a lease. spread: the fraction by which leases differ.
    back: jobs whose lease is over. kept: of every job the workers that stay whatever is auctioned.
    """

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        memory: Memory,
        lease_s: float,
        spread: float,
        chance: Chance,
    ) -> None:
        self._lease_s = lease_s
        self._spread = spread
        self._chance = chance
        self._now_s = snapshot.now_s
        self._memory = memory
        self._jobs = snapshot.jobs
        # For jobs that another policy started, a lease counts from their start.
        memory.leases = {
            job.job_id: memory.leases.get(
                job.job_id, (job.attempt.started_at_s or self._now_s) + lease_s
            )
            for job in snapshot.jobs
            if job.placed
        }
        self.back: set[JobId] = set()
        self.kept = {job.job_id: _present(job) for job in snapshot.jobs}

    def end(self) -> None:
        """End the leases whose time has come."""
        for job in self._jobs:
            if not is_movable(job) or self._memory.leases.get(job.job_id, inf) > self._now_s:
                continue
            if is_set_back(job, self._now_s):
                self.renew(job.job_id)
                self.kept[job.job_id] = tuple(
                    worker for worker in self.kept[job.job_id] if not worker.is_flexible
                )
            else:
                self.back.add(job.job_id)
                self.kept[job.job_id] = ()

    def renew(self, job_id: JobId) -> None:
        """A job has its GPUs for another lease, until leases meet at the latest."""
        off = self._spread * (self._chance.spaced() - 0.5) if self._spread else 0.0
        end_s = self._now_s + self._lease_s * (1.0 + off)
        meets_at_s = self._memory.meets_at_s
        self._memory.leases[job_id] = min(end_s, meets_at_s) if meets_at_s > self._now_s else end_s

    def renew_all(self) -> None:
        """No other app wants the ending leases: every holder keeps its GPUs for another lease."""
        for job in self._jobs:
            if is_movable(job) and self._memory.leases.get(job.job_id, inf) <= self._now_s:
                self.renew(job.job_id)

    def meeting(self, free: Room) -> Meeting:
        """How leases could end together for gangs that do not fit on the free GPUs."""
        return Meeting(self._memory, self._now_s, free, self.kept, self._stoppable())

    def _stoppable(self) -> list[JobView]:
        """Jobs whose lease goes on and may be ended."""
        return [
            job
            for job in self._jobs
            if is_movable(job) and self.kept[job.job_id] and not is_set_back(job, self._now_s)
        ]

    def returned(self, job: JobView) -> list[WorkerView]:
        """Workers of a job whose GPUs are auctioned."""
        kept = {worker.worker_index for worker in self.kept[job.job_id]}
        return [worker for worker in _present(job) if worker.worker_index not in kept]

    def offered(self, floor: FreeGpus) -> FreeGpus:
        """The free GPUs together with those that came back."""
        for job in self._jobs:
            floor.vacate(self.returned(job))
        return floor

    @property
    def next_end_s(self) -> float | None:
        """The next end of a lease."""
        ends = (end_s for end_s in self._memory.leases.values() if end_s > self._now_s)
        return min(ends, default=None)


class Meeting:
    """Leases that could end together, as long as no GPU is given.

    Apps that ask for many gangs ask for the same one: summing up what all jobs could give back
    costs more than checking whether a gang has room there.

    Args:
        free: GPUs that are not given. kept: of every job the workers that stay.
        stoppable: jobs whose lease goes on and may be ended.
    """

    def __init__(
        self,
        memory: Memory,
        now_s: float,
        free: Room,
        kept: Mapping[JobId, Sequence[WorkerView]],
        stoppable: Sequence[JobView],
    ) -> None:
        self._memory = memory
        self._now_s = now_s
        self._free = free
        self._kept = kept
        self._stoppable = stoppable
        self._most = _with_room_of(free, kept, stoppable)

    def is_called(self, has_room: Callable[[Room], bool]) -> bool:
        """End leases together until there is room, the next ones to end, and no more of them.

        Those that end before the last of these are leased on for no longer than that. Leases that
        all ended at once would be given again at once, and the next gang would wait for a whole
        lease. A planned meeting stands. Returns whether room could be made: no job that may not be
        stopped, or that a stop would set back, is part of it.
        """
        if not has_room(self._most):
            return False
        if self._memory.meets_at_s > self._now_s:
            return True
        leases = self._memory.leases
        first = sorted(self._stoppable, key=lambda job: (leases[job.job_id], job.job_id))
        counts = range(1, len(first) + 1)
        needed = bisect_left(
            counts, True, key=lambda n: has_room(_with_room_of(self._free, self._kept, first[:n]))
        )
        self._memory.meets_at_s = leases[first[needed].job_id]
        return True


def _with_room_of(
    free: Room, kept: Mapping[JobId, Sequence[WorkerView]], jobs: Iterable[JobView]
) -> dict[NodeName, int]:
    """The free GPUs if these jobs gave back all that they keep."""
    room = dict(free)
    for job in jobs:
        for worker in kept[job.job_id]:
            if worker.node in room:
                room[worker.node] += worker.freed_gpus
    return room


def _present(job: JobView) -> tuple[WorkerView, ...]:
    return tuple(worker for worker in job.placed if not worker.is_leaving)
