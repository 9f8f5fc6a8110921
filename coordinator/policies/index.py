"""A snapshot sorted for fast answers: nodes by free GPUs, waiting jobs by shape. Decides nothing.

All of it follows from the nodes and jobs of a snapshot. Whoever makes snapshots often keeps an
index up to date change by change; `index_of` makes one from nothing, and both are equal.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from common.model import (
    JobId,
    JobState,
    NodeName,
    NodeRole,
    ServiceName,
)
from coordinator.policies.snapshot import (
    Group,
    Index,
    JobShape,
    JobView,
    Masks,
    NodeView,
    Occupied,
    Tag,
    WorkerView,
)


def shape(job: JobView) -> JobShape:
    """The shape of a job."""
    return JobShape(
        gpus_per_worker=job.gpus_per_worker,
        min_workers=job.workers.min,
        is_elastic=job.is_elastic,
        gpu_types=job.gpu.types,
        multipliers=tuple(sorted(job.gpu.worker_multiplier.items())),
        preemptibility=job.preemptibility,
        grace_s=job.grace_s,
        spans_types=job.gpu.heterogeneous_speed_ratio > 0,
        was_preempted=job.preemption_count > 0,
        avoid_nodes=job.avoid_nodes,
    )


def bits(mask: int) -> Iterator[int]:
    """The members of a set of places, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def tag_of(base_count: int, flexible_count: int) -> Tag:
    """The tag of a node by what stays on it."""
    if base_count:
        return Tag.BASE
    return Tag.FLEXIBLE if flexible_count else Tag.EMPTY


def group_of(service: ServiceName | None, gpu_type: str, tag: Tag) -> Group:
    """The group of a node."""
    return Group(gpu_type, service, tag)


class NodeSorter:
    """Keeps nodes sorted while they change one by one; a node once seen stays known."""

    def __init__(self) -> None:
        self._names: list[NodeName] = []
        self._places: dict[NodeName, int] = {}
        self._nodes: list[Occupied | None] = []
        self._masks: dict[Group, Masks] = {}
        self._with_flexible: list[NodeName] = []

    def put(self, view: NodeView) -> None:
        """Add or replace a node."""
        place = self._places.get(view.name)
        if place is None:
            place = bisect_left(self._names, view.name)
            self._insert(place, view.name)
        self._take_out(place)
        if view.is_schedulable:
            self._put_in(place, _occupied(view))

    def _insert(self, place: int, name: NodeName) -> None:
        self._names.insert(place, name)
        self._nodes.insert(place, None)
        # A new one: snapshots of before share the old one.
        self._places = {known: number for number, known in enumerate(self._names)}
        low = (1 << place) - 1
        for masks in self._masks.values():
            masks[:] = [mask & low | (mask & ~low) << 1 for mask in masks]

    def _take_out(self, place: int) -> None:
        old = self._nodes[place]
        if old is None:
            return
        group = _group(old)
        self._masks[group][old.free] &= ~(1 << place)
        if not any(self._masks[group]):
            del self._masks[group]
        if old.flexible:
            self._with_flexible.remove(old.node.name)
        self._nodes[place] = None

    def _put_in(self, place: int, new: Occupied) -> None:
        masks = self._masks.setdefault(_group(new), [])
        add_bit(masks, new.free, place)
        if new.flexible:
            insort(self._with_flexible, new.node.name)
        self._nodes[place] = new

    def masks(self) -> tuple[tuple[Group, tuple[int, ...]], ...]:
        """The sets of places, group by group."""
        return tuple(
            (group, tuple(trimmed(self._masks[group]))) for group in sorted(self._masks, key=_order)
        )

    def index(self, jobs: JobSorter) -> Index:
        """The index of these nodes, as they are now, and of a sorter's jobs."""
        lines, resizable = jobs.parts()
        return Index(
            names=tuple(self._names),
            places=self._places,
            nodes=tuple(self._nodes),
            masks=self.masks(),
            with_flexible=tuple(self._with_flexible),
            lines=lines,
            resizable=resizable,
        )


def add_bit(masks: Masks, free: int, place: int) -> None:
    """Add a place to the set of a number of free GPUs."""
    if free >= len(masks):
        masks += [0] * (free + 1 - len(masks))
    masks[free] |= 1 << place


def trimmed(masks: Masks) -> Masks:
    """A copy without the empty sets at its end."""
    last = len(masks)
    while last and not masks[last - 1]:
        last -= 1
    return masks[:last]


def _order(group: Group) -> tuple[str, str, int]:
    return (group.gpu_type, group.service or "", group.tag)


def _group(occupied: Occupied) -> Group:
    tag = tag_of(occupied.base_count, len(occupied.flexible))
    return group_of(occupied.service, occupied.node.gpu_type, tag)


def _occupied(view: NodeView) -> Occupied:
    stay = [worker for worker in view.workers if not worker.is_leaving]
    flexible = [worker for worker in stay if worker.is_flexible]
    flexible.sort(key=lambda worker: (worker.job_id, worker.worker_index))
    service = view.service if view.role == NodeRole.ON_LOAN else None
    return Occupied(view, service, view.free_gpus, len(stay) - len(flexible), tuple(flexible))


_Parts = tuple[tuple[tuple[JobView, ...], ...], tuple[JobView, ...]]


class JobSorter:
    """Keeps waiting jobs in lines by shape, and resizable ones at hand, while they change."""

    def __init__(self) -> None:
        self._lines: dict[JobShape, list[tuple[float, float, JobId, JobView]]] = {}
        self._kept: dict[JobShape, tuple[JobView, ...]] = {}
        self._parts: _Parts | None = None
        self._waiting: dict[JobId, tuple[JobShape, tuple[float, float, JobId]]] = {}
        self._resizable: dict[JobId, JobView] = {}

    def put(self, job: JobView) -> None:
        """Add a job that is not there."""
        self._parts = None
        if job.state == JobState.PENDING:
            key = (-job.priority, job.submitted_at_s, job.job_id)
            line = shape(job)
            self._waiting[job.job_id] = (line, key)
            insort(self._lines.setdefault(line, []), (*key, job), key=lambda entry: entry[:3])
            self._kept.pop(line, None)
        elif job.is_resizable and job.gpu_type is not None:
            self._resizable[job.job_id] = job

    def remove(self, job_id: JobId) -> None:
        """Forget a job."""
        self._parts = None
        self._resizable.pop(job_id, None)
        found = self._waiting.pop(job_id, None)
        if found is None:
            return
        line, key = found
        entries = self._lines[line]
        del entries[bisect_left(entries, key, key=lambda entry: entry[:3])]
        self._kept.pop(line, None)
        if not entries:
            del self._lines[line]

    def parts(self) -> _Parts:
        """Lines and resizable jobs as they are now."""
        if self._parts is None:
            self._parts = self._sorted()
        return self._parts

    def _sorted(self) -> _Parts:
        lines: list[tuple[JobView, ...]] = []
        for line, entries in self._lines.items():
            if line not in self._kept:
                self._kept[line] = tuple(entry[3] for entry in entries)
            lines.append(self._kept[line])
        lines.sort(key=lambda jobs: jobs[0].job_id)
        return tuple(lines), tuple(self._resizable[job_id] for job_id in sorted(self._resizable))


Use = tuple[int, int, int]
"""Of one node: free GPUs, base workers, flexible workers."""
Flexible = dict[NodeName, tuple[WorkerView, ...]]
"""Per node, workers that may be taken back."""
Spot = tuple[str, ServiceName | None, int, int, int]
"""Of one node with such workers: GPU type, service, free GPUs, GPUs that those hold, its place."""


def removable(index: Index, usable: Container[ServiceName | None]) -> Flexible:
    """Flexible workers that stay, of jobs that can be resized, on nodes that may be used."""
    resizable = {job.job_id for job in index.resizable}
    found: Flexible = {}
    for name in index.with_flexible:
        occupied = index.nodes[index.places[name]]
        if occupied is None or occupied.service not in usable:
            continue
        mine = [worker for worker in occupied.flexible if worker.job_id in resizable]
        if mine:
            found[name] = tuple(mine)
    return found


def spot(
    index: Index, name: NodeName, flexible: Iterable[WorkerView], used: Mapping[int, Use]
) -> Spot:
    """Room for base workers on a node, flexible ones in their place; `used`: what has changed."""
    place = index.places[name]
    occupied = index.nodes[place]
    assert occupied is not None, f"{name} has flexible workers and takes none"
    free = used[place][0] if place in used else occupied.free
    held = sum([worker.gpus for worker in flexible])
    return occupied.node.gpu_type, occupied.service, free, held, place


def index_of(nodes: Iterable[NodeView], jobs: Sequence[JobView]) -> Index:
    """The index of a snapshot's nodes and jobs, from nothing."""
    node_sorter, job_sorter = NodeSorter(), JobSorter()
    for node in nodes:
        node_sorter.put(node)
    for job in jobs:
        job_sorter.put(job)
    return node_sorter.index(job_sorter)
