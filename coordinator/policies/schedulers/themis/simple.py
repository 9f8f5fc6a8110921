"""Themis without an auction: all GPUs are divided again at each lease end, the worst off first.

Apps are ordered by the finish-time fairness that their share of the GPUs would give from now on.
Each takes all that it can use until nothing is left: the form of Themis that PCS (OSDI'24)
evaluates. Between two divisions nothing is taken; GPUs that come free go to waiting jobs in the
same order.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct, field

from common.model import JobId, JobState
from coordinator.policies.contract.cooldown import most_workers_now
from coordinator.policies.contract.decisions import Allocation, PendingReason, Start, earliest
from coordinator.policies.contract.free_gpus import (
    FreeGpus,
    barred_gpus,
    can_grow,
    consolidated,
    is_movable,
    present_workers,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.knobs import Period
from coordinator.policies.parts.blockers_for_all import NOWHERE
from coordinator.policies.parts.grants import Grant, Plan, carry_out
from coordinator.policies.parts.memory import recalled
from coordinator.policies.parts.pooling import chosen_types, competes, stays
from coordinator.policies.parts.restart_cost import keeps_gang, told
from coordinator.policies.policy import Parts, Policy, joint
from coordinator.policies.schedulers.themis.finish_time_fairness import (
    Aim,
    Alone,
    Attendance,
    Yardstick,
    factor_on,
    measures,
    rho_text,
)

EARLY_S = 1e-6


class SimpleKnobs(Struct, frozen=True, kw_only=True):
    """lease_s: time between two divisions.

    aim: when an app of several trials is done.
    alone: the share that an app would have by itself.
    """

    lease_s: Period = 1200.0
    aim: Aim = Aim.ALL
    alone: Alone = Alone.SHARE


class SimpleMemory(Struct):
    """The memory. divided_at_s: when all GPUs were divided last; None: never."""

    attendance: Attendance = field(default_factory=Attendance)
    divided_at_s: float | None = None


class Division:
    """One pass. is_due: whether all GPUs are divided again. rhos: of each app, by its name."""

    def __init__(self, knobs: SimpleKnobs, snapshot: ClusterSnapshot, memory: bytes) -> None:
        self.memory = recalled(memory, SimpleMemory)
        self._snapshot = snapshot
        self._now_s = snapshot.now_s
        self._lease_s = knobs.lease_s
        self._floor = FreeGpus(snapshot)
        attendance = self.memory.attendance
        apps = attendance.note(snapshot)
        yard = Yardstick(
            gpus=max(1, self._floor.total_gpus()),
            now_s=snapshot.now_s,
            aim=knobs.aim,
            alone=knobs.alone,
        )
        self.rhos = {
            app: measure.rho(measure.share_left_s)
            for app, measure in measures(attendance, yard, apps).items()
        }
        ranked = sorted(apps, key=lambda app: (-self.rhos[app], app))
        self._line = [(app, job) for app in ranked for job in apps[app]]
        self._line.sort(key=lambda pair: -pair[1].priority)
        divided_at_s = self.memory.divided_at_s
        self.is_due = (
            divided_at_s is None or snapshot.now_s >= divided_at_s + knobs.lease_s - EARLY_S
        )
        if self.is_due:
            self.memory.divided_at_s = snapshot.now_s
        self._kinds = self._chosen()

    def plan(self) -> Plan:
        """The GPUs of each app, the worst off first."""
        kept = [job for job in self._snapshot.jobs if not self._is_open(job)]
        kinds = self._kinds
        open_ = [(app, job) for app, job in self._line if job.job_id in kinds]
        free = {kind: self._floor.free_gpus(kind) for kind in self._floor.gpu_types}
        for _, job in open_:
            for worker in job.placed:
                if worker.node in self._floor.nodes and not worker.is_leaving:
                    free[self._floor.nodes[worker.node].gpu_type] += worker.freed_gpus
        grants = [
            Grant(job=job, workers=present_workers(job), reason="until the next division")
            for job in kept
        ]
        own = {
            job.job_id: job.base_gpus_on(kinds[job.job_id]) - barred_gpus(job)
            for _, job in open_
            if stays(job) or keeps_gang(job, self._now_s)
        }
        for job_id, gpus in own.items():
            free[kinds[job_id]] -= gpus
        for app, job in open_:
            kind, barred = kinds[job.job_id], barred_gpus(job)
            free[kind] += own.get(job.job_id, 0)
            factor = factor_on(job, kind)
            each = job.gpus_per_worker * factor
            workers = min(job.workers.max, (free[kind] + barred) // each)
            if workers >= job.workers.min:
                count = min(workers * factor, most_workers_now(self._snapshot, job, kind))
                free[kind] -= count * job.gpus_per_worker - barred
                reason = f"rho of its {app} is {rho_text(self.rhos[app])}: all that it can use"
                grants.append(Grant(job=job, workers=count, gpu_type=kind, reason=reason))
        return carry_out(self._snapshot, grants, floor=self._floor, place=consolidated)

    def _chosen(self) -> dict[JobId, str]:
        """On which GPU type each of those whose share is open now has it."""
        places = {job.job_id: at for at, (_, job) in enumerate(self._line)}
        kinds = chosen_types(
            self._snapshot, self._floor, order=lambda job: places[job.job_id], resizes=True
        )
        for job in self._snapshot.jobs:
            is_running = job.state != JobState.PENDING and self._is_open(job)
            if is_running and job.gpu_type in self._floor.gpu_types:
                kinds[job.job_id] = job.gpu_type
        return kinds

    def _is_open(self, job: JobView) -> bool:
        may_change = is_movable(job) or competes(job, self._floor, resizes=True)
        return job.state == JobState.PENDING or (self.is_due and may_change)

    def wake_at_s(self) -> float | None:
        """The next division, while any app wants GPUs that it does not hold."""
        if not any(job.state == JobState.PENDING or can_grow(job) for job in self._snapshot.jobs):
            return None
        return (self.memory.divided_at_s or 0.0) + self._lease_s

    def told(self, job_id: JobId) -> tuple[str, ...]:
        """How a job stands."""
        return next(
            (
                (
                    f"rho of its {app} on its share from now on is {rho_text(self.rhos[app])}",
                    *told(job, self._now_s),
                )
                for app, job in self._line
                if job.job_id == job_id
            ),
            (),
        )

    def holds(self, plan: Plan) -> tuple[PendingReason, ...]:
        """Why each job that waits gets nothing now, in its order."""
        missed = {hold.job_id: hold for hold in plan.holds}
        decided = {start.job_id for start in plan.decisions if isinstance(start, Start)}
        at_s = (self.memory.divided_at_s or 0.0) + self._lease_s - self._now_s

        def why(app: str, job: JobView) -> str:
            if job.job_id not in self._kinds:
                return NOWHERE
            return (
                f"rho of its {app} is {rho_text(self.rhos[app])}; those that are worse off "
                f"leave no room, the next division is in {at_s:.0f} s"
            )

        return tuple(
            missed.get(job.job_id, PendingReason(job_id=job.job_id, blockers=(why(app, job),)))
            for app, job in self._line
            if job.state == JobState.PENDING and job.job_id not in decided
        )


def allocate(knobs: SimpleKnobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """One pass."""
    division = Division(knobs, snapshot, memory)
    plan = division.plan()
    return Allocation(
        decisions=plan.decisions,
        memory=msgspec.msgpack.encode(division.memory),
        wake_at_s=earliest(plan.wake_at_s, division.wake_at_s()),
    )


def hold(knobs: SimpleKnobs, snapshot: ClusterSnapshot, memory: bytes) -> tuple[PendingReason, ...]:
    """Why each job that waits gets nothing now."""
    division = Division(knobs, snapshot, memory)
    return division.holds(division.plan())


def tell(
    knobs: SimpleKnobs, snapshot: ClusterSnapshot, memory: bytes, job_id: JobId
) -> tuple[str, ...]:
    """rho of a job's app on its share from now on: by it the GPUs are divided the next time."""
    return Division(knobs, snapshot, memory).told(job_id)


POLICIES: tuple[Policy, ...] = (
    joint(
        "themis-simple",
        "all GPUs divided again each lease, the worst finish-time fairness first",
        knobs=SimpleKnobs(),
        allocate=allocate,
        pending_reasons=hold,
        standing=tell,
        parts=Parts(
            order="finish-time fairness, worst first",
            size="as many GPUs as it can use",
            place="fewest nodes",
        ),
    ),
)
