"""The best sets of jobs at a price per node, and the lower bound that follows. Pure numbers.

With a price per emptied node instead of a number to empty, the best set of jobs is a maximum
closure (Picard, Management Science 22, 1976): a minimum cut, found exactly. The sets that are best
for some price are the corners of the lower hull of cost over emptied nodes; they are nested, and
between two neighbours no choice costs less than their chord (the Lagrangian bound).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from coordinator.policies.aryl.reclaim.problem import Problem

EFFORT = 100_000
"""Steps of the search for corners: 25 to 40 ms of a core where it was measured."""


class Hull(Struct, frozen=True, kw_only=True):
    """The two corners around the wanted number of nodes, as sets of jobs, and the bound that they
    prove.

    below: empties at most the wanted nodes. above: empties at least that many. below is a subset.
    bound: no choice that empties enough costs less.
    """

    below: frozenset[int]
    above: frozenset[int]
    bound: int


class _Corner(Struct, frozen=True):
    victims: frozenset[int]
    emptied: int
    weight: int


def hull(problem: Problem, *, effort: int = EFFORT) -> Hull:
    """Corners and bound; with too little effort the corners are further apart and the bound lower.

    effort: steps of the flow search; the same problem and effort give the same answer.
    """
    everything = frozenset(job for needs in problem.needs for job in needs)
    low = _Corner(frozenset(), 0, 0)
    high = _Corner(everything, sum(problem.counts), problem.weight(everything))
    bound = 0
    while low.emptied < problem.wanted < high.emptied:
        price, unit = high.weight - low.weight, high.emptied - low.emptied
        cut = _between(problem, low, high, price, unit, effort)
        effort -= cut.steps
        bound = max(bound, _bound(problem, low, cut.profit_at_most, price, unit))
        if not cut.is_least:
            break
        corner = _Corner(cut.victims, problem.emptied(cut.victims), problem.weight(cut.victims))
        above_chord = (corner.emptied - low.emptied) * price - (corner.weight - low.weight) * unit
        if above_chord <= 0:
            break
        if corner.emptied <= problem.wanted:
            low = corner
        if corner.emptied >= problem.wanted:
            high = corner
    for exact in (low, high):
        if exact.emptied == problem.wanted:
            return Hull(below=exact.victims, above=exact.victims, bound=exact.weight)
    return Hull(below=low.victims, above=high.victims, bound=bound)


class _Cut(Struct, frozen=True, kw_only=True):
    """victims: the closure. profit_at_most: no closure earns more, counted from the low corner."""

    victims: frozenset[int]
    profit_at_most: int
    is_least: bool
    steps: int


def _bound(problem: Problem, low: _Corner, profit: int, price: int, unit: int) -> int:
    """For every choice: unit * weight >= price * emptied - profit, all beyond the low corner."""
    beyond = price * (problem.wanted - low.emptied) - profit
    return low.weight + -(-beyond // unit)


def _between(
    problem: Problem, low: _Corner, high: _Corner, price: int, unit: int, effort: int
) -> _Cut:
    """The best set at price / unit per node; it contains the low corner and is within the high.

    Corners are nested, so jobs outside the high one or inside the low one are decided. The bound
    stays sound: at a price between those of two corners some best set lies between them.
    """
    jobs = sorted(high.victims - low.victims)
    number = {job: index for index, job in enumerate(jobs)}
    needs: list[tuple[int, ...]] = []
    supply: list[int] = []
    for kind, count in zip(problem.needs, problem.counts, strict=True):
        if high.victims.issuperset(kind):
            rest = tuple(number[job] for job in kind if job in number)
            if rest:
                needs.append(rest)
                supply.append(count * price)
    flow = _Flow(needs, supply, [problem.weights[job] * unit for job in jobs], effort)
    flow.run()
    return _Cut(
        victims=low.victims.union(jobs[job] for job in sorted(flow.dead_jobs)),
        profit_at_most=sum(flow.left),
        is_least=flow.effort > 0,
        steps=effort - flow.effort,
    )


class _Flow:
    """A maximum flow from kinds of nodes to the jobs that they need.

    What a kind cannot hand on is profit. A search from a kind that reaches no job with spare room
    has found a set that nothing leaves: it is in the closure, and is not looked at again.
    """

    def __init__(
        self,
        needs: Sequence[tuple[int, ...]],
        supply: list[int],
        spare: list[int],
        effort: int,
    ) -> None:
        self.needs = needs
        self.left = supply
        self.spare = spare
        self.into: list[dict[int, int]] = [{} for _ in spare]
        self.dead_jobs: set[int] = set()
        self.effort = effort
        self._dead_kinds: set[int] = set()

    def run(self) -> None:
        """Push all that can be pushed; stops where it stands when the effort is spent."""
        order = sorted(range(len(self.needs)), key=lambda kind: (len(self.needs[kind]), kind))
        for kind in order:
            for job in sorted(self.needs[kind], key=lambda job: (-self.spare[job], job)):
                self._push(kind, job, min(self.left[kind], self.spare[job]))
        for kind in order:
            while self.left[kind] and kind not in self._dead_kinds and self.effort > 0:
                self._augment(kind)

    def _push(self, kind: int, job: int, amount: int) -> None:
        if amount:
            self.into[job][kind] = self.into[job].get(kind, 0) + amount
            self.left[kind] -= amount
            self.spare[job] -= amount

    def _augment(self, kind: int) -> None:
        """One shortest way from a kind to a job with spare room, or the proof that there is none.

        came: the job through whose flow a kind was reached. via: the kind that reached a job.
        """
        came: dict[int, int | None] = {kind: None}
        via: dict[int, int] = {}
        queue = deque([kind])
        while queue:
            here = queue.popleft()
            self.effort -= len(self.needs[here])
            for job in self.needs[here]:
                if job in via or job in self.dead_jobs:
                    continue
                via[job] = here
                if self.spare[job]:
                    self._carry(job, came, via)
                    return
                for other in self.into[job]:
                    if other not in came:
                        came[other] = job
                        queue.append(other)
        self._dead_kinds.update(came)
        self.dead_jobs.update(via)

    def _carry(self, end: int, came: dict[int, int | None], via: dict[int, int]) -> None:
        way: list[tuple[int, int, int | None]] = []
        amount, job = self.spare[end], end
        while True:
            kind = via[job]
            back = came[kind]
            way.append((kind, job, back))
            if back is None:
                break
            amount = min(amount, self.into[back][kind])
            job = back
        amount = min(amount, self.left[kind])
        for kind_on_way, job, back in way:
            self.into[job][kind_on_way] = self.into[job].get(kind_on_way, 0) + amount
            if back is not None:
                self.into[back][kind_on_way] -= amount
                if not self.into[back][kind_on_way]:
                    del self.into[back][kind_on_way]
        self.spare[end] -= amount
        self.left[kind] -= amount
