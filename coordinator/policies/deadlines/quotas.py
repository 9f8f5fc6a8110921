"""GPUs over time that plans may have, within what tenants allow. Must not know nodes, nor a policy.

A promise counts on nothing that another tenant's guarantee covers, used or not: a tenant below its
guarantee gets it back from whoever borrows it, and is admitted within it whatever was promised to
others. What is given without a promise may be borrowed, as far as it is lent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from msgspec import Struct

from coordinator.policies.deadlines.shares import Claim, Piece, Plan, Timeline
from coordinator.policies.floor import present_workers
from coordinator.policies.snapshot import JobView, TenantView
from coordinator.policies.tenants.lent import Claim as Has
from coordinator.policies.tenants.lent import left_to, unlent
from coordinator.policies.tenants.tenancy import WHOLE, Count, Tenancy


def has_quotas(tenants: Iterable[TenantView]) -> bool:
    """Whether anything is promised to any of them, or bounded."""
    return any(each.guarantee_gpus or each.borrow_limit_gpus is not None for each in tenants)


class Held(Struct, frozen=True, kw_only=True):
    """A plan on GPUs that are no matter of the pool at hand, and whose it is."""

    tenant: str
    plan: Plan
    gpus_per_worker: int


class Quotas(Struct, frozen=True, kw_only=True):
    """What tenants may have; the default: there is nothing to keep.

    capacity: GPUs of the cell. views: tenants by name, parents before children. held: what counts
        against them beside the claims at hand. used: GPUs that each has now; more than it may have
        is not taken from it.
    """

    capacity: int = 0
    views: Mapping[str, TenantView] = {}
    held: tuple[Held, ...] = ()
    used: Mapping[str, Count] = {}

    def path(self, name: str) -> tuple[str, ...]:
        """A tenant, its parent, and so on."""
        found: list[str] = []
        while name in self.views:
            found.append(name)
            name = self.views[name].parent
        return tuple(found)

    def room(self, name: str, planned: Mapping[str, Count], *, is_promise: bool) -> float:
        """GPUs that a tenant may still have beside what is planned for each."""
        limits = (self._limit(each) - planned[each] for each in self.path(name))
        return min(self._most(name, planned, is_promise=is_promise) - planned[name], *limits)

    def _limit(self, name: str) -> float:
        view = self.views[name]
        if view.borrow_limit_gpus is None:
            return inf
        return float(max(view.guarantee_gpus + view.borrow_limit_gpus, self.used.get(name, 0)))

    def _most(self, name: str, planned: Mapping[str, Count], *, is_promise: bool) -> float:
        """GPUs that others leave to it; a promise counts on its guarantee in any case."""
        view = self.views[name]
        others: list[Has] = []
        for other, theirs in self.views.items():
            if theirs.parent == view.parent and other != name:
                kept = self._kept(other, planned)
                if is_promise:
                    kept = max(0.0, float(theirs.guarantee_gpus - planned[other]))
                gpus = theirs.guarantee_gpus
                others.append(Has(guarantee_gpus=gpus, used=float(planned[other]), kept=kept))
        if view.parent == WHOLE:
            most = float(self.capacity) - sum(each.used + each.kept for each in others)
        else:
            whole = self._most(view.parent, planned, is_promise=is_promise)
            most = left_to(view.guarantee_gpus, min(whole, self._limit(view.parent)), others)
            if not is_promise:
                return most
        return max(float(view.guarantee_gpus), most)

    def _kept(self, name: str, planned: Mapping[str, Count]) -> float:
        """GPUs of its idle guarantee that a tenant does not lend, or those below it do not."""
        children = (child for child, view in self.views.items() if view.parent == name)
        below = sum(self._kept(child, planned) for child in children)
        return float(max(unlent(self.views[name], float(planned[name])), below))


def quotas_beside(
    tenancy: Tenancy, gpus: int, jobs: Iterable[JobView], plans: Mapping[str, Plan], now_s: float
) -> Quotas:
    """What tenants may have of so many GPUs beside jobs that are no matter of the pool at hand.

    plans: of those that were promised something; whoever else has workers keeps them.
    """
    held: list[Held] = []
    for job in jobs:
        plan = plans.get(job.job_id, ())
        if not plan and job.placed:
            plan = (Piece(now_s, inf, present_workers(job)),)
        held.append(Held(tenant=tenancy.leaf(job), plan=plan, gpus_per_worker=job.gpus_per_worker))
    return Quotas(capacity=gpus, views=tenancy.views, held=tuple(held), used=tenancy.used)


class Room:
    """Free GPUs of a pool over time, and those that each tenant is planned to have."""

    def __init__(self, start_s: float, gpus: int, quotas: Quotas) -> None:
        self.pool = Timeline(start_s, gpus)
        self._start_s = start_s
        self._quotas = quotas
        # Nothing is free of nothing: what is planned counts below zero.
        self._lines = {name: Timeline(start_s, 0) for name in quotas.views}
        for each in quotas.held:
            for name in quotas.path(each.tenant):
                self._lines[name].take(each.plan, each.gpus_per_worker)

    def take(self, plan: Plan, claim: Claim) -> None:
        """A plan holds its GPUs."""
        for line in self._of(claim):
            line.take(plan, claim.gpus_per_worker)

    def give(self, plan: Plan, claim: Claim) -> None:
        """The opposite of `take`."""
        for line in self._of(claim):
            line.give(plan, claim.gpus_per_worker)

    def _of(self, claim: Claim) -> list[Timeline]:
        return [self.pool, *(self._lines[name] for name in self._quotas.path(claim.tenant))]

    def line(self, claim: Claim) -> Timeline:
        """What a claim may be promised of it."""
        if claim.tenant not in self._lines:
            return self.pool
        everyone = (self.pool, *self._lines.values())
        found = Timeline(self._start_s, 0)
        found.times = sorted({at_s for line in everyone for at_s in line.times})
        found.free = [self._free(claim, at_s) for at_s in found.times]
        return found

    def _free(self, claim: Claim, at_s: float) -> int:
        room = self._quotas.room(claim.tenant, self._planned(at_s), is_promise=True)
        return int(min(self.pool.at(at_s), room))

    def now(self, claim: Claim) -> float:
        """GPUs that its tenant may take now without a promise, free or not."""
        if claim.tenant not in self._lines:
            return inf
        return self._quotas.room(claim.tenant, self._planned(self._start_s), is_promise=False)

    def _planned(self, at_s: float) -> dict[str, int]:
        return {name: -line.at(at_s) for name, line in self._lines.items()}
