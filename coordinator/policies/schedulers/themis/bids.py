"""The agent of an app: which GPUs it wants, and the worth of each subset to it. Pure.

An agent sees the GPUs offered and answers with a table of bids, by rho with each bundle (Themis,
NSDI'20, section 3). Subsets of GPUs are classes of size and of placement level. A job's speed
depends only on its worker count and on how many nodes and racks they spread over. So for each size
the table has the best levels only, each on a few sets of nodes that are real and free now.

Held GPUs count as won. Holding none is worth 1. GPUs are worth the rho with none over the rho with
them, the held ones included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import islice

from msgspec import Struct, field, structs

from common.model import JobId, JobState, NodeName
from coordinator.policies.contract.decisions import Placement
from coordinator.policies.contract.free_gpus import GangShape, fill, gang_shape
from coordinator.policies.contract.snapshot import JobView, NodeView, WorkerView
from coordinator.policies.schedulers.themis.bundles import Bundle, Share
from coordinator.policies.schedulers.themis.finish_time_fairness import (
    Held,
    Measure,
    factor_on,
    left_gpu_s,
    pace,
)
from coordinator.policies.schedulers.themis.partial_allocation import Bid
from coordinator.policies.schedulers.themis.placement_levels import MOST_PLACES, orders

MOST_SIZES = 8
"""Sizes that a table has; those of larger ladders are thinned, the smallest and largest stay."""


class Offer(Struct, frozen=True, kw_only=True):
    """The GPUs to be given away.

    free: GPUs by node.
    back: running jobs whose lease is over: their GPUs are part of `free`.
    most: workers that running jobs may have after this pass, by job. A job in the cooldown of a
        resize makes no bid for growth, as it could not use the GPUs yet.
    found: where waiting gangs have room, while none of it is given: of hundreds of apps that bid
        for the same nodes many ask for the same.
    """

    free: Mapping[NodeName, int]
    nodes: Mapping[NodeName, NodeView]
    back: frozenset[JobId]
    most: Mapping[JobId, int] = {}
    found: dict[GangShape, tuple[Placement, ...] | None] = field(
        default_factory=dict[GangShape, tuple[Placement, ...] | None]
    )


class _Step(Struct, frozen=True):
    """Workers that a job would have beyond its kept ones."""

    job: JobView
    gpu_type: str
    workers: int


class Agent:
    """One app in one auction.

    Args:
        held: what its jobs hold and keep, without those whose lease is over.
        left_s: seconds until the app is done, by what it would hold; also for nothing.
        worth_of: of a bundle, by rho with it and the held GPUs over rho with none.
    """

    def __init__(
        self,
        jobs: Sequence[JobView],
        measure: Measure,
        held: Mapping[JobId, Held],
        offer: Offer,
        left_s: Callable[[Mapping[JobId, Held]], float],
        worth_of: Callable[[float], float],
    ) -> None:
        self._jobs = jobs
        self._measure = measure
        self._held = dict(held)
        self._offer = offer
        self._left_s = left_s
        self._worth_of = worth_of
        self._free_gpus = sum(gpus for gpus in offer.free.values() if gpus > 0)
        self._gpu_types: dict[GangShape, str | None] = {}

    @property
    def wants_any(self) -> bool:
        """Whether there are GPUs that it would take."""
        return any(self._wants(job) for job in self._jobs)

    def table(self, places: Mapping[NodeName, int]) -> list[Bundle]:
        """Its bids; the first is for nothing, the others are better than it.

        places: of nodes in the auction's capacity.
        """
        nothing = Bundle(shares=(), bid=Bid((), self.value))
        return [nothing, *self._bids(places)]

    def least(self, places: Mapping[NodeName, int]) -> Bundle | None:
        """The smallest of its bids that is better than nothing, the best where several are.

        A ladder grows, so the first demand alone shows it, unless that is of no use.
        """
        found = self._better(islice(self._ladder(), 1), places) or self._bids(places)
        return found[0] if found else None

    def _bids(self, places: Mapping[NodeName, int]) -> list[Bundle]:
        """All that are better than nothing; where no gang that waits helps, running jobs grow."""
        return self._better(_thinned(list(self._ladder())), places) or self._better(
            _thinned(list(self._ladder(starts_any=False))), places
        )

    def _better(
        self, demands: Iterable[Sequence[_Step]], places: Mapping[NodeName, int]
    ) -> list[Bundle]:
        """Bundles that meet these demands and are better than nothing, the smallest first."""
        found: dict[tuple[tuple[int, int], ...], Bundle] = {}
        least = self.value * (1.0 + 1e-9)
        for steps in demands:
            for start in range(MOST_PLACES):
                bundle = self._bundle(steps, start, places)
                if bundle is None:
                    continue
                known = found.get(bundle.bid.asks)
                if bundle.bid.value > least and (
                    known is None or bundle.bid.value > known.bid.value
                ):
                    found[bundle.bid.asks] = bundle
        return sorted(found.values(), key=lambda bundle: (bundle.bid.gpus, -bundle.bid.value))

    @property
    def value(self) -> float:
        """Its bid for nothing: the worth of its held GPUs."""
        return self._worth(self._held)

    def waiting_gang(
        self, places: Mapping[NodeName, int], only: JobView | None = None
    ) -> Bundle | None:
        """The first base gang that waits and fits, where it is best, whatever it is worth.

        only: the job whose gang it has to be; None: of any.
        """
        for step in self._starting(self._jobs if only is None else (only,)):
            if step.job.state == JobState.PENDING:
                bundles = (self._bundle([step], at, places) for at in range(MOST_PLACES))
                found = [bundle for bundle in bundles if bundle is not None]
                if found:
                    return max(found, key=lambda bundle: bundle.bid.value)
        return None

    #   --- demand -------------------------------------------------------------------------------

    def _wants(self, job: JobView) -> bool:
        held = self._held.get(job.job_id)
        if held is None:
            return job.state == JobState.PENDING or job.job_id in self._offer.back
        return held.workers < self._most(job, held.gpu_type)

    def _most(self, job: JobView, gpu_type: str) -> int:
        most = self._offer.most.get(job.job_id)
        return job.workers_on(gpu_type).max if most is None else most

    def _ladder(self, *, starts_any: bool = True) -> Iterator[list[_Step]]:
        """Ever larger demands: base gangs job by job, then worker by worker where it helps most."""
        steps: list[_Step] = []
        for step in self._starting(self._jobs if starts_any else ()):
            steps.append(step)
            yield list(steps)
        steps += [
            _Step(job, self._held[job.job_id].gpu_type, 0)
            for job in self._jobs
            if self._wants(job) and self._is_growing(job)
        ]
        # The greatest first, of equal ones the first step; only its own gain changes with each.
        gains = [(-self._gain(step), at) for at, step in enumerate(steps)]
        heapify(gains)
        while gains and gains[0][0] < 0.0:
            _, at = gains[0]
            steps[at] = structs.replace(steps[at], workers=steps[at].workers + 1)
            heapreplace(gains, (-self._gain(steps[at]), at))
            yield list(steps)

    def _starting(self, jobs: Sequence[JobView]) -> Iterator[_Step]:
        """Base gangs that fit on the offer.

        Jobs that ran come first, because stopping them has a cost; then those with the least left.
        """
        starting = [job for job in jobs if self._wants(job) and not self._is_growing(job)]
        starting.sort(key=lambda job: (job.job_id not in self._offer.back, self._left_first(job)))
        for job in starting:
            gpu_type = self._gpu_type(job)
            if gpu_type is not None:
                yield _Step(job, gpu_type, job.workers_on(gpu_type).min)

    def _is_growing(self, job: JobView) -> bool:
        return job.job_id in self._held

    def _left_first(self, job: JobView) -> tuple[float, JobId]:
        return left_gpu_s(job, self._measure.now_s), job.job_id

    def _gpu_type(self, job: JobView) -> str | None:
        """The type of a job that ran; else the first accepted one with room for its base gang."""
        if job.gpu_type is not None and job.job_id in self._offer.back:
            return job.gpu_type
        gang = gang_shape(job)
        if gang not in self._gpu_types:
            self._gpu_types[gang] = self._type_with_room(job)
        return self._gpu_types[gang]

    def _type_with_room(self, job: JobView) -> str | None:
        slots: dict[str, int] = {}
        for name, gpus in self._offer.free.items():
            gpu_type = self._offer.nodes[name].gpu_type
            if job.accepts(gpu_type) and name not in job.nodes.avoided:
                slots[gpu_type] = slots.get(gpu_type, 0) + gpus // job.gpus_per_worker
        fitting = [kind for kind, count in slots.items() if count >= job.workers_on(kind).min]
        wanted = job.gpu.types or tuple(sorted(slots))
        return min(fitting, key=wanted.index, default=None)

    def _gain(self, step: _Step) -> float:
        """Reference GPU-seconds a second by one more worker, per GPU."""
        job, factor = step.job, factor_on(step.job, step.gpu_type)
        count = step.workers
        if self._is_growing(job):
            count += self._held[job.job_id].workers
        if count + 1 > self._most(job, step.gpu_type):
            return 0.0
        return pace(job, (count + 1) / factor) - pace(job, count / factor)

    # --- where ----------------------------------------------------------------------------------

    def _bundle(
        self, steps: Sequence[_Step], start: int, places: Mapping[NodeName, int]
    ) -> Bundle | None:
        """These demands on nodes; `start` chooses among the sets of nodes, None: no more."""
        if sum(step.workers * step.job.gpus_per_worker for step in steps) > self._free_gpus:
            return None
        free = dict(self._offer.free)
        shares: list[Share] = []
        held = dict(self._held)
        for number, step in enumerate(step for step in steps if step.workers > 0):
            is_first = number == 0
            placements = self._first(step, start) if is_first else self._place(step, free, 0)
            if placements is None:
                return None
            for placement in placements:
                free[placement.node] -= placement.worker_count * step.job.gpus_per_worker
            share = self._share(step, placements)
            shares.append(share)
            held[step.job.job_id] = share.held
        asks: dict[int, int] = {}
        for share in shares:
            for placement in share.more:
                at = places[placement.node]
                gpus = placement.worker_count * share.job.gpus_per_worker
                asks[at] = asks.get(at, 0) + gpus
        bid = Bid(tuple(sorted(asks.items())), self._worth(held))
        return Bundle(shares=tuple(shares), bid=bid)

    def _first(self, step: _Step, start: int) -> tuple[Placement, ...] | None:
        """Nodes for one job of all that are offered."""
        job = step.job
        if job.state != JobState.PENDING or self._is_growing(job):
            return self._place(step, self._offer.free, start)
        is_far_as_fast = job.profile.far_speed_ratio >= 1.0
        size, avoided = job.gpus_per_worker, job.nodes.avoided
        like = (size, step.workers, step.gpu_type, avoided, is_far_as_fast, start)
        if like not in self._offer.found:
            self._offer.found[like] = self._place(step, self._offer.free, start)
        return self._offer.found[like]

    def _worth(self, held: Mapping[JobId, Held]) -> float:
        """The worth of these workers."""
        return self._worth_of(self._measure.rho(self._left_s(held)) / self._rho_of_none)

    @cached_property
    def _rho_of_none(self) -> float:
        return self._measure.rho(self._left_s({}))

    def _share(self, step: _Step, placements: tuple[Placement, ...]) -> Share:
        job, is_grown = step.job, self._is_growing(step.job)
        return Share(
            job=job,
            gpu_type=step.gpu_type,
            more=placements,
            held=self._held_with(step, placements),
            is_grown=is_grown,
            least=1 if is_grown else job.workers_on(step.gpu_type).min,
        )

    def _held_with(self, step: _Step, placements: Iterable[Placement]) -> Held:
        nodes = frozenset(placement.node for placement in placements)
        count = step.workers
        if self._is_growing(step.job):
            nodes |= self._held[step.job.job_id].nodes
            count += self._held[step.job.job_id].workers
        known = self._offer.nodes
        racks = {known[name].rack if name in known else "" for name in nodes}
        return Held(count, nodes, len(racks), step.gpu_type)

    def _place(
        self, step: _Step, free: Mapping[NodeName, int], start: int
    ) -> tuple[Placement, ...] | None:
        """Nodes for one job: a running one stays where it is, others go on the fewest, close
        together.

        The base gang and the oldest flexible workers of a running job stay, as in `carry_out`; it
        grows back into its own GPUs first. Where another job got some of these it does not grow: it
        has to leave them before it can have others.
        """
        job, size = step.job, step.job.gpus_per_worker
        is_growing = self._is_growing(job)
        near = self._held[job.job_id].nodes if is_growing else frozenset[NodeName]()
        kept: dict[NodeName, int] = {}
        if is_growing or job.state != JobState.PENDING:
            if start > 0:
                return None
            first = self._held[job.job_id].workers if is_growing else 0
            for worker in _oldest(job)[first : first + step.workers]:
                kept[worker.node] = kept.get(worker.node, 0) + 1
            near |= kept.keys()
            if any(free.get(name, 0) < count * size for name, count in kept.items()):
                return None
        more = step.workers - sum(kept.values())
        rooms = {
            name: room
            for name, gpus in free.items()
            if self._offer.nodes[name].gpu_type == step.gpu_type
            and name not in job.nodes.avoided
            and (room := gpus // size - kept.get(name, 0)) > 0
        }
        placements = self._fill(job, rooms, more, near, start) if more else ()
        if placements is None:
            return None
        stay = tuple(Placement(node=name, worker_count=kept[name]) for name in sorted(kept))
        return (*stay, *placements)

    def _fill(
        self,
        job: JobView,
        rooms: Mapping[NodeName, int],
        count: int,
        near: frozenset[NodeName],
        start: int,
    ) -> tuple[Placement, ...] | None:
        nodes, is_far_as_fast = self._offer.nodes, job.profile.far_speed_ratio >= 1.0
        found = orders(rooms, count, nodes, near, is_far_as_fast=is_far_as_fast)
        order = next(islice(found, start, None), None)
        if order is None:
            return None
        placements = fill(rooms, order, count)
        placed = sum(placement.worker_count for placement in placements)
        return placements if placed == count else None


def _oldest(job: JobView) -> list[WorkerView]:
    """Workers in the order in which they stay."""
    return sorted(
        (worker for worker in job.placed if not worker.is_leaving),
        key=lambda worker: (worker.is_flexible, worker.worker_index),
    )


def _thinned(ladder: Sequence[list[_Step]]) -> list[list[_Step]]:
    if len(ladder) <= MOST_SIZES:
        return list(ladder)
    last = len(ladder) - 1
    kept = sorted({round(last * at / (MOST_SIZES - 1)) for at in range(MOST_SIZES)})
    return [ladder[at] for at in kept]
