"""GPUs over time that plans may use within tenants' limits.

A promise counts on no GPU that another tenant's guarantee covers, used or not. A tenant below its
guarantee gets it back from borrowers, and is admitted within it whatever was promised to others.
GPUs given without a promise may be borrowed, as far as they are lent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from math import inf

from msgspec import Struct

from common.model import JobId, Preemptibility
from coordinator.policies.contract.free_gpus import present_workers
from coordinator.policies.contract.snapshot import JobView, TenantView
from coordinator.policies.schedulers.qos.minimum_shares import Claim
from coordinator.policies.schedulers.qos.timeline import Piece, Plan, Timeline
from coordinator.policies.tenants.tenancy import Claim as Has
from coordinator.policies.tenants.tenancy import Count, Tenancy, left_to, unlent


def has_quotas(tenants: Iterable[TenantView]) -> bool:
    """Whether anything is promised to any of them, or bounded."""
    return any(each.guarantee_gpus or each.borrow_limit_gpus is not None for each in tenants)


def has_limits(tenants: Iterable[TenantView]) -> bool:
    """Whether anything keeps one of them from using all that is free."""
    limits = ((each.borrow_limit_gpus, each.lend_limit_gpus) for each in tenants)
    return any(limit is not None for pair in limits for limit in pair)


class Held(Struct, frozen=True, kw_only=True):
    """A plan on GPUs outside the present pool, and its job."""

    tenant: str
    plan: Plan
    gpus_per_worker: int


class Quotas(Struct, frozen=True, kw_only=True):
    """What tenants may have; the default: no rules.

    capacity: GPUs of the cell. views: tenants by name, parents before children.
    held: what counts against them beside the present claims.
    used: GPUs that each has now; a use beyond its limit is not taken from it.
    """

    capacity: int = 0
    views: Mapping[str, TenantView] = {}
    held: tuple[Held, ...] = ()
    used: Mapping[str, Count] = {}


class Row(Struct, frozen=True):
    """GPUs planned at an instant for each tenant, in the order of `Quotas.views`. On demand it also
    has the GPUs that may be promised beside them, and the dues of each then.
    """

    planned: tuple[Count, ...]
    promised: dict[str, int]
    due: list[float]


KNOWN_ROWS = 1 << 16
"""The most sequences that are remembered; then the memory is cleared."""


class Rooms:
    """What tenants may have beside the plans for them, each computed once.

    Plans that are tried one after another leave most instants as they were. A room depends on the
    plan alone, so it is the same in all of them.
    """

    def __init__(self, quotas: Quotas) -> None:
        self.quotas = quotas
        self.names = tuple(quotas.views)
        self._views = tuple(quotas.views.values())
        self._limits = tuple(map(self._limit, self._views))
        places = {name: at for at, name in enumerate(self.names)}
        self._parents = tuple(places.get(view.parent, -1) for view in self._views)
        self._siblings = tuple(
            tuple(at for at, view in enumerate(self._views) if view.parent == own.parent)
            for own in self._views
        )
        self._children = tuple(
            tuple(at for at, parent in enumerate(self._parents) if parent == own)
            for own in range(len(self._views))
        )
        self._guarantees = tuple(view.guarantee_gpus for view in self._views)
        self._has_keepers = any(view.lend_limit_gpus is not None for view in self._views)
        self._upwards = tuple(reversed(range(len(self._views))))
        self._paths = {name: self._path(at) for name, at in places.items()}
        self.depth = max(map(len, self._paths.values()), default=0)
        self._rows: dict[tuple[Count, ...], Row] = {}

    def _path(self, at: int) -> tuple[int, ...]:
        found: list[int] = []
        while at >= 0:
            found.append(at)
            at = self._parents[at]
        return tuple(found)

    def path(self, name: str) -> tuple[int, ...]:
        """Places in a row of a tenant, its parent, and so on; none of one that is not in it."""
        return self._paths.get(name, ())

    def row(self, planned: tuple[Count, ...]) -> Row:
        """The row for these GPU counts."""
        found = self._rows.get(planned)
        if found is None:
            if len(self._rows) >= KNOWN_ROWS:
                self._rows.clear()
            found = self._rows[planned] = Row(planned, {}, [])
        return found

    def promised(self, name: str, row: Row) -> int:
        """GPUs that a tenant may be promised beside the plan of each."""
        found = row.promised.get(name)
        if found is None:
            if not row.due:
                row.due.extend(self._due(row.planned))
            found = int(self._room(name, row.planned, row.due))
            row.promised[name] = found
        return found

    def unpromised(self, name: str, row: Row) -> float:
        """GPUs that it may have without a promise."""
        return self._room(name, row.planned, self._kept(row.planned), is_promise=False)

    def is_due(self, name: str, planned: Sequence[Count], gpus: int, depth: int) -> bool:
        """True if this number of further GPUs stays within a guarantee of its own, or of a tenant
        above it.

        depth: of a tenant at least this deep in the tree; those at the top have 1.
        """
        path = self.path(name)
        return any(
            planned[at] + gpus <= self._views[at].guarantee_gpus
            for at in path[: max(0, len(path) + 1 - depth)]
        )

    def _room(
        self,
        name: str,
        planned: Sequence[Count],
        kept: Sequence[float],
        *,
        is_promise: bool = True,
    ) -> float:
        """kept: of each tenant's idle guarantee, the part that is not for others."""
        path = self.path(name)
        most = 0.0
        for at in reversed(path):  # what a parent may have is for its children to divide
            gpus, parent = self._views[at].guarantee_gpus, self._parents[at]
            others = [
                Has(
                    guarantee_gpus=self._views[other].guarantee_gpus,
                    used=float(planned[other]),
                    kept=kept[other],
                )
                for other in self._siblings[at]
                if other != at
            ]
            if parent < 0:
                most = float(self.quotas.capacity) - sum(each.used + each.kept for each in others)
            else:
                most = left_to(gpus, min(most, self._limits[parent]), others)
            if is_promise or parent < 0:  # a promise counts on its guarantee in any case
                most = max(float(gpus), most)
        limits = (self._limits[at] - planned[at] for at in path)
        return min(most - planned[path[0]], *limits)

    def _limit(self, view: TenantView) -> float:
        if view.borrow_limit_gpus is None:
            return inf
        used = self.quotas.used.get(view.name, 0)
        return float(max(view.guarantee_gpus + view.borrow_limit_gpus, used))

    def _due(self, planned: Sequence[Count]) -> list[float]:
        """GPUs of its idle guarantee that each may get back from any holder, or tenants below it
        may, whatever else there has them by then.

        What one below it then has of a guarantee does not end what others there keep for
        themselves: no outsider is promised that as well.
        """
        due, below, none = [0.0] * len(planned), [0.0] * len(planned), [0.0] * len(planned)
        beside = self._beside(planned) if self._has_keepers else none
        for at in self._upwards:
            idle, found = self._guarantees[at] - planned[at], below[at]
            own = float(idle) + beside[at]
            if idle > 0 and own > found:
                found = own
            due[at] = found
            if (parent := self._parents[at]) >= 0:
                below[parent] += found
        return due

    def _beside(self, planned: Sequence[Count]) -> list[float]:
        """The most that tenants below each keep idle while one team there has its due."""
        found, kept = [0.0] * len(planned), self._kept(planned)
        for at in self._upwards:
            children = self._children[at]
            keep = sum(kept[n] for n in children)
            found[at] = max((keep - kept[n] + found[n] for n in children), default=keep)
        return found

    def _kept(self, planned: Sequence[Count]) -> list[float]:
        """GPUs of its idle guarantee that each does not lend, or those below it do not."""
        below = [0.0] * len(planned)
        kept = [0.0] * len(planned)
        for at in reversed(range(len(planned))):
            kept[at] = max(unlent(self._views[at], float(planned[at])), below[at])
            if self._parents[at] >= 0:
                below[self._parents[at]] += kept[at]
        return kept


def quotas_beside(
    tenancy: Tenancy,
    gpus: int,
    jobs: Iterable[JobView],
    plans: Mapping[str, Plan],
    now_s: float,
    *,
    kinds: Mapping[JobId, str],
) -> Quotas:
    """What tenants may have of a number of GPUs beside jobs outside the present pool.

    plans: of jobs with a promise. Of any other job with workers the base gang counts, if it may be
        stopped: its other workers are given back once a plan needs them. Counted as well they would
        keep the promise out, and be given again.
    kinds: GPU types of the plans, by job.
    """
    held: list[Held] = []
    for job in jobs:
        plan = plans.get(job.job_id, ())
        factor = job.gpu.worker_multiplier.get(kinds.get(job.job_id, ""), 1) if plan else 1
        if not plan and job.placed:
            workers = present_workers(job)
            if job.preemptibility == Preemptibility.FULL:
                workers = min(workers, job.workers_on(job.gpu_type or "").min)
            plan = (Piece(now_s, inf, workers),) if workers else ()
        each = job.gpus_per_worker * factor
        held.append(Held(tenant=tenancy.leaf(job), plan=plan, gpus_per_worker=each))
    return Quotas(capacity=gpus, views=tenancy.views, held=tuple(held), used=tenancy.used)


class _Planned:
    """The plan of each tenant from an instant on: `rows[i]` in [times[i], times[i + 1])."""

    def __init__(self, start_s: float, rooms: Rooms) -> None:
        self.times = [start_s]
        self.rows = [rooms.row((0,) * len(rooms.names))]
        self._rooms = rooms

    def add(self, plan: Plan, gpus_per_worker: int, places: Sequence[int]) -> None:
        """A plan holds its GPUs for those in these places of the rows; below zero: no longer."""
        for piece in plan:
            start_s = max(piece.start_s, self.times[0])
            if piece.end_s <= start_s:
                continue
            for at in range(self._cut(start_s), self._cut(piece.end_s)):
                planned = list(self.rows[at].planned)
                for place in places:
                    planned[place] += piece.workers * gpus_per_worker
                self.rows[at] = self._rooms.row(tuple(planned))

    def copy(self) -> _Planned:
        """One that can be changed alone."""
        found = copy(self)
        found.times, found.rows = [*self.times], [*self.rows]
        return found

    def _cut(self, at_s: float) -> int:
        """The place of the row that begins at an instant, made where there is none."""
        at = bisect_left(self.times, at_s)
        if at == len(self.times) or self.times[at] != at_s:
            self.times.insert(at, at_s)
            self.rows.insert(at, self.rows[at - 1])
        return at


class Room:
    """Free GPUs of a pool over time, and those that each tenant is planned to have."""

    def __init__(self, start_s: float, gpus: int, rooms: Rooms) -> None:
        self.pool = Timeline(start_s, gpus)
        self._start_s = start_s
        self._rooms = rooms
        self._planned = _Planned(start_s, rooms)
        self._lines: dict[str, Timeline] = {}  # by tenant, until a plan changes
        for each in rooms.quotas.held:
            self._planned.add(each.plan, each.gpus_per_worker, rooms.path(each.tenant))

    def copy(self) -> Room:
        """One that can be changed alone."""
        found = copy(self)
        found.pool, found._planned = self.pool.copy(), self._planned.copy()
        found._lines = {**self._lines}
        return found

    def take(self, plan: Plan, claim: Claim) -> None:
        """A plan holds its GPUs."""
        if plan:
            self.pool.take(plan, claim.gpus_per_worker)
            self._count(plan, claim, claim.gpus_per_worker)

    def give(self, plan: Plan, claim: Claim) -> None:
        """The opposite of `take`."""
        if plan:
            self.pool.give(plan, claim.gpus_per_worker)
            self._count(plan, claim, -claim.gpus_per_worker)

    def without(self, plan: Plan, claim: Claim) -> Room:
        """The same, where a plan on GPUs of another pool does not count against its tenant."""
        found = self.copy()
        found._count(plan, claim, -claim.gpus_per_worker)
        return found

    def _count(self, plan: Plan, claim: Claim, gpus_per_worker: int) -> None:
        self._lines.clear()
        if self._rooms.names:
            self._planned.add(plan, gpus_per_worker, self._rooms.path(claim.tenant))

    def line(self, claim: Claim) -> Timeline:
        """The part of it that a claim may be promised."""
        if not self._rooms.path(claim.tenant):
            return self.pool
        if claim.tenant not in self._lines:
            self._lines[claim.tenant] = self._line(claim.tenant)
        return self._lines[claim.tenant]

    def _line(self, tenant: str) -> Timeline:
        free: list[int] = []
        pool, idle = dict(self.pool.steps()), 0
        for at_s, row in zip(self._planned.times, self._planned.rows, strict=True):
            # Every GPU of the pool is planned for some tenant: no step of it is skipped.
            idle = pool.get(at_s, idle)
            free.append(min(idle, self._rooms.promised(tenant, row)))
        return Timeline.of(self._planned.times, free)

    def now(self, claim: Claim) -> float:
        """GPUs that its tenant may take now without a promise, free or not."""
        if not self._rooms.path(claim.tenant):
            return inf
        return self._rooms.unpromised(claim.tenant, self._planned.rows[0])

    def is_due(self, claim: Claim, gpus: int, depth: int) -> bool:
        """True if an idle guarantee covers this number of GPUs now, of a tenant this deep in the
        tree.
        """
        return self._rooms.is_due(claim.tenant, self._planned.rows[0].planned, gpus, depth)

    @property
    def depth(self) -> int:
        """Levels of the tree; 0: there is none."""
        return self._rooms.depth
