"""Marginal return: shares out the rest, the most GPU-seconds saved per GPU first. Pure.

ElasticFlow (ASPLOS 2023), section 4.2, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from msgspec import Struct

from coordinator.policies.schedulers.qos.admission import Book, Plans
from coordinator.policies.schedulers.qos.minimum_shares import Claim, greedily, now_of
from coordinator.policies.schedulers.qos.timeline import Piece, Plan

ROUNDING = 1e-9
"""As a fraction of GPU-seconds: less than this is rounding."""


class _Step(Struct, frozen=True):
    """One more step of a job: the GPU-seconds that its plan then saves per GPU, and that plan.

    is_earlier: it ends earlier by it; else it has that many workers already.
    """

    saved_gpu_s: float
    gpus: int
    workers: int
    plan: Plan
    is_earlier: bool

    @property
    def order(self) -> tuple[bool, float]:
        """The least comes first: a job that only keeps its workers is last."""
        return (not self.is_earlier, -self.saved_gpu_s)


class _Offer(NamedTuple):
    """One step in the queue. Of equals the earlier deadline comes first, then a base gang before
    more workers of another job.

    order: of the step as it was when it was offered. had: workers before it.
    """

    order: tuple[bool, float]
    deadline_s: float
    grows: bool
    name: str
    had: int


class Sharing:
    """The GPUs that minimum shares leave, shared out one by one (section 4.2, algorithm 2).

    The priority of one more step is the decrease of the whole plan in GPU-seconds, per GPU. It
    counts only if the job ends earlier. Jobs without a promise are in the same queue, with no
    share; they hold GPUs for a slot at a time. A step that avoids a stop also saves the stop's cost
    (ours: the paper's jobs save, and at once). Where changes take time, a job keeps workers that no
    other job takes (ours). Otherwise, with more work done in the slot, the share of the rest could
    be less and end later, so that the next pass takes back what one gave.
    """

    def __init__(
        self, book: Book, soft: Sequence[Claim], *, now_s: float, gpus: int, slot_s: float
    ) -> None:
        self._now_s = now_s
        self._slot_s = slot_s
        self._room = book.room()
        going_on = {claim.job_id: claim.hold(now_s) for claim in book.spared}
        self._plans: Plans = {**book.plans, **going_on}
        self._held: Plans = {**self._plans}
        self._soft = {claim.job_id for claim in soft}
        self._claims = {claim.job_id: claim for claim in (*book.claims, *soft)}
        self._queue: list[_Offer] = []
        self.given = {name: now_of(self._plans.get(name, ()), now_s) for name in self._claims}
        self._left = gpus - sum(
            workers * self._claims[name].gpus_per_worker for name, workers in self.given.items()
        )

    def lend(self, gpus: int) -> bool:
        """Lend GPUs to a job that needs a number, for now only; False if fewer are left."""
        if gpus > self._left:
            return False
        self._left -= gpus
        return True

    def share(self) -> dict[str, int]:
        """Workers of each job now."""
        self._give_dues()
        for name in self._claims:
            self._offer(name)
        while self._queue and self._left > 0:
            offer = heappop(self._queue)
            step = self._step(offer.name) if offer.had == self.given[offer.name] else None
            if step is None or not self._fits(step, offer.name):
                continue
            if step.order > offer.order and self._queue and step.order > self._queue[0].order:
                self._offer(offer.name)  # others' plans have changed its worth
                continue
            self._take(offer.name, step)
            self._offer(offer.name)
        return self.given

    def _give_dues(self) -> None:
        """GPUs that idle guarantees cover go first: of the innermost tenants, to running jobs.

        These lose them to no other tenant, and get them back from any borrower. No promise counts
        on them; but the one that gives them back could be a job that was promised its share.
        """
        for depth in range(self._room.depth, 0, -1):
            for runs in (True, False):
                for name, claim in self._claims.items():
                    if claim.runs == runs and claim.sizes:
                        self._give_due(name, depth)
            self._keep_dues(depth)

    def _give_due(self, name: str, depth: int) -> None:
        """Up to its present workers, or its base gang, as far as a guarantee at this depth covers
        it.
        """
        claim = self._claims[name]
        most = max(claim.present, claim.sizes[0])
        while (at := self._larger(name)) < len(claim.sizes) and claim.sizes[at] <= most:
            gpus = (claim.sizes[at] - self.given[name]) * claim.gpus_per_worker
            if not self._room.is_due(claim, gpus, depth):
                break
            step = self._step(name)
            if step is None or not step.is_earlier or not self._fits(step, name):
                break
            self._take(name, step)

    def _keep_dues(self, depth: int) -> None:
        """A running job keeps its other workers that a guarantee at this depth covers, though its
        share is less.

        They may be taken for no other tenant; and a share that is planned on them instead of idle
        GPUs is not carried out. A job that is due the same guarantee got its part before.
        """
        for name, claim in self._claims.items():
            if claim.runs and claim.sizes:
                self._keep_due(name, depth)

    def _keep_due(self, name: str, depth: int) -> None:
        """One by one, whatever the sizes by which it is planned: workers may go one by one."""
        claim = self._claims[name]
        most = min(claim.present, claim.sizes[-1])
        while (had := self.given[name]) < most:
            workers = had + 1 if had else claim.sizes[0]
            gpus = (workers - had) * claim.gpus_per_worker
            fits = gpus <= self._left and gpus <= self._room.now(claim)
            if not fits or not self._room.is_due(claim, gpus, depth):
                break
            kept = (Piece(self._now_s, self._now_s + self._slot_s, workers - had),)
            self._room.take(kept, claim)
            self._held[name] = (*self._held.get(name, ()), *kept)
            self.given[name] = workers
            self._left -= gpus

    def _offer(self, name: str) -> None:
        step = self._step(name)
        if step is not None and self._fits(step, name):
            had = self.given[name]
            deadline_s = self._claims[name].deadline_s
            heappush(self._queue, _Offer(step.order, deadline_s, had > 0, name, had))

    def _fits(self, step: _Step, name: str) -> bool:
        return step.gpus <= self._left and step.gpus <= self._room.now(self._claims[name])

    def _larger(self, name: str) -> int:
        """Index of its next size; one behind the last has none."""
        claim = self._claims[name]
        return claim.size_within(self.given[name] * claim.gpus_per_worker) + 1

    def _step(self, name: str) -> _Step | None:
        claim, had, at = self._claims[name], self.given[name], self._larger(name)
        if at >= len(claim.sizes):
            return None
        own = self._plans.get(name, ())
        plan = self._plan(name, at)
        is_earlier = plan is not None and (not own or plan[-1].end_s < own[-1].end_s)
        is_kept = claim.has_costs and claim.sizes[at] <= claim.present
        if plan is None or not (is_earlier or is_kept):
            return None
        least_gpu_s = claim.work_s / claim.rates[0] * claim.sizes[0] * claim.gpus_per_worker
        before_gpu_s = claim.gpu_s(own) if own else least_gpu_s
        gpus = (claim.sizes[at] - had) * claim.gpus_per_worker
        saved_gpu_s = before_gpu_s - claim.gpu_s(plan)
        if abs(saved_gpu_s) <= ROUNDING * before_gpu_s:
            saved_gpu_s = (
                0.0  # equals stay equal from pass to pass: chance would stop one for another
            )
        if had == 0:
            saved_gpu_s += claim.stop_gpu_s
        return _Step(saved_gpu_s / gpus, gpus, claim.sizes[at], plan, is_earlier)

    def _plan(self, name: str, at: int) -> Plan | None:
        """With one more step now; None: it must not begin, as it would have to pause."""
        claim = self._claims[name]
        if name in self._soft:
            pause_s = claim.pause_s(claim.sizes[at])
            end_s = self._now_s + pause_s + claim.work_s / claim.rates[at]
            return (Piece(self._now_s, end_s, claim.sizes[at]),)
        self._room.give(self._held[name], claim)
        line = self._room.line(claim)
        plan = greedily(line, claim, self._now_s, self._slot_s, at)
        begins = plan is not None and not claim.pauses and self.given[name] == 0
        if begins and not line.has_room(plan or (), claim.gpus_per_worker):
            plan = None
        self._room.take(self._held[name], claim)
        return plan

    def _take(self, name: str, step: _Step) -> None:
        claim, held = self._claims[name], step.plan
        if name in self._soft:
            held = (Piece(self._now_s, self._now_s + self._slot_s, step.workers),)
        self._room.give(self._held.get(name, ()), claim)
        self._room.take(held, claim)
        self._plans[name], self._held[name] = step.plan, held
        self.given[name] = step.workers
        self._left -= step.gpus
