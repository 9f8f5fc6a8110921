"""A line of jobs walked on real nodes: which jobs run, and which make room.

Running and waiting jobs stand in one line. Each takes its whole base gang from the GPUs that the
jobs before it leave: a running job where it is, a waiting one on free GPUs, else on GPUs of jobs
behind it. `grants.carry_out` turns the result into decisions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from common.model import JobState
from coordinator.policies.contract.decisions import Placement, placed_count
from coordinator.policies.contract.free_gpus import (
    FreeGpus,
    Place,
    best_fit,
    first_fit,
    gang_shape,
    is_movable,
    present_workers,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.contract.text import counted
from coordinator.policies.parts.grants import Grant

PlaceOf = Callable[[JobView], Place]
"""How the workers of a job are placed; jobs of one shape and one answer fit or fail together."""

Fit = tuple[str, tuple[Placement, ...]]
"""GPU type and nodes of a gang."""

Why = Callable[[JobView], str]
"""Why a job stands where it stands in the line: part of the reason of its start."""


def anywhere(job: JobView) -> Place:
    """Every job by best fit."""
    return best_fit


def takes_turns(job: JobView) -> bool:
    """Whether a job stands in the line: it waits, or it runs and may be stopped for others."""
    return job.state == JobState.PENDING or is_movable(job)


class Turns:
    """One walk.

    grants: the jobs that run after it, in the order of the line.
    held: the jobs that wait on, with the number of workers of its base gang that had room at most.
    """

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        line: Iterable[JobView],
        why: Why,
        place_of: PlaceOf = anywhere,
    ) -> None:
        self.grants: list[Grant] = []
        self.held: list[tuple[JobView, int]] = []
        self._why = why
        self._place_of = place_of
        # GPUs without a running job; below zero where a job behind must leave.
        self._free = FreeGpus(snapshot)
        # GPUs that no job before has: free, or of a running job behind.
        self._within = FreeGpus(snapshot)
        self._gpu_types = self._free.gpu_types
        self._full: dict[tuple[object, ...], int] = {}
        jobs = list(line)
        # Running jobs not yet walked by and that make room for none, the last in line first.
        self._behind = [job for job in reversed(jobs) if job.state != JobState.PENDING]
        for job in jobs:
            self._within.vacate(job.placed)
        self._room = sum(self._within.free.values())
        for job in jobs:
            if job.state != JobState.PENDING:
                if self._behind and self._behind[-1] is job:
                    self._behind.pop()
                else:  # it was to go
                    self._free.stay(job.placed)
                self._keep(job)
            elif self._room < job.base_gpus:
                self._hold(job, self._place_of(job))
            else:
                self._start(job)

    def _keep(self, job: JobView) -> None:
        """A running job stays where it is, unless a job before it took its GPUs."""
        needed = self._within.needed(job.placed)
        if self._within.goes_on(job.placed):
            self._room -= sum(needed.values())
            self.grants.append(Grant(job=job, workers=present_workers(job), reason="its turn"))
        else:
            self._free.vacate(job.placed)

    def _start(self, job: JobView) -> None:
        """A waiting job starts on free GPUs, else also on those of jobs behind it, else waits."""
        place = self._place_of(job)
        if (place, gang_shape(job)) in self._full:
            # Room only shrinks along the line: where its like did not fit it does not fit.
            self._hold(job, place)
            return
        found = first_fit(self._free, job, place) or self._of_the_last(job, place)
        if found is None:
            self._hold(job, place)
        else:
            self._give(job, *found)

    def _hold(self, job: JobView, place: Place) -> None:
        """It waits; where its like did before it, there was room for as many at most."""
        alike = (place, gang_shape(job))
        if alike not in self._full:
            self._full[alike] = self._most(job, place)
        self.held.append((job, self._full[alike]))

    def _of_the_last(self, job: JobView, place: Place) -> Fit | None:
        """Also on GPUs of jobs behind it: no job makes room where later ones in line would do."""
        if first_fit(self._within, job, place) is None:
            return None
        floor, last, gone = self._free, self._behind, 0

        def without(size: int) -> Fit | None:
            nonlocal gone
            for other in last[gone:size]:
                floor.vacate(other.placed)
            for other in last[size:gone]:
                floor.stay(other.placed)
            gone = size
            return first_fit(floor, job, place)

        needed = bisect_left(range(len(last)), True, key=lambda size: without(size) is not None)
        found = without(needed)
        without(0)
        assert found is not None
        return self._none_in_vain(job, place, found, last[:needed])

    def _none_in_vain(self, job: JobView, place: Place, found: Fit, gone: Sequence[JobView]) -> Fit:
        """The same, or a solution elsewhere, without stopped jobs that could as well go on."""
        nodes = {placement.node for placement in found[1]}
        left = [each for each in gone if any(worker.node in nodes for worker in each.placed)]
        for other in reversed(left):
            rest = [each for each in left if each is not other]
            for each in rest:
                self._free.vacate(each.placed)
            if spared := first_fit(self._free, job, place):
                found = spared
            for each in rest:
                self._free.stay(each.placed)
            if spared:
                left = rest
        # GPUs that they leave over are there for the next ones as well.
        for each in left:
            self._free.vacate(each.placed)
        going = {each.job_id for each in left}
        self._behind = [each for each in self._behind if each.job_id not in going]
        return found

    def _most(self, job: JobView, place: Place) -> int:
        """Workers of its base gang that find room if all behind it go."""
        self._within.avoided = job.nodes.avoided
        kinds = job.gpu.types or self._gpu_types
        rooms = (place(self._within, job, each, job.workers_on(each).min) for each in kinds)
        return max((placed_count(room) for room in rooms), default=0)

    def _give(self, job: JobView, gpu_type: str, placements: tuple[Placement, ...]) -> None:
        for floor in (self._free, self._within):
            floor.take(placements, job.gpus_per_worker)
        count = job.workers_on(gpu_type).min
        self._room -= count * job.gpus_per_worker
        self.grants.append(
            Grant(
                job=job,
                workers=count,
                gpu_type=gpu_type,
                placements=tuple(sorted(placements, key=lambda placement: placement.node)),
                reason=f"its turn ({self._why(job)}): "
                f"{counted(count * job.gpus_per_worker, 'GPU')} of type {gpu_type} on "
                f"{counted(len(placements), 'node')}",
            )
        )
