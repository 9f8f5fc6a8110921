"""The timeline: free GPUs over time, what plans take of them, and where there is room. Pure.

Steps are kept in blocks that know their least and most free GPUs. A search for room skips full
blocks, and a long plan takes GPUs from whole blocks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import pairwise
from math import inf

from msgspec import Struct

BLOCK_STEPS = 12
"""A block has at most twice this many steps."""


class Piece(Struct, frozen=True, array_like=True):
    """A number of workers in [start_s, end_s)."""

    start_s: float
    end_s: float
    workers: int


Plan = tuple[Piece, ...]
"""Pieces in order of time; with none in the gaps between them."""

Span = tuple[float, float, int]
"""(from, to, free GPUs)."""


class _Block:
    """Steps in a row. free: of each, beside `more`, which all of them have."""

    __slots__ = ("free", "least", "more", "most", "times")

    def __init__(self, times: list[float], free: list[int], more: int = 0) -> None:
        self.times, self.free, self.more = times, free, more
        self._count()

    def _count(self) -> None:
        self.least, self.most = min(self.free) + self.more, max(self.free) + self.more

    def copy(self) -> _Block:
        """One that can be changed alone."""
        found = copy(self)
        found.times, found.free = [*self.times], [*self.free]
        return found

    def split(self) -> _Block:
        """Its second half, which it has no longer."""
        half = len(self.times) // 2
        other = _Block(self.times[half:], self.free[half:], self.more)
        del self.times[half:], self.free[half:]
        self._count()
        return other

    def add(self, start_s: float, end_s: float, gpus: int) -> None:
        """Add this number of free GPUs to its steps that begin in a time span."""
        first, last = bisect_left(self.times, start_s), bisect_left(self.times, end_s)
        if first == last:
            return
        if last - first == len(self.times):
            self.more, self.least, self.most = self.more + gpus, self.least + gpus, self.most + gpus
            return
        for at in range(first, last):
            self.free[at] += gpus
        self._count()


class Timeline:
    """Free GPUs from an instant on, in steps; those of the last one are free for ever."""

    def __init__(self, start_s: float, gpus: int) -> None:
        self._blocks = [_Block([start_s], [gpus])]
        self._starts = [start_s]

    @classmethod
    def of(cls, times: Sequence[float], free: Sequence[int]) -> Timeline:
        """One with `free[i]` GPUs in [times[i], times[i + 1]), the last for ever."""
        found = cls(times[0], free[0])
        found._blocks = [
            _Block([*times[at : at + BLOCK_STEPS]], [*free[at : at + BLOCK_STEPS]])
            for at in range(0, len(times), BLOCK_STEPS)
        ]
        found._starts = [block.times[0] for block in found._blocks]
        return found

    def copy(self) -> Timeline:
        """One that can be changed alone."""
        found = Timeline(self.start_s, 0)
        found._blocks = [block.copy() for block in self._blocks]
        found._starts = [*self._starts]
        return found

    @property
    def start_s(self) -> float:
        """When it begins."""
        return self._starts[0]

    def steps(self) -> Iterator[tuple[float, int]]:
        """(when it begins, free GPUs) of each step, in order."""
        for block in self._blocks:
            for at_s, free in zip(block.times, block.free, strict=True):
                yield at_s, free + block.more

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
            self._is_free(piece, piece.workers * gpus_per_worker)
            for piece in plan
            if piece.end_s > self.start_s
        )

    def _is_free(self, piece: Piece, gpus: int) -> bool:
        for number in range(self._holding(piece.start_s), len(self._blocks)):
            block = self._blocks[number]
            if block.times[0] >= piece.end_s:
                return True
            if block.least >= gpus:
                continue
            first = max(0, bisect_right(block.times, piece.start_s) - 1)
            last = bisect_left(block.times, piece.end_s)
            if first < last and min(block.free[first:last]) + block.more < gpus:
                return False
        return True

    def room_s(
        self, after_s: float, gpus: int, until_s: Callable[[float], float | None]
    ) -> float | None:
        """When the first step after an instant begins from which a number of GPUs is free for long
        enough; None: there is none.

        until_s: until when, later than its begin and the later the later that is; None: skip this
            one and those behind it.
        """
        begins_s, end_s = None, inf
        first = self._holding(after_s)
        at = bisect_right(self._blocks[first].times, after_s)
        for number in range(first, len(self._blocks)):
            block = self._blocks[number]
            if block.times[0] >= end_s:
                return begins_s
            if block.most < gpus:
                begins_s, end_s = None, inf
            elif begins_s is None or block.least < gpus:
                least = gpus - block.more
                for at_s, free in zip(block.times[at:], block.free[at:], strict=True):
                    if at_s >= end_s:
                        return begins_s
                    if free < least:
                        begins_s, end_s = None, inf
                    elif begins_s is None:
                        until = until_s(at_s)
                        if until is None:
                            return None
                        begins_s, end_s = at_s, until
            at = 0
        return begins_s

    def first_s(self, after_s: float, holds: Callable[[float], bool]) -> float | None:
        """When the first step behind an instant begins for which something holds, as it does for
        all that follow it; None: there is none."""
        after = self._holding(after_s)
        number = bisect_left(self._starts, True, lo=after + 1, key=holds)
        times = self._blocks[number - 1].times
        first = bisect_right(times, after_s) if number - 1 == after else 1
        at = bisect_left(times, True, lo=first, key=holds)
        if at < len(times):
            return times[at]
        return self._starts[number] if number < len(self._starts) else None

    def at(self, at_s: float) -> int:
        """Free GPUs at an instant."""
        block = self._blocks[self._holding(at_s)]
        return block.free[max(0, bisect_right(block.times, at_s) - 1)] + block.more

    def spans(self, start_s: float, end_s: float, least: float = -inf) -> list[Span]:
        """Times of equal free GPUs within a time, in order; fewer than `least` count as none."""
        begun: list[tuple[float, int]] = []
        had = None
        for number in range(self._holding(start_s), len(self._blocks)):
            block = self._blocks[number]
            if block.times[0] >= end_s:
                break
            if had is not None and (
                block.least == had == block.most or (had == 0 and block.most < least)
            ):
                continue
            first = max(0, bisect_right(block.times, start_s) - 1)
            last, more = bisect_left(block.times, end_s), block.more
            for at_s, beside in zip(block.times[first:last], block.free[first:last], strict=True):
                free = beside + more
                if free < least:
                    free = 0
                if free != had:
                    begun.append((max(at_s, start_s), free))
                    had = free
        edges = pairwise((*begun, (end_s, 0)))
        return [(from_s, to_s, free) for (from_s, free), (to_s, _) in edges]

    def _holding(self, at_s: float) -> int:
        """The place of the block in which an instant is."""
        return max(0, bisect_right(self._starts, at_s) - 1)

    def _add(self, piece: Piece, gpus: int) -> None:
        start_s = max(piece.start_s, self.start_s)
        if piece.end_s <= start_s:
            return
        first, last = self._cut(start_s), self._cut(piece.end_s)
        for block in self._blocks[first : last + 1]:
            block.add(start_s, piece.end_s, gpus)

    def _cut(self, at_s: float) -> int:
        """A step begins at an instant, which is not before the first one; returns its block."""
        number = self._holding(at_s)
        block = self._blocks[number]
        times = block.times
        at = bisect_left(times, at_s)
        if at < len(times) and times[at] == at_s:
            return number
        times.insert(at, at_s)
        block.free.insert(at, block.free[at - 1])
        if len(times) <= 2 * BLOCK_STEPS:
            return number
        other = block.split()
        self._blocks.insert(number + 1, other)
        self._starts.insert(number + 1, other.times[0])
        return number + (at >= len(times))
