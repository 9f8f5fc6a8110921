"""Lent nodes and the base jobs on them, made by chance from a seed: for tests and benchmarks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from coordinator.policies.contract.snapshot import ClusterSnapshot
from tests.harness.builders import make_cluster, make_snapshot

GPUS = 8
BUSY_RATIO = 0.92
DEMANDS = (1, 1, 1, 1, 2, 2, 2, 3, 4, 4, 4, 5, 6, 8, 8, 8, 12, 12, 16, 16, 20, 24, 28, 32, 44, 64)
"""GPUs per job: gangs of 1 to 64, half of them of at most 6; what is no multiple of a node's GPUs
leaves a rest that other jobs share."""

CHURN_ROUNDS, CHURN_SHARE, MISSES_MAX = 4, 3, 40

Held = dict[int, dict[int, int]]
"""Per node: GPUs per job."""


class _Floor:
    """Nodes that fill up with jobs; whoever ends leaves holes for others."""

    def __init__(self, node_count: int) -> None:
        self.free = [GPUS] * node_count
        self.held: Held = {node: {} for node in range(node_count)}
        self.where: dict[int, list[int]] = {}

    def put(self, job: int, places: Sequence[tuple[int, int]]) -> None:
        for node, gpus in places:
            self.free[node] -= gpus
            self.held[node][job] = self.held[node].get(job, 0) + gpus
        self.where[job] = sorted({node for node, _ in places})

    def end(self, job: int) -> None:
        for node in self.where.pop(job):
            self.free[node] += self.held[node].pop(job)


def gangs(node_count: int, seed: int) -> Held:
    """Jobs of 1 to 64 GPUs in the tightest gaps, after four times a third of them has ended."""
    chance = random.Random(seed)
    floor = _Floor(node_count)
    next_job = 0

    def fill() -> None:
        nonlocal next_job
        misses = 0
        while sum(floor.free) > (1 - BUSY_RATIO) * GPUS * node_count and misses < MISSES_MAX:
            places = _tightest(floor.free, chance.choice(DEMANDS))
            if places:
                floor.put(next_job, places)
                next_job += 1
            else:
                misses += 1

    fill()
    for _ in range(CHURN_ROUNDS):
        for job in chance.sample(sorted(floor.where), len(floor.where) // CHURN_SHARE):
            floor.end(job)
        fill()
    return floor.held


def _tightest(free: Sequence[int], gpus: int) -> list[tuple[int, int]]:
    """Workers of up to a whole node each, each in the fullest node that takes it; or none."""
    left = list(free)
    places: list[tuple[int, int]] = []
    for worker in [GPUS] * (gpus // GPUS) + [gpus % GPUS] * bool(gpus % GPUS):
        fitting = [node for node, room in enumerate(left) if room >= worker]
        if not fitting:
            return []
        node = min(fitting, key=lambda node: (left[node], node))
        left[node] -= worker
        places.append((node, worker))
    return places


def scattered(node_count: int, seed: int) -> Held:
    """Jobs of up to 16 small workers, each from a node by chance onwards: many share nodes."""
    chance = random.Random(seed)
    floor = _Floor(node_count)
    misses = job = 0
    while misses < MISSES_MAX and sum(floor.free) > (1 - BUSY_RATIO) * GPUS * node_count:
        size = chance.choice((1, 1, 2, 2, 4))
        left = chance.choice((1, 1, 1, 2, 2, 4, 4, 8, 16))
        first = chance.randrange(node_count)
        places: list[tuple[int, int]] = []
        for offset in range(node_count):
            node = (first + offset) % node_count
            here = min(left, floor.free[node] // size)
            if here:
                places.append((node, here * size))
                left -= here
            if not left:
                break
        if left:
            misses += 1
            continue
        floor.put(job, places)
        job += 1
    return floor.held


def incidence(node_count: int, seed: int, *, jobs_per_node: int, span: int) -> Held:
    """Jobs on 1 to `span` nodes by chance, one GPU on each, whatever the nodes hold already."""
    chance = random.Random(seed)
    held: Held = {node: {} for node in range(node_count)}
    for job in range(node_count * jobs_per_node):
        for node in chance.sample(range(node_count), chance.randint(1, min(span, node_count))):
            held[node][job] = 1
    return held


CASES: dict[str, Callable[[int, int], Held]] = {
    "gangs": gangs,
    "scattered": scattered,
    "random, up to 3 nodes": lambda nodes, seed: incidence(nodes, seed, jobs_per_node=1, span=3),
    "random, up to 4 nodes": lambda nodes, seed: incidence(nodes, seed, jobs_per_node=2, span=4),
    "random, up to 10 nodes": lambda nodes, seed: incidence(nodes, seed, jobs_per_node=1, span=10),
}


def snapshot_of(held: Held) -> ClusterSnapshot:
    """The nodes, all lent, with their jobs."""
    nodes, jobs = make_cluster(
        {
            f"n{node:05}": {f"j{job:05}": gpus for job, gpus in here.items()}
            for node, here in held.items()
        }
    )
    return make_snapshot(nodes=nodes, jobs=jobs)
