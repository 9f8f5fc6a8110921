"""Tenants' promises: what is kept back, what may be borrowed, and who gives back first."""

from __future__ import annotations

from msgspec.structs import replace

from coordinator.policies.contract.decisions import Preempt
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.tenants.tenancy import Tenancy, waiting_gpus
from tests.policies.machines import cell, decide, job, machine, started
from tests.tables import each_row


def promised(snapshot: ClusterSnapshot, *tenants: TenantView) -> ClusterSnapshot:
    """The same cell with these promises."""
    return replace(snapshot, tenants=tuple(sorted(tenants, key=lambda each: each.name)))


def one_node(*jobs: JobView, gpus: int = 8) -> ClusterSnapshot:
    """A node with all of these."""
    return cell(machine("n0", gpus=gpus, jobs=jobs), jobs=jobs)


# --- what a tenant may take ---------------------------------------------------------------------


@each_row(("used", "room"), [(0, 6), (3, 6), (4, 6), (5, 5), (6, 4)])
def test_a_tenant_keeps_of_its_idle_guarantee_what_it_does_not_lend(used: int, room: int) -> None:
    """Of six promised two are lent: with `used` in use, 6 - used - 2 of the idle ones are kept."""
    mine = job("b", "B")
    jobs = (mine, *([job("a", "A", gpus=used, nodes=("n0",))] if used else []))
    snapshot = promised(
        one_node(*jobs, gpus=10),
        TenantView(name="A", guarantee_gpus=6, lend_limit_gpus=2),
        TenantView(name="B"),
    )
    assert Tenancy(snapshot).room(mine) == room


def test_a_guarantee_is_room_whatever_others_keep() -> None:
    """A keeps six of four GPUs to itself; B may still take the two that it is promised."""
    mine = job("b", "B")
    snapshot = promised(
        one_node(mine, gpus=4),
        TenantView(name="A", guarantee_gpus=6, lend_limit_gpus=0),
        TenantView(name="B", guarantee_gpus=2),
    )
    assert Tenancy(snapshot).room(mine) == 2


def test_what_it_may_not_borrow_is_nobody_s_due() -> None:
    """A asks for ten and may have three; what is over is B's."""
    jobs = (job("a", "A", gpus=10), job("b", "B", gpus=10))
    snapshot = promised(
        one_node(*jobs, gpus=10),
        TenantView(name="A", guarantee_gpus=2, borrow_limit_gpus=1, weight=9.0),
        TenantView(name="B"),
    )
    tenancy = Tenancy(snapshot)
    assert tenancy.fair_shares(waiting_gpus(snapshot, tenancy)) == {"A": 3.0, "B": 7.0}


# --- what is given back -------------------------------------------------------------------------


def test_the_tenant_with_the_least_of_its_guarantee_is_served_first() -> None:
    """C can give two GPUs back: to B, that has none of its four, though A's job came first."""
    jobs = (
        *(job(f"c{n}", "C", gpus=2, nodes=("n0",)) for n in range(4)),
        job("a0", "A", gpus=2, nodes=("n0",)),
        job("a1", "A", gpus=2, submitted_at_s=1.0),
        job("b0", "B", gpus=2, submitted_at_s=2.0),
    )
    snapshot = promised(
        one_node(*jobs, gpus=10),
        TenantView(name="A", guarantee_gpus=4),
        TenantView(name="B", guarantee_gpus=4),
        TenantView(name="C", guarantee_gpus=6),
    )
    assert started(decide("fifo", snapshot)) == ["b0"]


def test_the_borrower_s_job_that_loses_least_is_stopped() -> None:
    """By the work that a stop throws away, not by names."""
    lost = {"b0": 900.0, "b1": 50.0, "b2": 400.0}
    jobs = (
        *(
            replace(job(name, "B", gpus=2, nodes=("n0",)), lost_if_preempted_gpu_s=gpu_s)
            for name, gpu_s in lost.items()
        ),
        job("a", "A", gpus=2),
    )
    snapshot = promised(one_node(*jobs, gpus=6), TenantView(name="A", guarantee_gpus=2))
    found = decide("fifo", snapshot)
    assert [each.job_id for each in found.decisions if isinstance(each, Preempt)] == ["b1"]
    assert started(found) == ["a"]
