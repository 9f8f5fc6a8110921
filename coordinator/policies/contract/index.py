"""Indexes of a snapshot: nodes by free GPUs, jobs by shape, nodes of each service.

Each follows from the nodes and jobs of the snapshot alone. The engine, which makes snapshots often,
keeps its indexes up to date change by change. `index_of` and `nodes_of` build one from scratch.
Both ways give equal results.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from operator import attrgetter

from msgspec import Struct, field

from common.model import (
    JobId,
    JobState,
    NodeName,
    NodeRole,
    ServiceName,
)
from coordinator.policies.contract.snapshot import (
    ClusterSnapshot,
    Flexible,
    Group,
    Index,
    JobShape,
    JobView,
    Masks,
    NodeView,
    Occupied,
    ServiceNodes,
    Spot,
    Tag,
    WorkerView,
    add_bit,
    trimmed,
)

_NONE = ServiceNodes()


class _Kept(Struct):
    """One service; `made` is None where its nodes have changed since."""

    count: int = 0
    ready: dict[NodeName, NodeView] = field(default_factory=dict[NodeName, NodeView])
    coming: dict[NodeName, NodeView] = field(default_factory=dict[NodeName, NodeView])
    draining: dict[NodeName, NodeView] = field(default_factory=dict[NodeName, NodeView])
    made: ServiceNodes | None = None


class ServiceSorter:
    """Keeps the nodes of services apart by their roles."""

    def __init__(self) -> None:
        self._seen: dict[NodeName, NodeView] = {}
        self._services: dict[ServiceName, _Kept] = {}

    def put(self, view: NodeView) -> None:
        """Add or replace a node; one without a service counts for none."""
        old = self._seen.pop(view.name, None)
        if old is not None and old.service is not None:
            self._services[old.service].count -= 1
            self._change(self._services[old.service], old, is_there=False)
        if view.service is not None:
            self._seen[view.name] = view
            kept = self._services.setdefault(view.service, _Kept())
            kept.count += 1
            self._change(kept, view, is_there=True)
        if old is not None and old.service is not None and not self._services[old.service].count:
            del self._services[old.service]  # as if it had never had a node

    def remove(self, name: NodeName) -> None:
        """Forget a node."""
        old = self._seen.pop(name, None)
        if old is None or old.service is None:
            return
        kept = self._services[old.service]
        kept.count -= 1
        self._change(kept, old, is_there=False)
        if not kept.count:
            del self._services[old.service]

    def _change(self, kept: _Kept, view: NodeView, *, is_there: bool) -> None:
        if view.is_drained_by_operator or view.is_closing:
            into = None
        elif view.role == NodeRole.SERVING:
            # Where the server is down the role alone serves no load: another node is needed for it.
            into = kept.ready if view.serving_since_s is not None else None
        elif view.role == NodeRole.DRAINING:
            into = kept.draining
        else:
            into = kept.coming if _is_coming(view) else None
        if into is not None:
            if is_there:
                into[view.name] = view
            else:
                del into[view.name]
            kept.made = None

    def parts(self) -> dict[ServiceName, ServiceNodes]:
        """The nodes of each service as they are now."""
        found: dict[ServiceName, ServiceNodes] = {}
        for name, kept in self._services.items():
            if kept.made is None or kept.made.count != kept.count:
                kept.made = _sorted(kept)
            found[name] = kept.made
        return found


def _is_coming(node: NodeView) -> bool:
    return node.role in (NodeRole.VACATING, NodeRole.WARMING) or (
        node.role == NodeRole.ON_LOAN and node.is_reclaimed
    )


def _sorted(kept: _Kept) -> ServiceNodes:
    ready = tuple([kept.ready[name] for name in sorted(kept.ready)])
    since = [
        (node.serving_since_s, number)
        for number, node in enumerate(ready)
        if node.serving_since_s is not None
        and not (
            node.takes_nothing or node.sick_gpus or node.trespassed_gpus or node.is_load_unknown
        )
    ]
    since.sort()
    return ServiceNodes(
        count=kept.count,
        ready=ready,
        coming=tuple([kept.coming[name] for name in sorted(kept.coming)]),
        draining=tuple([kept.draining[name] for name in sorted(kept.draining)]),
        longest_serving=tuple([ready[number] for _, number in since]),
        gpu_types=frozenset([node.gpu_type for node in ready]),
    )


def nodes_of(snapshot: ClusterSnapshot, service: ServiceName) -> ServiceNodes:
    """The nodes of one service; none where it has none."""
    if snapshot.index is not None:
        return snapshot.index.services.get(service, _NONE)
    sorter = ServiceSorter()
    for node in snapshot.nodes:
        if node.service == service:
            sorter.put(node)
    return sorter.parts().get(service, _NONE)


def draining(snapshot: ClusterSnapshot) -> list[NodeView]:
    """Nodes of any service that leave it for training now, in order of name."""
    if snapshot.index is None:
        services = {node.service: None for node in snapshot.nodes if node.service is not None}
        found = [nodes_of(snapshot, service) for service in services]
    else:
        found = list(snapshot.index.services.values())
    return sorted((node for each in found for node in each.draining), key=attrgetter("name"))


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
        was_preempted=job.preemptions.count > 0,
        avoid_nodes=job.nodes.avoided,
        wants_no_loan=job.nodes.wants_no_loan,
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
    """Keeps nodes sorted while they change one by one.

    Nodes that join or leave shift the places of all others. They are noted, and all at once are put
    in their places when an index is asked for: a fleet that reports for the first time costs as
    much as its nodes, not as their square.
    """

    def __init__(self) -> None:
        self._names: tuple[NodeName, ...] = ()
        self._places: dict[NodeName, int] = {}
        self._nodes: list[Occupied | None] = []
        self._made: tuple[Occupied | None, ...] | None = None
        """Those of the last index; None if one has changed since."""
        self._joined: dict[NodeName, Occupied | None] = {}
        self._left: set[NodeName] = set()
        """Nodes without a place yet, and nodes that give theirs up."""
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
        self._left.discard(view.name)
        place = self._places.get(view.name)
        new = _occupied(view) if view.is_schedulable else None
        if place is None:
            self._joined[view.name] = new
            return
        self._take_out(place)
        if new is not None:
            self._put_in(place, new)

    def remove(self, name: NodeName) -> None:
        """Forget a node."""
        self._found = None
        self._services.remove(name)
        self._joined.pop(name, None)
        place = self._places.get(name)
        if place is not None:
            self._take_out(place)
            self._left.add(name)

    def _settle(self) -> None:
        """Give every node its place, once for all that joined or left since the last index."""
        if not (self._joined or self._left):
            return
        self._stale.update(self._spots)  # their places may have changed
        found = {name: self._nodes[place] for name, place in self._places.items()}
        for name in self._left:
            del found[name]
        found.update(self._joined)
        self._joined, self._left = {}, set()
        self._names = tuple(sorted(found))
        # A new one: snapshots of before share the old one.
        self._places = {name: place for place, name in enumerate(self._names)}
        self._nodes = [None] * len(found)
        self._made = None
        self._masks = {}
        for place, name in enumerate(self._names):
            if (occupied := found[name]) is not None:
                self._put_in(place, occupied)

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

    def _sorted_masks(self) -> tuple[tuple[Group, tuple[int, ...]], ...]:
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
        self._settle()
        self._find_removable(parts.resizable)
        if self._made is None:
            self._made = tuple(self._nodes)
        found = Index(
            names=self._names,
            places=self._places,
            nodes=self._made,
            masks=self._sorted_masks(),
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
    """The jobs of an index."""

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
        if job.preemptions.latest_at_s is not None:
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
"""One node: free GPUs, base workers, flexible workers."""


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
