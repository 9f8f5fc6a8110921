"""Apps and their finish-time fairness: rho = T_shared / T_alone. Pure.

An app is one tenant's unit of training: its jobs with the same `app` (trials of a hyper-parameter
search), or a job by itself. T_shared is the time since its submission plus the remaining time on
the GPUs that it would hold. T_alone is its time on a private share of the cluster, 1/N of its GPUs,
where N is the time-weighted mean number of apps since its submission (Themis, NSDI'20, section 3).
Above 1 an app is worse off than with a private share: the sharing incentive is broken. N is counted
from when an app was first seen; apps that ended before are unknown.

Work is in GPU-seconds of base gangs on the reference type: that of `JobView` times its GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from math import ceil, floor, inf, isfinite

from msgspec import Struct, field

from common.model import JobId, NodeName
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, WorkerView

LEAST_S = 1e-3
"""No span is shorter: an app without work would divide by zero."""


class Aim(StrEnum):
    """When an app is done."""

    ALL = "all"
    """All its trials have ended: work adds up."""
    FIRST = "first"
    """One of its trials has ended, whichever is the first."""


class Alone(StrEnum):
    """The private share of an app."""

    SHARE = "share"
    """1/N of the GPUs, or as many as it can use where that is less."""
    CLUSTER = "cluster"
    """The N-fold of its time on the whole cluster: laxer where it cannot use all GPUs."""


class Held(Struct, frozen=True):
    """Workers of one job, and over which nodes and how many racks they are spread.

    gpu_type: of its attempt.
    """

    workers: int
    nodes: frozenset[NodeName] = frozenset()
    racks: int = 1
    gpu_type: str = ""


# --- one job --------------------------------------------------------------------------------------


def pace(job: JobView, workers: float) -> float:
    """Worker-seconds of reference work in a second, with this number of workers of its reference
    type.

    Its base gang makes `min` of them; below, in proportion, as if it took turns.
    """
    gang = job.workers
    workers = min(workers, float(gang.max))
    if workers <= gang.min or not job.profile.speedup:
        return workers
    low, high = floor(workers), ceil(workers)
    speed = job.profile.speed(low)
    if high > low:
        speed += (job.profile.speed(high) - speed) * (workers - low)
    return gang.min * speed / job.profile.speed(gang.min)


def factor_on(job: JobView, gpu_type: str) -> int:
    """Workers on a type that stand for one of the reference type."""
    return job.gpu.worker_multiplier.get(gpu_type, 1)


def held_rate(job: JobView, held: Held) -> float:
    """GPU-seconds of reference work in a second on its held GPUs, 0 below its base gang."""
    factor = factor_on(job, held.gpu_type)
    if held.workers < job.workers.min * factor:
        return 0.0
    locality = job.profile.locality_ratio(len(held.nodes), held.racks)
    return pace(job, held.workers / factor) * locality * job.gpus_per_worker


def most_gpus(job: JobView) -> int:
    """GPUs that it can use on its reference type."""
    return job.workers.max * job.gpus_per_worker


def left_gpu_s(job: JobView, now_s: float) -> float:
    """GPU-seconds of reference work left."""
    return job.work_left_s(now_s) * job.gpus_per_worker


#   --- the memory -----------------------------------------------------------------------------


class Work(Struct, frozen=True, array_like=True):
    """A job's demand at its arrival: GPU-seconds, and the most GPUs.

    It arrives again as the gang that it is after its pre-run.
    """

    gpu_s: float
    gpus: int


class AppRecord(Struct, array_like=True):
    """An app with a job that waits or runs.

    area_s: integral of the number of apps when it was first seen. seen_at_s: when that was; None:
        at its submission.
    jobs: all of its jobs so far, also those that have ended.
    granted_at_s: when it was last given GPUs, or had some by an earlier policy; None: never.
    rho: as it was when they were given; infinite: another policy gave them.
    """

    submitted_at_s: float
    area_s: float
    jobs: dict[JobId, Work] = field(default_factory=dict[JobId, Work])
    granted_at_s: float | None = None
    rho: float = inf
    seen_at_s: float | None = None


class Attendance(Struct):
    """Which apps are there, and how many there were: what N is the mean of.

    area_s: app-seconds until `at_s`, from which on `apps` are there.
    unseen: records of apps of which only jobs are left that wait unseen: they are not among those
        that GPUs are shared with, and come back as what they were.
    """

    at_s: float = 0.0
    area_s: float = 0.0
    apps: dict[str, AppRecord] = field(default_factory=dict[str, AppRecord])
    unseen: dict[str, AppRecord] = field(default_factory=dict[str, AppRecord])

    def note(self, snapshot: ClusterSnapshot) -> dict[str, list[JobView]]:
        """Time has passed, apps came and went; returns the jobs of each, in order of the apps."""
        now_s = snapshot.now_s
        self.area_s += len(self.apps) * max(0.0, now_s - self.at_s)
        self.at_s = now_s
        found: dict[str, list[JobView]] = {}
        for job in snapshot.jobs:
            found.setdefault(app_of(job), []).append(job)
        known = self.apps | self.unseen
        self.apps = {app: self._record(known.get(app), found[app]) for app in sorted(found)}
        self.unseen = {
            app: record
            for app, record in known.items()
            if app not in found and not snapshot.unseen.isdisjoint(record.jobs)
        }
        return {app: found[app] for app in self.apps}

    def _record(self, record: AppRecord | None, jobs: Sequence[JobView]) -> AppRecord:
        if record is None:
            since_s = min(job.submitted_at_s for job in jobs)
            record = AppRecord(since_s, self.area_s, seen_at_s=self.at_s)
            had = [at_s for job in jobs if (at_s := self._had_gpus_at_s(job)) is not None]
            record.granted_at_s = max(had, default=None)
        for job in jobs:
            known = record.jobs.get(job.job_id)
            if known is None or known.gpus != most_gpus(job):
                work_s = max(job.estimate.whole_work_s, job.work_left_s(self.at_s))
                record.jobs[job.job_id] = Work(work_s * job.gpus_per_worker, most_gpus(job))
            if known is not None and known != record.jobs[job.job_id] and len(record.jobs) == 1:
                record.granted_at_s, record.rho = None, inf  # its last grant was of another gang
        return record

    def _had_gpus_at_s(self, job: JobView) -> float | None:
        """When a job that is new here last had GPUs; None: never."""
        if job.placed:
            return self.at_s
        return None if job.attempt.first_started_at_s is None else job.waiting_since_s

    def mean_apps(self, record: AppRecord) -> float:
        """N: time-weighted mean of apps since one was seen; how many are there in that instant."""
        seen_at_s = record.submitted_at_s if record.seen_at_s is None else record.seen_at_s
        passed_s = self.at_s - seen_at_s
        if passed_s <= LEAST_S:
            return float(max(1, len(self.apps)))
        return max(1.0, (self.area_s - record.area_s) / passed_s)


def app_of(job: JobView) -> str:
    """Its app; a job without one is its own, under a name that no app has.

    The word is the tenant's own: the same one of another tenant names another app.
    """
    return f"app {job.tenant}/{job.app}" if job.app else f"job {job.job_id}"


# --- rho ------------------------------------------------------------------------------------------


class Yardstick(Struct, frozen=True, kw_only=True):
    """How rho is measured. gpus: of the whole cluster, R_c."""

    gpus: int
    now_s: float
    aim: Aim = Aim.ALL
    alone: Alone = Alone.SHARE


class Measure:
    """One app against its share, at one instant.

    share_gpus: 1/N of the GPUs. alone_s: T_alone. share_left_s: until it is done on its share.

    Args:
        jobs: those that wait or run.
    """

    def __init__(
        self,
        yard: Yardstick,
        record: AppRecord,
        jobs: Sequence[JobView],
        mean_apps: float,
    ) -> None:
        self._yard = yard
        self._jobs = jobs
        self.now_s = yard.now_s
        self.share_gpus = yard.gpus / mean_apps
        self.elapsed_s = max(0.0, yard.now_s - record.submitted_at_s)
        self.alone_s = self._alone_s(record, mean_apps)
        self.share_left_s = self._left_on_share_s()

    def _alone_s(self, record: AppRecord, mean_apps: float) -> float:
        is_share = self._yard.alone == Alone.SHARE
        gpus = self.share_gpus if is_share else float(self._yard.gpus)
        stretch = 1.0 if is_share else mean_apps
        live = {job.job_id: job for job in self._jobs}
        pieces = [
            (work.gpu_s, _alone_rate(live.get(job_id), work, gpus), work.gpus)
            for job_id, work in record.jobs.items()
            if self._yard.aim == Aim.ALL or job_id in live
        ]
        return max(LEAST_S, stretch * self._span_s(pieces, gpus))

    def _span_s(self, pieces: Sequence[tuple[float, float, int]], gpus: float) -> float:
        """The span of (GPU-seconds, GPU-seconds a second at most, GPUs at most) on a number of
        GPUs.
        """
        longest = [work / rate for work, rate, _ in pieces]
        if self._yard.aim == Aim.FIRST:
            return min(longest)
        work = sum(piece[0] for piece in pieces)
        return max(*longest, work / min(gpus, sum(piece[2] for piece in pieces)))

    def left_s(self, held: Mapping[JobId, Held]) -> float:
        """Seconds until it is done on these GPUs for good; infinite with none.

        Jobs that hold nothing take over from those that end: work adds up (`Aim.ALL`), and none of
        them begins before the first has ended, so that the app is done the sooner with it.
        """
        rates = {
            job.job_id: held_rate(job, held[job.job_id]) for job in self._jobs if job.job_id in held
        }
        rate = sum(rates.values())
        if rate <= 0.0:
            return inf
        left = self._left_gpu_s
        spans = [left[job_id] / rate for job_id, rate in rates.items() if rate > 0.0]
        if self._yard.aim == Aim.FIRST:
            return min(spans)
        later = [span for job_id, span in self._base_spans_s.items() if not rates.get(job_id)]
        return max(*spans, min(spans) + max(later, default=0.0), self._all_left_gpu_s / rate)

    @cached_property
    def _left_gpu_s(self) -> dict[JobId, float]:
        """Reference work left of each job, found once: every bundle of a bid asks for it."""
        return {job.job_id: left_gpu_s(job, self._yard.now_s) for job in self._jobs}

    @cached_property
    def _base_spans_s(self) -> dict[JobId, float]:
        """For each job the time of its base gang."""
        return {
            job.job_id: job.work_left_s(self._yard.now_s) / job.workers.min for job in self._jobs
        }

    @cached_property
    def _all_left_gpu_s(self) -> float:
        return sum(self._left_gpu_s.values())

    def left_by_lease_s(self, held: Mapping[JobId, Held], lease_s: float) -> float:
        """Seconds until it is done if it has these GPUs for a lease, and its share from then on.

        Of nothing too: it waits for a lease.
        """
        left_s = self.left_s(held)
        if left_s <= lease_s:
            return left_s
        return lease_s + (1.0 - lease_s / left_s) * self.share_left_s

    def _left_on_share_s(self) -> float:
        """Seconds until it is done on 1/N of the GPUs."""
        pieces = [
            (
                left_gpu_s(job, self._yard.now_s),
                pace(job, self.share_gpus / job.gpus_per_worker) * job.gpus_per_worker,
                most_gpus(job),
            )
            for job in self._jobs
        ]
        return self._span_s(pieces, self.share_gpus)

    def rho(self, left_s: float) -> float:
        """Finish-time fairness if it is done in this number of seconds."""
        return max(LEAST_S, self.elapsed_s + left_s) / self.alone_s


def _alone_rate(job: JobView | None, work: Work, gpus: float) -> float:
    """GPU-seconds of reference work a second, alone on a number of GPUs."""
    if job is None:
        return min(gpus, float(work.gpus))
    return pace(job, gpus / job.gpus_per_worker) * job.gpus_per_worker


def measures(
    attendance: Attendance, yard: Yardstick, jobs_by_app: Mapping[str, Sequence[JobView]]
) -> dict[str, Measure]:
    """Every app against its share."""
    return {
        app: Measure(yard, attendance.apps[app], jobs, attendance.mean_apps(attendance.apps[app]))
        for app, jobs in jobs_by_app.items()
    }


def rho_text(rho: float) -> str:
    """As people read it."""
    return f"{rho:.2f}" if isfinite(rho) else "infinite"


def racks_of(snapshot: ClusterSnapshot) -> dict[NodeName, str]:
    """Racks of nodes."""
    return {node.name: node.rack for node in snapshot.nodes}


def held_by(
    held: Iterable[tuple[JobView, Iterable[WorkerView]]], racks: Mapping[NodeName, str]
) -> dict[JobId, Held]:
    """The GPUs that jobs hold by these workers, without those ordered to stop."""
    found: dict[JobId, Held] = {}
    for job, workers in held:
        nodes = [worker.node for worker in workers if not worker.is_leaving]
        if nodes:
            spread = len({racks.get(node, "") for node in nodes})
            found[job.job_id] = Held(len(nodes), frozenset(nodes), spread, job.gpu_type or "")
    return found
