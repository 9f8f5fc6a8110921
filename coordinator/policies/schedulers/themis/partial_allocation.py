"""The partial-allocation auction: which bidder gets which GPUs, and the withheld part. Pure.

Themis (NSDI'20, section 4) takes the mechanism from Cole, Gkatzelis and Goel (EC'13). Bidders state
their value of each bundle of GPUs. The proportionally fair choice makes the product of all values
greatest. Each bidder then keeps the part c of its bundle: the product of the others' values with it
there, over that without it. Its loss is its hidden payment, as large as the harm that it does to
others.

With a bundle worth the part c of it, a bidder's value is its own value times the others', over a
term that does not depend on it. The choice maximizes exactly that, so a truthful bid is the best
one. That holds of any bundles, if the choice is optimal. No payment leaves exactly the part c of
the worth of whole GPUs; `lease_terms` states the gain of a lie for each. That each keeps 1/e of its
value holds where GPUs can be divided at will; with n whole GPUs in a bundle, and values that grow
less and less, it is (1 - 1/n)^n.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, prod

from msgspec import Struct

EXACT_CHOICES = 600
"""Tables with no more combinations than this are searched through; others are climbed."""

MOST_LOOKS = 400_000
"""Bids that all climbs of one auction look at: so it ends in time, however many bidders come."""

LEAST_GAIN = 1e-9
"""In log value; less is rounding."""

LEAST_VALUE = 1e-5
"""Values below count as this: a logarithm needs one above 0."""


class Bid(Struct, frozen=True):
    """A bundle and its worth. asks: (place of a node, GPUs there), each place once."""

    asks: tuple[tuple[int, int], ...]
    value: float

    @property
    def gpus(self) -> int:
        """GPUs of the bundle."""
        return sum(count for _, count in self.asks)


class Award(Struct, frozen=True):
    """Which of its bids a bidder won, and the part of it that is left to it."""

    bid: int
    kept_ratio: float

    def kept_gpus(self, bid: Bid) -> int:
        """Whole GPUs of the bundle that are left: the payment is rounded up."""
        return int(self.kept_ratio * bid.gpus + LEAST_GAIN)


Table = Sequence[Bid]
"""All bids of one bidder; the first is for no GPU."""


def partial_allocation(tables: Sequence[Table], capacity: Sequence[int]) -> tuple[Award, ...]:
    """The auction of disjoint bundles.

    Args:
        capacity: GPUs at each place.
    """
    looks = MOST_LOOKS // (len(tables) + 1)
    chosen = proportional_fair(tables, capacity, looks=looks)
    values = [log(_value(table[at])) for table, at in zip(tables, chosen, strict=True)]
    awards: list[Award] = []
    for bidder, at in enumerate(chosen):
        if not tables[bidder][at].asks or _is_all_best(tables, chosen, bidder):
            # it takes nothing, or no other bidder would have more without it
            awards.append(Award(at, 1.0))
            continue
        rest = proportional_fair(tables, capacity, without=bidder, start=chosen, looks=looks)
        with_it = sum(value for other, value in enumerate(values) if other != bidder)
        without_it = sum(
            log(_value(table[rest[other]])) for other, table in enumerate(tables) if other != bidder
        )
        awards.append(Award(at, min(1.0, exp(with_it - without_it))))
    return tuple(awards)


def proportional_fair(
    tables: Sequence[Table],
    capacity: Sequence[int],
    *,
    without: int | None = None,
    start: Sequence[int] | None = None,
    looks: int = MOST_LOOKS,
) -> tuple[int, ...]:
    """The bid of each bidder, disjoint ones, with the greatest product of values.

    Optimal where there are few combinations; else no exchange of one bundle makes it better.

    Args:
        without: this bidder gets nothing.
        start: a disjoint choice to begin with.
        looks: bids that a climb may look at; a search through all combinations has no limit.
    """
    logs = [[log(_value(bid)) for bid in table] for table in tables]
    if without is not None:
        tables = [table[:1] if at == without else table for at, table in enumerate(tables)]
    climb = _Climb(tables, logs, capacity)
    if prod(len(table) for table in tables) <= EXACT_CHOICES:
        return climb.exact()
    first = [0] * len(tables) if start is None else list(start)
    if without is not None:
        first[without] = 0
    return climb.best_near(first, looks)


def _value(bid: Bid) -> float:
    return max(LEAST_VALUE, bid.value)


def _is_all_best(tables: Sequence[Table], chosen: Sequence[int], bidder: int) -> bool:
    """Whether every other bidder has the best of its bids already."""
    return all(
        other == bidder or _value(table[at]) >= max(map(_value, table))
        for other, (table, at) in enumerate(zip(tables, chosen, strict=True))
    )


_Upgrade = tuple[float, int, tuple[tuple[int, int], ...]]
"""A better bid: gain per GPU, which one, and at which places it asks for how many GPUs more."""


class _Climb:
    """One search.

    free: GPUs at each place that the present choice leaves.
    """

    def __init__(
        self, tables: Sequence[Table], logs: Sequence[Sequence[float]], capacity: Sequence[int]
    ) -> None:
        self._tables = tables
        self._logs = logs
        self._free = list(capacity)
        self._chosen = [0] * len(tables)
        self._gpus = [[bid.gpus for bid in table] for table in tables]
        self._tops = [max(own[: len(table)]) for own, table in zip(logs, tables, strict=True)]
        # Thousands of exchanges come by the same few choices of a bidder.
        self._upgrades: list[dict[int, list[_Upgrade]]] = [{} for _ in tables]
        self._looks = 0

    # --- all combinations ---------------------------------------------------------------------

    def exact(self) -> tuple[int, ...]:
        """The best of all combinations; of equal ones the first."""
        self._best: tuple[float, tuple[int, ...]] = (float("-inf"), ())
        hopes = [0.0]
        for table, logs in zip(reversed(self._tables), reversed(self._logs), strict=True):
            hopes.append(hopes[-1] + max(logs[: len(table)]))
        self._hopes = hopes[::-1]
        self._deepen(0, 0.0)
        return self._best[1]

    def _deepen(self, bidder: int, total: float) -> None:
        if total + self._hopes[bidder] <= self._best[0] + LEAST_GAIN:
            return
        if bidder == len(self._tables):
            self._best = (total, tuple(self._chosen))
            return
        for at, bid in enumerate(self._tables[bidder]):
            if self._fits(bid):
                self._put(bidder, at)
                self._deepen(bidder + 1, total + self._logs[bidder][at])
                self._put(bidder, 0)

    # --- from one choice to a better one ------------------------------------------------------

    def best_near(self, start: Sequence[int], looks: int) -> tuple[int, ...]:
        """Fill the free GPUs, then exchange bundles as long as it helps."""
        for bidder, at in enumerate(start):
            self._put(bidder, at)
        self._fill()
        self._looks = 0
        is_better = True
        while is_better:
            is_better = False
            for bidder, table in enumerate(self._tables):
                for at in range(1, len(table)):
                    if self._looks > looks:
                        return tuple(self._chosen)
                    if at != self._chosen[bidder]:
                        is_better |= self._exchange(bidder, at)
        return tuple(self._chosen)

    def _fill(self) -> None:
        """Upgrades that fit, those with the most gain per GPU first."""
        while any(self._free):
            best = (LEAST_GAIN, -1, -1)
            for bidder, top in enumerate(self._tops):
                if self._logs[bidder][self._chosen[bidder]] < top - LEAST_GAIN:
                    best = self._upgrade(bidder, best[0]) or best
            if best[1] < 0:
                return
            self._put(best[1], best[2])

    def _upgrade(self, bidder: int, least: float) -> tuple[float, int, int] | None:
        """The bid of one bidder that gains most per GPU: (gain, bidder, bid), of those that fit.

        least: it has to gain more.
        """
        here, free = self._chosen[bidder], self._free
        self._looks += len(self._tables[bidder])
        found = self._upgrades[bidder].get(here)
        if found is None:
            found = self._upgrades[bidder][here] = self._upgrades_from(bidder, here)
        for gain, at, more in found:
            if gain <= least:
                break
            for place, count in more:
                if free[place] < count:
                    break
            else:
                return gain, bidder, at
        return None

    def _upgrades_from(self, bidder: int, here: int) -> list[_Upgrade]:
        """Better bids than this one, those with the most gain per GPU first, of equal ones the
        first."""
        table, logs, gpus = self._tables[bidder], self._logs[bidder], self._gpus[bidder]
        own = dict(table[here].asks)
        found: list[_Upgrade] = []
        for at, bid in enumerate(table):
            gain = logs[at] - logs[here]
            if gain > LEAST_GAIN:
                beyond = ((place, count - own.get(place, 0)) for place, count in bid.asks)
                more = tuple((place, count) for place, count in beyond if count > 0)
                found.append((gain / max(1, gpus[at] - gpus[here]), at, more))
        found.sort(key=lambda upgrade: -upgrade[0])
        return found

    def _exchange(self, bidder: int, at: int) -> bool:
        """Give a bidder another bundle, take those in the way from others, and fill again."""
        self._looks += len(self._tables)
        before, total = list(self._chosen), self._total()
        self._put(bidder, 0)
        bid = self._tables[bidder][at]
        for other in self._in_the_way(bid):
            self._put(other, 0)
        if self._fits(bid):
            self._put(bidder, at)
            self._fill()
            if self._total() > total + LEAST_GAIN:
                return True
        for other, choice in enumerate(before):
            if choice != self._chosen[other]:
                self._put(other, choice)
        return False

    def _in_the_way(self, bid: Bid) -> list[int]:
        """Bidders to go, those with the least log value per GPU first, until the bid fits."""
        short = {place: count - self._free[place] for place, count in bid.asks}
        found: list[int] = []
        for other in sorted(range(len(self._tables)), key=self._worth_per_gpu):
            if all(count <= 0 for count in short.values()):
                break
            asks = self._tables[other][self._chosen[other]].asks
            if any(short.get(place, 0) > 0 for place, _ in asks):
                found.append(other)
                for place, count in asks:
                    if place in short:
                        short[place] -= count
        return found

    def _worth_per_gpu(self, bidder: int) -> tuple[float, int]:
        logs, at = self._logs[bidder], self._chosen[bidder]
        return (logs[at] - logs[0]) / max(1, self._gpus[bidder][at]), bidder

    def _total(self) -> float:
        return sum(logs[at] for logs, at in zip(self._logs, self._chosen, strict=True))

    def _fits(self, bid: Bid) -> bool:
        return all(self._free[place] >= count for place, count in bid.asks)

    def _put(self, bidder: int, at: int) -> None:
        """A bidder's choice is another; the GPUs of the one before are free."""
        for place, count in self._tables[bidder][self._chosen[bidder]].asks:
            self._free[place] += count
        for place, count in self._tables[bidder][at].asks:
            self._free[place] -= count
        self._chosen[bidder] = at
