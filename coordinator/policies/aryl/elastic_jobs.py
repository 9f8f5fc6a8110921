"""Elastic jobs as phase 2 sees them: their workers, demand and gain.

Phase 2 of Lyra, EuroSys'23, section 5.2, distributes flexible workers; `scaling` does so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from common.model import JobId
from coordinator.policies.aryl.knapsack import Group, ladder
from coordinator.policies.contract.cooldown import resizable_at_s
from coordinator.policies.contract.decisions import Placement, placed_count
from coordinator.policies.contract.estimates import has_curve, rate_on, work_on
from coordinator.policies.contract.index import workers_by_index
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, WorkerView

Weigh = Callable[[JobView, str], float]
"""How much a second of a job's running time on a GPU type counts, its own being 1."""


class Share:
    """One elastic job in phase 2: its workers, and the changes of this pass.

    removed: flexible workers that base demand or another job took.
    added: where it grows. A job never does both in one pass, so that all removals can be carried
        out first, whatever they make room for.
    """

    def __init__(
        self,
        job: JobView,
        gpu_type: str,
        *,
        now_s: float,
        is_new: bool = False,
        workers: Sequence[WorkerView] | None = None,
        weight: float = 1.0,
        trusts_profiles: bool = True,
    ) -> None:
        self.job = job
        self.gpu_type = gpu_type
        self._has_curve = has_curve(job, trusts_profiles=trusts_profiles)
        self._now_s = now_s
        self.is_new = is_new
        self.spans_types = job.spans_types
        """Whether it has, or gets, workers on another GPU type."""
        self.workers = workers_by_index(job) if workers is None else workers
        self.current = len(self.workers)
        """Flexible workers as the pass began."""
        self.span = job.workers_on(gpu_type)
        self.weight = weight
        """How much a second of its running time counts."""
        self.removed: list[WorkerView] = []
        self.added: list[Placement] = []
        self._work_s: float | None = None
        self._rates: tuple[float, ...] | None = None if self._has_curve else ()
        self._most: int | None = None if self._has_curve else self.span.max - self.span.min

    # Computed at first use: a job that has all it can use is never asked. By hand, because
    # `cached_property` takes a lock each time it computes one.

    @property
    def work_s(self) -> float:
        """Worker-seconds left on its GPU type."""
        if self._work_s is None:
            self._work_s = work_on(self.job, self.gpu_type, self._now_s)
        return self._work_s

    @property
    def count(self) -> int:
        """Flexible workers after this pass."""
        return self.current - len(self.removed) + (placed_count(self.added) if self.added else 0)

    @property
    def rates(self) -> tuple[float, ...]:
        """Work a second by number of flexible workers, by its profile; empty: in proportion."""
        if self._rates is None:
            base, most = self.span.min, max(self.current, self.span.max - self.span.min)
            counts = range(base, base + most + 1)
            self._rates = tuple([rate_on(self.job, self.gpu_type, count) for count in counts])
        return self._rates

    @property
    def most(self) -> int:
        """The most flexible workers that it can use: fewest of those that make it fastest."""
        if self._most is None:
            self._most = self.best(0, self.span.max - self.span.min)
        return self._most

    @property
    def is_full(self) -> bool:
        """True if it has all that it can use, or may not grow any more in this pass."""
        if self.removed:
            return True
        return self.current == self.most if self._has_curve else self.current >= self.most

    def rate(self, count: int) -> float:
        """Worker-seconds of work per second with this many flexible workers on its GPU type."""
        return self.rates[count] if self.rates else self.span.min + count

    def best(self, low: int, high: int) -> int:
        """The fewest flexible workers from `low` to `high` with which it is as fast as any."""
        if not self.rates:
            return high
        return max(range(low, high + 1), key=lambda count: (self.rate(count), -count))

    def next_count(self, count: int) -> int:
        """The next useful number of flexible workers above the given one, which is below `most`."""
        if not self.rates:
            return count + 1
        group = self._group(0.0, current=count, most=self.most, is_free=True)
        return next(iter(ladder(group, count)), self.most)

    def left_s(self, count: int, *, spans_types: bool) -> float:
        """Running time left with this number of flexible workers."""
        ratio = self.job.gpu.heterogeneous_speed_ratio if spans_types else 1.0
        return self.work_s / (ratio * self.rate(count))

    def saved_s(self, count: int) -> float:
        """Running time saved by this number of flexible workers."""
        return self.work_s / self.rate(0) - self.work_s / self.rate(count)

    def loss_s(self, worker_count: int) -> float:
        """Running time, by weight, lost by taking that many more of its flexible workers; below
        zero where it is faster without them."""
        left = max(0, self.count - worker_count)
        return self.weight * (self.saved_s(self.count) - self.saved_s(left))

    def change_cost_s(self, resize_cost_s: float, count: int) -> float:
        """Running time that a change by this number of workers costs: the measured cost of its
        resizes, else `resize_cost_s` for each worker. A job that starts in this pass pays
        nothing.
        """
        if self.is_new or not count:
            return 0.0
        measured_s = self.job.resizes.cost_s
        return resize_cost_s * count if measured_s is None else measured_s

    def group(self, resize_cost_s: float) -> Group:
        """The knapsack's view; what base demand has taken cannot come back in this pass."""
        kept = self.current - len(self.removed)
        most = kept if self.removed else max(kept, self.most)
        return self._group(resize_cost_s, current=kept, most=most)

    def group_before(self, resize_cost_s: float) -> Group:
        """The same as if nothing had been taken yet; it grows no more."""
        return self._group(resize_cost_s, current=self.current, most=self.current)

    def _group(
        self, resize_cost_s: float, *, current: int, most: int, is_free: bool = False
    ) -> Group:
        measured_s = None if self.is_new or is_free else self.job.resizes.cost_s
        each_s = 0.0 if self.is_new or measured_s is not None else resize_cost_s
        return Group(
            work_s=self.work_s,
            base_workers=self.span.min,
            extra_max=most,
            gpus_per_worker=self.job.gpus_per_worker,
            current=current,
            change_cost_s=each_s,
            resize_cost_s=measured_s or 0.0,
            weight=self.weight,
            rates=self.rates,
        )


class Shares(Mapping[JobId, Share]):
    """Every running job whose flexible workers may change now, by id.

    Most jobs' shares are never used in a pass, so each is made at first use.
    """

    def __init__(
        self,
        jobs: Iterable[JobView],
        *,
        now_s: float,
        held: Mapping[JobId, Sequence[WorkerView]],
        weigh: Weigh | None = None,
        trusts_profiles: bool = True,
    ) -> None:
        self.jobs = {job.job_id: job for job in jobs}
        """The ids of those jobs."""
        self._now_s = now_s
        self._held = held
        self._weigh = weigh
        self._trusts_profiles = trusts_profiles
        self._made: dict[JobId, Share] = {}

    def __getitem__(self, job_id: JobId) -> Share:
        share = self._made.get(job_id)
        if share is None:
            job = self.jobs[job_id]
            assert job.gpu_type is not None, f"{job_id} can be resized and has no GPU type"
            share = self._share(job, job.gpu_type, workers=self._held.get(job_id))
            self._made[job_id] = share
        return share

    def of_new(self, job: JobView, gpu_type: str) -> Share:
        """The share of a job that starts in this pass."""
        return self._share(job, gpu_type, is_new=True)

    def _share(
        self,
        job: JobView,
        gpu_type: str,
        *,
        is_new: bool = False,
        workers: Sequence[WorkerView] | None = None,
    ) -> Share:
        return Share(
            job,
            gpu_type,
            now_s=self._now_s,
            is_new=is_new,
            workers=workers,
            weight=1.0 if self._weigh is None else self._weigh(job, gpu_type),
            trusts_profiles=self._trusts_profiles,
        )

    def __iter__(self) -> Iterator[JobId]:
        return iter(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def made(self) -> dict[JobId, Share]:
        """Shares made so far; no other one can have changed."""
        return self._made


def shares_of(
    jobs: Iterable[JobView],
    *,
    now_s: float,
    held: Mapping[JobId, Sequence[WorkerView]] | None = None,
    weigh: Weigh | None = None,
    trusts_profiles: bool = True,
) -> Shares:
    """Every running job whose flexible workers may change now; `held`: those, where known; `weigh`:
    how much a second of a job's running time counts."""
    return Shares(
        [job for job in jobs if job.is_resizable and job.gpu_type is not None],
        now_s=now_s,
        held=held or {},
        weigh=weigh,
        trusts_profiles=trusts_profiles,
    )


def that_may_grow(
    snapshot: ClusterSnapshot, shares: Shares, growable: Iterable[JobView], new: Iterable[Share]
) -> list[Share]:
    """Running jobs past their cooldown, on GPU types on which any job could use more workers.

    On any other type all jobs have what they can use, and none would have to shrink for another.
    """
    types = {job.gpu_type for job in growable} | {share.gpu_type for share in new}
    if not types:
        return []
    return [
        shares[job_id]
        for job_id, job in shares.jobs.items()
        if job.gpu_type in types and resizable_at_s(snapshot, job) is None
    ]
