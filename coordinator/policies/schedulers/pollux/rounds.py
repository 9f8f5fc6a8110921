"""A round of Pollux: fits the search's answer to nodes, and tries others where it does not fit.

A search over workers per job does not know where GPUs are: pieces may be too small for a gang, or
on nodes that a job may not use. Its answer is planned on nodes. Where a job gets less than its
answer, other jobs get the rest, and the best of the tried plans is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from msgspec import Struct

from common.model import JobId
from coordinator.policies.contract.cooldown import resizable_at_s
from coordinator.policies.contract.decisions import Preempt, Resize, Start, placed_count
from coordinator.policies.contract.free_gpus import FreeGpus, Place, present_workers
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.parts.grants import Grant, Plan, carry_out
from coordinator.policies.parts.pooling import Pool
from coordinator.policies.schedulers.pollux.genetic_search import Genes, Mask, Problem

MOST_MENDED = 3
"""The number of further requests in a round where nodes gave less than requested."""


class Outcome(Struct, frozen=True, kw_only=True):
    """The result of one allocation: a plan, and by pool the following.

    asked, had: workers per job. worth: the fitness of those had.
    short: jobs that nodes gave less than requested; those that keep their size for another reason,
        for example a recent resize, are not.
    """

    plan: Plan
    asked: Sequence[Genes]
    had: Sequence[Genes]
    worth: Sequence[float]
    short: Sequence[Mask]

    @property
    def is_whole(self) -> bool:
        """True if nodes gave every job its requested count."""
        return not any(short.any() for short in self.short)


class Asking(Struct, frozen=True, kw_only=True):
    """One round's jobs and nodes.

    problems: of each of the pools.
    floor: nodes as they are before the round, rebuilt each time.
    place: finds nodes. grant: a number of workers for a job of a pool, with its reason.
    """

    snapshot: ClusterSnapshot
    pools: Sequence[Pool]
    problems: Sequence[Problem]
    floor: Callable[[], FreeGpus]
    place: Place
    grant: Callable[[Pool, JobView, int], Grant]

    def best(self, asked: Sequence[Genes]) -> Outcome:
        """The best result of these allocations, or of repaired ones if better; pool by pool, as
        they share no nodes. Never worse than the result of the present allocation or of a greedy
        one.
        """
        first = self.tried(asked)
        asked, worth = list(first.asked), list(first.worth)
        for other in self._others(first):
            for at, each in enumerate(other.worth):
                if each > worth[at]:
                    asked[at], worth[at] = other.asked[at], each
        is_first = all(one is other for one, other in zip(asked, first.asked, strict=True))
        return first if is_first else self.tried(asked)

    def _others(self, first: Outcome) -> Iterator[Outcome]:
        """The other requests: the repaired one, also without jobs that lie across nodes without
        need, and the search's initial one.
        """
        if not first.is_whole:
            yield from self._mended(first)
            wide = zip(self.pools, self.problems, first.asked, strict=True)
            narrow = self.tried([self._narrow(*each) for each in wide])
            yield narrow
            yield from self._mended(narrow)
        for seeds in zip(*(each.seeds() for each in self.problems), strict=True):
            if not all(map(np.array_equal, seeds, first.asked)):
                yield self.tried(seeds)

    def _mended(self, outcome: Outcome) -> Iterator[Outcome]:
        for _ in range(MOST_MENDED):
            if outcome.is_whole:
                break
            answers = zip(self.problems, outcome.asked, outcome.had, outcome.short, strict=True)
            mended = [each.mended(asked, had, short) for each, asked, had, short in answers]
            outcome = self.tried(mended)
            yield outcome

    def _narrow(self, pool: Pool, problem: Problem, asked: Genes) -> Genes:
        """A job that could do with one node gets no more, so that gangs find whole ones."""
        nodes = self.floor().nodes.values()
        gpus = max((node.gpus for node in nodes if node.gpu_type == pool.gpu_type), default=0)
        width = np.maximum(gpus // problem.sizes, problem.least)
        most = np.minimum(problem.most, width)
        return problem.filled(np.minimum(asked, most), most)

    def tried(self, asked: Sequence[Genes]) -> Outcome:
        """The result of an allocation."""
        grants = [
            self.grant(pool, job, int(count))
            for pool, counts in zip(self.pools, asked, strict=True)
            for job, count in zip(pool.jobs, counts, strict=True)
            if count
        ]
        plan = carry_out(self.snapshot, grants, floor=self.floor(), place=self.place)
        had = [workers_after(plan, pool) for pool in self.pools]
        short = [
            np.array([self._is_for_nodes(job) for job in pool.jobs]) & (genes < wished)
            for pool, genes, wished in zip(self.pools, had, asked, strict=True)
        ]
        worth = [each.worth(genes) for each, genes in zip(self.problems, had, strict=True)]
        return Outcome(plan=plan, asked=asked, had=had, worth=worth, short=short)

    def _is_for_nodes(self, job: JobView) -> bool:
        """Whether it is for nodes alone to give it workers now: nothing else keeps its size."""
        if not job.placed:
            return True
        return job.is_resizable and resizable_at_s(self.snapshot, job) is None


def workers_after(plan: Plan, pool: Pool) -> Genes:
    """Workers of its range that each job of a pool has once a plan is carried out."""
    change: dict[JobId, int] = {}
    for made in plan.decisions:
        match made:
            case Start():
                change[made.job_id] = placed_count(made.placements)
            case Resize():
                added = placed_count(made.added)
                change[made.job_id] = added - len(made.removed_workers)
            case _:
                pass
    stopped = {made.job_id for made in plan.decisions if isinstance(made, Preempt)}
    after = [
        0
        if job.job_id in stopped
        else (present_workers(job) + change.get(job.job_id, 0)) // pool.factor(job)
        for job in pool.jobs
    ]
    return np.array(after, dtype=np.int64)
