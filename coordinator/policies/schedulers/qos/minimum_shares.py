"""Minimum satisfactory shares: plans that meet a deadline with the fewest GPUs. Pure arithmetic.

ElasticFlow (ASPLOS 2023), section 4: free GPUs are a step function of time; a job fills it backward
from its deadline, with the smallest size for which its work fits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf

from msgspec import Struct, structs

from coordinator.policies.schedulers.qos.timeline import Piece, Plan, Span, Timeline

GUARD_S = 1e-3
"""Plans end this long before their deadline: sums of floats must not miss it."""
TOLERANCE = 1e-9
"""As a fraction of work: less than this is rounding."""


class Claim(Struct, frozen=True, kw_only=True):
    """The need of a job until its deadline.

    sizes: worker counts that it may have, growing; rates: work a second with each, growing.
    work_s: the remaining work, in the unit of the rates. deadline_s: inf: none.
    runs: it has its base gang now. pauses: after a stop it goes on from where it was; else its plan
        has no gap, because its work would start over behind it.
    redo_s: work that a stop now would add to the rest; inf: it cannot be stopped now.
    stop_gpu_s: GPU-seconds that a stop now costs, of work and of the restart.
    keeps: that is most of its work so far, or it cannot be stopped now: it goes on unless that
        would break a promise.
    tenant: whose quota it counts against; empty: none.
    predicted_s: the rest without a margin; 0: the same as work_s.
    present: workers that it has now. begins_s: from the begin of its plan, or from now where it
        starts already, until it computes; again_s: so after a stop. resize_s, grow_s: its pause
        when it loses workers, or gains some.
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
    predicted_s: float = 0.0
    present: int = 0
    begins_s: float = 0.0
    again_s: float = 0.0
    resize_s: float = 0.0
    grow_s: float = 0.0

    @property
    def has_costs(self) -> bool:
        """Whether any start or change takes time."""
        return self.begins_s > 0 or self.again_s > 0 or self.resize_s > 0

    def pause_s(self, workers: int) -> float:
        """How long it does not compute if it has this number of workers from now on."""
        return max(self.begins_s, self.change_s(self.present, workers) if self.runs else 0.0)

    def change_s(self, before: int, workers: int) -> float:
        """How long it does not compute when its workers change."""
        return self.grow_s if workers > before else self.resize_s if workers < before else 0.0

    def lean(self) -> Claim:
        """The same without a margin."""
        return structs.replace(self, work_s=self.predicted_s) if self.predicted_s else self

    def hold(self, now_s: float) -> Plan:
        """Its base gang from now to its end: the least that it has unless it is stopped."""
        if not self.runs or not self.sizes:
            return ()
        end_s = now_s + self.pause_s(self.sizes[0]) + self.work_s / self.rates[0]
        return (Piece(now_s, end_s, self.sizes[0]),)

    def anew(self) -> Claim:
        """The same job after a stop."""
        return structs.replace(
            self,
            runs=False,
            work_s=self.work_s + self.redo_s,
            predicted_s=self.predicted_s + self.redo_s if self.predicted_s else 0.0,
            begins_s=self.again_s,
            present=0,
        )

    def size_within(self, gpus: int) -> int:
        """Index of its largest size that a number of GPUs holds; -1: none."""
        return bisect_right(self.sizes, gpus // self.gpus_per_worker) - 1

    def done_by(self, plan: Plan, from_s: float) -> float:
        """Work that a plan does from an instant on, which is now."""
        gang, done = _Gang(self, from_s), 0.0
        for piece in plan:
            start_s = max(piece.start_s, from_s)
            if piece.end_s > start_s:
                pause_s = gang.goes_on(start_s, piece.end_s, piece.workers)
                rate = self.rates[bisect_left(self.sizes, piece.workers)]
                done += rate * max(0.0, piece.end_s - start_s - pause_s)
        return done

    def gpu_s(self, plan: Plan) -> float:
        """GPU-seconds that a plan holds."""
        workers = sum((piece.end_s - piece.start_s) * piece.workers for piece in plan)
        return workers * self.gpus_per_worker


class _Gang:
    """The time of a plan's starts and changes, piece by piece."""

    def __init__(self, claim: Claim, now_s: float) -> None:
        self._claim = claim
        self._workers = claim.present if claim.runs else 0
        self._until_s = now_s
        self._ready_s = now_s + claim.begins_s if claim.runs else -inf

    def goes_on(self, from_s: float, to_s: float, workers: int) -> float:
        """The pause when it goes on with this number of workers, in seconds."""
        if self._workers == 0:
            self._ready_s = from_s + self._claim.begins_s
        elif from_s > self._until_s:
            self._ready_s = from_s + self._claim.again_s
        else:
            change_s = self._claim.change_s(self._workers, workers)
            self._ready_s = max(self._ready_s, from_s + change_s)
        self._workers, self._until_s = workers, to_s
        return max(0.0, self._ready_s - from_s)


def fill(timeline: Timeline, claim: Claim, start_s: float) -> Plan | None:
    """The plan with the minimum satisfactory share (section 4.1, algorithm 1); None: none meets it.

    Sizes are tried from the smallest. Before the point from which a size has to run, the next
    smaller one does, as in the authors' artefact, and the smallest from the start: so a plan ends
    early rather than late. A plan makes up for the time of starts and changes with more running
    time (ours). A job that does not pause is planned within one stretch without a gap (ours: the
    paper's jobs save), and from the start if it runs.
    """
    end_s = claim.deadline_s - GUARD_S
    if end_s <= start_s or not claim.sizes:
        return None
    spans = timeline.spans(start_s, end_s, claim.sizes[0] * claim.gpus_per_worker)
    fit_of = {gpus: claim.size_within(gpus) for gpus in {free for _, _, free in spans}}
    fits = [fit_of[free] for _, _, free in spans]
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
                    found = list(map(min, wanted, fits[first:last]))
                    if not claim.has_costs:
                        return _forward(claim, spans[first:last], found, start_s)[0]
                    found = _steady(claim, spans[first:last], found)
                    plan, rest_s = _forward(claim, spans[first:last], found, start_s)
                    if rest_s <= claim.work_s * TOLERANCE:
                        return plan
                    left_s += rest_s  # what starts and changes take has to be made up for
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


def _steady(claim: Claim, spans: Sequence[Span], sizes: Sequence[int]) -> list[int]:
    """Sizes by span (below zero: none) without starts and growth that take more than they bring."""
    found = list(sizes)
    before, begins_s = -1, claim.begins_s
    if claim.runs:
        before, begins_s = claim.size_within(claim.present * claim.gpus_per_worker), claim.again_s
    for at, (from_s, _, _) in enumerate(spans):
        size = found[at]
        least = size if before >= 0 else 0
        end = next((n for n in range(at, len(found)) if found[n] < least), len(found))
        lasts_s, goes_back = spans[end - 1][1] - from_s, end < len(found)
        if size > before >= 0:
            new, old = claim.rates[size], claim.rates[before]
            costs = claim.grow_s * new + (claim.resize_s * old if goes_back else 0.0)
            if (new - old) * lasts_s <= costs:
                found[at] = before
        elif size > before and goes_back and lasts_s <= begins_s:
            found[at] = -1
        before = found[at]
        if before >= 0:
            begins_s = claim.again_s
    return found


def is_whole(plan: Plan) -> bool:
    """Whether a plan has no gap."""
    return all(before.end_s == after.start_s for before, after in pairwise(plan))


def _forward(
    claim: Claim, spans: Sequence[Span], sizes: Iterable[int], now_s: float
) -> tuple[Plan, float]:
    """Sizes by span as a plan that ends when the work is done; and the work that it leaves."""
    plan: list[Piece] = []
    left_s = claim.work_s
    gang = _Gang(claim, now_s) if claim.has_costs or claim.grow_s > 0 else None
    for (from_s, to_s, _), size in zip(spans, sizes, strict=True):
        if size < 0:
            continue
        rate, workers = claim.rates[size], claim.sizes[size]
        pause_s = gang.goes_on(from_s, to_s, workers) if gang else 0.0
        until_s = min(to_s, from_s + pause_s + left_s / rate)
        left_s -= rate * max(0.0, until_s - from_s - pause_s)
        if plan and plan[-1].end_s == from_s and plan[-1].workers == workers:
            plan[-1] = Piece(plan[-1].start_s, until_s, workers)
        elif until_s > from_s:
            plan.append(Piece(from_s, until_s, workers))
        if left_s <= claim.work_s * TOLERANCE:
            break
    return tuple(plan), left_s


def greedily(
    timeline: Timeline, claim: Claim, start_s: float, slot_s: float, size: int
) -> Plan | None:
    """A size now, the minimum satisfactory share after a slot (section 4.2, algorithm 2).

    A job that is late or has no deadline goes on with that size. None: it does not pause, and would
    have to before its end; or changes take time, and with these the rest would be late.
    """
    rate, workers = claim.rates[size], claim.sizes[size]
    pause_s = claim.pause_s(workers)
    end_s = start_s + pause_s + claim.work_s / rate
    rest = None
    if claim.deadline_s < inf and end_s > start_s + slot_s:
        left = structs.replace(
            claim,
            work_s=claim.work_s - rate * max(0.0, slot_s - pause_s),
            runs=True,
            present=workers,
            begins_s=max(0.0, pause_s - slot_s),
        )
        rest = fill(timeline, left, start_s + slot_s)
        if rest is None and (claim.has_costs or not claim.pauses):
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
