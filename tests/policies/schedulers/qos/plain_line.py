"""Who can be in time, by trying instant after instant: what a faster search has to find as well.

Nothing is passed over and nothing is remembered. Tests nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from coordinator.policies.schedulers.qos.demands import Wish
from coordinator.policies.schedulers.qos.timeline import Piece, Plan


class FlatLine:
    """Free GPUs from an instant on: `free[i]` in [times[i], times[i + 1]), the last for ever."""

    def __init__(self, start_s: float, gpus: int) -> None:
        self.times = [start_s]
        self.free = [gpus]

    def take(self, plan: Plan, gpus_per_worker: int) -> None:
        """A plan holds its GPUs; below zero: no longer."""
        for piece in plan:
            start_s = max(piece.start_s, self.times[0])
            if piece.end_s > start_s:
                for at in range(self._cut(start_s), self._cut(piece.end_s)):
                    self.free[at] -= piece.workers * gpus_per_worker

    def has_room(self, piece: Piece, gpus: int) -> bool:
        """Whether so many are free all the time."""
        first = max(0, bisect_right(self.times, piece.start_s) - 1)
        last = bisect_left(self.times, piece.end_s)
        return piece.end_s <= self.times[0] or all(free >= gpus for free in self.free[first:last])

    def spans(self, start_s: float, end_s: float) -> list[tuple[float, float, int]]:
        """(from, to, free GPUs) within a time, in order; neighbors differ."""
        found: list[tuple[float, float, int]] = []
        for at, (from_s, free) in enumerate(zip(self.times, self.free, strict=True)):
            to_s = min(end_s, self.times[at + 1] if at + 1 < len(self.times) else end_s)
            from_s = max(start_s, from_s)
            if from_s >= to_s:
                continue
            if found and found[-1][2] == free:
                from_s = found.pop()[0]
            found.append((from_s, to_s, free))
        return found

    def _cut(self, at_s: float) -> int:
        at = bisect_left(self.times, at_s)
        if at == len(self.times) or self.times[at] != at_s:
            self.times.insert(at, at_s)
            self.free.insert(at, self.free[at - 1])
        return at


class PlainLine:
    """By deadline, each at the first instant of all at which it has room. See `wishes.Line`."""

    def __init__(self, gpus: int, now_s: float) -> None:
        self._free = FlatLine(now_s, gpus)
        self._now_s = now_s
        self._chosen: list[Wish] = []
        self.plans: dict[str, Plan] = {}
        self.is_settled = False

    def add(self, wishes: Sequence[Wish]) -> None:
        """As many more as fit, in their order."""
        fixed = {wish.job.job_id for wish in self._chosen} if self.is_settled else set[str]()
        for wish in wishes:
            if self._place(wish):
                continue
            candidates = [wish, *(each for each in self._chosen if each.job.job_id not in fixed)]
            out = max(candidates, key=lambda each: (each.frees_gpu_s(self._now_s), each.rank))
            if out is wish:
                continue
            plan = self._remove(out)
            if not self._place(wish):
                self._put(out, plan)

    def _place(self, wish: Wish) -> bool:
        for at_s in list(self._free.times):
            plan = wish.plan(at_s, self._now_s)
            if plan is None:
                return False
            if self._free.has_room(plan[0], plan[0].workers * wish.gpus_each):
                self._put(wish, plan)
                return True
        return False

    def _put(self, wish: Wish, plan: Plan) -> None:
        self._free.take(plan, wish.gpus_each)
        self._chosen.append(wish)
        self.plans[wish.job.job_id] = plan

    def _remove(self, wish: Wish) -> Plan:
        plan = self.plans.pop(wish.job.job_id)
        self._free.take(plan, -wish.gpus_each)
        self._chosen = [each for each in self._chosen if each is not wish]
        return plan
