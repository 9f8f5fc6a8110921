"""The date that a refused job is given: admission accepts it, and none before it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from coordinator.policies.contract.snapshot import TenantView
from coordinator.policies.schedulers.qos.admission import LEAST_TRIES, Book
from coordinator.policies.schedulers.qos.earliest_date import earliest, spread
from coordinator.policies.schedulers.qos.minimum_shares import Claim
from coordinator.policies.schedulers.qos.quotas import Held, Quotas
from coordinator.policies.schedulers.qos.timeline import Piece

GPUS = 4


CURVES = ((1.0, 2.0, 4.0), (1.0, 1.5, 2.0), (1.0, 1.9, 2.1), (1.0, 2.5, 3.0))


SINCE_S = 1_700_000_000.3
"""Jobs come at no round instant."""


Row = tuple[int, int, tuple[float, ...], int, bool, bool]
"""Work, deadline, rates, GPUs of a worker; whether it pauses, whether it runs."""


ROWS = st.tuples(
    st.integers(1, 25),
    st.integers(1, 30),
    st.sampled_from(CURVES),
    st.sampled_from((1, 1, 2, 4)),
    st.booleans(),
    st.booleans(),
)


def claim(name: str, row: Row, *, since_s: float = SINCE_S) -> Claim:
    """A job of up to as many workers as the pool holds."""
    work, deadline, rates, each, pauses, runs = row
    sizes = tuple(size for size in (1, 2, 4) if size * each <= GPUS)
    return Claim(
        job_id=name,
        sizes=sizes,
        rates=rates[: len(sizes)],
        gpus_per_worker=each,
        work_s=float(work),
        deadline_s=since_s + deadline,
        runs=runs,
        pauses=pauses,
    )


def book_of(rows: Sequence[Row], *, since_s: float = SINCE_S) -> Book:
    """Promises to those that were there, and then to whoever could be admitted."""
    book = Book(since_s, GPUS, {})
    claims = [claim(f"j{number}", row, since_s=since_s) for number, row in enumerate(rows)]
    running: list[Claim] = []
    for each in claims:
        if each.runs and sum(c.gpus_per_worker for c in (*running, each)) <= GPUS:
            running.append(each)
    book.promise(running)
    for each in claims:
        if each not in running:
            book.admit([structs.replace(each, runs=False)])
    return book


def newcomer(row: Row, *, since_s: float = SINCE_S) -> Claim:
    """One that waits."""
    return structs.replace(claim("new", row, since_s=since_s), runs=False)


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(st.lists(ROWS, max_size=6), ROWS)
@example(
    [(1, 1, CURVES[0], 1, False, False), (3, 3, CURVES[0], 1, False, False)],
    (16, 1, CURVES[1], 2, False, False),
)
def test_the_date_named_is_accepted_and_none_before_it(rows: list[Row], row: Row) -> None:
    """Of all whole seconds from the deadline that was refused on it is the first accepted one."""
    book, new = book_of(rows), newcomer(row)
    assume(book.with_more([new]) is None)
    named_s = book.earliest_s(new, SINCE_S)
    every = (
        SINCE_S + date
        for date in range(row[1], row[1] + 400)
        if book.with_more([structs.replace(new, deadline_s=SINCE_S + date)]) is not None
    )
    assert named_s == next(every)
    assert book.admit([structs.replace(new, deadline_s=named_s)])


def test_a_date_far_off_is_accepted_too() -> None:
    """Where not every second can be tried the date named is still one that admission accepts.

    The job needs ten thousand seconds and all GPUs; others leave some only far from now.
    """
    rows = [(40_000 + 977 * n, 30_000 + 3_517 * n, CURVES[1], 1, True, False) for n in range(40)]
    book, new = book_of(rows), newcomer((40_000, 10_001, CURVES[0], 1, True, False))
    assert len(book.claims) > 2
    assert book.with_more([new]) is None
    named_s = book.earliest_s(new, SINCE_S)
    assert named_s > SINCE_S + 10_001 + LEAST_TRIES
    # Right before it is none; nor at any of some dates that are evenly spread before that.
    for step in range(1, 20):
        date = int(named_s - SINCE_S - 1) - (step - 1) * int(named_s - SINCE_S - 10_001) // 20
        assert book.with_more([structs.replace(new, deadline_s=SINCE_S + date)]) is None
    assert book.admit([structs.replace(new, deadline_s=named_s)])


def test_a_date_waits_for_what_other_pools_hold() -> None:
    """What the tenant holds elsewhere counts until it ends, though no plan of this pool is there.

    Three of its four GPUs are held for 1000 s, and the job needs two of them for 10 s.
    """
    view = TenantView(name="t", borrow_limit_gpus=0, guarantee_gpus=4)
    held = Held(tenant="t", plan=(Piece(SINCE_S, SINCE_S + 1000.0, 3),), gpus_per_worker=1)
    book = Book(SINCE_S, GPUS, {}, Quotas(capacity=8, views={"t": view}, held=(held,)))
    book.promise([])
    row = (10, 12, CURVES[0], 2, True, False)
    new = structs.replace(newcomer(row), tenant="t")
    assert book.earliest_s(new, SINCE_S) == SINCE_S + 1000.0 + 6.0
    for_ever = structs.replace(held, plan=(Piece(SINCE_S, inf, 3),))
    book = Book(SINCE_S, GPUS, {}, Quotas(capacity=8, views={"t": view}, held=(for_ever,)))
    book.promise([])
    assert book.earliest_s(new, SINCE_S) == inf


# --- the search itself ----------------------------------------------------------------------------


@given(st.integers(-50, 50), st.integers(0, 300), st.integers(1, 100))
def test_dates_to_try_are_all_or_evenly_spread(first: int, span: int, tries: int) -> None:
    """Both ends are among them, no two are equal, and gaps differ by one second at most."""
    found = spread(first, first + span, tries)
    assert (found[0], found[-1]) == (first, first + span)
    assert len(found) == min(span, tries) + 1
    gaps = {later - sooner for sooner, later in pairwise(found)}
    assert all(gap >= 1 for gap in gaps)
    assert max(gaps, default=1) - min(gaps, default=1) <= 1


@given(st.sets(st.integers(0, 200)), st.integers(1, 40))
def test_no_date_that_is_tried_comes_before_the_one_found(accepted: set[int], tries: int) -> None:
    """The date found is accepted, the second before it is not, nor is any that was tried before."""
    dates = spread(0, 200, tries)
    found = earliest(dates, accepted.__contains__)
    assert (found is None) == accepted.isdisjoint(dates)
    if found is not None:
        assert found in accepted
        assert found == 0 or found - 1 not in accepted
        assert accepted.isdisjoint(date for date in dates if date < found)
