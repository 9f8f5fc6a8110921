"""Cells that tenants share, on the real engine, and who lost what over passes. Tests nothing.

The books know nothing of how policies or the guard count: they look at who holds what before and
after each pass, and remember what a tenant was told to leave until it has it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from common.model import JobId, NodeName, Pool, Preemptibility
from common.profile import JobProfile
from coordinator.engine.engine import Engine
from coordinator.engine.state.events import Event, PassDue
from coordinator.engine.state.settings import EngineSettings, TenantSettings
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.sim.run.cluster import Delays, NodeSpec
from coordinator.sim.run.simulation import Simulation, Submission
from tests.draws import pick
from tests.harness.builders import make_spec

NODE_GPUS = 8

ENDLESS_PASSES = 200
"""In one instant: far more than any rule asks for."""

Held = Counter[tuple[NodeName, JobId]]


class Asked(Struct, frozen=True, kw_only=True):
    """One job: whose, when it comes, and what it may use.

    speedup: of its profile, as (workers, speed); empty: linear.
    """

    tenant: str
    at_s: float = 0.0
    workers: tuple[int, int] = (1, 1)
    gpus: int = 1
    work_s: float = 3600.0
    deadline_s: float | None = None
    speedup: tuple[tuple[int, float], ...] = ()
    preemptibility: Preemptibility = Preemptibility.FULL
    priority: int = 0


class Loss(Struct, frozen=True, kw_only=True):
    """GPUs of a node that a tenant was told to leave within its guarantee, and another took."""

    at_s: float
    tenant: str
    node: NodeName
    gpus: int


class Books:
    """Who holds what, pass by pass.

    A tenant is due what it holds, up to its guarantee, until a job of its own ends. Two things are
    excused, as jobs and workers are whole: a job that is stopped where one of the same tenant
    comes, or while more is held than is guaranteed; and what is over of a worker that made room
    for a job of the same tenant.

    losses: GPUs that a tenant is due and another one took. idled: that it is due, has not, and that
    nobody has taken yet.
    """

    def __init__(self, tenants: Iterable[TenantSettings]) -> None:
        self._tenants = {each.name: each for each in tenants}
        self._due: dict[str, int] = dict.fromkeys(self._tenants, 0)
        self._after: dict[str, int] = dict.fromkeys(self._tenants, 0)
        self._left: dict[str, Counter[NodeName]] = {name: Counter() for name in self._tenants}
        self.losses: list[Loss] = []
        self.idled: list[Loss] = []

    def passed(
        self, before: ClusterSnapshot, held: Held, after: ClusterSnapshot, holds: Held
    ) -> None:
        """One pass, and what was there and who held it before and after it."""
        jobs = {job.job_id: job for job in (*before.jobs, *after.jobs)}
        for name, tenant in self._tenants.items():
            own = {job_id: job for job_id, job in jobs.items() if self._is_part(job, name)}
            had, has = _of(held, own), _of(holds, own)
            used, uses = had.total(), has.total()
            # What ended by itself since the last pass is due no more.
            due = max(0, self._due[name] - max(0, self._after[name] - used))
            due = max(due, min(used, tenant.guarantee_gpus))
            due -= _excused(own, held, holds, beyond=used - tenant.guarantee_gpus)
            due = max(due, min(uses, tenant.guarantee_gpus))
            left = self._left[name]
            for node in {*had, *has, *left}:
                left[node] = max(0, left[node] + had[node] - has[node])
            if uses >= due:
                left.clear()
            others = jobs.keys() - own.keys()
            grew = _of(holds, others)
            grew.subtract(_of(held, others))
            self._note(name, due - uses, grew, after)
            self._due[name], self._after[name] = due, uses

    def _note(self, name: str, short: int, grew: Counter[NodeName], after: ClusterSnapshot) -> None:
        for node in after.nodes:
            gone = min(short, self._left[name][node.name])
            taken = min(gone - node.free_gpus, grew[node.name])
            for gpus, kind in ((gone, self.idled), (taken, self.losses)):
                if gpus > 0:
                    kind.append(Loss(at_s=after.now_s, tenant=name, node=node.name, gpus=gpus))

    def _is_part(self, job: JobView, name: str) -> bool:
        tenant = job.tenant
        while tenant != name and tenant in self._tenants:
            tenant = self._tenants[tenant].parent
        return tenant == name


def held(engine: Engine, snapshot: ClusterSnapshot) -> Held:
    """GPUs by node and job, those that several share counted for the first of them.

    A job that moves holds its GPUs where it goes.

    snapshot: of this engine, now.
    """
    found: Held = Counter()
    seen: set[str] = set()
    for job in snapshot.jobs:
        for worker in job.placed:
            if not worker.is_leaving:
                found[worker.node, job.job_id] += worker.gpus - len(seen & set(worker.gpu_uuids))
                seen.update(worker.gpu_uuids)
    for job_id in engine.state.migrating_jobs:
        entry = engine.state.jobs[job_id]
        for node, _ in entry.migration.gpus if entry.migration is not None else ():
            found[node, job_id] += entry.spec.gpus_per_worker
    return +found


def _of(held: Held, jobs: Collection[JobId]) -> Counter[NodeName]:
    found: Counter[NodeName] = Counter()
    for (node, job_id), gpus in held.items():
        if job_id in jobs:
            found[node] += gpus
    return found


def _excused(own: Mapping[JobId, JobView], held: Held, holds: Held, *, beyond: int) -> int:
    """GPUs that the jobs of a tenant leave as jobs and workers are whole.

    beyond: what it held beyond its guarantee.
    """
    grown = {key for key, gpus in holds.items() if key[1] in own and gpus > held[key]}
    came = {node for node, _ in grown}
    found = 0
    for job_id, job in own.items():
        stood = {node: gpus for (node, other), gpus in held.items() if other == job_id}
        is_gone = stood and not any(other == job_id for _, other in holds)
        if is_gone and (came & stood.keys() or beyond > 0):
            found += sum(stood.values())
        elif not is_gone:
            shrunk = (node for node, gpus in stood.items() if holds[node, job_id] < gpus)
            found += sum(job.gpus_per_worker - 1 for node in shrunk if node in came)
        beyond -= sum(stood.values()) if is_gone else 0
    return found


class Cell(Simulation):
    """A training cell under a policy; its books are kept in every pass."""

    def __init__(
        self,
        policy: str,
        tenants: Sequence[TenantSettings],
        *,
        nodes: int = 2,
        resize_cooldown_s: float = 60.0,
        min_runtime_s: float = 60.0,
        delays: Delays | None = None,
        check: bool = False,
    ) -> None:
        there = [
            NodeSpec(
                name=NodeName(f"n{number}"),
                home_pool=Pool.TRAINING,
                gpu_type="H100",
                gpus=NODE_GPUS,
            )
            for number in range(nodes)
        ]
        settings = EngineSettings(
            policy=policy,
            tenants=tuple(tenants),
            resize_cooldown_s=resize_cooldown_s,
            min_runtime_s=min_runtime_s,
        )
        super().__init__(settings, there, delays=delays, check=check)
        self.books = Books(tenants)
        self._passes_at: Counter[float] = Counter()

    @property
    def passes(self) -> int:
        """All so far."""
        return sum(self._passes_at.values())

    @property
    def most_passes(self) -> int:
        """The most passes in one instant."""
        return max(self._passes_at.values(), default=0)

    def handle(self, event: Event) -> None:
        """Look before and after each pass."""
        if not isinstance(event, PassDue):
            super().handle(event)
            return
        before = self.engine.snapshot()
        had = held(self.engine, before)
        super().handle(event)
        self._passes_at[self.loop.now_s] += 1
        assert self.most_passes < ENDLESS_PASSES, f"passes without end at {self.loop.now_s} s"
        after = self.engine.snapshot()
        self.books.passed(before, had, after, held(self.engine, after))

    def ask(self, jobs: Iterable[Asked]) -> None:
        """Let jobs come; their names end with their numbers."""
        for number, each in enumerate(jobs):
            least, most = each.workers
            spec = make_spec(
                f"{each.tenant}{number}",
                workers=(least, most),
                gpus_per_worker=each.gpus,
                expected_runtime_s=each.work_s / least,
                deadline_s=each.deadline_s,
                preemptibility=each.preemptibility,
                priority=each.priority,
                profile=JobProfile(speedup=each.speedup),
            )
            name = JobId(f"{each.tenant}{number}")
            made = Submission(
                at_s=each.at_s, job_id=name, spec=spec, work_s=each.work_s, tenant=each.tenant
            )
            self.submit([made])


TENANTS = (
    TenantSettings(name="p", guarantee_gpus=8),
    TenantSettings(name="a", parent="p", guarantee_gpus=6),
    TenantSettings(name="b", guarantee_gpus=4),
    TenantSettings(name="c"),
    TenantSettings(name="d", parent="p"),
)
"""To `c` nothing is promised; to `d` only what `p` has beyond `a`."""

CONCAVE = ((1, 1.0), (2, 1.8), (4, 3.0), (8, 4.5))


@st.composite
def trees(draw: st.DrawFn) -> tuple[TenantSettings, ...]:
    """`TENANTS` with weights and limits, and most often a second tree: `c` as a team of `b`."""
    parents = {"c": draw(pick("", "b", "b"))}
    return tuple(
        replace(
            each,
            parent=parents.get(each.name, each.parent),
            weight=draw(pick(1.0, 1.0, 3.5)),
            borrow_limit_gpus=draw(pick(None, None, None, 2)),
            lend_limit_gpus=draw(pick(None, None, 0, 1)),
        )
        for each in TENANTS
    )


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    """One job of any tenant; most may use more workers than they need."""
    least = draw(pick(1, 1, 2))
    work_s = float(draw(pick(120, 600, 1800, 7200)))
    return Asked(
        tenant=draw(pick(*"aabcddp")),
        at_s=float(draw(pick(0, 0, 0, 30, 90, 300))),
        workers=(least, least + draw(pick(0, 6, 2, 6))),
        gpus=draw(pick(1, 1, 1, 2)),
        work_s=work_s,
        deadline_s=draw(pick(None, work_s * 0.7, work_s * 3)),
        speedup=draw(pick((), CONCAVE)),
        preemptibility=draw(pick(Preemptibility.FULL, Preemptibility.NON)),
    )
