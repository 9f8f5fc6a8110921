"""What a lie in the auction is worth after the payment, for each kind of payment.

Through `paid`, with the chance that it draws taken apart: what comes out on the average is computed
and not drawn. `test_partial_allocation` looks at the mechanism by itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import nextafter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from coordinator.policies.contract.decisions import Placement
from coordinator.policies.schedulers.themis.bundles import Bundle, Share
from coordinator.policies.schedulers.themis.finish_time_fairness import Held
from coordinator.policies.schedulers.themis.lease_terms import Payment, Terms, paid
from coordinator.policies.schedulers.themis.partial_allocation import Award, Bid, partial_allocation
from coordinator.policies.schedulers.themis.seeded_chance import Chance
from tests.draws import pick, whole, yes_or_no
from tests.harness.builders import make_job_view, make_node_view

ROUNDING = 1.0 + 1e-6


NODE = make_node_view("n").name


JOB = make_job_view("j", workers=(1, 16), gpus_per_worker=1)


PAGE = Path(__file__).parents[4] / "docs" / "policies" / "themis.md"


Worths = Sequence[float]
"""Of no GPU, of one, of two, .. of one node."""


class Drawn(Chance):
    """Chance that comes out as it is told."""

    def __init__(self, ratio: float) -> None:
        super().__init__(1, 0)
        self._ratio = ratio

    def ratio(self, name: str) -> float:
        """The same each time."""
        return self._ratio


def table(worths: Worths) -> list[Bid]:
    """A bid for each number of GPUs."""
    return [Bid(((0, gpus),) if gpus else (), worth) for gpus, worth in enumerate(worths)]


def bundle(gpus: int, *, is_gang: bool) -> Bundle:
    """So many GPUs for one job, of which it can use any number, or only all."""
    if gpus == 0:
        return Bundle(shares=(), bid=Bid((), 1.0))
    share = Share(
        job=JOB,
        gpu_type="H100",
        more=(Placement(node=NODE, worker_count=gpus),),
        held=Held(gpus, frozenset({NODE})),
        is_grown=False,
        least=gpus if is_gang else 1,
    )
    return Bundle(shares=(share,), bid=Bid(((0, gpus),), 1.0))


def kept_gpus(award: Award, payment: Payment, ratio: float, *, is_gang: bool) -> int:
    """GPUs after the payment, if chance comes out as told; the bid of so many has that place."""
    won = bundle(award.bid, is_gang=is_gang)
    return sum(share.gpus for share in paid(won, award, payment, Drawn(ratio), "job j").shares)


def mean_worth(
    true: Worths, award: Award, payment: Payment, *, is_gang: bool, lost: float | None = None
) -> float:
    """What a bidder has on the average, at its true worths; what it draws decides at c alone.

    lost: what nothing counts for who lost what it had won; None: what it is worth.
    """
    c = award.kept_ratio
    below = kept_gpus(award, payment, 0.0, is_gang=is_gang)
    assert below == kept_gpus(award, payment, nextafter(c, 0.0), is_gang=is_gang)
    above = kept_gpus(award, payment, c, is_gang=is_gang)
    assert above == kept_gpus(award, payment, nextafter(1.0, 0.0), is_gang=is_gang)
    worth_of_none = true[0] if lost is None or award.bid == 0 else lost
    worths = [true[gpus] if gpus else worth_of_none for gpus in (below, above)]
    return c * worths[0] + (1.0 - c) * worths[1]


# --- generated auctions ---------------------------------------------------------------------------

tenths = whole(1, 40).map(lambda number: number / 10.0)


@st.composite
def any_worths(draw: st.DrawFn, gpus: int) -> list[float]:
    """More is worth more than nothing, but not always more than less."""
    least = draw(tenths) / 40.0
    return [least, *(least + draw(tenths) for _ in range(gpus))]


@st.composite
def concave(draw: st.DrawFn, gpus: int) -> list[float]:
    """Each GPU more is worth something, and no more than the one before."""
    gain, worths = float(draw(whole(10, 60))), [float(draw(whole(1, 40)))]
    for _ in range(gpus):
        worths.append(worths[-1] + gain)
        gain *= draw(pick(1.0, 0.9, 0.5))
    return worths


def lied(data: st.DataObject, true: Worths) -> list[float]:
    """The same bundles with invented worths, or all but nothing worth so many times as much."""
    if data.draw(yes_or_no()):
        return [true[0], *(data.draw(tenths) for _ in true[1:])]
    factor = data.draw(pick(0.1, 0.5, 2.0, 10.0))
    return [true[0], *(factor * worth for worth in true[1:])]


def awarded(first: Worths, others: Sequence[Worths], gpus: int) -> Award:
    """What the first bidder is awarded among others."""
    return partial_allocation([table(first), *map(table, others)], [gpus])[0]


often = settings(max_examples=150, deadline=None)


@often
@given(data=st.data(), gpus=whole(1, 6), is_gang=yes_or_no())
def test_by_lottery_a_lie_wins_no_more_on_the_average(
    data: st.DataObject, gpus: int, *, is_gang: bool
) -> None:
    """Exactly, of any worths: a bundle is worth c of it, if one that was lost counts nothing."""
    true, *others = (data.draw(any_worths(gpus)) for _ in range(3))
    honest, lie = awarded(true, others, gpus), awarded(lied(data, true), others, gpus)
    had, has = (
        mean_worth(true, award, Payment.LOTTERY, is_gang=is_gang, lost=0.0)
        for award in (honest, lie)
    )
    assert had == pytest.approx(honest.kept_ratio * true[honest.bid])
    assert has <= had * ROUNDING


@often
@given(data=st.data(), gpus=whole(1, 6), is_gang=yes_or_no())
def test_by_lottery_a_lie_gains_less_than_nothing_is_worth(
    data: st.DataObject, gpus: int, *, is_gang: bool
) -> None:
    """Who loses has still what nothing is worth, and a lie that risks more loses it more often:
    it gains no more than (c - c') times that, so that no lie doubles what a bidder has."""
    true, *others = (data.draw(any_worths(gpus)) for _ in range(3))
    honest, lie = awarded(true, others, gpus), awarded(lied(data, true), others, gpus)
    had, has = (
        mean_worth(true, award, Payment.LOTTERY, is_gang=is_gang) for award in (honest, lie)
    )
    most = max(0.0, honest.kept_ratio - lie.kept_ratio) * true[0]
    assert has <= (had + most) * ROUNDING
    assert has <= 2.0 * had


@often
@given(data=st.data(), gpus=whole(1, 6), is_gang=yes_or_no())
def test_by_whole_gpus_a_lie_gains_by_no_more_than_the_gpus_that_it_wins(
    data: st.DataObject, gpus: int, *, is_gang: bool
) -> None:
    """Of worths that grow less and less: rounding halves what is had at most, and of n' GPUs that
    a lie wins it keeps k' for certain, where c' of them would be due: 2 n' / k' times, or 3."""
    true, *others = (data.draw(concave(gpus)) for _ in range(3))
    honest, lie = awarded(true, others, gpus), awarded(lied(data, true), others, gpus)
    had, has = (mean_worth(true, each, Payment.WHOLE, is_gang=is_gang) for each in (honest, lie))
    sure = kept_gpus(lie, Payment.WHOLE, nextafter(1.0, 0.0), is_gang=is_gang)
    assert has <= max(3.0, 2.0 * lie.bid / max(1, sure)) * had * ROUNDING


@often
@given(data=st.data(), gpus=whole(1, 6))
def test_by_floor_a_lie_gains_so_much_over_one_gpu_more(data: st.DataObject, gpus: int) -> None:
    """Of worths that grow less and less: what rounding takes is less than one GPU; with that an
    honest bidder would have its part, and the n' / k' of a lie are of that."""
    true, *others = (data.draw(concave(gpus)) for _ in range(3))
    honest, lie = awarded(true, others, gpus), awarded(lied(data, true), others, gpus)
    gpus_had, gpus_has = (
        kept_gpus(each, Payment.FLOOR, 0.5, is_gang=False) for each in (honest, lie)
    )
    one_more = true[min(honest.bid, gpus_had + 1)]
    assert one_more >= honest.kept_ratio * true[honest.bid] / ROUNDING
    assert true[gpus_has] <= max(1.0, lie.bid / max(1, gpus_has)) * one_more * ROUNDING


# --- the page's figures ---------------------------------------------------------------------------

AUCTIONS, LIES = 200, 12


class Lies(Struct):
    """Of one payment. paid: in how many auctions one paid. most_ratio: by how much at most; and
    most_gain: what it brought, in what nothing is worth."""

    paid: int = 0
    most_ratio: float = 1.0
    most_gain: float = 0.0


def drawn_worths(chance: random.Random, gpus: int) -> list[float]:
    """As `concave`, without a strategy: the same for everybody who counts."""
    worths, gain = [chance.uniform(0.05, 0.3)], chance.uniform(0.05, 0.6)
    for _ in range(gpus):
        worths.append(worths[-1] + gain)
        gain *= chance.uniform(0.4, 1.0)
    return worths


def counted_lies() -> dict[Payment, Lies]:
    """Of each auction the best of some lies, payment by payment."""
    chance = random.Random(3)
    found = {payment: Lies() for payment in Payment}
    for _ in range(AUCTIONS):
        gpus, bidders = chance.choice((3, 4, 5)), chance.choice((2, 3))
        true, *others = (drawn_worths(chance, gpus) for _ in range(bidders))
        honest = awarded(true, others, gpus)
        lies: list[Award] = []
        for _ in range(LIES):
            factor = chance.uniform(0.3, 3.0)
            lie = [worth * factor * chance.uniform(0.8, 1.25) for worth in true]
            lies.append(awarded([true[0], *lie[1:]], others, gpus))
        for payment, each in found.items():
            had = mean_worth(true, honest, payment, is_gang=False)
            best = max(mean_worth(true, lie, payment, is_gang=False) for lie in lies)
            each.paid += best > had * ROUNDING
            each.most_ratio = max(each.most_ratio, best / had)
            each.most_gain = max(each.most_gain, (best - had) / true[0])
    return found


@pytest.mark.slow
def test_the_page_says_how_often_a_lie_pays() -> None:
    """Its figures are those of these auctions, payment by payment."""
    page = PAGE.read_text("utf-8")
    for payment, each in counted_lies().items():
        share = 100.0 * each.paid / AUCTIONS
        row = f"| `{payment}` | {share:.0f} % | {each.most_ratio:.2f} | {each.most_gain:.2f} |"
        assert row in page


def test_the_payment_that_is_shipped_is_the_one_with_a_bound() -> None:
    """By lottery alone no lie gains more than something fixed."""
    assert Terms().payment == Payment.LOTTERY
