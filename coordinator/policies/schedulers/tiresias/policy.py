"""Tiresias: jobs with the least attained GPU time run first, without estimates of their length.

Source: NSDI'19. `tiresias` is discretised two-dimensional LAS. `tiresias-gittins` knows the
attained service of past jobs, and orders the queues before the last one by Gittins index. A pass
walks the queues from the first to the last. Each job takes its whole gang or is skipped; a running
job that got nothing is preempted (pseudocode 2).

Jobs whose model is skewed suffer from being spread, so they run on the fewest nodes that could hold
them or wait; others run anywhere (section 3.3). A job that does not declare its skew takes the skew
of another job of its model that did. Otherwise it runs anywhere, as in the paper's profiling run.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from common.model import JobId, JobState, PositiveFloat, PositiveInt, Ratio
from coordinator.policies.contract.decisions import Allocation, PendingReason, earliest
from coordinator.policies.contract.free_gpus import Place, best_fit, fewest_nodes
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.contract.text import counted
from coordinator.policies.knobs import Idle
from coordinator.policies.parts.grants import carry_out
from coordinator.policies.parts.memory import recalled
from coordinator.policies.parts.priority_line import Turns, takes_turns
from coordinator.policies.parts.restart_cost import keeps_gang, told_of
from coordinator.policies.policy import Parts, joint
from coordinator.policies.schedulers.tiresias.gittins import GittinsTable, gittins_table
from coordinator.policies.schedulers.tiresias.queues import (
    Line,
    QueueKnobs,
    QueueMemory,
    Queues,
    submission,
)

LOOK_AGAIN_S = 300.0
"""A job that goes on to keep its work while others wait is checked at this interval: it may save.
"""

MODELS_KEPT = 1000
"""Models whose skew is remembered; the latest seen stay."""


class TiresiasKnobs(QueueKnobs, frozen=True, kw_only=True):
    """The knobs of the queues, and of the placement.

    pack_limit: models above this skew are consolidated (PACKLIMIT). The paper fits it to past runs
        and prints no value; 0.3 separates the models of its table 6.
    """

    pack_limit: Ratio = 0.3


class GittinsKnobs(TiresiasKnobs, frozen=True, kw_only=True):
    """Tiresias' own, and the known service of whole jobs.

    services: GPU-seconds of past jobs; empty: learn them from jobs that end.
    history: number of ended jobs whose service is kept.
    subtracts_age: compute the index by its definition; false: estimate it as the public simulator
        does, with a fixed look-ahead.
    delta_gpu_s: that look-ahead, in GPU-seconds of service.
    """

    services: tuple[PositiveFloat, ...] = ()
    history: PositiveInt = 1000
    subtracts_age: bool = True
    delta_gpu_s: PositiveFloat = 3250.0

    def idle(self) -> Idle:
        """The last queue has no order of indices, and without limits there is no other."""
        found = dict(super().idle())
        if not self.limits:
            own = ("services", "history", "subtracts_age", "delta_gpu_s")
            return found | dict.fromkeys(own, ("limits",))
        if self.services:
            found["history"] = ("services",)
        if self.subtracts_age:
            found["delta_gpu_s"] = ("subtracts_age",)
        return found


class Lived(Struct, frozen=True, array_like=True):
    """A job as the last pass saw it: its service then, and its growth per second."""

    service_gpu_s: float
    at_s: float
    gpus: float


class Memory(Struct, frozen=True):
    """The memory for the next pass.

    skews: of models by name. lived: live jobs that had begun. served: services of those that left.
    """

    queues: QueueMemory = QueueMemory()
    skews: dict[str, float] = {}
    lived: dict[JobId, Lived] = {}
    served: tuple[float, ...] = ()


class _Pass:
    """One pass."""

    def __init__(self, knobs: TiresiasKnobs, snapshot: ClusterSnapshot, memory: bytes) -> None:
        before = recalled(memory, Memory)
        self._knobs = knobs
        self._snapshot = snapshot
        self._skews = _learned(snapshot, before.skews)
        self._unseen = {
            job_id: Lived(lived.service_gpu_s, lived.at_s, 0.0)  # it waits
            for job_id, lived in before.lived.items()
            if job_id in snapshot.unseen
        }
        self._table: GittinsTable | None = None
        self._served = before.served
        if isinstance(knobs, GittinsKnobs):
            if not knobs.services:
                self._served = _served(snapshot, before)[-knobs.history :]
            services = knobs.services or self._served
            self._table = gittins_table(services) if services else None
        self.queues = Queues(knobs, snapshot, before.queues)
        self._line = list(filter(takes_turns, snapshot.jobs))
        # While no job waits all go on, in any order.
        self._is_idle = all(job.state != JobState.PENDING for job in self._line)
        line = () if self._is_idle else sorted(self._line, key=self._key)
        self.turns = Turns(snapshot, line, self._why, self._place_of)

    def _key(self, job: JobView) -> tuple[object, ...]:
        index = 0.0
        if self._table is not None and not self.queues.is_last(job):
            index = self.index(self._table, job)
        rank = self.queues.rank(job)
        return (
            not self._keeps(job),
            -job.priority,
            self.queues.number(job),
            -index,
            rank,
            submission(job),
        )

    def _keeps(self, job: JobView) -> bool:
        """True if it goes on to keep its work: promoted jobs could stop one another for ever.

        Without promotions each job leaves a queue once, so stops end.
        """
        return self._knobs.promotes and keeps_gang(job, self._snapshot.now_s)

    def index(self, table: GittinsTable, job: JobView) -> float:
        """The Gittins index of a job, by all that it has attained, as the history has it.

        A return to the first queue counts its service from 0 for the queues alone (section 3.2.5).
        """
        knobs, attained_gpu_s = self._knobs, job.attained_service_gpu_s(self._snapshot.now_s)
        assert isinstance(knobs, GittinsKnobs)
        if knobs.subtracts_age:
            return table.index(attained_gpu_s)
        return table.static_index(attained_gpu_s, knobs.delta_gpu_s)

    def _why(self, job: JobView) -> str:
        number, of = self.queues.number(job) + 1, len(self._knobs.limits) + 1
        service_gpu_s = self.queues.service_gpu_s(job)
        return f"queue {number} of {of}, {service_gpu_s:.0f} GPU-s served, priority {job.priority}"

    def _place_of(self, job: JobView) -> Place:
        return fewest_nodes if self._is_skewed(job) else best_fit

    def _is_skewed(self, job: JobView) -> bool:
        own_ratio = job.profile.skew_ratio
        skew_ratio = self._skews.get(job.profile.model) if own_ratio is None else own_ratio
        return skew_ratio is not None and skew_ratio > self._knobs.pack_limit

    def allocation(self) -> Allocation:
        """Decisions, and the memory."""
        grants = self.turns.grants
        decisions = () if self._is_idle else carry_out(self._snapshot, grants).decisions
        runs = self._line if self._is_idle else [grant.job for grant in grants]
        is_learning = isinstance(self._knobs, GittinsKnobs) and not self._knobs.services
        after = Memory(
            queues=self.queues.memory,
            skews=self._skews,
            lived=self._lived() if is_learning else {},
            served=self._served if is_learning else (),
        )
        wake_at_s = self.queues.wake_at_s(runs, (job for job, _ in self.turns.held))
        if self.turns.held and any(map(self._keeps, runs)):
            wake_at_s = earliest(wake_at_s, self._snapshot.now_s + LOOK_AGAIN_S)
        return Allocation(
            decisions=decisions, memory=msgspec.msgpack.encode(after), wake_at_s=wake_at_s
        )

    def _lived(self) -> dict[JobId, Lived]:
        now_s = self._snapshot.now_s
        starting = {grant.job.job_id for grant in self.turns.grants}
        lived = dict(self._unseen)
        for job in self._snapshot.jobs:
            gpus = job.progress.computing_gpus
            if job.job_id in starting or job.state == JobState.STARTING:
                gpus = gpus or job.base_gpus
            service_gpu_s = job.attained_service_gpu_s(now_s)
            if service_gpu_s or gpus:
                lived[job.job_id] = Lived(service_gpu_s, now_s, gpus)
        return lived

    def holds(self) -> tuple[PendingReason, ...]:
        """Why each job that waits would not start."""
        return tuple(
            PendingReason(job_id=job.job_id, blockers=(self._hold(job, room),))
            for job, room in self.turns.held
        )

    def _hold(self, job: JobView, room: int) -> str:
        where = " on the fewest nodes, as its model is skewed" if self._is_skewed(job) else ""
        return (
            f"needs {counted(job.workers.min, 'worker')} of {counted(job.gpus_per_worker, 'GPU')}"
            f"{where}; jobs before it leave room for at most {room} ({self._why(job)})"
        )


def _learned(snapshot: ClusterSnapshot, skews: dict[str, float]) -> dict[str, float]:
    """Skews of models: what jobs tell, the latest submitted last."""
    learned = {
        job.profile.model: job.profile.skew_ratio
        for job in snapshot.jobs
        if job.profile.skew_ratio is not None and job.profile.model
    }
    if learned.items() <= skews.items():
        return skews
    kept = {model: skew for model, skew in skews.items() if model not in learned}
    return dict([*kept.items(), *learned.items()][-MODELS_KEPT:])


def _served(snapshot: ClusterSnapshot, before: Memory) -> tuple[float, ...]:
    """The attained service of jobs when they left, for any reason: service is all that counts.

    A hidden waiting job has not left. Its service so far, counted again in each pass, would soon
    fill the history, and make jobs stop for each other at every event.
    """
    live = snapshot.unseen | {job.job_id for job in snapshot.jobs}
    left = (lived for job_id, lived in before.lived.items() if job_id not in live)
    ends = (job.service_gpu_s + job.gpus * (snapshot.now_s - job.at_s) for job in left)
    return (*before.served, *(service_gpu_s for service_gpu_s in ends if service_gpu_s > 0))


def _allocate(knobs: TiresiasKnobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    return _Pass(knobs, snapshot, memory).allocation()


def _hold(
    knobs: TiresiasKnobs, snapshot: ClusterSnapshot, memory: bytes
) -> tuple[PendingReason, ...]:
    return _Pass(knobs, snapshot, memory).holds()


def _tell(
    knobs: TiresiasKnobs, snapshot: ClusterSnapshot, memory: bytes, job_id: JobId
) -> tuple[str, ...]:
    """For a job that goes on whichever job is promoted: why."""
    return told_of(snapshot, job_id) if knobs.promotes else ()


PLACING = "fewest nodes for skewed models, else best fit"

POLICIES = (
    joint(
        "tiresias",
        "least attained service first, in queues, preempting; needs no running times",
        knobs=TiresiasKnobs(),
        allocate=_allocate,
        pending_reasons=_hold,
        standing=_tell,
        parts=Parts(
            order="queues by attained service, then running jobs, then first start",
            size="base demand",
            place=PLACING,
        ),
    ),
    joint(
        "tiresias-dlas",
        "tiresias as in its authors' public simulator, including its late queue changes",
        knobs=TiresiasKnobs(limits=(3250.0, 7200.0), line=Line.ENTRY, mixes_units=True),
        allocate=_allocate,
        pending_reasons=_hold,
        standing=_tell,
        parts=Parts(
            order="queues by attained service, then entry", size="base demand", place=PLACING
        ),
    ),
    joint(
        "tiresias-gittins",
        "tiresias with queues ordered by Gittins index, learned from the service of ended jobs",
        knobs=GittinsKnobs(),
        allocate=_allocate,
        pending_reasons=_hold,
        standing=_tell,
        parts=Parts(
            order="queues by attained service, then Gittins index",
            size="base demand",
            place=PLACING,
        ),
    ),
)
