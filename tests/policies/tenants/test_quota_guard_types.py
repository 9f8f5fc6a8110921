"""What tenants have room for on one GPU type and not on another, where workers count otherwise."""

from __future__ import annotations

from msgspec.structs import replace

from common.model import NodeName, WorkerRange
from coordinator.policies.contract.decisions import Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.registry import POLICIES, policy
from coordinator.policies.tenants.quota_guard import narrowed
from coordinator.policies.tenants.tenancy import Tenancy
from tests.harness.builders import job_with, make_job_view, make_node_view, make_snapshot
from tests.tables import each_row

TYPES = ("A100", "H100")


BOUND = TenantView(name="a", guarantee_gpus=4, borrow_limit_gpus=0)


KEEPER = TenantView(name="b", guarantee_gpus=12, lend_limit_gpus=0)


def gang(name: str = "twice", *, types: tuple[str, ...] = TYPES) -> JobView:
    """Four GPUs of an H100 node, or eight of an A100 node."""
    made = make_job_view(name, workers=(4, 4), types=types, multiplier={"A100": 2})
    return replace(made, tenant="a")


def cell(*jobs: JobView, tenants: tuple[TenantView, ...], free: int = 8) -> ClusterSnapshot:
    """A node of each type; of that of the second so many GPUs are free."""
    nodes = [make_node_view("a", gpu_type="A100"), make_node_view("h", gpu_type="H100")]
    nodes[1] = replace(nodes[1], free_gpus=free)
    return replace(make_snapshot(nodes=nodes, jobs=jobs), tenants=tenants)


@each_row(
    ("name", "tenant"),
    [
        *((name, BOUND) for name in sorted(POLICIES)),
        *((name, KEEPER) for name in sorted(POLICIES.keys() - {"qos-elasticflow"})),
    ],
)
def test_a_job_starts_on_the_type_on_which_its_tenant_has_room(
    name: str, tenant: TenantView
) -> None:
    """It would rather have another type, on which it is twice as many GPUs."""
    tenants = (tenant,)
    found = policy(name).allocate(cell(gang(), tenants=tenants), b"").decisions
    assert [(made.job_id, made.gpu_type) for made in found if isinstance(made, Start)] == [
        ("twice", "H100")
    ]


def test_who_may_span_types_tries_that_type_first_and_may_still_use_the_other() -> None:
    """Its gang would be within the room on both together."""
    spans = replace(gang(), gpu=replace(gang().gpu, heterogeneous_speed_ratio=0.7))
    snapshot = cell(spans, tenants=(BOUND,))
    (made,) = policy("fifo-skip").allocate(snapshot, b"").decisions
    assert isinstance(made, Start) and made.gpu_type == "H100"
    tenancy = Tenancy(snapshot)
    (seen,) = narrowed(snapshot, tenancy, tenancy.room)[0].jobs
    assert seen.gpu.types == ("H100", "A100")


def test_it_is_told_what_it_waits_for_and_why_not_on_the_other_type() -> None:
    """No GPUs on the one, and no room on the other."""
    (hold,) = policy("fifo").pending_reasons(cell(gang(), tenants=(BOUND,), free=2), b"")
    free, room, _ = hold.blockers
    assert free.startswith("needs 4 GPUs of type H100")
    assert room.startswith("tenant a: 8 GPUs on top of the 0 that it uses exceed its guarantee")


def test_who_is_too_many_on_every_type_runs_on_none() -> None:
    """Six GPUs on the one and twelve on the other are beyond four."""
    six = replace(gang(), workers=WorkerRange(min=6, max=6))
    snapshot = cell(six, tenants=(BOUND,))
    snapshot = replace(snapshot, nodes=(*snapshot.nodes, make_node_view("t", gpu_type="T4")))
    assert policy("fifo-skip").allocate(snapshot, b"").decisions == ()
    (hold,) = policy("fifo-skip").pending_reasons(snapshot, b"")
    assert "6 GPUs" in hold.blockers[0]


def test_a_guarantee_covers_no_gang_that_is_larger_on_each_type_that_it_accepts() -> None:
    """Four of its workers stand for two: eight GPUs are beyond four, and whoever came first has the
    node."""
    first = replace(make_job_view("first", gpus_per_worker=8, types=("A100",)), tenant="b")
    later = replace(gang("later", types=("A100",)), submitted_at_s=1.0)
    tenants = (replace(BOUND, borrow_limit_gpus=None),)
    found = policy("fifo-skip").allocate(cell(first, later, tenants=tenants), b"")
    assert [made.job_id for made in found.decisions if isinstance(made, Start)] == ["first"]
    assert found.waits == ()
    full = cell(job_with(later, nodes_avoided=(NodeName("a"),)), tenants=tenants)
    assert not any(
        "guarantee" in why for why in policy("fifo-skip").pending_reasons(full, b"")[0].blockers
    )
