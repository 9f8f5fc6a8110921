"""The genetic search of Pollux for the workers of each job (OSDI'21, section 4.2). Pure numbers.

SPEEDUP is goodput over that of a fair share, and FITNESS a power mean of it over jobs. A job that
changes pays for its restart by its age. A job that would be stopped and lose work pays for that as
well (ours: the paper's jobs save first).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from common.model import JobState
from coordinator.policies.contract.free_gpus import present_workers
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.knobs import Seconds
from coordinator.policies.parts.pooling import Pool, stays
from coordinator.policies.parts.restart_cost import loss_s

Genes = NDArray[np.int64]
Values = NDArray[np.float64]
Mask = NDArray[np.bool_]

LEAST = 1e-3
"""Added to each speed-up before the power, so that a job without GPUs counts and is finite."""


Power = Annotated[float, Meta(ge=-50, le=50)]
"""A sum of any jobs' speed-ups to it, each at least LEAST, is a finite number."""

Count = Annotated[int, Meta(ge=1, le=10_000)]
"""As many allocations are in memory at a time, or tried one after the other, in each round."""


class SearchKnobs(Struct, frozen=True, kw_only=True):
    """Knobs of the search, as in the paper (section 4.2.1) and its artefact.

    power: power of the mean; below 0 jobs with a low share count more.
    restart_s: time that a change costs a job (delta).
    population: allocations kept from one generation to the next.
    generations: most generations of one round.
    patience: generations without a better allocation until a round ends.
    """

    power: Power = -1.0
    restart_s: Seconds = 30.0
    population: Count = 100
    generations: Count = 100
    patience: Count = 20


class Problem:
    """One round over the GPUs of one type: what each job gains by each number of workers.

    values: jobs x workers (from none), SPEEDUP after the price of a change.
    sizes: GPUs of one worker of a job's range, see `Pool.factor`; workers are counted by that.
    least, most: workers that each job may have, if it has any; the latter within what the caller
        lets it have, at least its smallest gang.
    kept: the base gangs of those that may not be stopped.
    """

    def __init__(
        self, knobs: SearchKnobs, pool: Pool, now_s: float, most: Sequence[int] | None = None
    ) -> None:
        self.gpus = pool.gpus
        self.power = knobs.power or LEAST  # the limit is the geometric mean
        sizes = [job.gpus_per_worker * pool.factor(job) for job in pool.jobs]
        self.sizes = np.array(sizes, dtype=np.int64)
        self.least = np.array([job.workers.min for job in pool.jobs], dtype=np.int64)
        fits = self.gpus // self.sizes
        self.most = np.minimum([job.workers.max for job in pool.jobs], fits)
        if most is not None:
            self.most = np.minimum(self.most, np.array(most, dtype=np.int64))
        self.most[self.most < self.least] = 0
        self.kept = self.least * np.array([stays(job) for job in pool.jobs], dtype=np.int64)
        now = [present_workers(job) // pool.factor(job) for job in pool.jobs]
        self.now = np.array(now, dtype=np.int64)
        fair_gpus = self.gpus / len(pool.jobs)
        width = int(self.most.max(initial=0)) + 1
        self.values: Values = np.zeros((len(pool.jobs), width))
        for row, job in enumerate(pool.jobs):
            self._fill(row, job, fair_gpus, knobs.restart_s, now_s)

    def _fill(
        self, row: int, job: JobView, fair_gpus: float, restart_s: float, now_s: float
    ) -> None:
        fair_workers = min(fair_gpus / int(self.sizes[row]), float(job.workers.max))
        fair = job.profile.rate(fair_workers, base=job.workers.min)
        counts = np.arange(int(self.least[row]), int(self.most[row]) + 1)
        self.values[row, counts] = [job.rate(int(count)) / fair for count in counts]
        if job.state == JobState.PENDING:
            return
        age_s = now_s - job.submitted_at_s
        restarts = max(0, job.attempt.number - 1)
        paid = max(0.0, (age_s - restarts * restart_s) / (age_s + restart_s)) if age_s else 1.0
        width = np.arange(self.values.shape[1], dtype=np.int64)
        changes: Mask = np.not_equal(width, self.now[row])
        self.values[row, changes] *= paid
        # A stopped job has a speed-up of 0, which no factor lowers. Its repeated work makes that 0
        # worth less than the 0 of a waiting job.
        spent_s, lost_s = age_s + restart_s, loss_s(job, now_s)
        self.values[row, 0] = -LEAST * lost_s / (spent_s + lost_s) if lost_s else 0.0

    def fitness(self, population: Genes) -> Values:
        """The fitness of each allocation: the power mean of its jobs' speed-ups."""
        speedups = np.take_along_axis(self.values[None, :, :], population[:, :, None], axis=2)
        powered = (speedups[:, :, 0] + LEAST) ** self.power
        return np.asarray(powered.mean(axis=1) ** (1.0 / self.power))

    def repaired(self, population: Genes, random: np.random.Generator) -> Genes:
        """Make each allocation legal: jobs in a random order take the GPUs left for them."""
        order = np.argsort(random.random(population.shape), axis=1)
        sizes, least = self.sizes[order], self.least[order]
        kept, free = self.kept[order], self.gpus - int((self.kept * self.sizes).sum())
        wanted = np.minimum(np.take_along_axis(population, order, axis=1), self.most[order])
        wanted[wanted < least] = 0
        more = np.maximum(0, wanted - kept)
        before = np.cumsum(more * sizes, axis=1) - more * sizes
        had = kept + np.minimum(more, np.maximum(0, free - before) // sizes)
        had[had < least] = 0
        legal = np.empty_like(population)
        np.put_along_axis(legal, order, had, axis=1)
        return legal

    def worth(self, genes: Genes) -> float:
        """The fitness of one allocation, as far as it is one that jobs may have."""
        return float(self.fitness(np.minimum(genes, self.most)[None, :])[0])

    def seeds(self, present: Genes | None = None) -> list[Genes]:
        """Allocations to begin with: the present one, that filled up, and a greedy one."""
        if present is None:
            present = np.minimum(self.now, self.most)
            present[present < self.least] = 0
        return [present, self.filled(present), self.filled(self.kept)]

    def mended(self, asked: Genes, had: Genes, is_short: Mask) -> Genes:
        """The next request where nodes gave these jobs less than requested: for them no more, and
        for the others as much as that leaves.
        """
        most = np.where(is_short, np.minimum(had, self.most), self.most)
        most[most < self.least] = 0
        return self.filled(np.minimum(asked, most), most)

    def filled(self, genes: Genes, most: Genes | None = None) -> Genes:
        """Fill an allocation: each remaining GPU goes to the job that it helps most, one by one.

        most: workers that each job may have; None: as many as the problem lets it have.
        """
        most, genes = self.most if most is None else most, genes.copy()
        left = self.gpus - int((genes * self.sizes).sum())
        while True:
            steps = np.where(genes == 0, self.least, 1)
            after = genes + steps
            fits = (after <= most) & (steps * self.sizes <= left)
            if not fits.any():
                return genes
            rows = np.flatnonzero(fits)
            gain = (self.values[rows, after[rows]] + LEAST) ** self.power
            gain -= (self.values[rows, genes[rows]] + LEAST) ** self.power
            gain *= np.sign(self.power) / (steps[rows] * self.sizes[rows])
            best = int(np.argmax(gain))
            if gain[best] <= 0:
                return genes
            row = rows[best]
            genes[row] = after[row]
            left -= int(steps[row] * self.sizes[row])


def search(problem: Problem, knobs: SearchKnobs, random: np.random.Generator) -> Genes:
    """The best allocation found: workers per job.

    The present one and a greedy one are in the first generation, and the best is never lost: the
    answer is at least as good as both.
    """
    jobs = len(problem.sizes)
    present = problem.repaired(problem.now[None, :].copy(), random)[0]
    seeds = problem.seeds(present)
    wild = random.integers(0, problem.most + 1, size=(max(0, knobs.population - len(seeds)), jobs))
    population = problem.repaired(np.vstack([np.array(seeds), wild]), random)
    best, idle = -np.inf, 0
    for _ in range(knobs.generations):
        children = problem.repaired(_mutated(problem, _crossed(population, random), random), random)
        everyone = np.vstack([population, children])
        fitness = problem.fitness(everyone)
        order = np.argsort(-fitness, kind="stable")[: knobs.population]
        population = everyone[order]
        idle = 0 if fitness[order[0]] > best else idle + 1
        best = max(best, float(fitness[order[0]]))
        if idle >= knobs.patience:
            break
    found: Genes = population[int(np.argmax(problem.fitness(population)))]
    return found


def _crossed(population: Genes, random: np.random.Generator) -> Genes:
    """Each child has one parent's jobs up to a point, the other's from there."""
    count, jobs = population.shape
    parents: Genes = random.integers(0, count, size=(2, count))
    points: Genes = random.integers(0, jobs + 1, size=(count, 1))
    is_first: Mask = np.less(np.arange(jobs, dtype=np.int64), points)
    crossed: Genes = np.where(is_first, population[parents[0]], population[parents[1]])
    return crossed


def _mutated(problem: Problem, population: Genes, random: np.random.Generator) -> Genes:
    """One job with workers and one without change in the mean, to any number of workers."""
    has_some: Mask = population > 0
    some: Genes = has_some.sum(axis=1, keepdims=True)
    none: Genes = population.shape[1] - some
    chance: Values = np.where(has_some, 1.0 / np.maximum(some, 1), 1.0 / np.maximum(none, 1))
    drawn = random.integers(0, problem.most + 1, size=population.shape)
    is_drawn: Mask = random.random(population.shape) < chance
    return np.where(is_drawn, drawn, population)
