"""The frozen snapshot that policies decide on, and the tenants' checks of their decisions.

Building a snapshot changes nothing. Every decision of a pass goes through the checks here: a
decision that breaks a quota or a guarantee is refused, whichever policy made it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from common.model import JobId, NodeName, NodeRole, Pool, ServiceName
from coordinator.engine import reach
from coordinator.engine.job_views import seen_job, worker_view
from coordinator.engine.jobs import node_selection
from coordinator.engine.jobs.gang_start import is_schedulable
from coordinator.engine.loans import lifecycle as loans_lifecycle
from coordinator.engine.loans import unknown_loads
from coordinator.engine.nodes import windows
from coordinator.engine.state import mixed_nodes
from coordinator.engine.state.commands import Refused
from coordinator.engine.state.context import Context, barred_uuids, free_slots, sick_slots
from coordinator.engine.state.settings import EngineSettings, TenantSettings
from coordinator.engine.state.tables import ClusterState, NodeEntry
from coordinator.policies.contract.decisions import Decision
from coordinator.policies.contract.index import JobSorter, NodeSorter
from coordinator.policies.contract.snapshot import (
    ClusterSnapshot,
    JobView,
    NodeView,
    ServiceView,
    Shadow,
    TenantView,
)
from coordinator.policies.tenants.quota_guard import guarded


def views(settings: EngineSettings) -> tuple[TenantView, ...]:
    """The tenants of the cell, by name."""
    return _views(settings.tenants) if settings.tenants else ()


@lru_cache(maxsize=16)  # each snapshot asks for those of the same settings
def _views(tenants: tuple[TenantSettings, ...]) -> tuple[TenantView, ...]:
    return tuple(
        TenantView(
            name=tenant.name,
            parent=tenant.parent,
            weight=tenant.weight,
            guarantee_gpus=tenant.guarantee_gpus,
            borrow_limit_gpus=tenant.borrow_limit_gpus,
            lend_limit_gpus=tenant.lend_limit_gpus,
            user_max_gpus=tenant.user_max_gpus,
        )
        for tenant in sorted(tenants, key=lambda tenant: tenant.name)
    )


def allowed(
    ctx: Context, snapshot: ClusterSnapshot, decisions: tuple[Decision, ...]
) -> tuple[Decision, ...]:
    """The decisions that tenants allow; the others are refused, each with the reason."""
    if not snapshot.tenants:
        return decisions
    kept, dropped = guarded(snapshot, decisions)
    for each in dropped:
        ctx.refused.append(Refused(decision=each.decision, why=each.why))
    ctx.state.counters.decisions_refused += len(dropped)
    return kept


K = TypeVar("K", bound=str)
V = TypeVar("V")


class Views:
    """Frozen views of the tables, rebuilt only where something changed.

    Derived from the state and never saved. `note` learns what an event changed; a snapshot then
    shares every other view with the one before it.
    """

    def __init__(self, state: ClusterState) -> None:
        self._nodes = _Sorted[NodeName, NodeView](state.nodes)
        self._jobs = _Sorted[JobId, JobView](state.live_jobs)
        self._node_sorter = NodeSorter()
        self._job_sorter = JobSorter()
        self._fleet = reach.fleet_gpus(())
        """GPUs of the nodes whose views are fresh."""
        self._parts: dict[NodeName, _Part] = {}
        """The contents of each of those nodes."""
        self._part_names: dict[NodeName, tuple[NodeName, ...]] = {}
        """Nodes with several parts; any other node is one part of its own name."""
        self.excluded = node_selection.Excluded()
        """The nodes that jobs may not use by what they ask of nodes."""
        self._barred = windows.Barred()
        self.fleet_mark = 0
        """It grows whenever one of these changes."""

    def note(self, ctx: Context) -> None:
        """Learn what an event, or the part of it until now, has changed."""
        if ctx.changed_nodes:
            self._nodes.stale.update(ctx.changed_nodes)
        if ctx.dirty_nodes:
            self._nodes.stale.update(ctx.dirty_nodes)
        if ctx.changed_jobs:
            self._jobs.stale.update(ctx.changed_jobs)

    def forget(self, state: ClusterState) -> None:
        """Everything may have changed."""
        self._nodes.stale.update(state.nodes)
        self._jobs.stale.update(state.live_jobs)

    def asked(self, ctx: Context) -> ClusterSnapshot:
        """As `snapshot`, for queries that the journal does not record.

        Its views of jobs are rebuilt for the next pass, as if no query had come. The sums of a view
        are valid at any later instant, but their rounding depends on the instant of the query.
        """
        self._see_nodes(ctx)
        stale = set(self._jobs.stale)
        found = self.snapshot(ctx)
        self._jobs.stale |= stale
        return found

    def snapshot(self, ctx: Context) -> ClusterSnapshot:
        """Everything that a policy may know, sorted by name and id."""
        self._see_nodes(ctx)
        state = ctx.state
        for job_id in self._jobs.take_stale():
            job = seen_job(ctx, job_id, self._fleet, self.excluded)
            self._jobs.put(job_id, job)
            self._job_sorter.remove(job_id)
            if job is not None:
                self._job_sorter.put(job)
        return ClusterSnapshot(
            now_s=ctx.now_s,
            nodes=self._nodes.views(),
            jobs=self._jobs.views(),
            services=services(ctx),
            is_frozen=state.is_frozen,
            resize_cooldown_s=ctx.settings.resize_cooldown_s,
            min_runtime_s=ctx.settings.min_runtime_s,
            start_s=ctx.settings.start_p99_s,
            restart_s=ctx.settings.restart_p99_s,
            resize_s=ctx.settings.resize_p99_s,
            index=self._node_sorter.index(self._job_sorter),
            tenants=views(ctx.settings),
        )

    def _see_nodes(self, ctx: Context) -> None:
        """Bring the views of nodes up to date; jobs are stale that reach less far, or farther, or
        would overrun other windows.
        """
        self.note(ctx)
        self._jobs.stale.update(self._barred.moved(ctx, self._jobs.stale))
        before = dict(self._fleet) if self._nodes.stale else self._fleet
        for name in self._nodes.take_stale():
            node = ctx.state.nodes.get(name)
            self._count(name, node)
            self._put(ctx, name, node)
        if selections := self.excluded.take_changed():
            self._jobs.stale.update(
                job_id
                for job_id in ctx.state.live_jobs
                if node_selection.selection_of(ctx.state.jobs[job_id].spec) in selections
            )
        self.excluded.keep(ctx.state.jobs[job_id].spec for job_id in ctx.state.live_jobs)
        if self._fleet != before:
            self._jobs.stale.update(
                job_id
                for job_id in ctx.state.live_jobs
                if reach.is_other(before, self._fleet, ctx.state.jobs[job_id])
            )

    def _put(self, ctx: Context, name: NodeName, node: NodeEntry | None) -> None:
        """Replace the views of a node's parts; mostly it is one part."""
        seen = () if node is None else node_views(ctx, node)
        had = self._part_names.pop(name, (name,))
        now = tuple([view.name for view in seen])
        self.excluded.note(name, node, now)
        for gone in had if now != had else ():
            if gone not in now:
                self._nodes.put(gone, None)
                self._node_sorter.remove(gone)
        for view in seen:
            self._nodes.put(view.name, view)
            self._node_sorter.put(view)
        if len(now) > 1:
            self._part_names[name] = now
        if now != had:  # a job that avoids the node avoids all its parts
            self._jobs.stale.update(
                job_id
                for job_id in ctx.state.live_jobs
                if name in ctx.state.windows or name in ctx.state.jobs[job_id].retry.avoided
            )

    def _count(self, name: NodeName, node: NodeEntry | None) -> None:
        had, now = self._parts.pop(name, None), None if node is None else _part(node)
        if now is not None:
            self._parts[name] = now
        if now == had:
            return
        self.fleet_mark += 1
        for part, sign in ((had, -1), (now, 1)):
            for kind, gpus in part.gpus if part is not None else ():
                left = self._fleet.get(kind, 0) + sign * gpus
                if left:
                    self._fleet[kind] = left
                else:
                    del self._fleet[kind]

    def fleet(self, ctx: Context) -> ClusterSnapshot:
        """The nodes, services and tenants of a snapshot, without the jobs: the same for any number
        of jobs that wait."""
        self._see_nodes(ctx)
        return ClusterSnapshot(
            now_s=ctx.now_s,
            nodes=self._nodes.views(),
            jobs=(),
            services=services(ctx),
            tenants=views(ctx.settings),
        )


class _Part(NamedTuple):
    """A node as the fleet counts it, whatever runs on it."""

    gpus: tuple[tuple[str, int], ...]
    role: NodeRole
    service: ServiceName | None


def _part(node: NodeEntry) -> _Part:
    types = node.gpu_types if node.gpus else ()
    gpus = tuple([(kind, node.count_of(kind)) for kind in types])
    return _Part(gpus, node.role, node.service)


def made_anew(ctx: Context) -> tuple[list[NodeView], list[JobView]]:
    """The views of a snapshot, sorted, from nothing but the state."""
    nodes = [seen for node in ctx.state.nodes.values() for seen in node_views(ctx, node)]
    nodes.sort(key=lambda seen: seen.name)
    fleet = reach.fleet_gpus(ctx.state.nodes.values())
    excluded = node_selection.Excluded(ctx.state.nodes.values())
    jobs = [seen_job(ctx, job_id, fleet, excluded) for job_id in sorted(ctx.state.live_jobs)]
    return nodes, [job for job in jobs if job is not None]


class _Sorted(Generic[K, V]):
    """Views in the order of their keys, and which of them are stale."""

    def __init__(self, stale: Iterable[K]) -> None:
        self._views: list[V] = []
        self._made: tuple[V, ...] | None = ()
        self.stale: set[K] = set(stale)
        self._keys: list[K] = []

    def take_stale(self) -> list[K]:
        """The stale keys in order; they are fresh after the caller has put them."""
        stale, self.stale = sorted(self.stale), set()
        return stale

    def views(self) -> tuple[V, ...]:
        """All of them, in order; the same tuple until one is put."""
        if self._made is None:
            self._made = tuple(self._views)
        return self._made

    def put(self, key: K, view: V | None) -> None:
        """Replace, add or (None) remove a view."""
        self._made = None
        place = bisect_left(self._keys, key)
        is_there = place < len(self._keys) and self._keys[place] == key
        if view is None:
            if is_there:
                del self._keys[place], self._views[place]
        elif is_there:
            self._views[place] = view
        else:
            self._keys.insert(place, key)
            self._views.insert(place, view)


def node_views(ctx: Context, node: NodeEntry) -> tuple[NodeView, ...]:
    """One node, frozen: one view, or one for each of its parts."""
    kinds = mixed_nodes.kinds(node)
    if len(node.gpu_types) == 1:
        return (_whole(ctx, node),)
    return tuple([_of_kind(ctx, node, kind) for kind in kinds])


def _of_kind(ctx: Context, node: NodeEntry, kind: str) -> NodeView:
    """The GPUs of one type of a mixed node, with their workers.

    On a serving node, a fault of any of its GPUs counts, because its server runs on all.
    """
    whole, barred = _whole(ctx, node), barred_uuids(node)
    slots = [slot for slot in node.gpus if slot.gpu_type == kind]
    uuids = {slot.uuid for slot in slots}
    is_training = node.home_pool == Pool.TRAINING
    name = mixed_nodes.name_of(node, kind)
    return replace(
        whole,
        name=name,
        gpu_type=kind,
        gpus=len(slots),
        free_gpus=sum(slot.gpu_type == kind for slot in free_slots(ctx, node)),
        sick_gpus=sum(slot.uuid in uuids for slot in sick_slots(node))
        if is_training
        else whole.sick_gpus,
        trespassed_gpus=sum(uuid in node.trespassed for uuid in barred & uuids)
        if is_training
        else whole.trespassed_gpus,
        barred_gpus=len(barred & uuids),
        workers=tuple(
            [
                replace(worker, node=name)
                for worker in whole.workers
                if uuids.issuperset(worker.gpu_uuids)
            ]
        ),
        cpus=node.cpus * len(slots) // len(node.gpus),
        memory_bytes=node.memory_bytes * len(slots) // len(node.gpus),
        gpu_memory_bytes=min([slot.memory_bytes for slot in slots], default=0),
    )


def _whole(ctx: Context, node: NodeEntry) -> NodeView:
    """One node, frozen, as if its GPUs were of one type."""
    barred = barred_uuids(node)
    return NodeView(
        name=node.name,
        home_pool=node.home_pool,
        role=_role(node),
        gpu_type=node.gpu_type,
        gpus=len(node.gpus),
        free_gpus=len(free_slots(ctx, node)),
        is_schedulable=is_schedulable(node),
        service=node.service,
        is_reclaimed=node.role == NodeRole.ON_LOAN
        and (node.homecoming.is_awaited or node.desired.role != NodeRole.ON_LOAN),
        is_drained_by_operator=node.cordon.is_cordoned,
        takes_nothing=bool(
            node.ledger.error
            or node.failed_starts.closed_reason
            or node.is_out
            or node.cordon.is_closing
        ),
        is_closing=node.cordon.is_closing and node.service is not None,
        sick_gpus=len(sick_slots(node)) if barred else 0,
        is_load_unknown=node.name in ctx.state.unknown_loads,
        trespassed_gpus=sum([uuid in node.trespassed for uuid in barred]) if barred else 0,
        barred_gpus=len(barred),
        serving_since_s=node.serving_since_s,
        shadow=_shadow(ctx, node),
        workers=tuple(
            [worker_view(worker, barred) for _, worker in loans_lifecycle.workers_on(ctx, node)]
        ),
        rack=node.rack,
        cpus=node.cpus,
        memory_bytes=node.memory_bytes,
        gpu_memory_bytes=min([slot.memory_bytes for slot in node.gpus], default=0),
        closes_at_s=windows.closes_at_s(ctx.state, node),
    )


def _role(node: NodeEntry) -> NodeRole:
    """What it reports; one that was lent since then drains, or its service would count it twice."""
    is_told = node.role == NodeRole.SERVING and node.desired.role == NodeRole.ON_LOAN
    return NodeRole.DRAINING if is_told else node.role


def _shadow(ctx: Context, node: NodeEntry) -> Shadow:
    found = ctx.state.shadow_loans.get(node.name)
    if found is None:
        return Shadow.NONE
    return Shadow.LENT if found.reclaimed_at_s is None else Shadow.COMING


def services(ctx: Context) -> tuple[ServiceView, ...]:
    """Every configured service, frozen."""
    settings = {service.name: service for service in ctx.settings.services}
    return tuple(
        ServiceView(
            name=entry.name,
            mode=entry.mode,
            capacity_per_node=settings[name].capacity_per_node,
            min_serving=settings[name].min_serving,
            headroom_ratio=settings[name].headroom_ratio,
            reclaim_deadline_s=settings[name].reclaim_deadline_s,
            return_s=ctx.settings.return_s(settings[name]),
            max_grace_s=settings[name].max_grace_s,
            hold_off_s=settings[name].hold_off_s,
            loan_period_s=ctx.settings.loan_period_s,
            load=tuple(entry.load),
            unknown=(unknown := unknown_loads.of_service(ctx.state, entry.name)),
            serving=unknown_loads.serving_count(ctx.state, entry.name) if unknown else 0,
            unknown_load_s=settings[name].unknown_load_s,
            season=entry.season,
            is_recalled=entry.is_recalled,
        )
        for name, entry in sorted(ctx.state.services.items())
        if name in settings
    )
