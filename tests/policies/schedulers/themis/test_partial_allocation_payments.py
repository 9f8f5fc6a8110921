"""Hidden payments by hand: whose absence is looked at, and what an app is measured by meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest

from common.model import JobId, NodeName
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.schedulers.themis.app_standing import Standing
from coordinator.policies.schedulers.themis.finish_time_fairness import (
    AppRecord,
    Held,
    Measure,
    Work,
    Yardstick,
)
from coordinator.policies.schedulers.themis.partial_allocation import (
    EXACT_CHOICES,
    Bid,
    partial_allocation,
    proportional_fair,
)
from tests.harness.builders import job_with, make_job_view


def wants(gpus: int, value: float, *, place: int = 0) -> list[Bid]:
    """A bidder with one bundle; nothing is worth 1."""
    return [Bid((), 1.0), Bid(((place, gpus),), value)]


FOUR = [wants(2, 9.0), wants(1, 2.0), wants(1, 1.5), wants(2, 2.5)]
"""Of three GPUs the first two win: 9 x 2 is the greatest product.

Without the first the second and the fourth would have them, others' worth 5 instead of 2; without
the second the first and the third, 13.5 instead of 9.
"""


KEPT = [2.0 / 5.0, 9.0 / 13.5, 1.0, 1.0]


def crowd(first: int, count: int) -> list[list[Bid]]:
    """Bidders that each want the GPU of a place of their own, so many that a choice is climbed."""
    return [wants(1, 2.0, place=place) for place in range(first, first + count)]


def kept(tables: Sequence[Sequence[Bid]], capacity: Sequence[int]) -> list[float]:
    """The part c of each bidder."""
    return [award.kept_ratio for award in partial_allocation(tables, capacity)]


def test_each_bidder_pays_for_its_own_absence() -> None:
    """c is what the others have with it over what they would have if it, and nobody else, left."""
    assert [award.bid for award in partial_allocation(FOUR, [3])] == [1, 1, 0, 0]
    assert kept(FOUR, [3]) == pytest.approx(KEPT)


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (1, 0, 3, 2), (2, 3, 0, 1)])
def test_a_payment_does_not_depend_on_the_place_in_line(order: tuple[int, ...]) -> None:
    """The same bidders in another order pay the same."""
    found = kept([FOUR[at] for at in order], [3])
    assert found == pytest.approx([KEPT[at] for at in order])


def test_among_many_bidders_payments_are_the_same() -> None:
    """Where choices are climbed, too: who wants other GPUs changes nobody's payment."""
    others = crowd(1, 10)
    assert 2 ** (len(FOUR) + len(others)) > EXACT_CHOICES
    found = kept([*FOUR, *others], [3, *[1] * len(others)])
    assert found == pytest.approx([*KEPT, *[1.0] * len(others)])


def test_an_auction_of_many_looks_beyond_the_greedy_choice() -> None:
    """By worth per GPU a single one goes first, and leaves no room for the last, which has more.

    The first exchange that is tried, for the first bidder, is for the worse.
    """
    tables = [wants(2, 1.3), wants(1, 2.0), *crowd(1, 10), wants(2, 3.5)]
    awards = partial_allocation(tables, [2, *[1] * 10])
    assert [award.bid for award in awards] == [0, 0, *[1] * 10, 1]
    assert awards[-1].kept_ratio == pytest.approx(1.0 / 2.0)


def test_without_a_bidder_it_has_nothing_and_its_gpus_are_free() -> None:
    """Also where the search begins from a choice in which it has won."""
    for tables, capacity in (
        (FOUR, [3]),
        ([*FOUR, *crowd(1, 10)], [3, *[1] * 10]),
    ):
        chosen = proportional_fair(tables, capacity)
        rest = proportional_fair(tables, capacity, without=0, start=chosen)
        assert chosen[:4] == (1, 1, 0, 0)
        assert rest[:4] == (0, 1, 0, 1)


# --- by what an app is measured ------------------------------------------------------------------

NODES = frozenset({NodeName("n")})


NOW_S = 1000.0


def standing(
    *, held: int = 0, back: int = 0, granted_at_s: float | None = None, rho: float = 3.0
) -> Standing:
    """An app of one job with 800 s of work, which came 100 s ago and would have all of 4 GPUs."""
    made = make_job_view("j", workers=(1, 4), gpus_per_worker=1, remaining_work_s=800.0)
    job: JobView = job_with(made, whole_work_s=800.0, submitted_at_s=NOW_S - 100.0)
    works = {JobId("j"): Work(800.0, 4)}
    record = AppRecord(NOW_S - 100.0, 0.0, works, granted_at_s=granted_at_s, rho=rho)
    return Standing(
        app="job j",
        jobs=[job],
        record=record,
        measure=Measure(Yardstick(gpus=4, now_s=NOW_S), record, [job], 1.0),
        held={JobId("j"): Held(held, NODES)} if held else {},
        back={JobId("j"): Held(back, NODES)} if back else {},
        priority=0,
        least_gpus=1,
    )


@pytest.mark.parametrize(("gpus", "left_s"), [(1, 800.0), (2, 400.0), (4, 200.0)])
def test_gpus_whose_lease_is_over_count_until_they_are_given_away(gpus: int, left_s: float) -> None:
    """Who goes into an auction with GPUs is as well off as it is with them, not as with nothing."""
    made = standing(back=gpus, granted_at_s=NOW_S - 50.0)
    alone_s = made.measure.alone_s
    assert made.rho(NOW_S, 1200.0) == pytest.approx((100.0 + left_s) / alone_s)
    assert made.rho(NOW_S, 1200.0) == standing(held=gpus).rho(NOW_S, 1200.0)


def test_what_an_app_was_given_counts_instead_of_what_it_had() -> None:
    """Four GPUs whose lease is over, of which it won one again: it is measured by one."""
    made = standing(held=1, back=4, granted_at_s=NOW_S)
    assert made.rho(NOW_S, 1200.0) == standing(held=1).rho(NOW_S, 1200.0)


def test_without_gpus_rho_grows_from_the_last_grant() -> None:
    """Half a lease since it had rho 3 is 4.5; who was never granted anything is infinitely poor."""
    assert standing(granted_at_s=NOW_S - 600.0).rho(NOW_S, 1200.0) == pytest.approx(4.5)
    assert standing().rho(NOW_S, 1200.0) == float("inf")


def test_who_had_its_gpus_of_another_policy_stands_as_if_they_had_been_its_share() -> None:
    """It lost them 50 s ago, and came 50 s before: 100 s until then and 200 on all four GPUs, where
    it would have been done in 200."""
    made = standing(granted_at_s=NOW_S - 50.0, rho=inf)
    assert made.rho(NOW_S, 1200.0) == pytest.approx((50.0 + 200.0) / 200.0 * (1 + 50.0 / 1200.0))
