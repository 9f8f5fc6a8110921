"""Tetris: packs machine by machine by alignment, short jobs first, within a fairness bound.

Source: Tetris, SIGCOMM'14, sections 3.2 to 3.4, for gangs. A machine with room picks, of the jobs
that fit there, the one with the highest score, until nothing fits; then the next machine. The score
is the alignment less eps times the work that is left. The alignment is the scalar product of a
worker's demand and the machine's free resources, both as parts of the machine. eps is the ratio of
the means, so that both weigh alike.

The paper leaves the order of machines to their heartbeats. Here the fullest machine with room for
any job goes first, by free GPUs and then by name, so that small jobs keep whole machines whole.

All of a gang must fit in one pass, and no job is preempted. A gang that no machine takes whole goes
to the machines with the most room, so to the fewest, and its last part to the fullest that takes
that. It is a candidate on the fullest of them. Its alignment is the mean over its workers, of which
those away from its first machine count `remote_ratio`.

Only the jobs of the highest priority that fit are looked at, and at a machine of those the 1 -
`fairness` part whose tenants have the smallest dominant shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil
from statistics import fmean

from msgspec import Struct

from common.model import JobId, JobState, NodeName, NonNegativeFloat, Ratio
from coordinator.policies.contract.decisions import (
    Allocation,
    PendingReason,
    Placement,
    placed_count,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.contract.text import counted
from coordinator.policies.knobs import Part
from coordinator.policies.parts.dominant_share import AddedShares
from coordinator.policies.parts.grants import Grant, carry_out, going_on
from coordinator.policies.parts.resource_vectors import Bins, Vector, wanted
from coordinator.policies.policy import Parts, joint


class TetrisKnobs(Struct, frozen=True, kw_only=True):
    """fairness: f of the paper: at 0 packing is best, near 1 the worst-off job goes first.

    remote_ratio: value of a worker away from the first machine of its gang (the paper's 10 %
        penalty on remote input).
    srtf_weight: weight of the remaining work, times eps; 0: packing only.
    """

    fairness: Ratio = 0.25
    remote_ratio: Part = 0.9
    srtf_weight: NonNegativeFloat = 1.0


class _Fit(Struct, frozen=True, kw_only=True):
    """Where a gang of one shape would go, which of these machines picks it, and the alignment."""

    gpu_type: str
    placements: tuple[Placement, ...]
    machine: NodeName
    alignment: float


Shape = tuple[object, ...]


def _shape(job: JobView) -> Shape:
    factors = sorted(job.gpu.worker_multiplier.items())
    sizes = (job.gpus_per_worker, job.cpus_per_worker, job.memory_bytes_per_worker)
    return (*sizes, job.workers.min, job.gpu.types, job.nodes.avoided, *factors)


class Packing:
    """One pass. starts: jobs with their nodes, in order. waiting: jobs that wait on."""

    def __init__(self, knobs: TetrisKnobs, snapshot: ClusterSnapshot) -> None:
        self._knobs = knobs
        self._snapshot = snapshot
        self._bins = Bins(snapshot)
        self._shares = AddedShares(snapshot, self._bins.total)
        self._fits: dict[Shape, _Fit | None] = {}
        self.starts: list[tuple[JobView, _Fit, float]] = []
        self.waiting: dict[JobId, JobView] = {
            job.job_id: job for job in snapshot.jobs if job.state == JobState.PENDING
        }
        for priority in sorted({job.priority for job in self.waiting.values()}, reverse=True):
            level = {
                name: (job, _shape(job))
                for name, job in self.waiting.items()
                if job.priority == priority
            }
            while (best := self._best(level.values())) is not None:
                del level[best[0].job_id]
                self._start(*best)

    def why(self, job: JobView) -> str:
        """Why a job waits on."""
        if unfit := self._bins.why_not_alone(job):
            return unfit
        return (
            f"its gang of {counted(job.workers.min, 'worker')} of "
            f"{counted(job.gpus_per_worker, 'GPU')} does not fit in the free GPUs, CPUs "
            "and memory"
        )

    # --- the score ------------------------------------------------------------------------------

    def _best(self, level: Iterable[tuple[JobView, Shape]]) -> tuple[JobView, _Fit, float] | None:
        """The choice of the fullest machine with room, among jobs that fit and that fairness
        leaves.
        """
        found = [(job, fit) for job, shape in level if (fit := self._fit(job, shape)) is not None]
        if not found:
            return None
        machine = min({fit.machine for _, fit in found}, key=self._fullness)
        fits = {job.job_id: fit for job, fit in found if fit.machine == machine}
        line = sorted((self.waiting[job_id] for job_id in fits), key=self._worst_off)
        count = max(1, ceil((1.0 - self._knobs.fairness) * len(line)))
        line = line[:count]
        left = {job.job_id: self._left(job) for job in line}
        eps = self._eps(fits, left)
        scores = {name: fits[name].alignment - eps * left[name] for name in left}
        job = max(line, key=lambda job: (scores[job.job_id], -job.submitted_at_s))
        return job, fits[job.job_id], scores[job.job_id]

    def _worst_off(self, job: JobView) -> tuple[object, ...]:
        return (self._shares.worst_off(job.tenant), job.submitted_at_s, job.job_id)

    def _left(self, job: JobView) -> float:
        """Work left in parts of the cluster times seconds (section 3.3.1)."""
        one = wanted(job, self._bins.total).over(self._bins.total)
        return job.work_left_s(self._snapshot.now_s) * sum(one)

    def _eps(self, fits: Mapping[JobId, _Fit], left: Mapping[JobId, float]) -> float:
        """Mean alignment over mean work left."""
        mean_left = fmean(left.values())
        if mean_left <= 0:
            return 0.0
        return self._knobs.srtf_weight * fmean(fits[name].alignment for name in left) / mean_left

    # --- where ----------------------------------------------------------------------------------

    def _fullness(self, name: NodeName) -> tuple[float, NodeName]:
        """The order of machines: those with the fewest free GPUs first."""
        return self._bins.fullest(name), name

    def _fit(self, job: JobView, shape: Shape) -> _Fit | None:
        """Where its gang would go: on the fewest machines of one type, then on the fullest.

        Jobs of one shape share the answer until room changes.
        """
        if shape not in self._fits:
            found = (self._placed(job, kind) for kind in self._bins.kinds(job))
            self._fits[shape] = min(
                (fit for fit in found if fit is not None),
                key=lambda fit: (len(fit.placements), self._fullness(fit.machine)),
                default=None,
            )
        return self._fits[shape]

    def alignment(self, job: JobView, name: NodeName) -> float:
        """Demand times room, both as parts of the machine."""
        whole = self._bins.whole[name]
        return wanted(job, whole).over(whole).dot(self._bins.free[name].over(whole))

    def _placed(self, job: JobView, kind: str) -> _Fit | None:
        """On machines of a type: the fullest that takes all, else those with the most room."""
        count = job.workers_on(kind).min
        placements = self._chosen(job, kind, count)
        if not placements:
            return None
        first = placements[0].node
        total = sum(
            placement.worker_count
            * self.alignment(job, placement.node)
            * (1.0 if placement.node == first else self._knobs.remote_ratio)
            for placement in placements
        )
        return _Fit(
            gpu_type=kind,
            placements=placements,
            machine=min((placement.node for placement in placements), key=self._fullness),
            alignment=total / count,
        )

    def _chosen(self, job: JobView, kind: str, count: int) -> tuple[Placement, ...]:
        """Machines for a number of workers; none unless all fit."""
        rooms: dict[NodeName, int] = {
            name: room
            for name, node in self._bins.floor.nodes.items()
            if node.gpu_type == kind and (room := self._bins.room(job, name))
        }
        if sum(rooms.values()) < count:
            return ()
        found: list[Placement] = []
        while count:
            takers = [name for name, room in rooms.items() if room >= count]
            if takers:
                name = min(takers, key=self._fullness)
            else:
                name = min(rooms, key=lambda name: (-rooms[name], self._fullness(name)))
            here = min(count, rooms.pop(name))
            found.append(Placement(node=name, worker_count=here))
            count -= here
        return tuple(found)

    def _start(self, job: JobView, fit: _Fit, score: float) -> None:
        self.starts.append((job, fit, score))
        del self.waiting[job.job_id]
        self._bins.move(job, fit.placements)
        count = placed_count(fit.placements)
        self._shares.add(job.tenant, Vector().plus(wanted(job, self._bins.total), count))
        touched = {placement.node for placement in fit.placements}
        for shape, other in list(self._fits.items()):
            # Room only shrinks, so a job that found none finds none. A job on several machines was
            # placed when one machine filled up: that one chose as the fullest, so the job did not
            # fit there. Of several, one may now be the fullest that takes a job.
            if other is not None and (
                len(touched) > 1 or touched & {each.node for each in other.placements}
            ):
                del self._fits[shape]


def _allocate(knobs: TetrisKnobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    grants = [
        Grant(
            job=job,
            workers=placed_count(fit.placements),
            gpu_type=fit.gpu_type,
            placements=fit.placements,
            reason=f"alignment {fit.alignment:.3f}, score {score:.3f} with its remaining work",
        )
        for job, fit, score in Packing(knobs, snapshot).starts
    ]
    return Allocation(decisions=carry_out(snapshot, [*grants, *going_on(snapshot)]).decisions)


def _hold(
    knobs: TetrisKnobs, snapshot: ClusterSnapshot, memory: bytes
) -> tuple[PendingReason, ...]:
    packing = Packing(knobs, snapshot)
    waiting = sorted(packing.waiting.values(), key=lambda job: (job.submitted_at_s, job.job_id))
    return tuple(PendingReason(job_id=job.job_id, blockers=(packing.why(job),)) for job in waiting)


POLICIES = (
    joint(
        "tetris",
        "packs GPUs, CPUs and memory by alignment, short jobs first, with a fairness knob",
        knobs=TetrisKnobs(),
        allocate=_allocate,
        pending_reasons=_hold,
        is_ordered=False,
        parts=Parts(
            order="alignment less eps x work left", size="base demand", place="fullest first"
        ),
    ),
)
