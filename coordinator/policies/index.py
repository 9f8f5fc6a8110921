"""A snapshot sorted for fast answers: nodes by free GPUs, waiting jobs by shape. Decides nothing.

All of it follows from the nodes and jobs of a snapshot. Whoever makes snapshots often keeps an
index up to date change by change; `index_of` makes one from nothing, and both are equal.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from operator import attrgetter

from msgspec import Struct

from common.model import (
    JobId,
    JobState,
    NodeName,
    NodeRole,
    ServiceName,
)
from coordinator.policies.service_nodes import ServiceSorter
from coordinator.policies.shapes import Group, JobShape, Masks, Tag, add_bit, trimmed
from coordinator.policies.snapshot import (
    ClusterSnapshot,
    Flexible,
    Index,
    JobView,
    NodeView,
    Occupied,
    Spot,
    WorkerView,
)

_BASE, _FLEXIBLE, _EMPTY = Tag.BASE, Tag.FLEXIBLE, Tag.EMPTY
"""Members of an enum are slow to look up, and placements ask for these all the time."""

_BY_INDEX = attrgetter("worker_index")


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
        wants_no_loan=job.wants_no_loan,
    )


def tag_of(base_count: int, flexible_count: int) -> Tag:
    """The tag of a node by what stays on it."""
    if base_count:
        return _BASE
    return _FLEXIBLE if flexible_count else _EMPTY


def group_of(service: ServiceName | None, gpu_type: str, tag: Tag) -> Group:
    """The group of a node."""
    return Group(gpu_type, service, tag)


class NodeSorter:
    """Keeps nodes sorted while they change one by one."""

    def __init__(self) -> None:
        self._names: tuple[NodeName, ...] = ()
        self._places: dict[NodeName, int] = {}
        self._nodes: list[Occupied | None] = []
        self._made: tuple[Occupied | None, ...] | None = None
        """Those, as the last index has them; None where one has changed since."""
        self._masks: dict[Group, Masks] = {}
        self._flexible: Flexible = {}
        self._spots: dict[NodeName, Spot] = {}
        self._stale: set[NodeName] = set()
        """Nodes of which these two may be others by now."""
        self._resizable: tuple[JobView, ...] = ()
        self._resizable_jobs: dict[JobId, JobView] = {}
        """The jobs for which they were made, in order and by id."""
        self._removable: Flexible = {}
        self._room: dict[NodeName, Spot] = {}
        """Copies of these two, which snapshots share until something of them changes."""
        self._services = ServiceSorter()
        self._found: tuple[_Parts, Index] | None = None
        """The last index and the jobs that it is of; None where a node has changed since."""

    def put(self, view: NodeView) -> None:
        """Add or replace a node."""
        self._found = None
        self._services.put(view)
        self.make_room([view.name])
        place = self._places[view.name]
        self._take_out(place)
        if view.is_schedulable:
            self._put_in(place, _occupied(view))

    def make_room(self, names: Iterable[NodeName]) -> None:
        """Know new nodes before they are put, all at once, so that places are counted once."""
        new = sorted(name for name in names if name not in self._places)
        if not new:
            return
        self._found = self._made = None
        self._stale.update(self._spots)  # whose places may be others now
        known = list(self._names)
        for name in new:
            place = bisect_left(known, name)
            known.insert(place, name)
            self._nodes.insert(place, None)
            low = (1 << place) - 1
            for masks in self._masks.values():
                masks[:] = [mask & low | (mask & ~low) << 1 for mask in masks]
        self._names = tuple(known)
        # A new one: snapshots of before share the old one.
        self._places = {known: number for number, known in enumerate(self._names)}

    def remove(self, name: NodeName) -> None:
        """Forget a node."""
        self._found = None
        self._services.remove(name)
        place = self._places.get(name)
        if place is None:
            return
        self._take_out(place)
        self._made = None
        self._stale.update(self._spots)  # whose places may be others now
        self._names = (*self._names[:place], *self._names[place + 1 :])
        del self._nodes[place]
        self._places = {known: number for number, known in enumerate(self._names)}
        low = (1 << place) - 1
        for masks in self._masks.values():
            masks[:] = [mask & low | (mask >> 1) & ~low for mask in masks]

    def _take_out(self, place: int) -> None:
        old = self._nodes[place]
        if old is None:
            return
        group = _group(old)
        self._masks[group][old.free] &= ~(1 << place)
        if not any(self._masks[group]):
            del self._masks[group]
        if old.flexible:
            self._stale.add(old.node.name)
        self._nodes[place] = self._made = None

    def _put_in(self, place: int, new: Occupied) -> None:
        masks = self._masks.setdefault(_group(new), [])
        add_bit(masks, new.free, place)
        if new.flexible:
            self._stale.add(new.node.name)
        self._nodes[place], self._made = new, None

    def masks(self) -> tuple[tuple[Group, tuple[int, ...]], ...]:
        """The sets of places, group by group."""
        return tuple(
            (group, tuple(trimmed(self._masks[group]))) for group in sorted(self._masks, key=_order)
        )

    def index(self, jobs: JobSorter) -> Index:
        """The index of these nodes, as they are now, and of a sorter's jobs; the same one until
        something of them changes."""
        parts = jobs.parts()
        if self._found is not None and self._found[0] is parts:
            return self._found[1]
        self._find_removable(parts.resizable)
        if self._made is None:
            self._made = tuple(self._nodes)
        found = Index(
            names=self._names,
            places=self._places,
            nodes=self._made,
            masks=self.masks(),
            flexible=self._removable,
            spots=self._room,
            lines=parts.lines,
            resizable=parts.resizable,
            growable=parts.growable,
            preempted=parts.preempted,
            held=parts.held,
            services=self._services.parts(),
        )
        self._found = (parts, found)
        return found

    def _find_removable(self, resizable: tuple[JobView, ...]) -> None:
        """Look again where nodes changed, or where jobs have workers that only now may, or no
        longer may, be resized."""
        if resizable is self._resizable and not self._stale:
            return
        if resizable is not self._resizable:
            now = {job.job_id: job for job in resizable}
            for job_id in self._resizable_jobs.keys() ^ now.keys():
                job = now.get(job_id) or self._resizable_jobs[job_id]
                self._stale.update([worker.node for worker in job.placed])
            self._resizable, self._resizable_jobs = resizable, now
            if not self._stale:
                return
        for name in self._stale:
            place = self._places.get(name)
            occupied = None if place is None else self._nodes[place]
            workers = () if occupied is None else occupied.flexible
            mine = tuple([one for one in workers if one.job_id in self._resizable_jobs])
            self._flexible.pop(name, None)
            self._spots.pop(name, None)
            if mine and occupied is not None and place is not None:
                self._flexible[name] = mine
                self._spots[name] = spot(occupied, mine, occupied.free, place)
        self._stale.clear()
        self._removable, self._room = dict(self._flexible), dict(self._spots)


def _order(group: Group) -> tuple[str, str, int]:
    return (group.gpu_type, group.service or "", group.tag)


def _group(occupied: Occupied) -> Group:
    tag = tag_of(occupied.base_count, len(occupied.flexible))
    return group_of(occupied.service, occupied.node.gpu_type, tag)


def _occupied(view: NodeView) -> Occupied:
    service = view.service if view.role == NodeRole.ON_LOAN else None
    if not view.workers:
        return Occupied(view, service, view.free_gpus, 0, ())
    stay = [worker for worker in view.workers if not worker.is_leaving]
    flexible = [worker for worker in stay if worker.is_flexible]
    if len(flexible) > 1:
        flexible.sort(key=lambda worker: (worker.job_id, worker.worker_index))
    return Occupied(view, service, view.free_gpus, len(stay) - len(flexible), tuple(flexible))


class _Parts(Struct, frozen=True):
    """What an index has of jobs."""

    lines: tuple[tuple[JobView, ...], ...]
    resizable: tuple[JobView, ...]
    growable: tuple[JobView, ...]
    preempted: tuple[JobView, ...]
    held: dict[JobId, tuple[WorkerView, ...]]


def workers_by_index(job: JobView) -> tuple[WorkerView, ...]:
    """Flexible workers that are not leaving, by index."""
    stay = [worker for worker in job.placed if worker.is_flexible and not worker.is_leaving]
    stay.sort(key=_BY_INDEX)
    return tuple(stay)


def _can_grow(job: JobView, flexible_count: int) -> bool:
    """Whether a running job could use more workers than it has, if there were room; or by its
    profile fewer."""
    if job.gpu_type is None or job.gpu.heterogeneous_speed_ratio:
        return True
    span = job.workers_on(job.gpu_type)
    if flexible_count < span.max - span.min:
        return True
    best = job.profile.fastest(job.workers.min, job.workers.max)
    return best < job.workers.max


class JobSorter:
    """Keeps waiting jobs in lines by shape, and resizable ones at hand, while they change."""

    def __init__(self) -> None:
        self._lines: dict[JobShape, list[tuple[float, float, JobId, JobView]]] = {}
        self._kept: dict[JobShape, tuple[JobView, ...]] = {}
        self._parts: _Parts | None = None
        self._waiting: dict[JobId, tuple[JobShape, tuple[float, float, JobId]]] = {}
        self._resizable: dict[JobId, JobView] = {}
        self._growable: dict[JobId, JobView] = {}
        self._held: dict[JobId, tuple[WorkerView, ...]] = {}
        self._preempted: dict[JobId, JobView] = {}

    def put(self, job: JobView) -> None:
        """Add a job that is not there."""
        if job.preempted_at_s is not None:
            self._parts = None
            self._preempted[job.job_id] = job
        if job.state == JobState.PENDING:
            self._parts = None
            key = (-job.priority, job.submitted_at_s, job.job_id)
            line = shape(job)
            self._waiting[job.job_id] = (line, key)
            insort(self._lines.setdefault(line, []), (*key, job), key=lambda entry: entry[:3])
            self._kept.pop(line, None)
        elif job.is_resizable and job.gpu_type is not None:
            self._parts = None
            held = workers_by_index(job)
            self._resizable[job.job_id] = job
            self._held[job.job_id] = held
            if _can_grow(job, len(held)):
                self._growable[job.job_id] = job

    def remove(self, job_id: JobId) -> None:
        """Forget a job."""
        if self._preempted.pop(job_id, None) is not None:
            self._parts = None
        if self._resizable.pop(job_id, None) is not None:
            self._parts = None
            self._growable.pop(job_id, None)
            del self._held[job_id]
        found = self._waiting.pop(job_id, None)
        if found is None:
            return
        self._parts = None
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
        resizable = tuple([self._resizable[job_id] for job_id in sorted(self._resizable)])
        growable = tuple([self._growable[job_id] for job_id in sorted(self._growable)])
        preempted = tuple([self._preempted[job_id] for job_id in sorted(self._preempted)])
        return _Parts(tuple(lines), resizable, growable, preempted, dict(self._held))


Use = tuple[int, int, int]
"""Of one node: free GPUs, base workers, flexible workers."""


def removable(index: Index, usable: Set[ServiceName | None]) -> Flexible:
    """Flexible workers that stay, of jobs that can be resized, on nodes that may be used."""
    if index.services.keys() <= usable:
        return dict(index.flexible)  # no service is recalled
    spots = index.spots
    return {name: each for name, each in index.flexible.items() if spots[name][1] in usable}


def spot(occupied: Occupied, flexible: Iterable[WorkerView], free: int, place: int) -> Spot:
    """Room for base workers on a node, flexible ones in their place."""
    held = sum([worker.freed_gpus for worker in flexible])
    return occupied.node.gpu_type, occupied.service, free, held, place


def spots_now(index: Index, flexible: Flexible, used: Mapping[int, Use]) -> dict[NodeName, Spot]:
    """The spots of nodes with workers that may be taken back; `used`: nodes that have changed."""
    before = index.flexible
    stale = {name for name, workers in flexible.items() if workers is not before[name]}
    stale.update([name for place in used if (name := index.names[place]) in flexible])
    is_all = len(flexible) == len(before)
    found = dict(index.spots) if is_all else {name: index.spots[name] for name in flexible}
    for name in stale:
        place = index.places[name]
        occupied = index.nodes[place]
        assert occupied is not None, f"{name} has flexible workers and takes none"
        free = used[place][0] if place in used else occupied.free
        found[name] = spot(occupied, flexible[name], free, place)
    return found


def open_jobs(snapshot: ClusterSnapshot) -> Sequence[JobView]:
    """Jobs to which a pass could give workers, by id: those that wait and those that may grow.

    Without an index at hand it names all others too.
    """
    if snapshot.index is None:
        return snapshot.jobs
    found = [*snapshot.index.resizable, *chain.from_iterable(snapshot.index.lines)]
    found.sort(key=attrgetter("job_id"))
    return found


def open_kinds(snapshot: ClusterSnapshot) -> Iterator[JobView]:
    """As `open_jobs`, in any order, and of waiting jobs of one shape only one."""
    index = snapshot.index
    if index is None:
        return iter(snapshot.jobs)
    return chain(index.resizable, (line[0] for line in index.lines))


def index_of(nodes: Iterable[NodeView], jobs: Sequence[JobView]) -> Index:
    """The index of a snapshot's nodes and jobs, from nothing."""
    node_sorter, job_sorter = NodeSorter(), JobSorter()
    for node in nodes:
        node_sorter.put(node)
    for job in jobs:
        job_sorter.put(job)
    return node_sorter.index(job_sorter)
