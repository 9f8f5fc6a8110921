"""Placement of workers: best fit, with separate groups of lent nodes.

Policies made of rules place here; those that decide jointly place on `free_gpus`. The rules (Lyra,
EuroSys'23, section 5.3): a worker goes to the fullest node that still fits it, and an empty node is
opened last. Base and flexible workers of elastic jobs go to separate groups of lent nodes, so that
the flexible group can go home without a preemption.

Deviation: the paper puts elastic base demand on lent nodes first. A base worker there is the only
source of preemptions, so by default it goes to training nodes while they fit
(`elastic_base_prefers_loan` restores the paper's rule).

Rules that keep jobs away from nodes implement the form of a placement filter, also here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from common.model import NodeName, Preemptibility, ServiceName
from coordinator.policies.contract.decisions import Placement
from coordinator.policies.contract.index import (
    Use,
    group_of,
    index_of,
    removable,
    spot,
    spots_now,
    tag_of,
)
from coordinator.policies.contract.node_names import bits_of
from coordinator.policies.contract.snapshot import (
    ClusterSnapshot,
    Flexible,
    Group,
    JobView,
    Masks,
    NodeView,
    Occupied,
    Spot,
    Tag,
    WorkerView,
    add_bit,
    bits,
    trimmed,
)


class PlacementFilter(Protocol):
    """A rule that keeps base workers of some jobs away from some nodes, or stops growth there."""

    def barred(self, job: JobView) -> int:
        """Places that base workers of a job must leave alone, as bits."""
        ...

    def barred_flexible(self, job: JobView) -> int:
        """Places where no flexible worker of a job may be added, as bits; those there may stay."""
        ...

    def may_use_loans(self, job: JobView) -> bool:
        """Whether nodes that were lent besides could be of use to a job that waits."""
        ...

    def why(self, job: JobView) -> str:
        """The reason why a job stays away, as a sentence; empty if there is none."""
        ...


Saved = tuple[dict[int, Use], dict[Group, Masks], Flexible | None]


class PlacementState:
    """Free GPUs of the nodes that take workers, and the flexible workers that could give more.

    A scratch copy of the snapshot's index: making one, saving and restoring cost the same however
    many nodes there are. `flexible` lists, per node, the workers that may be taken back: flexible,
    not leaving, of jobs that can be resized now. A lent node is of the base group while a base
    worker is on it, of the flexible group while only flexible ones are.
    """

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        *,
        elastic_base_prefers_loan: bool = False,
        has_flexible: bool = True,
        separates_groups: bool = True,
        waits_for_loan: bool = False,
        separates_at_home: bool = False,
    ) -> None:
        self.index = snapshot.index or index_of(snapshot.nodes, snapshot.jobs)
        self.elastic_base_prefers_loan = elastic_base_prefers_loan
        self.separates_groups = separates_groups
        self.waits_for_loan = waits_for_loan
        self.separates_at_home = separates_at_home
        self.services = {service.name: service for service in snapshot.services}
        self._usable: set[ServiceName | None] = {None}
        self._usable.update(
            service.name for service in snapshot.services if not service.is_recalled
        )
        self._masks = {
            group: list(masks) for group, masks in self.index.masks if group.service in self._usable
        }
        self._used: dict[int, Use] = {}
        self.gpu_types = tuple(sorted({group.gpu_type for group in self._masks}))
        self.home_types = {group.gpu_type for group in self._masks if group.service is None}
        self.bars: list[PlacementFilter] = []
        self._flexible: Flexible | None = None if has_flexible else {}
        self._spots: dict[NodeName, Spot] | None = None

    @property
    def free(self) -> Mapping[NodeName, int]:
        """Free GPUs of every usable node. Computed on demand: a stored copy would be part of a
        reference cycle, and keep the snapshot alive until the garbage collector runs.
        """
        return _Free(self)

    @property
    def flexible(self) -> Flexible:
        """Per node the workers that may be taken back; worked out when first asked for."""
        if self._flexible is None:
            self._flexible = removable(self.index, self._usable)
        return self._flexible

    # --- single nodes -----------------------------------------------------------------------

    def _occupied(self, name: NodeName) -> Occupied | None:
        """A node that may be used; None for any other."""
        place = self.index.places.get(name)
        occupied = None if place is None else self.index.nodes[place]
        return occupied if occupied and occupied.service in self._usable else None

    def __contains__(self, name: NodeName) -> bool:
        return self._occupied(name) is not None

    def node(self, name: NodeName) -> Occupied:
        """A node that may be used, as it was before the pass."""
        occupied = self._occupied(name)
        if occupied is None:
            raise KeyError(name)
        return occupied

    @property
    def nodes(self) -> dict[NodeName, NodeView]:
        """Every node that may be used, in order of name."""
        return {
            occupied.node.name: occupied.node
            for occupied in self.index.nodes
            if occupied is not None and occupied.service in self._usable
        }

    def use(self, name: NodeName) -> Use:
        """Free GPUs, base workers and flexible workers of a node now."""
        used = self._used.get(self.index.places[name])
        if used is not None:
            return used
        occupied = self.node(name)
        return occupied.free, occupied.base_count, len(occupied.flexible)

    def available(self, name: NodeName) -> int:
        """GPUs of a node that base demand could get: free, or held by flexible workers."""
        return self.free[name] + sum(worker.freed_gpus for worker in self.flexible.get(name, ()))

    def is_empty(self, name: NodeName) -> bool:
        """Whether nothing runs there."""
        return self.use(name)[1:] == (0, 0)

    def rank(self, job: JobView, name: NodeName, *, is_flexible: bool) -> int:
        """Which kind of node a worker prefers; lower is better."""
        _, base_count, flexible_count = self.use(name)
        tag = tag_of(base_count, flexible_count)
        return self._rank(job, self.node(name).service, tag, is_flexible=is_flexible)

    # --- changes ----------------------------------------------------------------------------

    def save(self) -> Saved:
        """All that changes in a pass, to go back to with `restore`."""
        masks = {group: trimmed(masks) for group, masks in self._masks.items() if any(masks)}
        return dict(self._used), masks, None if self._flexible is None else dict(self._flexible)

    def restore(self, saved: Saved) -> None:
        """Go back to what `save` saw; good for one time."""
        self._used, self._masks, self._flexible = saved
        self._spots = None

    def take(self, name: NodeName, gpus: int) -> None:
        """Hold GPUs of a node; the caller has looked that they are free."""
        self._change(name, gpus=-gpus)

    def give(self, name: NodeName, gpus: int) -> None:
        """Count on GPUs of a node that others are to vacate."""
        self._change(name, gpus=gpus)

    def _change(self, name: NodeName, *, gpus: int = 0, base: int = 0, flexible: int = 0) -> None:
        occupied, place = self.node(name), self.index.places[name]
        before = (occupied.free, occupied.base_count, len(occupied.flexible))
        old = self._used.get(place, before)
        assert old[0] + gpus >= 0, f"{name}: {old[0]} free, {-gpus} asked"
        new = (old[0] + gpus, old[1] + base, old[2] + flexible)
        self._masks[_group(occupied, old)][old[0]] &= ~(1 << place)
        add_bit(self._masks.setdefault(_group(occupied, new), []), new[0], place)
        if new == before:
            self._used.pop(place, None)
        else:
            self._used[place] = new
        if self._spots is not None and name in self._spots:
            self._spots[name] = spot(occupied, self.flexible[name], new[0], place)

    def hold(self, placements: Iterable[Placement], gpus_per_worker: int) -> None:
        """Take the GPUs of placements; their nodes are tagged by it."""
        for placement in placements:
            count = placement.worker_count
            self._change(
                placement.node,
                gpus=-count * gpus_per_worker,
                base=0 if placement.is_flexible else count,
                flexible=count if placement.is_flexible else 0,
            )

    def release(self, worker: WorkerView) -> None:
        """A flexible worker goes: those of its GPUs are free that others can have."""
        left = list(self.flexible[worker.node])
        left.remove(worker)
        self.flexible[worker.node] = tuple(left)
        self._change(worker.node, gpus=worker.freed_gpus, flexible=-1)

    def keep(self, worker: WorkerView) -> None:
        """A released worker stays after all; the caller has looked that its GPUs are free."""
        self.flexible[worker.node] = (*self.flexible[worker.node], worker)
        self._change(worker.node, gpus=-worker.freed_gpus, flexible=1)

    # --- what may go where ------------------------------------------------------------------

    def may_host(self, job: JobView, service: ServiceName | None, *, is_flexible: bool) -> bool:
        """Whether the rules let a worker of the job run on nodes that a service lent."""
        if service is None:
            return True
        if job.preemptibility == Preemptibility.NON:
            return False
        if job.preemptibility == Preemptibility.SEMI and not is_flexible:
            return False
        return job.grace_s <= self.max_grace_s(service)

    def max_grace_s(self, service: ServiceName | None) -> float:
        """Longest grace on lent nodes of a service; below zero if no worker may run there."""
        if service is None or service not in self.services:
            return -1.0
        return self.services[service].max_grace_s

    def _groups(
        self, job: JobView, gpu_type: str, *, is_flexible: bool, barred: int | None = None
    ) -> Iterator[tuple[Group, Masks]]:
        if barred is None:
            barred = self.avoided(job)
            barred |= self.barred_flexible(job) if is_flexible else self.barred(job)
        for group, masks in self._masks.items():
            if group.gpu_type != gpu_type:
                continue
            service = group.service
            if service is None or self.may_host(job, service, is_flexible=is_flexible):
                yield group, [mask & ~barred for mask in masks] if barred else masks

    def avoided(self, job: JobView) -> int:
        """Places that all workers of a job leave alone, as bits."""
        if not job.nodes.avoided:
            return 0  # so of nearly all
        return bits_of(job.nodes.avoided, self.index.places)

    def barred(self, job: JobView) -> int:
        """Places that base workers of a job must leave alone, as bits."""
        barred = 0
        for bar in self.bars:
            barred |= bar.barred(job)
        return barred

    def barred_flexible(self, job: JobView) -> int:
        """Places where no flexible worker of a job may be added, as bits."""
        barred = 0
        for bar in self.bars:
            barred |= bar.barred_flexible(job)
        return barred

    def hosts(self, job: JobView, gpu_type: str, *, is_flexible: bool) -> list[NodeName]:
        """Nodes of a GPU type that may host workers of the job, in order of name."""
        found = 0
        for _, masks in self._groups(job, gpu_type, is_flexible=is_flexible):
            for mask in masks:
                found |= mask
        return [self.index.names[place] for place in bits(found)]

    def clearable(self, job: JobView, gpu_type: str) -> list[NodeName]:
        """Nodes of a GPU type that may host base workers of the job in place of flexible ones."""
        found = 0
        for _, masks in self._groups(job, gpu_type, is_flexible=False):
            for mask in masks:
                found |= mask
        places = self.index.places
        return [
            name for name, workers in self.flexible.items() if workers and found >> places[name] & 1
        ]

    def has_places(
        self, job: JobView, gpu_type: str, count: int, *, if_unbarred: bool = False, but: int = 0
    ) -> bool:
        """True if that many base workers would find a place, with flexible workers making room.

        if_unbarred: assume that no node is barred; bars depend on more than a job's shape.
        but: places that do not count, as bits.
        """
        size = job.gpus_per_worker
        barred = but | self.avoided(job) | (0 if if_unbarred else self.barred(job))
        if count <= 0:
            return True
        for _, masks in self._groups(job, gpu_type, is_flexible=False, barred=barred):
            for free in range(size, len(masks)):
                if masks[free]:
                    count -= masks[free].bit_count() * (free // size)
                    if count <= 0:
                        return True  # mostly soon
        allowed = {
            service: self.may_host(job, service, is_flexible=False) for service in self._usable
        }
        if self._spots is None:
            self._spots = spots_now(self.index, self.flexible, self._used)
        for its_type, service, free, held, place in self._spots.values():
            if its_type == gpu_type and allowed[service] and not barred >> place & 1:
                count -= (free + held) // size - free // size
        return count <= 0

    def free_gpus(self, gpu_type: str) -> int:
        """Free GPUs of a type on all usable nodes."""
        return sum(
            free * mask.bit_count()
            for group, masks in self._masks.items()
            if group.gpu_type == gpu_type
            for free, mask in enumerate(masks)
            if mask
        )

    def tiers(self, job: JobView, gpu_type: str, *, is_flexible: bool) -> list[list[Masks]]:
        """Groups that may host workers of the job, best first; equally good ones together."""
        ranked: dict[tuple[int, bool], list[Masks]] = {}
        empty = Tag.EMPTY
        for group, masks in self._groups(job, gpu_type, is_flexible=is_flexible):
            rank = self._rank(job, group.service, group.tag, is_flexible=is_flexible)
            ranked.setdefault((rank, group.tag == empty), []).append(masks)
        return [ranked[key] for key in sorted(ranked)]

    def _rank(
        self, job: JobView, service: ServiceName | None, tag: Tag, *, is_flexible: bool
    ) -> int:
        """Which kind of node a worker prefers; lower is better.

        Flexible: flexible group, empty lent node, training, base group.
        Base: training, base group, empty lent node, flexible group; with
        `elastic_base_prefers_loan` training comes after the empty lent nodes for elastic jobs.
        Without groups: training, then lent, whatever runs there. With `separates_at_home` training
        nodes with base workers are first for base and last for flexible ones, so that whole
        nodes can be cleared for a gang without a preemption.
        """
        if not self.separates_groups:
            return 0 if service is None else 1
        if service is None:
            prefers_loan = self.elastic_base_prefers_loan and job.is_elastic
            is_base = self.separates_at_home and tag == Tag.BASE
            return 4 + is_base if is_flexible else (4 if prefers_loan else 0) - is_base
        if tag == Tag.BASE:
            return 5 if is_flexible else 1
        if tag == Tag.FLEXIBLE:
            return 1 if is_flexible else 6
        return 3


class _Free(Mapping[NodeName, int]):
    """Free GPUs of every usable node."""

    def __init__(self, room: PlacementState) -> None:
        self._room = room

    def __getitem__(self, name: NodeName) -> int:
        return self._room.use(name)[0]

    def __iter__(self) -> Iterator[NodeName]:
        return iter(self._room.nodes)

    def __len__(self) -> int:
        return len(self._room.nodes)


def _group(occupied: Occupied, use: Use) -> Group:
    return group_of(occupied.service, occupied.node.gpu_type, tag_of(use[1], use[2]))


def fill(
    room: PlacementState,
    job: JobView,
    gpu_type: str,
    worker_count: int,
    *,
    is_flexible: bool = False,
    gpus_for_one: int = 1,
) -> tuple[Placement, ...]:
    """Where up to `worker_count` workers go by best fit; nothing is held yet.

    gpus_for_one: GPUs of this type that stand for one of the attempt's, see `GpuRequest`.

    All workers of a job are equally large, so filling the nodes in order of best fit is the same
    as placing worker by worker.
    """
    size, left = job.gpus_per_worker * gpus_for_one, worker_count
    placements: list[Placement] = []
    for groups in room.tiers(job, gpu_type, is_flexible=is_flexible):
        for free in range(size, max(map(len, groups))):
            mask = 0
            for masks in groups:
                mask |= masks[free] if free < len(masks) else 0
            for place in bits(mask):
                if left <= 0:
                    return tuple(placements)
                count = min(left, free // size)
                placements.append(
                    Placement(
                        node=room.index.names[place], worker_count=count, is_flexible=is_flexible
                    )
                )
                left -= count
    return tuple(placements)
