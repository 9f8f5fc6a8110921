"""Phase 2: how many flexible workers each elastic job gets, and on which nodes.

Phase 2 of Lyra, EuroSys'23, section 5.2, once per pool of one GPU type and from scratch each pass.
Unlike in the paper a change is not free: it costs a rendezvous, so each added or removed worker
must save at least `resize_cost_s` (default 5 s) of running time. That is the hysteresis: one job
shrinks for another only when the net gain is positive after both have paid. A job whose resizes
were measured has a known cost, and each resize must save that, however many workers it moves.

A job with a speed profile is valued by the profile, not by the paper's linear rule. It is offered
no size that is no faster than a smaller one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coordinator.policies.aryl.elastic_jobs import Share
from coordinator.policies.aryl.knapsack import Group, climb, solve
from coordinator.policies.aryl.placement import PlacementState, fill
from coordinator.policies.contract.decisions import merge, placed_count
from coordinator.policies.contract.snapshot import WorkerView

RESIZE_COST_S = 5.0


def share_flexible(
    room: PlacementState, shares: Sequence[Share], *, resize_cost_s: float = RESIZE_COST_S
) -> None:
    """Re-solve the flexible demand of all shares in their pools; `room` ends as decided."""
    by_type: dict[str, list[Share]] = {}
    for share in sorted(shares, key=lambda share: share.job.job_id):
        by_type.setdefault(share.gpu_type, []).append(share)
    for gpu_type in sorted(by_type):
        _share_pool(room, by_type[gpu_type], gpu_type, resize_cost_s)


def _share_pool(
    room: PlacementState, pool: list[Share], gpu_type: str, resize_cost_s: float
) -> None:
    if all(share.is_full for share in pool):
        return
    groups = [share.group(resize_cost_s) for share in pool]
    movable = [_movable(room, share) for share in pool]
    held = sum(worker.freed_gpus for workers in movable for worker in workers)
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
        resize_cost_s=group.resize_cost_s,
        weight=group.weight,
        rates=group.rates[fixed:],
    )


def _value_s(pool: Sequence[Share], groups: Sequence[Group]) -> float:
    return sum(group.value_s(share.count) for share, group in zip(pool, groups, strict=True))


def _movable(room: PlacementState, share: Share) -> list[WorkerView]:
    """Flexible workers that may leave, in the order of leaving: from training nodes, then the
    youngest.

    Workers on another GPU type than the attempt's are of no use to the pool. Workers on GPUs that
    stay barred bring it less than they are worth. Both count as fixed.
    """
    gone = {worker.worker_index for worker in share.removed}
    mine = [
        worker
        for worker in share.workers
        if worker.node in room and worker.worker_index not in gone and not worker.is_other_type
        if worker.freed_gpus == worker.gpus
    ]
    return sorted(
        mine,
        key=lambda worker: (
            room.node(worker.node).service is not None,
            -worker.worker_index,
        ),
    )


def _apply(
    room: PlacementState,
    pool: Sequence[Share],
    groups: Sequence[Group],
    movable: Sequence[list[WorkerView]],
    wanted: Sequence[int],
) -> None:
    """Shrink to the targets, grow to them, fill the free GPUs, give back unused ones."""
    released: list[tuple[Share, Group, list[WorkerView]]] = []
    for share, group, workers, want in zip(pool, groups, movable, wanted, strict=True):
        gone = workers[: max(0, share.count - want)]
        for worker in gone:
            share.removed.append(worker)
            room.release(worker)
        released.append((share, group, gone))
    growers = [
        (share, group, want - share.count)
        for share, group, want in zip(pool, groups, wanted, strict=True)
        if want > share.count
    ]
    growers.sort(key=lambda grower: (-grower[0].job.gpus_per_worker, grower[0].job.job_id))
    for share, group, count in growers:  # best-fit decreasing: the largest workers first
        _add(room, share, group, count)
    for share, group, gone in reversed(released):
        _take_back(room, share, group, gone[::-1])
    _grow(room, pool, groups)


def _add(room: PlacementState, share: Share, group: Group, count: int) -> int:
    """As many workers more as have a place, and no more of them than help; how many."""
    placements = fill(room, share.job, share.gpu_type, count, is_flexible=True)
    placed = placed_count(placements)
    if group.is_curved and placed:
        helping = group.best(share.count, share.count + placed) - share.count
        if helping < placed:  # the rest of the way through a dip has no place
            placed = helping
            placements = fill(room, share.job, share.gpu_type, placed, is_flexible=True)
    room.hold(placements, share.job.gpus_per_worker)
    share.added = list(merge([*share.added, *placements]))
    return placed


def _take_back(
    room: PlacementState, share: Share, group: Group, workers: Iterable[WorkerView]
) -> None:
    """Removed workers stay if their GPUs were not taken; a job with a profile keeps no more than
    help.
    """
    back: list[WorkerView] = []
    for worker in workers:
        if room.free[worker.node] >= worker.freed_gpus:
            share.removed.remove(worker)
            room.keep(worker)
            back.append(worker)
    if group.is_curved and back:
        kept = group.best(share.count - len(back), share.count) - (share.count - len(back))
        for worker in back[kept:]:
            share.removed.append(worker)
            room.release(worker)


def _grow(room: PlacementState, pool: Sequence[Share], groups: Sequence[Group]) -> None:
    """Hand out free GPUs worker by worker, so that no usable GPU stays idle."""
    counts = [share.count for share in pool]
    full: set[tuple[int, str, float]] = set()  # shapes that no node fits: free only falls here

    def take(index: int, more: int) -> bool:
        share = pool[index]
        shape = (share.job.gpus_per_worker, share.job.preemptibility, share.job.grace_s)
        if share.removed or shape in full:
            return False
        added = _add(room, share, groups[index], more)
        if added == 0 and more == 1:
            full.add(shape)
        counts[index] += added
        return added == more

    climb(groups, counts, take)


def give_back(
    room: PlacementState, shares: Iterable[Share], *, resize_cost_s: float = RESIZE_COST_S
) -> None:
    """Let every removed worker stay whose GPUs were not taken, the most valuable first.

    A worker that slows its job down by the profile stays only if its removal is not worth the cost.
    """
    removed = [share for share in shares if share.removed]
    removed.sort(key=lambda each: (-each.job.priority, each.loss_s(-1), each.job.job_id))
    for share in removed:
        workers = sorted(share.removed, key=lambda worker: worker.worker_index)
        _take_back(room, share, share.group_before(resize_cost_s), workers)
