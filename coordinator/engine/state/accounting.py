"""Definitions of the reported figures, shared by the live system and the simulator. Pure.

Queueing time is submitted -> first start, plus every later wait (glossary), over all submitted
jobs. A job that still waits counts with its wait so far; otherwise a full cell would look quick.
JCT is finished - submitted, over jobs that succeeded. A deadline is due once its job has ended or
its time is over, and met if the job succeeded in time. Utilisation is GPUs held by workers over
schedulable GPUs, integrated over time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from msgspec import Struct, structs

from common.model import JobState, NodeName, NodeRole, Pool
from coordinator.engine.state import loan_outcome
from coordinator.engine.state.tables import ClusterState, Counters, JobEntry, NodeEntry


class Quantiles(Struct, frozen=True, kw_only=True):
    """Mean, median and 95th percentile in seconds; zero of nothing."""

    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0


class Durations(Struct, frozen=True, kw_only=True):
    """Mean, median and 95th percentile in seconds. None: nothing to measure yet, because 0 would be
    read as a measured time.
    """

    mean: float | None = None
    p50: float | None = None
    p95: float | None = None


class ReclaimTimes(Struct, frozen=True, kw_only=True):
    """Seconds from the reclaim order, or from the lapse of a lease, to serving again; None if no
    node has come home that way.
    """

    p50: float | None = None
    max: float | None = None


class Figures(Struct, frozen=True, kw_only=True):
    """One run in numbers, under their glossary names. Seconds are of the run's own clock."""

    jobs_submitted: int
    jobs_finished: int
    jobs_failed: int
    jobs_finished_on_loan: int
    deadlines_due: int
    deadlines_met: int
    queueing_s: Durations
    jct_s: Durations
    training_gpu_ratio: float
    on_loan_gpu_ratio: float
    loans: int
    loans_cancelled: int
    leases_lapsed: int
    lapse_s: ReclaimTimes
    lapses_late: int
    reclaims: int
    reclaim_s: ReclaimTimes
    reclaims_late: int
    preemptions: int
    lost_gpu_s: float
    flexible_workers_released: int
    resizes: int
    gang_timeouts: int
    suspensions: int = 0
    migrations: int = 0
    migration_lost_gpu_s: float = 0.0
    turn_backs: int = 0
    turn_back_s: ReclaimTimes = ReclaimTimes()
    turn_backs_late: int = 0
    jobs_rejected: int = 0
    resize_lost_gpu_s: float = 0.0
    """The part of `lost_gpu_s` that resizes cost; the rest is of preemptions."""
    stalls: int = 0


def plain(value: Struct) -> dict[str, object]:
    """Figures as nested plain values, for JSON and the wire."""
    return {name: _plain(item) for name, item in structs.asdict(value).items()}


def _plain(item: object) -> object:
    if isinstance(item, Struct):
        return plain(item)
    if isinstance(item, Mapping):
        items = cast("Mapping[str, object]", item)
        return {name: _plain(each) for name, each in items.items()}
    if isinstance(item, tuple | list):
        return [_plain(each) for each in cast("Sequence[object]", item)]
    return item


def quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def quantiles(values: Sequence[float]) -> Quantiles:
    """Mean, p50 and p95."""
    if not values:
        return Quantiles()
    return Quantiles(
        mean=sum(values) / len(values), p50=quantile(values, 0.5), p95=quantile(values, 0.95)
    )


def durations(values_s: Sequence[float]) -> Durations:
    """Mean, p50 and p95 of lengths in seconds; None without values."""
    if not values_s:
        return Durations()
    found = quantiles(values_s)
    return Durations(mean=found.mean, p50=found.p50, p95=found.p95)


Counts = tuple[int, int, int, int]
"""GPUs held and there: in the training pool, and on loan."""

_NOTHING: Counts = (0, 0, 0, 0)


class GpuTally:
    """GPUs held and schedulable per pool, kept up node by node; derived, so never saved."""

    def __init__(self, state: ClusterState) -> None:
        self._by_node: dict[NodeName, Counts] = {}
        self._sums = list(_NOTHING)
        self.update(state, state.nodes)

    def update(self, state: ClusterState, names: Iterable[NodeName]) -> None:
        """Count the named nodes again."""
        for name in names:
            node = state.nodes.get(name)
            new = _NOTHING if node is None else _counts(node)
            old = self._by_node.get(name, _NOTHING)
            if new != old:
                self._by_node[name] = new
                for i in range(4):
                    self._sums[i] += new[i] - old[i]

    @property
    def counts(self) -> Counts:
        """The sums as they are now."""
        training_held, training, on_loan_held, on_loan = self._sums
        return training_held, training, on_loan_held, on_loan

    def integrate(self, counters: Counters, now_s: float) -> None:
        """Add GPU-seconds since the last call, at the counts of before this event."""
        if counters.integrated_at_s is not None:
            elapsed_s = now_s - counters.integrated_at_s
            if elapsed_s <= 0.0:
                return  # time never goes back, and most events share their instant with another
            training_held, training, on_loan_held, on_loan = self._sums
            counters.training_held_gpu_s += training_held * elapsed_s
            counters.training_gpu_s += training * elapsed_s
            counters.on_loan_held_gpu_s += on_loan_held * elapsed_s
            counters.on_loan_gpu_s += on_loan * elapsed_s
        counters.integrated_at_s = now_s


def _counts(node: NodeEntry) -> Counts:
    is_training = node.home_pool == Pool.TRAINING
    if not is_training and node.role != NodeRole.ON_LOAN:
        return _NOTHING
    held = len([True for slot in node.gpus if slot.holder is not None])
    return (held, len(node.gpus), 0, 0) if is_training else (0, 0, held, len(node.gpus))


def figures(state: ClusterState, *, now_s: float | None = None) -> Figures:
    """The run so far.

    Args:
        now_s: until when waiting jobs have waited; by default the instant of the last event.
    """
    until_s = state.now_s if now_s is None else now_s
    counters = state.counters
    met = deadlines(state.jobs.values(), until_s)
    done = [job for job in state.jobs.values() if job.state == JobState.SUCCEEDED]
    jct_s = [job.finished_at_s - job.submitted_at_s for job in done if job.finished_at_s]
    return Figures(
        jobs_submitted=counters.jobs_submitted,
        jobs_finished=counters.jobs_finished,
        jobs_failed=counters.jobs_failed,
        jobs_finished_on_loan=counters.jobs_finished_on_loan,
        deadlines_due=len(met),
        deadlines_met=sum(met),
        queueing_s=durations([queueing_s(job, until_s) for job in state.jobs.values()]),
        jct_s=durations(jct_s),
        training_gpu_ratio=_ratio(counters.training_held_gpu_s, counters.training_gpu_s),
        on_loan_gpu_ratio=_ratio(counters.on_loan_held_gpu_s, counters.on_loan_gpu_s),
        loans=counters.loans,
        loans_cancelled=counters.loans_cancelled,
        leases_lapsed=counters.leases_lapsed,
        lapse_s=_times(counters.lapse_s),
        lapses_late=counters.lapses_late,
        reclaims=counters.reclaims,
        reclaim_s=_times(counters.reclaim_s),
        reclaims_late=counters.reclaims_late,
        preemptions=counters.preemptions,
        lost_gpu_s=counters.preemption_cost_gpu_s + counters.resize_cost_gpu_s,
        flexible_workers_released=counters.flexible_workers_released,
        resizes=counters.resizes,
        gang_timeouts=counters.gang_timeouts,
        suspensions=counters.suspensions,
        migrations=counters.migrations,
        migration_lost_gpu_s=counters.migration_cost_gpu_s,
        turn_backs=counters.turn_backs,
        turn_back_s=_times(counters.turn_back_s),
        turn_backs_late=counters.turn_backs_late,
        jobs_rejected=counters.jobs_rejected,
        resize_lost_gpu_s=counters.resize_cost_gpu_s,
        stalls=counters.stalls,
    )


def with_overdue(known: Figures, state: ClusterState, now_s: float) -> Figures:
    """The figures with loans that are late and not home: these may never come home.

    A loan counts as a reclaim while it is unknown whether its node has left its service.
    """
    overdue = [loan for loan in state.loans.values() if loan_outcome.overdue_s(loan, now_s) > 0]
    lapses = sum(map(loan_outcome.is_lapse, overdue))
    turn_backs = sum(map(loan_outcome.is_turn_back, overdue))
    asked = [
        loan
        for loan in overdue
        if not (loan_outcome.is_lapse(loan) or loan_outcome.is_turn_back(loan))
    ]
    return structs.replace(
        known,
        reclaims=known.reclaims + sum(not loan_outcome.has_left(loan) for loan in asked),
        reclaims_late=known.reclaims_late + len(asked),
        lapses_late=known.lapses_late + lapses,
        turn_backs_late=known.turn_backs_late + turn_backs,
    )


def _times(took_s: list[float]) -> ReclaimTimes:
    if not took_s:
        return ReclaimTimes()
    return ReclaimTimes(p50=quantile(took_s, 0.5), max=max(took_s))


def deadlines(jobs: Iterable[JobEntry], now_s: float) -> list[bool]:
    """For each job whose deadline is due at an instant: whether it succeeded in time.

    A job that its user cancelled is neither met nor missed.
    """
    found: list[bool] = []
    for job in jobs:
        deadline_s = job.spec.deadline_s
        if deadline_s is None or job.state == JobState.CANCELLED:
            continue
        passed_s = (now_s if job.finished_at_s is None else job.finished_at_s) - job.submitted_at_s
        if job.finished_at_s is not None or passed_s > deadline_s:
            found.append(job.state == JobState.SUCCEEDED and passed_s <= deadline_s)
    return found


def queueing_s(job: JobEntry, now_s: float) -> float:
    """Time in the queue until an instant, all attempts together, in seconds; none of it while a
    hold or a dependency kept it out."""
    if job.attempt.ran_at_s is not None or job.gate.is_shut:
        return job.wait.queueing_s
    until_s = now_s if job.finished_at_s is None else job.finished_at_s
    return job.wait.queueing_s + max(0.0, until_s - job.wait.pending_since_s)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
