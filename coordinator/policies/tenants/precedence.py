"""Room kept for jobs of a higher priority: no lesser job takes what one of these waits for or has.

A policy may start any job that fits, or serve tenants by a measure of its own. Small jobs of low
priority then take each GPU that comes free, and a wide gang of higher priority never finds its
room. So a pass in which a lesser job starts is checked. For each waiting job of higher priority,
nodes are chosen on which it could run soonest, by the estimated remaining time of the jobs there.
Where a lesser job starts on these nodes, the pass is repeated as if it had to avoid them, unless it
will be over by then (EASY backfilling, Lifka, JSSPP'95). The estimate counts as late by its
source's known error.

Nor is a job stopped for one of a lower priority: a policy that gives GPUs out in rounds, turns or
leases would stop the most important job because it had more than others. That pass is taken again
as if that job had to rest. A deadline that is still ahead is a reason of another kind, as it may
have been promised: for this job others are stopped as the policy says. Between tenants that share
by weight, and under a policy that divides by tenants itself, all that holds within a tenant: else
one would keep another's GPUs by the height of its priorities.

Jobs of one priority are the policy's own matter, as is who of those that fit starts: a job that
could start at once and that the policy leaves waiting all the same keeps no room from others. What
a guarantee covers is not kept from its owner for a job that none covers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName, Preemptibility
from coordinator.policies.contract.decisions import Allocation, PendingReason, Preempt, Start
from coordinator.policies.contract.estimates import base_runtime_s, ends_at_s, late_ratio
from coordinator.policies.contract.node_names import NodeNames, sorted_names
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.contract.text import listed
from coordinator.policies.tenants.entitlements import is_covered
from coordinator.policies.tenants.infeasible import Fleet
from coordinator.policies.tenants.tenancy import Tenancy

MOST_KEPT = 16
"""Nodes are kept for this number of jobs: of the highest priority those that wait longest."""

MOST_TRIES = 4
"""The limit of repeated passes, each time for fewer jobs that the policy leaves waiting."""

SLACK_S = 60.0
"""A job on these nodes must end this long before they are needed: a start takes time."""

Decide = Callable[[ClusterSnapshot, bytes], Allocation]
Explain = Callable[[ClusterSnapshot, bytes], tuple[PendingReason, ...]]


class Kept(Struct, frozen=True, kw_only=True):
    """Nodes that are kept for a job, and from when on it could run on them."""

    job: JobView
    nodes: frozenset[NodeName]
    ready_at_s: float


def allocated(
    decide: Decide, snapshot: ClusterSnapshot, memory: bytes, *, by_tenant: bool = False
) -> Allocation:
    """A pass of a policy in which no lesser job takes room that is kept, or is held.

    by_tenant: the policy divides by tenants itself.
    """
    return _kept(partial(_stopping_none, decide, by_tenant), snapshot, memory)[0]


def _stopping_none(
    decide: Decide, by_tenant: bool, snapshot: ClusterSnapshot, memory: bytes
) -> Allocation:
    """A pass in which no job is stopped for a lesser job."""
    made, resting = decide(snapshot, memory), set[JobId]()
    within_tenants = by_tenant or bool(snapshot.tenants)
    for _ in range(MOST_TRIES):
        robbed = _robbed(snapshot, made, within_tenants=within_tenants)
        if not robbed:
            break
        resting |= robbed
        jobs = tuple(
            replace(job, is_resting=True) if job.job_id in resting else job for job in snapshot.jobs
        )
        made = decide(replace(snapshot, jobs=jobs, index=None), memory)
    return made


def _robbed(snapshot: ClusterSnapshot, made: Allocation, *, within_tenants: bool) -> set[JobId]:
    """Jobs that are stopped where lesser ones start that would have no room there without it."""
    stopped = {each.job_id for each in made.decisions if isinstance(each, Preempt)}
    begun = _starts(made) if stopped else {}
    if not begun:
        return set()
    jobs = {job.job_id: job for job in snapshot.jobs}
    victims = sorted((jobs[name] for name in stopped & jobs.keys()), key=lambda job: -job.priority)
    started = [
        (jobs[each.job_id], placement.node, placement.worker_count)
        for each in made.decisions
        if isinstance(each, Start) and each.job_id in jobs
        for placement in each.placements
    ]
    free = {node.name: node.free_gpus for node in snapshot.nodes}
    found, now_s = set[JobId](), snapshot.now_s
    for victim in victims:
        mine = {worker.node for worker in victim.placed if not worker.is_leaving}
        wants, room = dict.fromkeys(mine, 0), {name: free.get(name, 0) for name in mine}
        for job, name, count in started:
            is_lesser = job.priority < victim.priority and (job.deadline_at_s or 0.0) <= now_s
            if name in mine and is_lesser and (not within_tenants or job.tenant == victim.tenant):
                wants[name] += count * job.gpus_per_worker
        for other in victims:
            for worker in other.placed if other.priority < victim.priority else ():
                if worker.node in mine and not worker.is_leaving:
                    room[worker.node] += worker.freed_gpus
        if any(wants[name] > room[name] for name in mine):
            found.add(victim.job_id)
    return found


def _kept(
    decide: Decide, snapshot: ClusterSnapshot, memory: bytes
) -> tuple[Allocation, dict[JobId, list[Kept]]]:
    """The pass, and the nodes that are kept from jobs in it."""
    first = decide(snapshot, memory)
    passed = _passed(snapshot, first)
    if not passed:
        return first, {}
    keeping = _Keeping(snapshot)
    kept = keeping.of(passed)
    for _ in range(MOST_TRIES):
        barred = keeping.barred(kept)
        if not _takes(first, barred):
            return first, barred
        made = decide(_avoiding(snapshot, barred), memory)
        begun, now_s = _starts(made), snapshot.now_s
        left = [each for each in kept if each.ready_at_s > now_s or each.job.job_id in begun]
        if len(left) == len(kept):
            return made, barred
        kept = left
    return first, {}


def explained(
    decide: Decide,
    explain: Explain,
    snapshot: ClusterSnapshot,
    memory: bytes,
    *,
    by_tenant: bool = False,
) -> tuple[PendingReason, ...]:
    """Why jobs wait: by the policy, and the jobs for which room is kept from them."""
    holds = explain(snapshot, memory)
    made, barred = _kept(partial(_stopping_none, decide, by_tenant), snapshot, memory)
    begun, why = _starts(made), {job_id: _told(snapshot, kept) for job_id, kept in barred.items()}
    found = [
        replace(hold, blockers=(*hold.blockers, why.pop(hold.job_id)))
        if hold.blockers and hold.job_id in why
        else hold
        for hold in holds
        if hold.job_id not in begun  # it starts, since room is kept from others
    ]
    said = {hold.job_id for hold in holds}
    found += [
        PendingReason(job_id=job_id, blockers=(reason,))
        for job_id, reason in sorted(why.items())
        if job_id not in begun.keys() | said
    ]
    return tuple(found)


def _told(snapshot: ClusterSnapshot, kept: Sequence[Kept]) -> str:
    return "; ".join(
        f"{listed(sorted(each.nodes), 'is', 'are')} kept for {each.job.job_id}, which waits with "
        f"priority {each.job.priority} and can have "
        f"{'it' if len(each.nodes) == 1 else 'them'} in {each.ready_at_s - snapshot.now_s:.0f} s"
        for each in kept
    )


def _passed(snapshot: ClusterSnapshot, made: Allocation) -> list[JobView]:
    """Jobs that wait on though a lesser one starts, the most important and oldest first."""
    begun = _starts(made)
    if not begun:
        return []
    jobs = snapshot.jobs
    least = min((job.priority for job in jobs if job.job_id in begun), default=0)
    found = [
        job
        for job in jobs
        if job.priority > least and job.state == JobState.PENDING and job.job_id not in begun
    ]
    return sorted(found, key=lambda job: (-job.priority, job.submitted_at_s, job.job_id))


def _starts(made: Allocation) -> dict[JobId, set[NodeName]]:
    return {
        each.job_id: {placement.node for placement in each.placements}
        for each in made.decisions
        if isinstance(each, Start)
    }


def _takes(made: Allocation, barred: dict[JobId, list[Kept]]) -> bool:
    """True if any job starts where room is kept from it."""
    return any(
        not nodes.isdisjoint(each.nodes)
        for job_id, nodes in _starts(made).items()
        for each in barred.get(job_id, ())
    )


def _avoiding(snapshot: ClusterSnapshot, barred: dict[JobId, list[Kept]]) -> ClusterSnapshot:
    both: dict[tuple[frozenset[NodeName], tuple[NodeName, ...]], NodeNames] = {}

    def seen(job: JobView) -> JobView:
        kept = barred.get(job.job_id)
        if kept is None:
            return job
        nodes = frozenset(name for each in kept for name in each.nodes)
        like = (nodes, job.nodes.avoided)
        if like not in both:
            both[like] = sorted_names(nodes.union(job.nodes.avoided))
        return replace(job, nodes=replace(job.nodes, avoided=both[like]))

    return replace(snapshot, jobs=tuple(map(seen, snapshot.jobs)), index=None)


class _Keeping:
    """One pass: the room to keep, and the jobs to keep it from."""

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self._now_s = snapshot.now_s
        self._snapshot = snapshot
        self._nodes = [
            node for node in snapshot.nodes if node.is_schedulable and not node.is_reclaimed
        ]
        self._max_grace_s = {each.name: each.max_grace_s for each in snapshot.services}
        self._ends_at_s = ends_at_s(snapshot)
        self._claimed: dict[NodeName, int] = {}
        self._tenancy = None
        if any(tenant.guarantee_gpus for tenant in snapshot.tenants):
            self._tenancy = Tenancy(snapshot)

    #   --- the jobs to keep room for --------------------------------------------------------------

    def of(self, jobs: Iterable[JobView]) -> list[Kept]:
        """Nodes for the first of some jobs that could run on those that there are."""
        found: list[Kept] = []
        fleet = Fleet(self._snapshot)
        for job in jobs:
            if len(found) == MOST_KEPT:
                break
            if not fleet.is_never(job) and (kept := self._soonest(job)) is not None:
                found.append(kept)
        return found

    def _soonest(self, job: JobView) -> Kept | None:
        kinds = job.gpu.types or tuple(sorted({node.gpu_type for node in self._nodes}))
        ways = (self._on(job, kind) for kind in kinds)
        best = min((way for way in ways if way is not None), key=lambda way: way[0], default=None)
        if best is None:
            return None
        ready_at_s, names = best
        for name in names:
            self._claimed[name] = self._claimed.get(name, 0) + job.gpus_per_worker
        return Kept(job=job, nodes=frozenset(names), ready_at_s=ready_at_s)

    def _on(self, job: JobView, kind: str) -> tuple[float, list[NodeName]] | None:
        """When its base gang has room on a GPU type at the soonest, and the node of each worker."""
        count = job.workers_on(kind).min
        openings = [
            (at_s, node.name)
            for node in self._nodes
            if node.gpu_type == kind and self._may_have(job, node)
            for at_s in self._openings(node, job.gpus_per_worker, count)
        ]
        openings.sort()
        if len(openings) < count:
            return None
        return openings[count - 1][0], [name for _, name in openings[:count]]

    def _may_have(self, job: JobView, node: NodeView) -> bool:
        if node.name in job.nodes.avoided:
            return False
        if node.service is None:
            return True
        willing = job.preemptibility == Preemptibility.FULL
        return willing and job.grace_s <= self._max_grace_s.get(node.service, -1.0)

    def _openings(self, node: NodeView, size: int, most: int) -> list[float]:
        """When a node has room for a first worker, a second one, ..; in order of time."""
        free = node.free_gpus - self._claimed.get(node.name, 0)
        found = [self._now_s] * min(most, max(0, free // size))
        ends = sorted(
            (self._ends_at_s.get(worker.job_id, inf), worker.freed_gpus)
            for worker in node.workers
            if not worker.is_leaving
        )
        for at_s, gpus in ends:
            if len(found) >= most or at_s == inf:
                break
            free += gpus
            found += [at_s] * (max(0, free // size) - len(found))
        return found[:most]

    #   --- the jobs to keep it from ---------------------------------------------------------------

    def barred(self, kept: Sequence[Kept]) -> dict[JobId, list[Kept]]:
        """The nodes kept from each lesser waiting job."""
        found: dict[JobId, list[Kept]] = {}
        for job in self._snapshot.jobs if kept else ():
            if job.state == JobState.PENDING:
                mine = [each for each in kept if self._bars(each, job)]
                if mine:
                    found[job.job_id] = mine
        return found

    def _bars(self, kept: Kept, job: JobView) -> bool:
        if job.priority >= kept.job.priority or self._is_over_by(job, kept.ready_at_s):
            return False
        tenancy = self._tenancy
        return tenancy is None or not is_covered(tenancy, job) or is_covered(tenancy, kept.job)

    def _is_over_by(self, job: JobView, at_s: float) -> bool:
        ratio = late_ratio(job.estimate.source)
        if ratio is None:
            return False
        longest_s = max(base_runtime_s(job, kind, self._now_s) for kind in (job.gpu.types or ("",)))
        return self._now_s + ratio * longest_s + SLACK_S <= at_s
