"""Promises of deadlines on a pool of GPUs, and who gets what they leave. Pure arithmetic.

ElasticFlow (ASPLOS 2023): admission (section 4.1, algorithm 1) and allocation (section 4.2,
algorithm 2). Must not know jobs beyond their claims, nor nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import inf

from msgspec import Struct, structs

from coordinator.policies.deadlines.shares import (
    Claim,
    Piece,
    Plan,
    Timeline,
    fill,
    greedily,
    now_of,
)

Plans = dict[str, Plan]
"""By job."""


class Book:
    """Promises on the GPUs of one type.

    plans: of the claims that meet their deadline. late: those that cannot any more.
    """

    def __init__(self, now_s: float, gpus: int, kept: Plans) -> None:
        self._now_s = now_s
        self._gpus = gpus
        self._kept = kept
        self.claims: list[Claim] = []
        self.plans: Plans = {}
        self.late: list[Claim] = []

    def promise(self, claims: Sequence[Claim]) -> None:
        """Plan for jobs that were promised their deadline: anew, or as before if that is more."""
        self.claims = sorted(claims, key=by_deadline)
        self.plans = self._planned(self.claims, {})
        if len(self.plans) < len(self.claims):
            kept = self._planned(self.claims, self._kept)
            if len(kept) > len(self.plans):
                self.plans = kept
        self.late = [claim for claim in self.claims if claim.job_id not in self.plans]
        self.claims = [claim for claim in self.claims if claim.job_id in self.plans]

    def _planned(self, claims: Iterable[Claim], kept: Plans) -> Plans:
        """Plans in order of deadline; first those that are kept, where they still do."""
        line = Timeline(self._now_s, self._gpus)
        plans: Plans = {}
        rest: list[Claim] = []
        for claim in claims:
            plan = kept.get(claim.job_id)
            if plan is None or not self._still_does(claim, plan, line):
                rest.append(claim)
                continue
            line.take(plan, claim.gpus_per_worker)
            plans[claim.job_id] = plan
        for claim in rest:
            plan = fill(line, claim, self._now_s)
            if plan is not None:
                line.take(plan, claim.gpus_per_worker)
                plans[claim.job_id] = plan
        return plans

    def _still_does(self, claim: Claim, plan: Plan, line: Timeline) -> bool:
        return (
            all(piece.workers in claim.sizes for piece in plan)
            and claim.done_by(plan, self._now_s) >= claim.work_s * (1.0 - 1e-6)
            and line.has_room(plan, claim.gpus_per_worker)
        )

    def with_more(self, newcomers: Sequence[Claim]) -> Plans | None:
        """Plans for all that were promised and for newcomers; None: some promise would break."""
        claims = sorted((*self.claims, *newcomers), key=by_deadline)
        plans = self._planned(claims, {})
        if len(plans) == len(claims):
            return plans
        # The greedy order is not the only one: newcomers may fit around the plans that hold.
        line, around = self.line(), {**self.plans}
        for claim in sorted(newcomers, key=by_deadline):
            plan = fill(line, claim, self._now_s)
            if plan is None:
                return None
            line.take(plan, claim.gpus_per_worker)
            around[claim.job_id] = plan
        return around

    def admit(self, newcomers: Sequence[Claim]) -> bool:
        """Promise newcomers their deadlines, if that breaks no promise; all of them or none."""
        plans = self.with_more(newcomers)
        if plans is None:
            return False
        self.plans = plans
        self.claims = sorted((*self.claims, *newcomers), key=by_deadline)
        return True

    def earliest_s(self, claim: Claim) -> float:
        """The earliest deadline at which a newcomer would be admitted; inf: it never fits."""
        if not claim.sizes:
            return inf
        low_s = max(self._now_s, claim.deadline_s)
        ends_s = (piece.end_s for plan in self.plans.values() for piece in plan)
        high_s = max(low_s, max(ends_s, default=low_s)) + claim.work_s / claim.rates[-1] + 1.0
        while high_s - low_s > 0.5:
            middle_s = (low_s + high_s) / 2.0
            if self.with_more((structs.replace(claim, deadline_s=middle_s),)) is None:
                low_s = middle_s
            else:
                high_s = middle_s
        return high_s

    def line(self) -> Timeline:
        """What the plans leave free."""
        line = Timeline(self._now_s, self._gpus)
        for claim in self.claims:
            line.take(self.plans[claim.job_id], claim.gpus_per_worker)
        return line


def by_deadline(claim: Claim) -> tuple[float, str]:
    return claim.deadline_s, claim.job_id


# --- what the minimum shares leave ----------------------------------------------------------------


class _Step(Struct, frozen=True):
    """One more step of a job: GPU-seconds that its plan then saves per GPU, and that plan."""

    saved_gpu_s: float
    gpus: int
    workers: int
    plan: Plan


class Sharing:
    """What the minimum shares leave, GPU by GPU (section 4.2, algorithm 2).

    The priority of one more step is what the whole plan then needs less in GPU-seconds, per GPU;
    it counts only if the job ends earlier. Jobs without a promise are in the same queue, with
    nothing as their share; they hold GPUs for a slot at a time.
    """

    def __init__(
        self, book: Book, soft: Sequence[Claim], *, now_s: float, gpus: int, slot_s: float
    ) -> None:
        self._now_s = now_s
        self._slot_s = slot_s
        self._line = book.line()
        self._plans: Plans = {**book.plans}
        self._held: Plans = {**book.plans}
        self._soft = {claim.job_id for claim in soft}
        self._claims = {claim.job_id: claim for claim in (*book.claims, *soft)}
        self._queue: list[tuple[float, float, str, int]] = []
        self.given = {name: now_of(self._plans.get(name, ()), now_s) for name in self._claims}
        self._left = gpus - sum(
            workers * self._claims[name].gpus_per_worker for name, workers in self.given.items()
        )

    def share(self) -> dict[str, int]:
        """Workers of each job now."""
        for name in self._claims:
            self._offer(name)
        while self._queue and self._left > 0:
            key, _, name, had = heappop(self._queue)
            step = self._step(name) if had == self.given[name] else None
            if step is None or step.gpus > self._left:
                continue
            if -step.saved_gpu_s > key and self._queue and -step.saved_gpu_s > self._queue[0][0]:
                self._offer(name)  # others' plans have changed what it is worth
                continue
            self._take(name, step)
            self._offer(name)
        return self.given

    def _offer(self, name: str) -> None:
        step = self._step(name)
        if step is not None and step.gpus <= self._left:
            deadline_s = self._claims[name].deadline_s
            heappush(self._queue, (-step.saved_gpu_s, deadline_s, name, self.given[name]))

    def _step(self, name: str) -> _Step | None:
        claim, had = self._claims[name], self.given[name]
        at = claim.size_within(had * claim.gpus_per_worker) + 1
        if at >= len(claim.sizes):
            return None
        own = self._plans.get(name, ())
        if name in self._soft:
            end_s = self._now_s + claim.work_s / claim.rates[at]
            plan: Plan = (Piece(self._now_s, end_s, claim.sizes[at]),)
        else:
            self._line.give(self._held[name], claim.gpus_per_worker)
            plan = greedily(self._line, claim, self._now_s, self._slot_s, at)
            self._line.take(self._held[name], claim.gpus_per_worker)
        if own and plan[-1].end_s >= own[-1].end_s:
            return None
        least_gpu_s = claim.work_s / claim.rates[0] * claim.sizes[0] * claim.gpus_per_worker
        before_gpu_s = claim.gpu_s(own) if own else least_gpu_s
        gpus = (claim.sizes[at] - had) * claim.gpus_per_worker
        saved_gpu_s = (before_gpu_s - claim.gpu_s(plan)) / gpus
        return _Step(saved_gpu_s, gpus, claim.sizes[at], plan)

    def _take(self, name: str, step: _Step) -> None:
        claim, held = self._claims[name], step.plan
        if name in self._soft:
            held = (Piece(self._now_s, self._now_s + self._slot_s, step.workers),)
        self._line.give(self._held.get(name, ()), claim.gpus_per_worker)
        self._line.take(held, claim.gpus_per_worker)
        self._plans[name], self._held[name] = step.plan, held
        self.given[name] = step.workers
        self._left -= step.gpus
