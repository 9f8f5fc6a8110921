"""Defragmentation: moves workers so that free GPUs on several nodes become room on one node.

A worker needs all its GPUs on one node. Where enough GPUs are free, but no node has enough, the
cheapest node is cleared. A flexible worker there is replaced by one elsewhere; a job with its base
gang there moves as a whole (ElasticFlow packs by buddy allocation and migrates, ASPLOS 2023,
section 4.3). A moved worker takes free GPUs that are too few for the waiting worker, so that no
room is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import inf

from msgspec import Struct

from common.model import JobId, NodeName
from coordinator.policies.contract.decisions import (
    Decision,
    Migrate,
    Placement,
    Resize,
    merge,
)
from coordinator.policies.contract.free_gpus import FreeGpus, is_movable
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, WorkerView
from coordinator.policies.contract.text import counted
from coordinator.policies.parts.restart_cost import loss_gpu_s

RESTS = 10
"""A moved job stays where it is for this many times the length of the move: moves take at most that
small a part of its time, however often others need room.
"""

MOST_REFUSED = 32
"""After this many jobs that may not move, a pass asks no other one: asking takes time."""

MayMove = Callable[[JobView, float], bool]
"""(job, seconds for which it would stand still) -> whether it may; a job with a yes does move."""


class _Unit(Struct, frozen=True, kw_only=True):
    """What moves at once: a flexible worker, or a job with all its workers.

    gpus: the number that it frees on the node to be cleared.
    pause_s: its job stands still for this long.
    cost_gpu_s: that pause in GPU-seconds, plus the work that is repeated.
    """

    job: JobView
    workers: tuple[WorkerView, ...]
    is_whole: bool
    gpus: int
    pause_s: float
    cost_gpu_s: float

    @property
    def price(self) -> tuple[float, int, str, int]:
        """To choose by: cost, GPUs that move, names."""
        gpus = sum(worker.gpus for worker in self.workers)
        return self.cost_gpu_s, gpus, self.job.job_id, self.workers[0].worker_index


class _Move(Struct, frozen=True, kw_only=True):
    """A unit, and the node of each of its workers."""

    unit: _Unit
    targets: tuple[NodeName, ...]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Where its workers go."""
        pairs = zip(self.unit.workers, self.targets, strict=True)
        placed = (
            Placement(node=name, worker_count=1, is_flexible=worker.is_flexible)
            for worker, name in pairs
        )
        return merge(list(placed))


class Clearing:
    """The moves of one pass; decided for one job that needs room after the other."""

    def __init__(self, snapshot: ClusterSnapshot, may_move: MayMove) -> None:
        self._may_move = may_move
        self._now_s = snapshot.now_s
        self._jobs = {job.job_id: job for job in snapshot.jobs}
        self._resize_s = snapshot.start_s + snapshot.resize_s
        self._restart_s = snapshot.start_s + snapshot.restart_s
        self._stays: set[JobId] = set()
        self._moves: dict[JobId, list[_Move]] = {}
        self._takers: dict[JobId, JobId] = {}

    @property
    def decisions(self) -> list[Decision]:
        """The moves, in this order, after all decisions that free GPUs."""
        return [self._decision(job_id, moves) for job_id, moves in self._moves.items()]

    def make(
        self,
        floor: FreeGpus,
        job: JobView,
        gpu_type: str,
        *,
        least: int,
        count: int,
        busy: Collection[JobId],
    ) -> bool:
        """Let others move until a number of workers of a job find room, or as many as can.

        Where these are fewer than `least`, or no more than without moves, no job moves.

        busy: jobs that stay where they are.
        """
        floor.avoided = job.nodes.avoided
        had = have = sum(floor.rooms(gpu_type, job.gpus_per_worker).values())
        before, moves = dict(floor.free), list[_Move]()
        stays = {*busy, *self._moves, job.job_id}
        while have < count:
            found = self._clear_one(floor, job, gpu_type, stays)
            if not found:
                break
            for move in found:
                floor.vacate(move.unit.workers)
                floor.take(move.placements, move.unit.job.gpus_per_worker)
                stays.add(move.unit.job.job_id)
            moves += found
            have = sum(floor.rooms(gpu_type, job.gpus_per_worker).values())
        if have < least or have <= had:
            floor.free.update(before)
            return False
        for move in moves:
            name = move.unit.job.job_id
            self._moves.setdefault(name, []).append(move)
            self._takers[name] = job.job_id
        return True

    #   --- which node, and which workers --------------------------------------------------------

    def _clear_one(
        self, floor: FreeGpus, job: JobView, gpu_type: str, busy: Collection[JobId]
    ) -> list[_Move]:
        """The cheapest moves that make room for one worker more, of those that may; or none."""
        size = job.gpus_per_worker
        pieces = {
            name: gpus % size
            for name, gpus in floor.free.items()
            if gpus % size and floor.nodes[name].gpu_type == gpu_type
        }
        if not pieces:
            return []
        avoided = job.nodes.avoided
        sets = [
            (sum(unit.cost_gpu_s for unit in units), len(units), name, units)
            for name, node in floor.nodes.items()
            if node.gpu_type == gpu_type and name not in avoided
            for units in self._sets(floor, name, pieces, size, busy)
        ]
        for *_, name, units in sorted(sets, key=lambda each: each[:3]):
            if len(self._stays) >= MOST_REFUSED:
                break
            rest = {other: gpus for other, gpus in pieces.items() if other != name}
            moves = _moved(units, rest)
            if moves and self._are_allowed(units):
                return moves
        return []

    def _are_allowed(self, units: Sequence[_Unit]) -> bool:
        """A refused job is not asked again; a useless move only loses slack."""
        by_job = {unit.job.job_id: unit for unit in units}
        if not self._stays.isdisjoint(by_job):
            return False
        for name, unit in by_job.items():
            if not self._may_move(unit.job, unit.pause_s):
                self._stays.add(name)
                return False
        return True

    def _sets(
        self,
        floor: FreeGpus,
        name: NodeName,
        pieces: Mapping[NodeName, int],
        size: int,
        busy: Collection[JobId],
    ) -> Iterator[Sequence[_Unit]]:
        """Units that make room for one worker more: one alone, and the cheapest by GPU."""
        missing = size - floor.free[name] % size
        if floor.free[name] + missing > floor.nodes[name].gpus:
            return
        most = max((gpus for other, gpus in pieces.items() if other != name), default=0)
        units = [
            unit
            for unit in self._units(floor, name, busy)
            if all(worker.gpus <= most for worker in unit.workers)
        ]
        alone = [unit for unit in units if unit.gpus >= missing]
        if alone:
            yield [min(alone, key=lambda unit: unit.price)]
        together = _cheapest(units, missing)
        if len(together) > 1:
            yield together

    def _units(self, floor: FreeGpus, name: NodeName, busy: Collection[JobId]) -> Iterator[_Unit]:
        here: dict[JobId, list[WorkerView]] = {}
        for worker in floor.nodes[name].workers:
            here.setdefault(worker.job_id, []).append(worker)
        for job_id, workers in here.items():
            job = self._jobs[job_id]
            if job_id in busy or job_id in self._stays or not _is_steady(job):
                continue
            if job.is_resizable and self._has_rested(job, job.resizes.latest_at_s, self._resize_s):
                for worker in workers:
                    if worker.is_flexible:
                        yield self._unit(job, (worker,), name, self._resize_s)
            pause_s = self._restart_s and self._restart_s + job.grace_s
            if self._has_rested(job, job.attempt.started_at_s, pause_s):
                yield self._unit(job, job.placed, name, pause_s)

    def _has_rested(self, job: JobView, since_s: float | None, pause_s: float) -> bool:
        return self._now_s >= (since_s if since_s is not None else -inf) + RESTS * pause_s

    def _unit(
        self, job: JobView, workers: tuple[WorkerView, ...], name: NodeName, pause_s: float
    ) -> _Unit:
        is_whole = len(workers) == len(job.placed)
        cost_gpu_s = pause_s * sum(worker.gpus for worker in job.placed)
        if is_whole:
            cost_gpu_s += loss_gpu_s(job, self._now_s)
        return _Unit(
            job=job,
            workers=workers,
            is_whole=is_whole,
            gpus=sum(worker.gpus for worker in workers if worker.node == name),
            pause_s=pause_s,
            cost_gpu_s=cost_gpu_s,
        )

    #   --- the moves ----------------------------------------------------------------------------

    def _decision(self, job_id: JobId, moves: Sequence[_Move]) -> Decision:
        unit, cost_gpu_s = moves[0].unit, sum(move.unit.cost_gpu_s for move in moves)
        many = counted(sum(len(move.unit.workers) for move in moves), "worker")
        names = ", ".join(sorted({worker.node for m in moves for worker in m.unit.workers}))
        reason = (
            f"{self._takers[job_id]} needs GPUs of one node and they are free in pieces: this one "
            f"makes room with {many} on {names}"
        )
        added = merge([placement for move in moves for placement in move.placements])
        if unit.is_whole:
            return Migrate(
                job_id=job_id, placements=added, predicted_cost_gpu_s=cost_gpu_s, reason=reason
            )
        removed = sorted(worker.worker_index for m in moves for worker in m.unit.workers)
        return Resize(
            job_id=job_id,
            added=added,
            removed_workers=tuple(removed),
            predicted_cost_gpu_s=cost_gpu_s,
            reason=reason,
        )


def _is_steady(job: JobView) -> bool:
    """It runs, may be stopped, and nothing of it is under way."""
    return (
        is_movable(job)
        and not job.spans_types
        and not any(each.is_leaving or each.freed_gpus != each.gpus for each in job.placed)
    )


def _cheapest(units: Iterable[_Unit], missing: int) -> list[_Unit]:
    """Units that free a number of GPUs, the cheapest per GPU first, all of them needed; or none."""
    found: list[_Unit] = []
    for unit in sorted(units, key=lambda each: (each.cost_gpu_s / each.gpus, each.price)):
        if sum(each.gpus for each in found) >= missing:
            break
        same = (each for each in found if each.job is unit.job)
        if not any(each.is_whole or unit.is_whole for each in same):
            found.append(unit)
    for unit in sorted(found, key=lambda each: each.price, reverse=True):
        if sum(each.gpus for each in found) - unit.gpus >= missing:
            found.remove(unit)
    return found if sum(each.gpus for each in found) >= missing else []


def _moved(units: Sequence[_Unit], pieces: dict[NodeName, int]) -> list[_Move]:
    """The smallest piece for each worker, large workers first; none where any of them fits none."""
    moves: list[_Move] = []
    for unit in sorted(units, key=lambda each: (-each.workers[0].gpus, each.price)):
        targets, avoided = list[NodeName](), unit.job.nodes.avoided
        for worker in unit.workers:
            fits = (
                name for name, gpus in pieces.items() if gpus >= worker.gpus and name not in avoided
            )
            target = min(fits, key=lambda name: (pieces[name], name), default=None)
            if target is None:
                return []
            pieces[target] -= worker.gpus
            targets.append(target)
        moves.append(_Move(unit=unit, targets=tuple(targets)))
    return moves
