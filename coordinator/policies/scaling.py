"""How many flexible workers each elastic job gets, and where. Must not know who waits.

Phase 2 of Lyra, EuroSys'23, section 5.2, once per pool of one GPU type and from scratch each
pass. Unlike the paper a change is not free: it costs a rendezvous, so each worker more or less
must save at least `resize_cost_s` (default 5 s) of running time. That is the hysteresis: one
job shrinks for another only when the net gain is positive after both have paid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from common.model import JobId
from coordinator.policies.decisions import Placement
from coordinator.policies.index import workers_by_index
from coordinator.policies.knapsack import Group, climb, jct_reduction_s, solve
from coordinator.policies.placement import Room, fill, merge, placed_count
from coordinator.policies.snapshot import ClusterSnapshot, JobView, WorkerView
from coordinator.policies.words import counted

RESIZE_COST_S = 5.0

Weigh = Callable[[JobView, str], float]
"""How much a second of a job's running time on a GPU type counts, its own being 1."""


class Share:
    """One elastic job in phase 2: what it has, and what this pass changes.

    removed: flexible workers that base demand or another job took.
    added: where it grows. A job never does both in one pass, so that removals can be carried out
        first, all of them, whatever they make room for.
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
    ) -> None:
        self.job = job
        self.gpu_type = gpu_type
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

    @cached_property
    def work_s(self) -> float:
        """Worker-seconds left on its GPU type; of a job that has all it can use nobody asks."""
        return work_on(self.job, self.gpu_type, self._now_s)

    @property
    def count(self) -> int:
        """Flexible workers after this pass."""
        return self.current - len(self.removed) + (placed_count(self.added) if self.added else 0)

    @property
    def is_full(self) -> bool:
        """Whether it has all that it can use, or may not grow any more in this pass."""
        return bool(self.removed) or self.current >= self.span.max - self.span.min

    def left_s(self, count: int, *, spans_types: bool) -> float:
        """Running time left with so many flexible workers."""
        ratio = self.job.gpu.heterogeneous_speed_ratio if spans_types else 1.0
        return self.work_s / (ratio * (self.span.min + count))

    def loss_s(self, worker_count: int) -> float:
        """Running time, by weight, lost by taking that many more of its flexible workers."""
        base = self.span.min
        left = max(0, self.count - worker_count)
        saved_s = jct_reduction_s(self.work_s, base, self.count)
        return self.weight * (saved_s - jct_reduction_s(self.work_s, base, left))

    def group(self, resize_cost_s: float) -> Group:
        """The knapsack's view; what base demand has taken cannot come back in this pass."""
        workers = self.span
        kept = self.current - len(self.removed)
        return Group(
            work_s=self.work_s,
            base_workers=workers.min,
            extra_max=kept if self.removed else max(kept, workers.max - workers.min),
            gpus_per_worker=self.job.gpus_per_worker,
            current=kept,
            change_cost_s=0.0 if self.is_new else resize_cost_s,
            weight=self.weight,
        )


def work_on(job: JobView, gpu_type: str, now_s: float) -> float:
    """Worker-seconds left, counted in workers of a GPU type: a type that needs twice the workers
    has twice the worker-seconds."""
    return job.work_left_s(now_s) * job.gpu.worker_multiplier.get(gpu_type, 1)


def share_flexible(
    room: Room, shares: Sequence[Share], *, resize_cost_s: float = RESIZE_COST_S
) -> None:
    """Re-solve the flexible demand of all shares in their pools; `room` ends as decided."""
    by_type: dict[str, list[Share]] = {}
    for share in sorted(shares, key=lambda share: share.job.job_id):
        by_type.setdefault(share.gpu_type, []).append(share)
    for gpu_type in sorted(by_type):
        _share_pool(room, by_type[gpu_type], gpu_type, resize_cost_s)


def _share_pool(room: Room, pool: list[Share], gpu_type: str, resize_cost_s: float) -> None:
    if all(share.is_full for share in pool):
        return
    groups = [share.group(resize_cost_s) for share in pool]
    movable = [_movable(room, share) for share in pool]
    held = sum(worker.gpus for workers in movable for worker in workers)
    free = room.free_gpus(gpu_type)
    fixed = [group.current - len(workers) for group, workers in zip(groups, movable, strict=True)]
    targets = solve([_above(g, f) for g, f in zip(groups, fixed, strict=True)], free + held)
    wanted = [target + base for target, base in zip(targets, fixed, strict=True)]
    is_shrinking = any(want < group.current for want, group in zip(wanted, groups, strict=True))
    before = room.save()
    removed_before = [list(share.removed) for share in pool]
    _apply(room, pool, groups, movable, wanted)
    if not is_shrinking:
        return
    gain_s = _value_s(pool, groups)
    after, changes = room.save(), [(share.removed, share.added) for share in pool]
    # Free GPUs in pieces are less than their sum: see what growing alone would have brought.
    room.restore(before)
    for share, removed in zip(pool, removed_before, strict=True):
        share.removed, share.added = removed, []
    _grow(room, pool, groups)
    if _value_s(pool, groups) < gain_s:
        room.restore(after)
        for share, (removed, added) in zip(pool, changes, strict=True):
            share.removed, share.added = removed, added


def _above(group: Group, fixed: int) -> Group:
    """A group whose first `fixed` flexible workers stay: they count as base."""
    if not fixed:
        return group
    return Group(
        work_s=group.work_s,
        base_workers=group.base_workers + fixed,
        extra_max=group.extra_max - fixed,
        gpus_per_worker=group.gpus_per_worker,
        current=group.current - fixed,
        change_cost_s=group.change_cost_s,
        weight=group.weight,
    )


def _value_s(pool: Sequence[Share], groups: Sequence[Group]) -> float:
    return sum(group.value_s(share.count) for share, group in zip(pool, groups, strict=True))


def _movable(room: Room, share: Share) -> list[WorkerView]:
    """Flexible workers that may go, first to go first: from training nodes, then the youngest.

    Those on another GPU type than the attempt's are of no use to the pool; they count as fixed.
    """
    gone = {worker.worker_index for worker in share.removed}
    mine = [
        worker
        for worker in share.workers
        if worker.node in room and worker.worker_index not in gone and not worker.is_other_type
    ]
    return sorted(
        mine,
        key=lambda worker: (
            room.node(worker.node).service is not None,
            -worker.worker_index,
        ),
    )


def _apply(
    room: Room,
    pool: Sequence[Share],
    groups: Sequence[Group],
    movable: Sequence[list[WorkerView]],
    wanted: Sequence[int],
) -> None:
    """Shrink to the targets, grow to them, fill what is left, give back what nobody used."""
    released: list[tuple[Share, WorkerView]] = []
    for share, workers, want in zip(pool, movable, wanted, strict=True):
        for worker in workers[: max(0, share.count - want)]:
            share.removed.append(worker)
            room.release(worker)
            released.append((share, worker))
    growers = [
        (share, want - share.count)
        for share, want in zip(pool, wanted, strict=True)
        if want > share.count
    ]
    growers.sort(key=lambda pair: (-pair[0].job.gpus_per_worker, pair[0].job.job_id))
    for share, count in growers:  # best-fit decreasing: the largest workers first
        _add(room, share, count)
    for share, worker in reversed(released):
        if room.free[worker.node] >= worker.gpus:
            share.removed.remove(worker)
            room.keep(worker)
    _grow(room, pool, groups)


def _add(room: Room, share: Share, count: int) -> int:
    placements = fill(room, share.job, share.gpu_type, count, is_flexible=True)
    room.hold(placements, share.job.gpus_per_worker)
    share.added = list(merge([*share.added, *placements]))
    return placed_count(placements)


def _grow(room: Room, pool: Sequence[Share], groups: Sequence[Group]) -> None:
    """Hand out free GPUs worker by worker, so that none waits that somebody can use."""
    counts = [share.count for share in pool]
    full: set[tuple[int, str, float]] = set()  # shapes that no node fits: free only falls here

    def take(index: int) -> bool:
        share = pool[index]
        shape = (share.job.gpus_per_worker, share.job.preemptibility, share.job.grace_s)
        if share.removed or shape in full:
            return False
        if _add(room, share, 1) == 0:
            full.add(shape)
            return False
        counts[index] += 1
        return True

    climb(groups, counts, take)


def give_back(room: Room, shares: Iterable[Share]) -> None:
    """Let every removed worker stay whose GPUs nobody took, the most valuable first."""
    removed = [(share, worker) for share in shares for worker in share.removed]
    removed.sort(key=lambda pair: (-pair[0].loss_s(1), pair[0].job.job_id, pair[1].worker_index))
    for share, worker in removed:
        if room.free[worker.node] >= worker.gpus:
            share.removed.remove(worker)
            room.keep(worker)


class Shares(Mapping[JobId, Share]):
    """Every running job whose flexible workers may change now, by id.

    Of most jobs nobody asks for the share in a pass, so it is made when somebody does.
    """

    def __init__(
        self,
        jobs: Iterable[JobView],
        *,
        now_s: float,
        held: Mapping[JobId, Sequence[WorkerView]],
        weigh: Weigh | None = None,
    ) -> None:
        self.jobs = {job.job_id: job for job in jobs}
        """Those jobs."""
        self._now_s = now_s
        self._held = held
        self._weigh = weigh
        self._made: dict[JobId, Share] = {}

    def __getitem__(self, job_id: JobId) -> Share:
        share = self._made.get(job_id)
        if share is None:
            job = self.jobs[job_id]
            assert job.gpu_type is not None, f"{job_id} can be resized and has no GPU type"
            workers = self._held.get(job_id)
            weight = self._weight(job, job.gpu_type)
            share = Share(job, job.gpu_type, now_s=self._now_s, workers=workers, weight=weight)
            self._made[job_id] = share
        return share

    def of_new(self, job: JobView, gpu_type: str) -> Share:
        """The share of a job that starts in this pass."""
        weight = self._weight(job, gpu_type)
        return Share(job, gpu_type, now_s=self._now_s, is_new=True, weight=weight)

    def _weight(self, job: JobView, gpu_type: str) -> float:
        return 1.0 if self._weigh is None else self._weigh(job, gpu_type)

    def __iter__(self) -> Iterator[JobId]:
        return iter(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def made(self) -> dict[JobId, Share]:
        """Those that somebody asked for; nothing can have changed of any other."""
        return self._made


def shares_of(
    jobs: Iterable[JobView],
    *,
    now_s: float,
    held: Mapping[JobId, Sequence[WorkerView]] | None = None,
    weigh: Weigh | None = None,
) -> Shares:
    """Every running job whose flexible workers may change now; `held`: those, where known; `weigh`:
    how much a second of a job's running time counts."""
    resizable = [job for job in jobs if job.is_resizable and job.gpu_type is not None]
    return Shares(resizable, now_s=now_s, held=held or {}, weigh=weigh)


def that_may_grow(
    snapshot: ClusterSnapshot, shares: Shares, growable: Iterable[JobView], new: Iterable[Share]
) -> list[Share]:
    """Running jobs that have rested, on GPU types on which anybody at all could use more workers.

    On any other type all have what they can use, and nobody would have to shrink for anybody.
    """
    types = {job.gpu_type for job in growable} | {share.gpu_type for share in new}
    return [
        shares[job_id]
        for job_id, job in shares.jobs.items()
        if job.gpu_type in types and rests_until_s(snapshot, job) is None
    ]


def why_not_larger(
    snapshot: ClusterSnapshot, share: Share, *, resize_cost_s: float, is_barred: bool
) -> tuple[str, ...]:
    """Why a running job has no more workers after a pass that was tried; nothing of one that has
    all that it can use.

    is_barred: nobody grows, since jobs wait.
    """
    job, most = share.job, share.span.max - share.span.min
    if share.current >= most:
        return ()
    if share.removed:
        return (f"the next pass takes {len(share.removed)} of its flexible workers for others",)
    if share.added:
        return (f"the next pass gives it {counted(placed_count(share.added), 'worker')} more",)
    rest_s = rests_until_s(snapshot, job)
    if rest_s is not None:
        return (f"it was resized a moment ago and rests for {rest_s - snapshot.now_s:.0f} s more",)
    if is_barred:
        return ("it does not grow while jobs wait",)
    now_left_s = share.left_s(share.count, spans_types=share.spans_types)
    saved_s = now_left_s - share.left_s(share.count + 1, spans_types=share.spans_types)
    if share.weight * saved_s <= resize_cost_s:
        return (
            f"it does not grow: one worker more would save {saved_s:.1f} s of what it is thought "
            f"to have left, and a resize costs {resize_cost_s:g} s",
        )
    return (
        f"it does not grow: no node that its flexible workers may use has {job.gpus_per_worker} "
        f"free GPUs of type {share.gpu_type}, and no running job gains less by those that it has",
    )


def rests_until_s(snapshot: ClusterSnapshot, job: JobView) -> float | None:
    """When the job's cooldown after its last resize ends; None when it has."""
    last_s = job.last_resized_at_s
    if last_s is None or last_s + snapshot.resize_cooldown_s <= snapshot.now_s:
        return None
    return last_s + snapshot.resize_cooldown_s
