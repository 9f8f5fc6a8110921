"""Minimum satisfactory shares: plans that meet a deadline with the fewest GPUs. Pure arithmetic.

ElasticFlow (ASPLOS 2023), section 4: free GPUs are a step function of time; a job fills it
backward from its deadline, with the smallest size for which its work fits. Must not know snapshots
or how a plan is carried out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf

from msgspec import Struct, structs

GUARD_S = 1e-3
"""Plans end so long before their deadline: sums of floats must not miss it."""
TOLERANCE = 1e-9
"""Of work: what is less than this part of it is rounding."""


class Piece(Struct, frozen=True, array_like=True):
    """So many workers in [start_s, end_s)."""

    start_s: float
    end_s: float
    workers: int


Plan = tuple[Piece, ...]
"""Pieces in order of time; with none in the gaps between them."""


class Claim(Struct, frozen=True, kw_only=True):
    """What a job needs until its deadline.

    sizes: worker counts that it may have, growing; rates: work a second with each, growing.
    work_s: what is left, in the unit of the rates. deadline_s: inf: none.
    runs: it has its base gang now. pauses: it goes on after a stop from where it was; else a plan
        of it has no gap, as its work would begin anew behind it.
    redo_s: work that a stop now would add to what is left; inf: it cannot be stopped now.
    stop_gpu_s: GPU-seconds that a stop now costs, of work and of the restart.
    keeps: that is most of what it has done, or it cannot be stopped now: it goes on unless that
        would break a promise.
    tenant: whose quota it counts against; empty: nobody's.
    """

    job_id: str
    sizes: tuple[int, ...]
    rates: tuple[float, ...]
    gpus_per_worker: int
    work_s: float
    deadline_s: float = inf
    runs: bool = False
    pauses: bool = True
    redo_s: float = 0.0
    stop_gpu_s: float = 0.0
    keeps: bool = False
    tenant: str = ""

    def hold(self, now_s: float) -> Plan:
        """Its base gang from now to its end: what it has at least if nobody stops it."""
        if not self.runs or not self.sizes:
            return ()
        return (Piece(now_s, now_s + self.work_s / self.rates[0], self.sizes[0]),)

    def anew(self) -> Claim:
        """The same job after a stop."""
        return structs.replace(self, runs=False, work_s=self.work_s + self.redo_s)

    def size_within(self, gpus: int) -> int:
        """Index of its largest size that so many GPUs hold; -1: none."""
        return bisect_right(self.sizes, gpus // self.gpus_per_worker) - 1

    def done_by(self, plan: Plan, from_s: float) -> float:
        """Work that a plan does from an instant on."""
        return sum(
            self.rates[bisect_left(self.sizes, piece.workers)]
            * max(0.0, piece.end_s - max(piece.start_s, from_s))
            for piece in plan
        )

    def gpu_s(self, plan: Plan) -> float:
        """GPU-seconds that a plan holds."""
        workers = sum((piece.end_s - piece.start_s) * piece.workers for piece in plan)
        return workers * self.gpus_per_worker


class Timeline:
    """Free GPUs from an instant on: `free[i]` in [times[i], times[i + 1]), the last for ever."""

    def __init__(self, start_s: float, gpus: int) -> None:
        self.times = [start_s]
        self.free = [gpus]

    def copy(self) -> Timeline:
        """One that can be changed alone."""
        other = Timeline(self.times[0], 0)
        other.times, other.free = list(self.times), list(self.free)
        return other

    def take(self, plan: Plan, gpus_per_worker: int) -> None:
        """A plan holds its GPUs."""
        for piece in plan:
            self._add(piece, -piece.workers * gpus_per_worker)

    def give(self, plan: Plan, gpus_per_worker: int) -> None:
        """The opposite of `take`."""
        for piece in plan:
            self._add(piece, piece.workers * gpus_per_worker)

    def has_room(self, plan: Plan, gpus_per_worker: int) -> bool:
        """Whether a plan's GPUs are free all the time."""
        return all(
            self.free[at] >= piece.workers * gpus_per_worker
            for piece in plan
            if piece.end_s > self.times[0]
            for at in range(
                max(0, bisect_right(self.times, piece.start_s) - 1),
                bisect_left(self.times, piece.end_s),
            )
        )

    def at(self, at_s: float) -> int:
        """Free GPUs at an instant."""
        return self.free[max(0, bisect_right(self.times, at_s) - 1)]

    def spans(self, start_s: float, end_s: float) -> list[tuple[float, float, int]]:
        """(from, to, free GPUs) within a time, in order."""
        first = max(0, bisect_right(self.times, start_s) - 1)
        last = bisect_left(self.times, end_s)
        found: list[tuple[float, float, int]] = []
        for at in range(first, last):
            to_s = min(self.times[at + 1] if at + 1 < len(self.times) else inf, end_s)
            from_s = max(self.times[at], start_s)
            if found and found[-1][2] == self.free[at]:
                from_s = found.pop()[0]
            found.append((from_s, to_s, self.free[at]))
        return found

    def _add(self, piece: Piece, gpus: int) -> None:
        start_s = max(piece.start_s, self.times[0])
        if piece.end_s <= start_s:
            return
        for at in range(self._cut(start_s), self._cut(piece.end_s)):
            self.free[at] += gpus

    def _cut(self, at_s: float) -> int:
        """The place of the step that begins at an instant, made where there is none."""
        at = bisect_left(self.times, at_s)
        if at == len(self.times) or self.times[at] != at_s:
            self.times.insert(at, at_s)
            self.free.insert(at, self.free[at - 1])
        return at


def fill(timeline: Timeline, claim: Claim, start_s: float) -> Plan | None:
    """The plan with the minimum satisfactory share (section 4.1, algorithm 1); None: none meets it.

    Sizes are tried from the smallest. Before the point from which a size has to run, the next
    smaller one does, as in the authors' artefact, and the smallest from the start: so a plan ends
    early rather than late. Who does not pause is planned within one stretch without a gap (ours:
    the paper's jobs save), and from the start if it runs.
    """
    end_s = claim.deadline_s - GUARD_S
    if end_s <= start_s:
        return None
    spans = timeline.spans(start_s, end_s)
    fits = [claim.size_within(gpus) for _, _, gpus in spans]
    stretches = _stretches(claim, fits)
    for size in range(len(claim.sizes)):
        for first, last in stretches:
            left_s = claim.work_s * (1.0 - TOLERANCE)
            for at in range(last - 1, first - 1, -1):
                if fits[at] >= 0:
                    from_s, to_s, _ = spans[at]
                    left_s -= claim.rates[min(size, fits[at])] * (to_s - from_s)
                if left_s <= 0:
                    wanted = [max(0, size - 1)] * (at - first) + [size] * (last - at)
                    found = map(min, wanted, fits[first:last])
                    return _forward(claim, spans[first:last], found)
    return None


def _stretches(claim: Claim, fits: Sequence[int]) -> list[tuple[int, int]]:
    """Spans (from, to) within which a plan has to be: all, or each row of them without a gap."""
    if claim.pauses:
        return [(0, len(fits))]
    found: list[tuple[int, int]] = []
    first = 0
    for at, fit in enumerate((*fits, -1)):
        if fit < 0:
            if at > first:
                found.append((first, at))
            first = at + 1
    return [each for each in found if each[0] == 0] if claim.runs else found


def is_whole(plan: Plan) -> bool:
    """Whether a plan has no gap."""
    return all(before.end_s == after.start_s for before, after in pairwise(plan))


def _forward(claim: Claim, spans: Sequence[tuple[float, float, int]], sizes: Iterable[int]) -> Plan:
    """Sizes by span as a plan that ends when the work is done."""
    plan: list[Piece] = []
    left_s = claim.work_s
    for (from_s, to_s, _), size in zip(spans, sizes, strict=True):
        if size < 0:
            continue
        rate, workers = claim.rates[size], claim.sizes[size]
        until_s = min(to_s, from_s + left_s / rate)
        left_s -= rate * (until_s - from_s)
        if plan and plan[-1].end_s == from_s and plan[-1].workers == workers:
            plan[-1] = Piece(plan[-1].start_s, until_s, workers)
        elif until_s > from_s:
            plan.append(Piece(from_s, until_s, workers))
        if left_s <= claim.work_s * TOLERANCE:
            break
    return tuple(plan)


def greedily(
    timeline: Timeline, claim: Claim, start_s: float, slot_s: float, size: int
) -> Plan | None:
    """A size now, the minimum satisfactory share after a slot (section 4.2, algorithm 2).

    A job that is late or has no deadline goes on with that size. None: it does not pause, and would
    have to before its end.
    """
    rate, workers = claim.rates[size], claim.sizes[size]
    end_s = start_s + claim.work_s / rate
    rest = None
    if claim.deadline_s < inf and end_s > start_s + slot_s:
        left = structs.replace(claim, work_s=claim.work_s - rate * slot_s, runs=True)
        rest = fill(timeline, left, start_s + slot_s)
        if rest is None and not claim.pauses:
            return None
    if rest is None:
        return (Piece(start_s, end_s, workers),)
    return (Piece(start_s, start_s + slot_s, workers), *rest)


def now_of(plan: Plan, now_s: float) -> int:
    """Workers that a plan has at an instant."""
    return next((p.workers for p in plan if p.start_s <= now_s < p.end_s), 0)


def next_change_s(plan: Plan, now_s: float) -> float:
    """When a plan wants another number of workers; inf: never again."""
    instants = (instant for piece in plan for instant in (piece.start_s, piece.end_s))
    return min((instant for instant in instants if instant > now_s), default=inf)
