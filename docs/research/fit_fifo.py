"""The fit's own strict FIFO on nodes of eight GPUs. Must not know the engine or its policies.

Its rules, which are those of the scheduler's Baseline written a second time:

- passes at multiples of a period only; all that ended or came until then is known to it;
- one line for each kind of nodes, in order of submission; its first that does not fit blocks it;
- a worker goes to the node that it fits best, of several alike to the one with the lowest number;
- gangs that start together are then placed anew, the largest workers first (best-fit decreasing;
  Lyra, EuroSys'23, section 5.3), and what room that leaves is offered to the line once more.

The last two decide which nodes stay whole, and so how long a gang of hundreds of nodes blocks the
line: a FIFO without them differs from the engine's by hours of single jobs' queueing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

import numpy as np

from coordinator.workloads.chance import Floats
from coordinator.workloads.paper import GPUS_PER_NODE, NODES, Drawn, PaperParameters


class Nodes:
    """Nodes of eight GPUs, numbered, as sets of bits by how many GPUs are free."""

    def __init__(self, count: int) -> None:
        self._free = [GPUS_PER_NODE] * count
        self._with_free = [0] * GPUS_PER_NODE + [(1 << count) - 1]

    def take(self, size: int, count: int) -> list[int] | None:
        """Nodes for `count` workers of `size` GPUs; None and no change when they do not all fit."""
        if count == 1:  # as most jobs
            return [self._take_one(size)] if any(self._with_free[size:]) else None
        room = sum(
            [nodes.bit_count() * (free // size) for free, nodes in enumerate(self._with_free)]
        )
        if room < count:
            return None
        return [self._take_one(size) for _ in range(count)]

    def _take_one(self, size: int) -> int:
        free, with_free = size, self._with_free
        while not with_free[free]:
            free += 1
        nodes = with_free[free]
        node = (nodes & -nodes).bit_length() - 1
        self._move(node, free - size)
        return node

    def give(self, nodes: Iterable[int], size: int) -> None:
        """One worker left each of them."""
        for node in nodes:
            self._move(node, self._free[node] + size)

    def _move(self, node: int, free: int) -> None:
        bit, with_free = 1 << node, self._with_free
        with_free[self._free[node]] ^= bit
        with_free[free] ^= bit
        self._free[node] = free


class Line:
    """One line in front of one kind of nodes.

    Args:
        jobs: which of the drawn ones stand in it, in order of submission.
        nodes: how many nodes there are.
    """

    def __init__(self, drawn: Drawn, jobs: Sequence[int], nodes: int) -> None:
        self._jobs = jobs
        self._nodes = Nodes(nodes)
        self._submit_s: list[float] = drawn.submit_s.tolist()
        self._duration_s: list[float] = drawn.duration_s.tolist()
        self._size: list[int] = drawn.size.tolist()
        self._workers: list[int] = (drawn.gpus // drawn.size).tolist()
        self._ends: list[tuple[float, int, list[int]]] = []
        self._next = 0

    def run(self, period_s: int) -> list[float]:
        """When each job starts, in the line's order; passes that cannot start one are left out.

        Raises:
            ValueError: a gang that is larger than all nodes.
        """
        starts_s: list[float] = []
        now_s = -math.inf
        while self._next < len(self._jobs):
            now_s = math.ceil(self._news_s(now_s) / period_s) * period_s
            for job, held in self._pass(now_s).items():
                starts_s.append(now_s)
                heapq.heappush(self._ends, (now_s + self._duration_s[job], job, held))
        return starts_s

    def _news_s(self, now_s: float) -> float:
        """When the head of the line comes, or, where it waits, when the next job ends."""
        head = self._jobs[self._next]
        if self._submit_s[head] > now_s:
            return self._submit_s[head]
        if not self._ends:
            raise ValueError(f"job {head}: {self._workers[head]} workers never fit")
        return self._ends[0][0]

    def _pass(self, now_s: float) -> dict[int, list[int]]:
        """The jobs that start, in order, and the nodes of their workers."""
        while self._ends and self._ends[0][0] <= now_s:
            _, job, held = heapq.heappop(self._ends)
            self._nodes.give(held, self._size[job])
        began: dict[int, list[int]] = {}
        self._begin(now_s, began)
        if len(began) > 1:
            self._pack(began)
            self._begin(now_s, began)
        return began

    def _begin(self, now_s: float, began: dict[int, list[int]]) -> None:
        while self._next < len(self._jobs):
            job = self._jobs[self._next]
            if self._submit_s[job] > now_s:
                return
            held = self._nodes.take(self._size[job], self._workers[job])
            if held is None:
                return
            began[job] = held
            self._next += 1

    def _pack(self, began: dict[int, list[int]]) -> None:
        """Place them anew, the largest workers first."""
        for job, held in began.items():
            self._nodes.give(held, self._size[job])
        for job in sorted(began, key=lambda job: -self._size[job]):
            again = self._nodes.take(self._size[job], self._workers[job])
            # Sizes divide one another, so whatever fits in some order fits largest first.
            assert again is not None, f"job {job} fitted before"
            began[job] = again


def fifo_starts(drawn: Drawn, parameters: PaperParameters, *, nodes: int = NODES) -> Floats:
    """When each job starts under strict FIFO: the head of a line holds up all behind it.

    One line for each kind of nodes: a job that accepts the rare type alone waits with its like.

    Args:
        nodes: of all kinds; the rare ones are among them.

    Raises:
        ValueError: a gang that is larger than all nodes of its kind.
    """
    starts_s = np.zeros(len(drawn.gpus))
    rare = np.flatnonzero(drawn.is_rare).tolist()
    rest = np.flatnonzero(~drawn.is_rare).tolist()
    for jobs, count in ((rest, nodes - parameters.rare_nodes), (rare, parameters.rare_nodes)):
        starts_s[jobs] = Line(drawn, jobs, count).run(parameters.pass_period_s)
    return starts_s
