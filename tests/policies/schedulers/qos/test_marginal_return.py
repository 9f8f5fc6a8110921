"""What minimum shares leave: which jobs take one more step, which do not though GPUs are idle, and
whose idle guarantees are first."""

from __future__ import annotations

from math import inf

import pytest
from msgspec import structs

from coordinator.policies.contract.snapshot import TenantView
from coordinator.policies.schedulers.qos.admission import Book
from coordinator.policies.schedulers.qos.marginal_return import Sharing
from coordinator.policies.schedulers.qos.minimum_shares import Claim
from coordinator.policies.schedulers.qos.quotas import Quotas
from coordinator.policies.schedulers.qos.timeline import Piece
from tests.tables import each_row

TWO_S = Claim(
    job_id="c",
    sizes=(1, 2, 4),
    rates=(1.0, 1.5, 2.0),
    gpus_per_worker=1,
    work_s=3.0,
    deadline_s=2.01,
)
"""Its share is two workers for two seconds."""


def given(claim: Claim, *, slot_s: float, gpus: int = 4) -> int:
    """Workers that it gets now, alone."""
    book = Book(0.0, gpus, {})
    book.promise([claim])
    assert book.plans[claim.job_id] == (Piece(0.0, 2.0, 2),)
    return Sharing(book, (), now_s=0.0, gpus=gpus, slot_s=slot_s).share()[claim.job_id]


@pytest.mark.parametrize(("slot_s", "workers"), [(1.0, 2), (1.2, 4), (1.5, 4)])
def test_one_more_step_is_taken_only_where_the_job_then_ends_earlier(
    slot_s: float, workers: int
) -> None:
    """Four workers for a second leave a second of work for one: it ends when it would have ended,
    and the idle GPUs stay free. For longer than that it ends earlier, and takes them."""
    assert given(TWO_S, slot_s=slot_s) == workers


def test_a_step_that_only_saves_gpu_time_is_not_taken_either() -> None:
    """Four workers for half a second and one for the rest are 3.5 GPU-s in place of four, and end
    at the same time."""
    cheap = structs.replace(TWO_S, rates=(1.4, 1.5, 1.8))
    assert given(cheap, slot_s=0.5) == 2


def test_a_step_that_others_have_made_worth_less_goes_behind_those_that_are_now_worth_more() -> (
    None
):
    """`long` would save the most by two workers more, then one, then two. With `short` done after a
    second it would have two instead of the one: that saves as little as a step of `middle`, whose
    deadline is earlier."""
    one = structs.replace(TWO_S, sizes=(1, 2))
    short = structs.replace(one, job_id="short", rates=(1.0, 2.0), work_s=2.0)
    middle = structs.replace(one, job_id="middle", rates=(1.0, 1.9), deadline_s=3.01)
    rates = (1.0, 1.7, 3.23)
    long = structs.replace(TWO_S, job_id="long", rates=rates, work_s=9.0, deadline_s=6.01)
    book = Book(0.0, 7, {})
    book.promise([short, middle, long])
    found = Sharing(book, (), now_s=0.0, gpus=7, slot_s=1.0).share()
    assert found == {"short": 2, "middle": 2, "long": 2}


RUNS = Claim(
    job_id="runs",
    sizes=(1, 2, 4),
    rates=(1.0, 2.0, 2.1),
    gpus_per_worker=1,
    work_s=8.0,
    deadline_s=6.001,
    runs=True,
    present=4,
    tenant="t",
)
"""Beside `OUTSIDE` its share is one of its four workers for two seconds, then two; with more for so
long the rest needs but one, and it ends no earlier."""


OUTSIDE = Claim(
    job_id="outside",
    sizes=(4,),
    rates=(1.0,),
    gpus_per_worker=1,
    work_s=2.0,
    deadline_s=2.001,
    tenant="u",
)


WAITS = Claim(job_id="waits", sizes=(1,), rates=(1.0,), gpus_per_worker=1, work_s=10.0, tenant="t")


def shared(
    *views: TenantView,
    gpus: int,
    promised: tuple[Claim, ...],
    soft: tuple[Claim, ...] = (),
    of_other_types: int = 0,
) -> dict[str, int]:
    """Workers of each now, within what tenants may have; what is beyond shares for two seconds."""
    tree = {view.name: view for view in (*views, TenantView(name="u"))}
    book = Book(0.0, gpus, {}, Quotas(capacity=gpus + of_other_types, views=tree))
    book.promise(promised, soft)
    assert len(book.plans) == len(promised)
    return Sharing(book, soft, now_s=0.0, gpus=gpus, slot_s=2.0).share()


@each_row(("guarantee", "workers"), [(0, 1), (1, 1), (2, 2), (3, 3), (4, 4)])
def test_who_runs_keeps_of_its_workers_what_a_guarantee_covers(
    guarantee: int, workers: int
) -> None:
    """Though it does not end earlier by that, and one by one, whatever its sizes: they may be taken
    for no other tenant."""
    view = TenantView(name="t", guarantee_gpus=guarantee)
    found = shared(view, gpus=8, promised=(OUTSIDE, RUNS))
    assert found == {"outside": 4, "runs": workers}


def test_what_a_guarantee_covers_goes_first_to_whom_it_is_due() -> None:
    """To a job that waits for it, where another of its tenant has more than its share."""
    view = TenantView(name="t", guarantee_gpus=2)
    found = shared(view, gpus=6, promised=(OUTSIDE, RUNS), soft=(WAITS,))
    assert found == {"outside": 4, "runs": 1, "waits": 1}


def test_of_nested_guarantees_the_inner_one_keeps_its_workers_first() -> None:
    """What it covers is not for another of the same division, which that one covers as well."""
    above = TenantView(name="above", guarantee_gpus=2)
    view = TenantView(name="t", parent="above", guarantee_gpus=2)
    beside = TenantView(name="v", parent="above")
    waits = structs.replace(WAITS, tenant="v")
    found = shared(above, view, beside, gpus=6, promised=(OUTSIDE, RUNS), soft=(waits,))
    assert found == {"outside": 4, "runs": 2, "waits": 0}


def test_what_an_outer_guarantee_covers_is_kept_behind_what_an_inner_one_does() -> None:
    """By whoever asked first: the one GPU that the shares leave goes to the inner one's job."""
    above = TenantView(name="above", guarantee_gpus=3)
    team = TenantView(name="t", parent="above")
    inner = TenantView(name="v", parent="above", guarantee_gpus=2)
    other = structs.replace(RUNS, job_id="the inner one's", tenant="v")
    found = shared(above, team, inner, gpus=7, promised=(OUTSIDE, RUNS, other), of_other_types=8)
    assert found == {"outside": 4, "runs": 1, "the inner one's": 2}


def test_a_step_that_a_guarantee_covers_in_part_takes_nothing_that_another_one_is_due() -> None:
    """Of four workers without a promise beside a share of two, a guarantee of five covers three."""
    five, one = TenantView(name="t", guarantee_gpus=5), TenantView(name="v", guarantee_gpus=1)
    share = structs.replace(OUTSIDE, job_id="share", tenant="t", sizes=(2,))
    runs = structs.replace(RUNS, deadline_s=inf)
    waits = structs.replace(WAITS, tenant="v")
    found = shared(five, one, gpus=6, promised=(share,), soft=(runs, waits))
    assert found == {"share": 2, "runs": 3, "waits": 1}


def test_who_keeps_workers_stays_within_the_limits_of_its_tenant() -> None:
    """Though the guarantee of the tenant above it covers more: what its shares are of three GPUs
    leaves one of them now."""
    above = TenantView(name="above", guarantee_gpus=8)
    view = TenantView(name="t", parent="above", borrow_limit_gpus=3)
    other = structs.replace(WAITS, deadline_s=10.5)
    found = shared(above, view, gpus=24, promised=(OUTSIDE, RUNS, other))
    assert found == {"outside": 4, "runs": 2, "waits": 1}


def test_who_keeps_workers_leaves_others_theirs() -> None:
    """Where its guarantee is of GPUs of another type as well: of this one none is left."""
    view = TenantView(name="t", guarantee_gpus=4)
    found = shared(view, gpus=5, promised=(OUTSIDE, RUNS), of_other_types=8)
    assert found == {"outside": 4, "runs": 1}


def test_what_who_keeps_workers_then_grows_by_is_counted_once() -> None:
    """To two workers that a guarantee covers it gets two more, and another job what is left."""
    view = TenantView(name="t", guarantee_gpus=2)
    runs = structs.replace(RUNS, rates=(1.0, 2.0, 4.0))
    waits = structs.replace(WAITS, tenant="u")
    found = shared(view, gpus=9, promised=(OUTSIDE, runs), soft=(waits,))
    assert found == {"outside": 4, "runs": 4, "waits": 1}


def test_workers_that_make_their_job_no_faster_are_not_kept() -> None:
    """It has four, and with two it is as fast."""
    view = TenantView(name="t", guarantee_gpus=4)
    runs = structs.replace(RUNS, sizes=(1, 2), rates=(1.0, 2.0))
    assert shared(view, gpus=8, promised=(OUTSIDE, runs)) == {"outside": 4, "runs": 2}


@pytest.mark.parametrize(("guarantee", "workers"), [(1, 0), (2, 2)])
def test_who_would_pause_by_its_plan_keeps_its_base_gang_if_a_guarantee_above_it_covers_that(
    guarantee: int, workers: int
) -> None:
    """What no team of a division was given is promised to none of them; it idles all the same."""
    division = TenantView(name="division", guarantee_gpus=guarantee)
    own = TenantView(name="division itself", parent="division", guarantee_gpus=guarantee)
    team = TenantView(name="t", parent="division")
    short = structs.replace(OUTSIDE, job_id="short", sizes=(2,), work_s=10.0, deadline_s=10.001)
    long = structs.replace(OUTSIDE, job_id="long", work_s=12.0, deadline_s=12.001)
    runs = structs.replace(
        RUNS, sizes=(2, 4), rates=(2.0, 4.0), work_s=16.0, present=2, deadline_s=16.001
    )
    found = shared(division, own, team, gpus=8, promised=(short, long, runs))
    assert found == {"short": 2, "long": 4, "runs": workers}


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


def given_to_all(tenants: tuple[TenantView, ...], *claims: Claim) -> dict[str, int]:
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
    found = given_to_all(tenants, *others, claim("c", "covered", (2,)))
    assert found == {"o0": 2, "o1": 0, "c": 2}


def test_of_those_that_one_guarantee_covers_who_runs_gets_it_before_who_waits() -> None:
    """Though the one that waits was asked first; the rest of the GPUs goes by what it saves."""
    tenants = (TenantView(name="t", guarantee_gpus=2, borrow_limit_gpus=0), TenantView(name="u"))
    found = given_to_all(
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
    found = given_to_all(
        tenants, claim("waits", "t", (1,)), claim("runs", "t", (1, 2), present=2), other
    )
    assert found == {"waits": 0, "runs": 2, "u": 2}


def test_no_more_than_there_is_goes_to_those_that_are_due_it() -> None:
    """Their guarantee is of GPUs of other types as well."""
    tenants = (TenantView(name="t", guarantee_gpus=8),)
    found = given_to_all(tenants, claim("a", "t", (3,)), claim("b", "t", (2,)))
    assert found == {"a": 3, "b": 0}


def test_nobody_is_given_more_than_its_tenant_may_use() -> None:
    """Though the guarantee of the tenant above it covers more."""
    tenants = (
        TenantView(name="division", guarantee_gpus=4),
        TenantView(name="t", parent="division", borrow_limit_gpus=1),
    )
    found = given_to_all(tenants, claim("a", "t", (1,)), claim("b", "t", (1,)))
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
    assert given_to_all(tenants, claim("t", "t", (2, 4), present=4), *others) == found


def test_nobody_is_due_more_than_it_has() -> None:
    """Its guarantee covers growth to the next size as well, but that has no precedence: it would
    take the GPU of another tenant's job."""
    tenants = TenantView(name="t", guarantee_gpus=4), TenantView(name="u")
    other = claim("u", "u", (1,), present=1, stop_gpu_s=1000.0)
    found = given_to_all(tenants, claim("t", "t", (1, 2, 4), present=3), other)
    assert found["u"] == 1
    assert found["t"] >= 2
