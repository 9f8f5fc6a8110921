"""Fair shares by weight: tenants below their share take GPUs outside all guarantees first.

The shares are those of `tenancy`, as `aryl tenant list` shows them (KAI-Scheduler's rule). A tenant
that has its share stands behind a waiting sibling that has not, at the level of the tree where they
part. Jobs are whole, so a tenant may pass its share by part of its last job. Weights stop no
running job and keep no GPU free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from msgspec import Struct

from common.model import JobId, JobState
from coordinator.policies.contract.decisions import Decision, Preempt, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.contract.text import counted
from coordinator.policies.tenants.gpu_flow import Flow, Move, gang_on, more_free, moves_of
from coordinator.policies.tenants.tenancy import Tenancy, waiting_gpus

EPSILON_GPUS = 1e-9
"""Shares are sums of parts: this little below a share is at it."""


def are_weighed(tenancy: Tenancy) -> bool:
    """True if any tenant has a sibling to share with by weight; otherwise nothing is computed."""
    return any(len(siblings) > 1 for siblings in tenancy.children.values())


class Weighed(Struct, frozen=True, kw_only=True):
    """The decisions of one pass among the siblings of one level.

    beyond: jobs that start although their tenant has its share, in the order of the decisions.
    behind: those of them, and of the waiting jobs, whose turn comes after a sibling's.
    short: jobs that wait on or are stopped, of the tenants whose turn it is.
    """

    beyond: tuple[JobView, ...]
    behind: tuple[JobView, ...]
    short: frozenset[JobId]


class Scale:
    """One pass on the scale of fair shares.

    shares: GPUs by tenant. levels: of the tree, the outermost is 0.
    """

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self._snapshot = snapshot
        self._flow = Flow(snapshot)
        tenancy = Tenancy(snapshot)
        self.shares: Mapping[str, float] = tenancy.fair_shares(waiting_gpus(snapshot, tenancy))
        self.levels = range(max((len(tenancy.path(job)) for job in snapshot.jobs), default=0))

    def weighed(
        self, decisions: Sequence[Decision], hidden: Set[JobId] = frozenset(), *, level: int
    ) -> Weighed:
        """The decisions of a pass among the siblings of a level; hidden jobs wait for others."""
        tenancy = Tenancy(self._snapshot)
        beyond = self._carry_out(tenancy, decisions, level)
        gone = {each.job_id for each in decisions if isinstance(each, Preempt)}
        begun = {each.job_id for each in decisions if isinstance(each, Start)}
        waits = [
            job
            for job in self._snapshot.jobs
            if job.state == JobState.PENDING and job.job_id not in hidden | begun
        ]
        lacking = [*waits, *(job for job in self._snapshot.jobs if job.job_id in gone - begun)]
        names = {name for each in lacking if (name := _at(tenancy, each, level)) is not None}
        below = {name for name in names if not self.is_met(tenancy, name)}
        groups = (each for each in tenancy.children.values() if not below.isdisjoint(each))
        after = {name for each in groups for name in each if self.is_met(tenancy, name)}
        return Weighed(
            beyond=tuple(beyond),
            behind=tuple(each for each in (*beyond, *waits) if _at(tenancy, each, level) in after),
            short=frozenset(each.job_id for each in lacking if _at(tenancy, each, level) in below),
        )

    def _carry_out(
        self, tenancy: Tenancy, decisions: Sequence[Decision], level: int
    ) -> list[JobView]:
        """Count what decisions move, but for the starts of tenants that have their share; these."""
        beyond: list[JobView] = []
        for move in moves_of(self._flow, decisions):
            tenancy.leave(move.job, move.gone)
            name = _at(tenancy, move.job, level)
            is_start = isinstance(move.decision, Start)
            if is_start and name is not None and self.is_met(tenancy, name):
                beyond.append(move.job)
            else:
                tenancy.take(move.job, sum(move.taken.values()))
        return beyond

    def is_less_outside(
        self, before: Sequence[Decision], after: Sequence[Decision], *, level: int
    ) -> bool:
        """True if a tenant at an outer level has less of its share after one pass than after
        another.
        """
        if level == 0:
            return False
        old = self._tenancy_after(moves_of(self._flow, before))
        new = self._tenancy_after(moves_of(self._flow, after))
        return any(
            new.used[name] < min(old.used[name], share) - EPSILON_GPUS
            for name, share in self.shares.items()
            if len(new.path_of(name)) <= level
        )

    def _tenancy_after(self, moves: Iterable[Move]) -> Tenancy:
        tenancy = Tenancy(self._snapshot)
        for move in moves:
            tenancy.leave(move.job, move.gone)
            tenancy.take(move.job, sum(move.taken.values()))
        return tenancy

    def is_met(self, tenancy: Tenancy, name: str) -> bool:
        """Whether a tenant uses its share."""
        return tenancy.used[name] >= self.shares[name] - EPSILON_GPUS

    def fitting_jobs(self, decisions: Sequence[Decision], jobs: Iterable[JobView]) -> set[JobId]:
        """Jobs that find room, one after another, on the GPUs that a pass leaves free and within
        their tenants' limits.
        """
        moves = moves_of(self._flow, decisions)
        tenancy, more = self._tenancy_after(moves), more_free(moves)
        free = {node: gpus + more.get(node, 0) for node, gpus in self._flow.free.items()}
        nodes, found = self._flow.nodes, set[JobId]()
        for job in jobs:
            kinds = job.gpu.types or sorted({node.gpu_type for node in nodes.values()})
            room = tenancy.room(job)
            wanted = (k for k in kinds if job.base_gpus_on(k) <= room)
            gangs = (gang_on(free, nodes, job, kind) for kind in wanted)
            gang = next((each for each in gangs if each), ())
            if gang:
                found.add(job.job_id)
            for placement in gang:
                taken = placement.worker_count * job.gpus_per_worker
                free[placement.node] -= taken
                tenancy.take(job, taken)
        return found


def _at(tenancy: Tenancy, job: JobView, level: int) -> str | None:
    """The tenant of a level that a job counts for; None where the tree is not so deep there."""
    path = tenancy.path(job)
    return path[-1 - level] if level < len(path) else None


def why_behind(snapshot: ClusterSnapshot, hidden: Set[JobId]) -> dict[JobId, str]:
    """Waiting jobs whose tenant has its share while siblings wait below theirs, and that."""
    tenancy = Tenancy(snapshot)
    if not are_weighed(tenancy):
        return {}
    scale = Scale(snapshot)
    found: dict[JobId, str] = {}
    for level in scale.levels:
        for job in scale.weighed((), hidden, level=level).behind:
            name = tenancy.path(job)[-1 - level]
            why = (
                f"tenant {name} uses {counted(tenancy.used[name], 'GPU')}, and its share by "
                f"weight is {scale.shares[name]:.1f}: jobs of tenants below theirs go first"
            )
            found.setdefault(job.job_id, why)
    return found
