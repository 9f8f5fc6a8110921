"""Preemptive orders: the jobs with the least left run, whoever no longer belongs makes room.

Must not know the engine, nor what a preemption costs: these are the textbook orders SRTF (least
remaining time) and SRSF (least remaining time x GPUs; Tiresias, NSDI'19, section 3), good where
stopping is free and a measure of what is possible where it is not.

Running and waiting jobs stand in one line. Each takes its whole base gang from what is left by
those before it: a running job where it is, a waiting one on GPUs that are free, else on those of
jobs behind it. A running job whose GPUs are taken by then is preempted, and the engine's nominee
mechanism gives them on as they are vacated. Nobody moves, and nobody is stopped in vain: what a
victim held is part of what somebody starts on in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from common.model import JobState, NodeName, NodeRole
from coordinator.policies.blockers import Hold
from coordinator.policies.decisions import Allocation, Decision, Placement, Preempt, Start
from coordinator.policies.floor import is_movable
from coordinator.policies.policy import NoKnobs, Parts, Policy, joint
from coordinator.policies.snapshot import ClusterSnapshot, JobView

RANK_DIGITS = 3
"""Ranks are compared to the millisecond: rounding must not preempt anybody."""

Left = Callable[[JobView, float], float]
"""How much a job has left at an instant; the least runs first."""


def remaining_time(job: JobView, now_s: float) -> float:
    """Seconds left with the base gang."""
    return job.work_left_s(now_s) / job.workers.min


def remaining_service(job: JobView, now_s: float) -> float:
    """GPU-seconds left."""
    return job.work_left_s(now_s) * job.gpus_per_worker


def by_least_left(snapshot: ClusterSnapshot, left: Left) -> tuple[Decision, ...]:
    """One scheduling pass: who stops, and who starts on it."""
    line = _Line(snapshot, left)
    return (*line.preempts, *line.starts)  # in this order the starts find their GPUs promised


def why_waiting(snapshot: ClusterSnapshot, left: Left) -> tuple[Hold, ...]:
    """Why each job that waits would not start in a pass now."""
    line = _Line(snapshot, left)
    return tuple(
        Hold(
            job_id=job.job_id,
            blockers=(
                f"needs {job.workers.min} workers of {job.gpus_per_worker} GPUs; jobs with less "
                f"left leave room for {room}",
            ),
        )
        for job, room in line.held
    )


class _Line:
    """One walk along the line.

    within: GPUs per node that nobody before has: free, or of a running job behind.
    free: GPUs per node on which nobody runs; below zero where somebody behind must go.
    held: jobs that wait on, and for how many workers of theirs there was room.
    """

    def __init__(self, snapshot: ClusterSnapshot, left: Left) -> None:
        self._now_s = snapshot.now_s
        # Lent nodes are left alone: whoever lent them takes them back by its own rule.
        self._types = {
            node.name: node.gpu_type
            for node in snapshot.nodes
            if node.is_schedulable and node.role == NodeRole.TRAINING
        }
        self._free = {
            node.name: node.free_gpus for node in snapshot.nodes if node.name in self._types
        }
        self._within = dict(self._free)
        self._full: dict[tuple[object, ...], int] = {}
        self._takers: dict[NodeName, list[JobView]] = {}
        self.starts: list[Decision] = []
        self.preempts: list[Decision] = []
        self.held: list[tuple[JobView, int]] = []

        def rank(job: JobView) -> tuple[object, ...]:
            left_now = round(left(job, snapshot.now_s), RANK_DIGITS)
            return (-job.priority, left_now, job.submitted_at_s, job.job_id)

        line = [job for job in snapshot.jobs if job.state == JobState.PENDING or is_movable(job)]
        line.sort(key=rank)
        for job in line:
            for name, gpus in self._held_by(job).items():
                self._within[name] += gpus
        for job in line:
            if job.state == JobState.PENDING:
                self._start(job)
            else:
                self._keep(job)

    def _held_by(self, job: JobView) -> dict[NodeName, int]:
        """GPUs that a preemption of the job would vacate here."""
        gpus: dict[NodeName, int] = {}
        for worker in job.placed:
            if worker.node in self._within and not worker.is_leaving:
                gpus[worker.node] = gpus.get(worker.node, 0) + worker.gpus
        return gpus

    def _keep(self, job: JobView) -> None:
        """A running job stays where it is, unless a job before it took its GPUs."""
        held = self._held_by(job)
        if all(self._within[name] >= gpus for name, gpus in held.items()):
            for name, gpus in held.items():
                self._within[name] -= gpus
            return
        for name, gpus in held.items():
            self._free[name] += gpus
        takers = {taker.job_id for name in held for taker in self._takers.get(name, ())}
        beneficiary, lost_gpu_s = ", ".join(sorted(takers)), job.lost_gpu_s(self._now_s)
        self.preempts.append(
            Preempt(
                job_id=job.job_id,
                predicted_cost_gpu_s=lost_gpu_s,
                beneficiary=beneficiary,
                reason=f"{beneficiary} with less left takes its GPUs; "
                f"{lost_gpu_s:.0f} GPU-s of work lost",
            )
        )

    def _start(self, job: JobView) -> None:
        """A waiting job starts on free GPUs, else on those of jobs behind it, else waits."""
        factors = sorted(job.gpu.worker_multiplier.items())
        alike = (job.gpus_per_worker, job.workers.min, job.gpu.types, job.avoid_nodes, *factors)
        if alike in self._full:
            # Room only shrinks along the line: where its like did not fit it does not fit.
            self.held.append((job, self._full[alike]))
            return
        most = 0
        kinds = job.gpu.types or sorted(set(self._types.values()))
        for room in (self._free, self._within):
            for gpu_type in kinds:
                count = job.workers_on(gpu_type).min
                placements = self._place(job, room, gpu_type, count)
                placed = sum(placement.worker_count for placement in placements)
                if placed == count:
                    self._take(job, gpu_type, placements)
                    return
                most = max(most, placed)
        self._full[alike] = most
        self.held.append((job, most))

    def _place(
        self, job: JobView, room: Mapping[NodeName, int], gpu_type: str, count: int
    ) -> list[Placement]:
        """Up to `count` workers by best fit: the fullest nodes that take one first."""
        size = job.gpus_per_worker
        fits = [
            name
            for name, gpus in room.items()
            if gpus >= size and self._types[name] == gpu_type and name not in job.avoid_nodes
        ]
        placements: list[Placement] = []
        for name in sorted(fits, key=lambda name: (room[name], name)):
            if count <= 0:
                break
            here = min(count, room[name] // size)
            placements.append(Placement(node=name, worker_count=here))
            count -= here
        return placements

    def _take(self, job: JobView, gpu_type: str, placements: list[Placement]) -> None:
        for placement in placements:
            gpus = placement.worker_count * job.gpus_per_worker
            self._within[placement.node] -= gpus
            self._free[placement.node] -= gpus
            self._takers.setdefault(placement.node, []).append(job)
        count, factor = job.workers_on(gpu_type).min, job.gpu.worker_multiplier.get(gpu_type, 1)
        runtime_s = job.work_left_s(self._now_s) * factor / count
        self.starts.append(
            Start(
                job_id=job.job_id,
                gpu_type=gpu_type,
                placements=tuple(sorted(placements, key=lambda placement: placement.node)),
                estimated_runtime_s=runtime_s,
                estimate_source=job.estimate_source,
                reason=f"its turn ({runtime_s:.0f} s left by {job.estimate_source}, priority "
                f"{job.priority}): {count * job.gpus_per_worker} GPUs of type {gpu_type} on "
                f"{len(placements)} nodes",
            )
        )


def _preemptive(name: str, description: str, left: Left) -> Policy:
    def allocate(_: NoKnobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        return Allocation(decisions=by_least_left(snapshot, left), memory=memory)

    def hold(_: NoKnobs, snapshot: ClusterSnapshot, memory: bytes) -> tuple[Hold, ...]:
        return why_waiting(snapshot, left)

    return joint(
        name,
        description,
        knobs=NoKnobs(),
        allocate=allocate,
        hold=hold,
        parts=Parts(order=left.__name__.replace("_", " "), size="base demand", place="best fit"),
    )


POLICIES = (
    _preemptive(
        "srtf",
        "least remaining time first, preempting jobs with more left",
        remaining_time,
    ),
    _preemptive(
        "srsf",
        "least remaining time x GPUs first, preempting jobs with more left",
        remaining_service,
    ),
)
