"""Idle guarantees in what minimum shares leave: whose they are first, and how much of them."""

from __future__ import annotations

import pytest

from coordinator.policies.contract.snapshot import TenantView
from coordinator.policies.schedulers.qos.admission import Book
from coordinator.policies.schedulers.qos.marginal_return import Sharing
from coordinator.policies.schedulers.qos.minimum_shares import Claim
from coordinator.policies.schedulers.qos.quotas import Quotas

GPUS = 4


def claim(
    name: str,
    tenant: str,
    sizes: tuple[int, ...],
    *,
    present: int = 0,
    stop_gpu_s: float = 0.0,
) -> Claim:
    """A job without a promise; each worker more helps it less. present: it runs with so many."""
    return Claim(
        job_id=name,
        tenant=tenant,
        sizes=sizes,
        rates=tuple(size**0.5 for size in sizes),
        gpus_per_worker=1,
        work_s=100.0,
        runs=present > 0,
        present=present,
        stop_gpu_s=stop_gpu_s,
    )


def given(tenants: tuple[TenantView, ...], *claims: Claim) -> dict[str, int]:
    """Workers of each on four GPUs, asked in this order."""
    views = {view.name: view for view in tenants}
    book = Book(0.0, GPUS, {}, Quotas(capacity=GPUS, views=views))
    book.promise((), claims)
    return Sharing(book, claims, now_s=0.0, gpus=GPUS, slot_s=60.0).share()


def test_the_guarantee_of_the_innermost_tenant_is_given_out_first() -> None:
    """A division's covers what a team of it runs, but not before the guarantee of another team of
    it has gone to that one's job, though this only waits."""
    tenants = (
        TenantView(name="division", guarantee_gpus=4),
        TenantView(name="covered", parent="division", guarantee_gpus=2),
        TenantView(name="other", parent="division"),
    )
    others = [claim(f"o{n}", "other", (2,), present=2) for n in range(2)]
    found = given(tenants, *others, claim("c", "covered", (2,)))
    assert found == {"o0": 2, "o1": 0, "c": 2}


def test_of_those_that_one_guarantee_covers_who_runs_gets_it_before_who_waits() -> None:
    """Though the one that waits was asked first; the rest of the GPUs goes by what it saves."""
    tenants = (TenantView(name="t", guarantee_gpus=2, borrow_limit_gpus=0), TenantView(name="u"))
    found = given(
        tenants,
        claim("waits", "t", (2,)),
        claim("runs", "t", (2,), present=2),
        claim("u", "u", (2,), present=2),
    )
    assert found == {"waits": 0, "runs": 2, "u": 2}


def test_who_runs_keeps_what_it_grew_by_before_another_one_of_its_tenant_starts() -> None:
    """As far as the guarantee that covers both goes."""
    tenants = (TenantView(name="t", guarantee_gpus=2), TenantView(name="u"))
    other = claim("u", "u", (2,), present=2, stop_gpu_s=1000.0)
    found = given(tenants, claim("waits", "t", (1,)), claim("runs", "t", (1, 2), present=2), other)
    assert found == {"waits": 0, "runs": 2, "u": 2}


def test_no_more_than_there_is_goes_to_those_that_are_due_it() -> None:
    """Their guarantee is of GPUs of other types as well."""
    tenants = (TenantView(name="t", guarantee_gpus=8),)
    found = given(tenants, claim("a", "t", (3,)), claim("b", "t", (2,)))
    assert found == {"a": 3, "b": 0}


def test_nobody_is_given_more_than_its_tenant_may_use() -> None:
    """Though the guarantee of the tenant above it covers more."""
    tenants = (
        TenantView(name="division", guarantee_gpus=4),
        TenantView(name="t", parent="division", borrow_limit_gpus=1),
    )
    found = given(tenants, claim("a", "t", (1,)), claim("b", "t", (1,)))
    assert found == {"a": 1, "b": 0}


@pytest.mark.parametrize(
    ("guarantee", "found"),
    [
        (2, {"t": 2, "u0": 1, "u1": 1}),
        (3, {"t": 3, "u0": 1, "u1": 0}),
        (4, {"t": 4, "u0": 0, "u1": 0}),
    ],
)
def test_a_job_that_grew_has_precedence_with_what_a_guarantee_covers_and_no_more(
    guarantee: int, found: dict[str, int]
) -> None:
    """What it has beyond that goes to others' jobs where their stops would cost more than it is
    worth."""
    others = [claim(f"u{n}", "u", (1,), present=1, stop_gpu_s=1000.0) for n in range(2)]
    tenants = TenantView(name="t", guarantee_gpus=guarantee), TenantView(name="u")
    assert given(tenants, claim("t", "t", (2, 4), present=4), *others) == found


def test_nobody_is_due_more_than_it_has() -> None:
    """Its guarantee covers growth to the next size as well, but that has no precedence: it would
    take the GPU of another tenant's job."""
    tenants = TenantView(name="t", guarantee_gpus=4), TenantView(name="u")
    other = claim("u", "u", (1,), present=1, stop_gpu_s=1000.0)
    found = given(tenants, claim("t", "t", (1, 2, 4), present=3), other)
    assert found["u"] == 1
    assert found["t"] >= 2
