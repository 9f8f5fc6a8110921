"""What tenants allow under every policy: quotas, guarantees, and borrowers that give back."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName
from coordinator.policies.bundles import POLICIES, Policy
from coordinator.policies.decisions import Decision, Placement, Preempt, Resize, Start
from coordinator.policies.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.tenants.guarding import guarded
from coordinator.policies.tenants.takeback import taken_back
from tests.builders import make_job_view, make_node_view, make_snapshot, make_worker_view
from tests.strategies import snapshots

slow = pytest.mark.slow
often = settings(max_examples=150, deadline=None)

NAMES = ("a", "b", "c", "d", "nobody")
"""`c` and `d` are part of `p`; nothing is promised to `nobody`."""


@st.composite
def shared_cells(draw: st.DrawFn) -> ClusterSnapshot:
    """Generated clusters whose jobs belong to tenants in two levels."""
    snapshot = draw(snapshots())
    jobs = tuple(replace(job, tenant=draw(st.sampled_from(NAMES))) for job in snapshot.jobs)
    few = st.integers(0, 12)
    limit = st.one_of(st.none(), st.integers(0, 8))
    inner = {name: draw(few) for name in "cd"}
    tenants = [
        TenantView(name="p", guarantee_gpus=sum(inner.values()) + draw(few)),
        *(
            TenantView(
                name=name,
                parent="p" if name in inner else "",
                guarantee_gpus=inner[name] if name in inner else draw(few),
                borrow_limit_gpus=draw(limit),
                lend_limit_gpus=draw(limit),
            )
            for name in "abcd"
        ),
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
        """Whether a job counts for a tenant."""
        parent = self.tenants[job.tenant].parent if job.tenant in self.tenants else ""
        return name in (job.tenant, parent)

    def _count(self, job: JobView, gpus: int) -> None:
        for name in (*self.tenants, "nobody"):
            if self.is_part(job, name):
                self.used[name] += gpus

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
        for worker in job.placed:
            if worker.worker_index in indices and not worker.is_leaving:
                left[worker.node] += worker.gpus
        self._count(job, -left.total())
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


def check(snapshot: ClusterSnapshot, decisions: tuple[Decision, ...]) -> Books:
    """Carry decisions out, and look whether each tenant keeps what it is promised."""
    books = Books(snapshot)
    free, before = dict(books.free), Counter(books.used)
    for decision in decisions:
        books.carry_out(decision)
    for name, tenant in books.tenants.items():
        after = books.used[name]
        if tenant.borrow_limit_gpus is not None:
            assert after <= max(before[name], tenant.guarantee_gpus + tenant.borrow_limit_gpus)
        if before[name] <= tenant.guarantee_gpus and after < before[name]:
            assert not books.lost_to_others(name, free), f"{name} lost its guarantee"
    return books


@slow
@often
@given(policy=st.sampled_from(sorted(POLICIES)), snapshot=shared_cells())
def test_no_policy_breaks_a_quota_or_takes_from_a_guarantee(
    policy: str, snapshot: ClusterSnapshot
) -> None:
    """Under every policy; the GPUs that are given away are there; the guard has no more to say."""
    decisions = POLICIES[policy].allocate(snapshot, b"").decisions
    check(snapshot, decisions)
    assert guarded(snapshot, decisions) == (decisions, ())


@slow
@often
@given(policy=st.sampled_from(sorted(POLICIES)), snapshot=shared_cells())
def test_who_waits_for_a_quota_is_told_so(policy: str, snapshot: ClusterSnapshot) -> None:
    """A job whose tenant has no room does not start, and its only blocker names its tenant."""
    made: Policy = POLICIES[policy]
    started = {d.job_id for d in made.allocate(snapshot, b"").decisions if isinstance(d, Start)}
    for hold in made.hold(snapshot, b""):
        if any(why.startswith("tenant ") for why in hold.blockers):
            books = Books(snapshot)
            tenant = books.tenants.get(books.jobs[hold.job_id].tenant)
            within = tenant is not None and tenant.guarantee_gpus > books.used[tenant.name]
            assert within or hold.job_id not in started


@slow
@often
@given(policy=st.sampled_from(sorted(POLICIES)), snapshot=snapshots())
def test_without_promises_tenants_change_nothing(policy: str, snapshot: ClusterSnapshot) -> None:
    """Tenants that are promised nothing and bounded by nothing are as good as none."""
    named = replace(snapshot, tenants=(TenantView(name="t"),))
    made = POLICIES[policy]
    assert made.allocate(named, b"") == made.allocate(snapshot, b"")


# --- by hand ------------------------------------------------------------------------------------

A8 = TenantView(name="a", guarantee_gpus=8)
B8 = TenantView(name="b", guarantee_gpus=8)


def runs(name: str, tenant: str, node: str, gpus: int, *, lost_gpu_s: float = 0.0) -> JobView:
    """A job of one worker that runs."""
    made = make_job_view(
        name,
        state=JobState.RUNNING,
        gpus_per_worker=gpus,
        placed=(make_worker_view(name, 0, node, gpus=gpus),),
        lost_if_preempted_gpu_s=lost_gpu_s,
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


def test_a_tenant_within_its_guarantee_is_not_stopped_for_another() -> None:
    """Neither is its job stopped nor does the other start."""
    snapshot = cell(runs("r", "a", "n0", 8), waits("w", "b", 8), tenants=(A8, B8), nodes=1)
    kept, dropped = guarded(snapshot, (stop("r"), start("w", "n0")))
    assert kept == ()
    assert ["loses nothing" in each.why for each in dropped] == [True, False]


def test_a_tenant_may_stop_its_own_job_for_its_own() -> None:
    """What it leaves of it is nobody's in this pass: an outsider does not start there."""
    snapshot = cell(
        runs("r", "a", "n0", 8),
        waits("own", "a", 4),
        waits("other", "b", 4),
        tenants=(A8, B8),
        nodes=1,
    )
    decisions = (stop("r"), start("own", "n0"), start("other", "n0"))
    assert guarded(snapshot, decisions)[0] == decisions[:2]


def test_what_is_borrowed_may_go_to_another() -> None:
    """A stop is no loss of a guarantee while the tenant holds more than that before it."""
    snapshot = cell(
        runs("r1", "a", "n0", 8),
        runs("r2", "a", "n1", 8),
        waits("w1", "b", 8),
        waits("w2", "b", 8),
        tenants=(A8, B8),
    )
    decisions = (stop("r1"), stop("r2"), start("w1", "n0"), start("w2", "n1"))
    kept, _ = guarded(snapshot, decisions)
    assert names(kept, Preempt) == {"r1"}
    assert names(kept, Start) == {"w1"}


def test_flexible_workers_go_before_the_gang_is_refused() -> None:
    """Room for six GPUs: of two base and six flexible workers four flexible ones start."""
    job = replace(make_job_view("w", workers=(2, 8)), tenant="a")
    snapshot = cell(job, tenants=(TenantView(name="a", guarantee_gpus=4, borrow_limit_gpus=2),))
    node = NodeName("n0")
    asked = Start(
        job_id=job.job_id,
        gpu_type="H100",
        placements=(
            Placement(node=node, worker_count=2),
            Placement(node=node, worker_count=6, is_flexible=True),
        ),
        estimated_runtime_s=60.0,
        estimate_source="declared",
        reason="test",
    )
    (kept,), _ = guarded(snapshot, (asked,))
    assert isinstance(kept, Start)
    assert [placement.worker_count for placement in kept.placements] == [2, 4]
    assert kept.estimated_runtime_s == 80.0


def test_a_job_that_its_quota_holds_blocks_nobody() -> None:
    """Strict order of submission, and the head's tenant has no room: the next one starts."""
    snapshot = cell(
        runs("r", "a", "n0", 8),
        waits("head", "a", 8),
        waits("next", "b", 8, submitted_at_s=1.0),
        tenants=(TenantView(name="a", guarantee_gpus=8, borrow_limit_gpus=0),),
    )
    decisions = POLICIES["fifo"].allocate(snapshot, b"").decisions
    assert names(decisions, Start) == {"next"}
    (hold,) = (h for h in POLICIES["fifo"].hold(snapshot, b"") if h.job_id == "head")
    assert "borrow limit of 0" in hold.blockers[0]


def test_a_job_without_room_blocks_nobody_where_it_does_not_fit_either() -> None:
    """Strict order, the head wants both nodes and its tenant may have one: the next one starts."""
    head = replace(make_job_view("head", workers=(2, 2), gpus_per_worker=8), tenant="a")
    snapshot = cell(
        runs("r", "a", "n0", 8),
        head,
        waits("next", "b", 8, submitted_at_s=1.0),
        tenants=(TenantView(name="a", guarantee_gpus=8, borrow_limit_gpus=0),),
    )
    assert names(POLICIES["fifo"].allocate(snapshot, b"").decisions, Start) == {"next"}


def test_what_a_quota_refuses_goes_to_others_in_the_same_pass() -> None:
    """Two of a tenant fit alone and not together: the room of the second is another's."""
    snapshot = cell(
        waits("a1", "a", 8),
        waits("a2", "a", 8, submitted_at_s=1.0),
        waits("b1", "b", 8, submitted_at_s=2.0),
        tenants=(TenantView(name="a", guarantee_gpus=8, borrow_limit_gpus=0),),
    )
    decisions = POLICIES["fifo"].allocate(snapshot, b"").decisions
    assert names(decisions, Start) == {"a1", "b1"}


@pytest.mark.parametrize("policy", ["fifo", "aryl", "srtf"])
def test_a_tenant_gets_its_guarantee_back(policy: str) -> None:
    """Of two jobs of a borrower the one that loses less is stopped, and the owed job starts."""
    snapshot = cell(
        runs("dear", "a", "n0", 8, lost_gpu_s=900.0),
        runs("cheap", "a", "n1", 8, lost_gpu_s=10.0),
        waits("owed", "b", 8),
        tenants=(A8, B8),
    )
    decisions = POLICIES[policy].allocate(snapshot, b"").decisions
    check(snapshot, decisions)
    assert names(decisions, Start) == {"owed"}
    assert len(names(decisions, Preempt)) == 1
    if policy != "srtf":  # which has a rule of its own
        assert names(decisions, Preempt) == {"cheap"}


def test_flexible_workers_are_given_back_before_a_job_is_stopped() -> None:
    """As many as are needed, and nobody else is touched."""
    elastic = replace(
        make_job_view(
            "e",
            state=JobState.RUNNING,
            workers=(2, 8),
            placed=[make_worker_view("e", i, "n0", is_flexible=i >= 2) for i in range(8)],
        ),
        tenant="a",
    )
    snapshot = cell(
        elastic,
        runs("r", "a", "n1", 8),
        waits("owed", "b", 4),
        tenants=(A8, B8),
    )
    decisions = taken_back(snapshot, ())
    assert names(decisions, Start) == {"owed"}
    (shrunk,) = (d for d in decisions if isinstance(d, Resize))
    assert len(shrunk.removed_workers) == 4
    assert not names(decisions, Preempt)


def test_a_borrower_does_not_start_where_a_guarantee_is_due() -> None:
    """The pass would give the last node to a borrower: that start is dropped, nobody is stopped."""
    snapshot = cell(
        runs("r", "a", "n0", 8), waits("more", "a", 8), waits("owed", "b", 8), tenants=(A8, B8)
    )
    assert taken_back(snapshot, (start("more", "n1"),))[-1].reason.startswith("tenant b is due")
    assert names(taken_back(snapshot, (start("more", "n1"),)), Start) == {"owed"}


def test_only_borrowers_give_back_however_cheap_others_are() -> None:
    """A stop of the third tenant's job would lose nothing, but it is within its guarantee."""
    snapshot = cell(
        runs("dear", "a", "n0", 8, lost_gpu_s=900.0),
        runs("more", "a", "n1", 8, lost_gpu_s=950.0),
        runs("cheap", "c", "n2", 8),
        waits("owed", "b", 8),
        tenants=(A8, B8, TenantView(name="c", guarantee_gpus=8)),
        nodes=3,
    )
    assert names(taken_back(snapshot, ()), Preempt) == {"dear"}


def test_nobody_is_stopped_in_vain_for_a_guarantee() -> None:
    """The cheapest job is no help, as its node stays half full: only the next one is stopped."""
    snapshot = cell(
        runs("half", "a", "n0", 4),
        runs("stays", "c", "n0", 4),
        runs("whole", "a", "n1", 8, lost_gpu_s=5.0),
        waits("owed", "b", 8),
        tenants=(TenantView(name="a"), B8, TenantView(name="c", guarantee_gpus=4)),
    )
    decisions = taken_back(snapshot, ())
    assert names(decisions, Preempt) == {"whole"}
    assert names(decisions, Start) == {"owed"}


@pytest.mark.parametrize(
    ("guarantee", "wants", "free_nodes"),
    [(8, 8, 1), (4, 8, 0), (0, 4, 0)],
    ids=["there is room", "larger than its guarantee", "promised nothing"],
)
def test_nothing_is_taken_back_without_right(guarantee: int, wants: int, free_nodes: int) -> None:
    """Neither where there is room, nor beyond a guarantee: the borrower keeps what it has."""
    snapshot = cell(
        runs("r1", "a", "n0", 8),
        runs("r2", "a", "n1", 8),
        waits("w", "b", wants),
        tenants=(A8, TenantView(name="b", guarantee_gpus=guarantee)),
        nodes=2 + free_nodes,
    )
    assert taken_back(snapshot, ()) == ()


def test_within_a_division_teams_give_each_other_back_first() -> None:
    """A sibling that borrows of the division's guarantee gives it back; outsiders lose nothing."""
    tenants = (
        TenantView(name="p", guarantee_gpus=16),
        TenantView(name="c", parent="p", guarantee_gpus=8),
        TenantView(name="d", parent="p", guarantee_gpus=8),
    )
    snapshot = cell(
        runs("d1", "d", "n0", 8),
        runs("d2", "d", "n1", 8, lost_gpu_s=5.0),
        waits("owed", "c", 8),
        tenants=tenants,
    )
    decisions = taken_back(snapshot, ())
    assert names(decisions, Preempt) == {"d1"}
    assert guarded(snapshot, decisions) == (decisions, ())
