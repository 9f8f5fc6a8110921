"""Cells that tenants share, by hand, and books of what decisions do to each. Tests nothing."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName
from coordinator.policies.contract.decisions import (
    Decision,
    Placement,
    Preempt,
    Resize,
    Start,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from tests.draws import together
from tests.harness.builders import make_job_view, make_node_view, make_snapshot, make_worker_view
from tests.strategies import snapshots

A8 = TenantView(name="a", guarantee_gpus=8)
B8 = TenantView(name="b", guarantee_gpus=8)


def runs(name: str, tenant: str, node: str, gpus: int, *, lost_gpu_s: float = 0.0) -> JobView:
    """A job of one worker that runs."""
    made = make_job_view(
        name,
        state=JobState.RUNNING,
        gpus_per_worker=gpus,
        placed=(make_worker_view(name, 0, node, gpus=gpus),),
        unsaved_gpu_s=lost_gpu_s,
    )
    return replace(made, tenant=tenant)


def waits(name: str, tenant: str, gpus: int, *, submitted_at_s: float = 0.0) -> JobView:
    """A job of one worker that waits."""
    made = make_job_view(name, gpus_per_worker=gpus, submitted_at_s=submitted_at_s)
    return replace(made, tenant=tenant)


def cell(*jobs: JobView, tenants: tuple[TenantView, ...], nodes: int = 2) -> ClusterSnapshot:
    """Nodes of eight GPUs."""
    there = [
        make_node_view(
            f"n{n}", workers=[w for job in jobs for w in job.placed if w.node == f"n{n}"]
        )
        for n in range(nodes)
    ]
    return replace(make_snapshot(nodes=there, jobs=jobs), tenants=tenants)


def start(name: str, node: str) -> Start:
    """One worker there."""
    return Start(
        job_id=JobId(name),
        gpu_type="H100",
        placements=(Placement(node=NodeName(node), worker_count=1),),
        estimated_runtime_s=1.0,
        estimate_source="declared",
        reason="test",
    )


def stop(name: str) -> Preempt:
    """A preemption."""
    return Preempt(job_id=JobId(name), reason="test")


def names(decisions: tuple[Decision, ...], kind: type[Start | Preempt | Resize]) -> set[str]:
    """Jobs of the decisions of a kind."""
    return {d.job_id for d in decisions if isinstance(d, kind)}


NAMES = ("a", "b", "cx", "cy", "d", "nobody")
"""`c` and `d` are part of `p`, `cx` and `cy` of `c`; nothing is promised to `nobody`."""
PARENTS = {"p": "", "a": "", "b": "", "c": "p", "d": "p", "cx": "c", "cy": "c"}


OWNERS = together(*[NAMES] * 8)
LIMITS = (*[None] * 9, *range(9))
RULES = together(range(13), (1.0, 1.0, 3.0), LIMITS, LIMITS)


@st.composite
def shared_cells(draw: st.DrawFn) -> ClusterSnapshot:
    """Generated clusters whose jobs belong to tenants in three levels, with limits at each."""
    snapshot = draw(snapshots())
    owners = (*draw(OWNERS), *draw(OWNERS))
    jobs = tuple(
        replace(job, tenant=owner) for job, owner in zip(snapshot.jobs, owners, strict=False)
    )
    rules = {name: draw(RULES) for name in PARENTS}
    promised = {name: rule[0] for name, rule in rules.items()}
    promised["c"] += promised["cx"] + promised["cy"]
    promised["p"] += promised["c"] + promised["d"]
    tenants = [
        TenantView(
            name=name,
            parent=parent,
            weight=rules[name][1],
            guarantee_gpus=promised[name],
            borrow_limit_gpus=rules[name][2],
            lend_limit_gpus=rules[name][3],
        )
        for name, parent in PARENTS.items()
    ]
    return replace(snapshot, jobs=jobs, tenants=tuple(sorted(tenants, key=lambda t: t.name)))


class Books:
    """Decisions carried out on plain counts, independent of how the policies count."""

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self.jobs = {job.job_id: job for job in snapshot.jobs}
        self.free = {node.name: node.free_gpus for node in snapshot.nodes}
        self.tenants = {tenant.name: tenant for tenant in snapshot.tenants}
        self.used: Counter[str] = Counter()
        for job in snapshot.jobs:
            self._count(job, sum(w.gpus for w in job.placed if not w.is_leaving))
        self.stops: list[tuple[JobView, dict[NodeName, int]]] = []
        self.takes: list[tuple[JobView, dict[NodeName, int]]] = []

    def is_part(self, job: JobView, name: str) -> bool:
        """Whether a job counts for a tenant: its own, or one above that."""
        own = job.tenant
        while own != name and own in self.tenants:
            own = self.tenants[own].parent
        return own == name

    def _count(self, job: JobView, gpus: int) -> None:
        for name in (*self.tenants, "nobody"):
            if self.is_part(job, name):
                self.used[name] += gpus

    def kept(self, tenant: TenantView) -> int:
        """GPUs of its idle guarantee that a tenant does not lend, or its teams do not."""
        teams = sum(self.kept(team) for team in self.tenants.values() if team.parent == tenant.name)
        if tenant.lend_limit_gpus is None:
            return teams
        return max(teams, tenant.guarantee_gpus - self.used[tenant.name] - tenant.lend_limit_gpus)

    def carry_out(self, decision: Decision) -> None:
        """Apply one decision; the GPUs it asks for must be there."""
        match decision:
            case Start():
                self._take(self.jobs[decision.job_id], decision.placements)
            case Resize():
                job = self.jobs[decision.job_id]
                self._stop(job, set(decision.removed_workers))
                self._take(job, decision.added)
            case Preempt():
                job = self.jobs[decision.job_id]
                self._stop(job, {worker.worker_index for worker in job.placed})
            case _:
                pass

    def _stop(self, job: JobView, indices: set[int]) -> None:
        left: Counter[NodeName] = Counter()
        used = 0
        for worker in job.placed:
            if worker.worker_index in indices and not worker.is_leaving:
                left[worker.node] += worker.freed_gpus
                used += worker.gpus
        self._count(job, -used)
        self.stops.append((job, dict(left)))
        for node, gpus in left.items():
            self.free[node] += gpus

    def _take(self, job: JobView, placements: tuple[Placement, ...]) -> None:
        taken: Counter[NodeName] = Counter()
        for placement in placements:
            taken[placement.node] += placement.worker_count * job.gpus_per_worker
        self._count(job, taken.total())
        self.takes.append((job, dict(taken)))
        for node, gpus in taken.items():
            self.free[node] -= gpus
            assert self.free[node] >= 0, f"{node} has not {gpus} GPUs"

    def lost_to_others(self, name: str, free: dict[NodeName, int]) -> bool:
        """Whether outsiders stand on GPUs that only the tenant's stops made free."""

        def on(moves: list[tuple[JobView, dict[NodeName, int]]], node: NodeName) -> int:
            return sum(gpus.get(node, 0) for job, gpus in moves if not self.is_part(job, name))

        mine = {node for job, left in self.stops if self.is_part(job, name) for node in left}
        return any(on(self.takes, node) > free[node] + on(self.stops, node) for node in mine)

    def left_for_nobody(self, name: str) -> list[JobId]:
        """Jobs of a tenant that could go on with more of what they had, as nobody took it."""
        found: list[JobId] = []
        took = {job.job_id for job, _ in self.takes}
        for job, left in self.stops:
            if not self.is_part(job, name) or job.job_id in took or not left:
                continue
            held = sum(w.freed_gpus for w in job.placed if not w.is_leaving)
            staying = held - sum(left.values())
            if staying:  # flexible workers, each by itself
                is_free = any(self.free[node] >= job.gpus_per_worker for node in left)
            else:
                is_free = all(self.free[node] >= gpus for node, gpus in left.items())
            if is_free:
                found.append(job.job_id)
        return found


def check_kept(snapshot: ClusterSnapshot, books: Books, before: Counter[str]) -> None:
    """A root that takes GPUs beyond its guarantee leaves the others what they do not lend, and a
    team that does leaves its siblings what they do not, of what their parent may use at most."""
    grown = {name for name in books.used if books.used[name] > before[name]}
    there = {node.name for node in snapshot.nodes if node.is_schedulable}
    free = sum(gpus for node, gpus in books.free.items() if node in there)
    barred = sum(w.gpus - w.freed_gpus for job in snapshot.jobs for w in job.placed)
    # Another root within its guarantee may have come last, to what was still kept before.
    of_right = sum(
        books.used[name] - before[name]
        for name in grown
        if name in books.tenants
        and not books.tenants[name].parent
        and books.used[name] <= books.tenants[name].guarantee_gpus
    )
    for name in grown:
        tenant = books.tenants.get(name, TenantView(name=name))
        if books.used[name] <= tenant.guarantee_gpus:
            continue
        siblings = [
            other
            for other in books.tenants.values()
            if other.parent == tenant.parent and other.name != name
        ]
        kept = sum(books.kept(other) for other in siblings)
        if not tenant.parent:
            assert kept <= free + barred + of_right, f"{name} took what others do not lend"
            continue
        parent = books.tenants[tenant.parent]
        if parent.borrow_limit_gpus is not None:
            most = parent.guarantee_gpus + parent.borrow_limit_gpus
            assert books.used[parent.name] + kept <= most, f"{name} took what siblings keep"


def check(snapshot: ClusterSnapshot, decisions: tuple[Decision, ...]) -> Books:
    """Carry decisions out, and look whether each tenant keeps what it is promised."""
    books = Books(snapshot)
    free, before = dict(books.free), Counter(books.used)
    for decision in decisions:
        books.carry_out(decision)
    check_kept(snapshot, books, before)
    for name, tenant in books.tenants.items():
        after = books.used[name]
        if tenant.borrow_limit_gpus is not None:
            assert after <= max(before[name], tenant.guarantee_gpus + tenant.borrow_limit_gpus)
        if before[name] <= tenant.guarantee_gpus and after < before[name]:
            assert not books.lost_to_others(name, free), f"{name} lost its guarantee"
            assert not books.left_for_nobody(name), f"{name} left of its guarantee for nobody"
    return books
