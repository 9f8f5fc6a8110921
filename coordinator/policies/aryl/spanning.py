"""Spanning: gangs and growth over several GPU types, on the GPUs that one type leaves over.

Lyra, EuroSys'23, section 6: a heterogeneous job has its base on training nodes and its flexible
workers on inference nodes where possible, and comes last. On another type a worker has as many more
GPUs as the job's multipliers say. The gang runs at `heterogeneous_speed_ratio` of its full speed
("at most 70 % of ideal", section 7.1). The paper keeps these jobs out of the passes of others. Here
they take their turn on one type like any job, so that none starves; only spanning comes last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from common.model import JobId
from coordinator.policies.aryl.elastic_jobs import Share
from coordinator.policies.aryl.gang_admission import Gang
from coordinator.policies.aryl.gpu_types import gpus_per_worker, hold, types_in_order
from coordinator.policies.aryl.placement import PlacementState, fill
from coordinator.policies.contract.decisions import Placement, merge, placed_count
from coordinator.policies.contract.snapshot import JobView


def other_types(room: PlacementState, job: JobView, gpu_type: str) -> list[tuple[str, int]]:
    """The types that an attempt of a type can also use, and how many GPUs there stand for one."""
    found = ((other, job.gpu.gpus_for_one(other, gpu_type)) for other in types_in_order(room, job))
    return [(other, each) for other, each in found if each is not None and other != gpu_type]


def find_spanning(
    room: PlacementState, job: JobView, shares: Mapping[JobId, Share], *, but: Collection[str] = ()
) -> Gang | None:
    """Room for a base gang on free GPUs of several types, most on the first that it can
    have.

    but: GPU types that others wait for.
    """
    if not job.gpu.heterogeneous_speed_ratio:
        return None
    for gpu_type in types_in_order(room, job):
        count = job.workers_on(gpu_type).min
        placements = [] if gpu_type in but else list(fill(room, job, gpu_type, count))
        if not placements:
            continue
        for other, each in other_types(room, job, gpu_type):
            left = count - placed_count(placements)
            if left > 0 and other not in but:
                placements += fill(room, job, other, left, gpus_for_one=each)
        if placed_count(placements) == count:
            return Gang(job=job, gpu_type=gpu_type, placements=tuple(placements), spans_types=True)
    return None


def grow_spanning(room: PlacementState, shares: Iterable[Share], *, resize_cost_s: float) -> None:
    """Flexible workers on free GPUs of other types, where most time is saved for a GPU first.

    Only jobs that have no more to win on their own type grow so, all at once or not at all: the
    whole gang slows down with the first worker on another type. `room` ends as decided.
    """
    able = [
        share
        for share in shares
        if share.job.gpu.heterogeneous_speed_ratio and not share.removed and _more(share) > 0
    ]
    wishes: list[tuple[float, JobId, Share]] = []
    types = {share.gpu_type for share in able}
    if not any(room.free_gpus(gpu_type) for gpu_type in room.gpu_types if types != {gpu_type}):
        return
    for share in able:
        placements = _wish(room, share)
        saved_s = _saved_s(share, placements, resize_cost_s)
        if saved_s > 0:
            gpus = _gpus(room, share, placements)
            wishes.append((-saved_s / gpus, share.job.job_id, share))
    for *_, share in sorted(wishes, key=lambda wish: wish[:2]):
        placements = _wish(room, share)  # the remaining room
        if _saved_s(share, placements, resize_cost_s) > 0:
            hold(room, share.job, share.gpu_type, placements)
            share.spans_types = True
            share.added = list(merge([*share.added, *placements]))


def _more(share: Share) -> int:
    """Workers that it could still use."""
    return share.most - share.count


def _wish(room: PlacementState, share: Share) -> list[Placement]:
    """As many workers on other types as the job can still use and as fit now."""
    placements = _seats(room, share, _more(share))
    placed = placed_count(placements)
    helping = share.best(share.count, share.count + placed) - share.count
    return placements if helping == placed else _seats(room, share, helping)


def _seats(room: PlacementState, share: Share, left: int) -> list[Placement]:
    """Seats for up to this number of workers on other types."""
    job = share.job
    placements: list[Placement] = []
    for other, each in other_types(room, job, share.gpu_type):
        more = left - placed_count(placements)
        if more > 0:
            placements += fill(room, job, other, more, is_flexible=True, gpus_for_one=each)
    return placements


def _saved_s(share: Share, placements: list[Placement], resize_cost_s: float) -> float:
    """Running time that these workers save, less what the change costs."""
    more = placed_count(placements)
    if not more:
        return 0.0
    before_s = share.left_s(share.count, spans_types=share.spans_types)
    after_s = share.left_s(share.count + more, spans_types=True)
    return before_s - after_s - share.change_cost_s(resize_cost_s, more)


def _gpus(room: PlacementState, share: Share, placements: list[Placement]) -> int:
    return sum(
        placement.worker_count * gpus_per_worker(room, share.job, share.gpu_type, placement.node)
        for placement in placements
    )
