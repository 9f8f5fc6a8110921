"""Phase 1: which waiting jobs start, and room for their base gangs.

Phase 1 of Lyra, EuroSys'23, section 5.2: base demand, shortest job first. A job that does not fit
is left out of this pass and the next one is tried. Flexible workers count as room: no flexible
worker keeps a base gang waiting that fits in its place. Once the starts are known, the gangs are
placed by best-fit decreasing (section 5.3).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import chain

from msgspec import Struct

from common.model import JobId, NodeName
from coordinator.policies.aryl.aged_claims import Claims
from coordinator.policies.aryl.elastic_jobs import Share, Shares
from coordinator.policies.aryl.gpu_types import hold, types_in_order
from coordinator.policies.aryl.placement import PlacementState, Saved, fill
from coordinator.policies.aryl.reservations import Reservations
from coordinator.policies.aryl.scaling import give_back
from coordinator.policies.aryl.shortest_first import OrderKey, submission_key
from coordinator.policies.contract.decisions import Placement, placed_count
from coordinator.policies.contract.snapshot import JobView, WorkerView
from coordinator.policies.tenants.infeasible import Hosts

Find = Callable[..., "Gang | None"]
"""As `find_gang`."""
_Before = tuple[Saved, dict[JobId, list[WorkerView]]]


class Gang(Struct, frozen=True, kw_only=True):
    """A base gang that fits: where it goes, and which flexible workers make room."""

    job: JobView
    gpu_type: str
    placements: tuple[Placement, ...]
    evicted: tuple[WorkerView, ...] = ()
    spans_types: bool = False


def admit(
    room: PlacementState,
    key: OrderKey,
    shares: Shares,
    *,
    strict: Hosts | None = None,
    find_last: Find | None = None,
    claims: Claims | None = None,
    reservations: Reservations | None = None,
) -> list[Gang]:
    """Take waiting jobs in order while their base gangs fit; whole gangs or nothing.

    Gangs come back in the order of the jobs, placed with the largest workers first.

    strict: the first job that does not fit blocks all jobs behind it that want the GPU types that
        it waits for (head of the line, one line per type). These are the types that could host it
        some day: an infeasible job blocks none. None: it blocks none.
    find_last: another way to find room, tried last for jobs that would still wait.
    claims: nodes kept for aged jobs, which are tried before all others.
    reservations: GPUs reserved for gangs that waited too long, which are tried before these.
    """
    before = _save(room, shares)
    gangs = [] if reservations is None else _take_waited(room, reservations, shares)
    if claims is not None:
        seen = {gang.job.job_id for gang in gangs}
        if reservations is not None:
            seen |= {made.job_id for made in reservations.made}
        gangs += _take_aged(room, claims, shares, but=seen)
    aged = {gang.job.job_id for gang in gangs}
    gangs += _take_in_order(room, key, shares, strict=strict, but=aged)
    if _pack_again(room, gangs, shares, before):  # other pieces are free now: look once more
        taken = {gang.job.job_id for gang in gangs}
        gangs += _take_in_order(room, key, shares, strict=strict, but=taken)
    if find_last is not None and strict is None and _has_spanning(room):
        taken = {gang.job.job_id for gang in gangs}
        gangs += _take_in_order(room, key, shares, but=taken, find=find_last)
    give_back(room, shares.made.values())  # a later gang may have left room for an earlier worker
    return gangs


def _take_waited(
    room: PlacementState, reservations: Reservations, shares: Mapping[JobId, Share]
) -> list[Gang]:
    """Gangs that have waited too long and fit; GPUs are set aside for the first that do not."""
    gangs: list[Gang] = []
    room.bars.append(reservations)
    for job in reservations.due():
        gang = find_gang(room, job, shares)
        if gang is None:
            reservations.reserve(job)
        else:
            reservations.starts(job)
            _take(room, gang, shares)
            gangs.append(gang)
    return gangs


def _take_aged(
    room: PlacementState,
    claims: Claims,
    shares: Mapping[JobId, Share],
    *,
    but: Collection[JobId] = (),
) -> list[Gang]:
    """Gangs of aged jobs that fit; nodes are kept for the first that do not.

    but: jobs that have started, or for which GPUs are set aside already.
    """
    gangs: list[Gang] = []
    room.bars.append(claims)
    for job in claims.aged(room):
        if job.job_id in but:
            continue
        gang = find_gang(room, job, shares)
        if gang is None:
            claims.claim(room, job)
        else:
            _take(room, gang, shares)
            gangs.append(gang)
    return gangs


def _take_in_order(
    room: PlacementState,
    key: OrderKey,
    shares: Mapping[JobId, Share],
    *,
    strict: Hosts | None = None,
    but: Collection[JobId] = (),
    find: Find | None = None,
) -> list[Gang]:
    """Gangs that fit, in order, without the jobs in `but`.

    Room only shrinks in a pass, so a line of like jobs is left at its first that does not
    fit.
    """
    gangs: list[Gang] = []
    heads = [
        _Head(key(jobs[0]), jobs)
        for jobs in (
            _line(line, key, but)
            for line in room.index.lines
            if strict or find is not None or _may_fit(room, line[0])
        )
        if jobs
    ]
    heapify(heads)
    blocked: set[str] = set()
    find = find or find_gang
    while heads:
        head = heads[0]
        job = head.jobs[head.next]
        gang = find(room, job, shares, but=blocked)
        if gang is not None:
            _take(room, gang, shares)
            gangs.append(gang)
        elif strict:
            wanted = types_in_order(room, job)
            blocked.update(strict(job, (name for name in wanted if name not in blocked)))
        if gang is not None and head.advance(key):
            heapreplace(heads, head)
        else:
            heappop(heads)
    return gangs


def _has_spanning(room: PlacementState) -> bool:
    return any(line[0].gpu.heterogeneous_speed_ratio for line in room.index.lines)


class _Head:
    """How far a line of like jobs has come; the one whose next job is first comes first."""

    def __init__(self, key: tuple[float, ...], jobs: Sequence[JobView]) -> None:
        self.jobs = jobs
        self.next = 0
        self._key = (key, jobs[0].job_id)

    def advance(self, key: OrderKey) -> bool:
        """Go on to the next job; False when there is none."""
        self.next += 1
        if self.next >= len(self.jobs):
            return False
        job = self.jobs[self.next]
        self._key = (key(job), job.job_id)
        return True

    def __lt__(self, other: _Head) -> bool:
        return self._key < other._key


def _line(jobs: Sequence[JobView], key: OrderKey, but: Collection[JobId]) -> Sequence[JobView]:
    """Like jobs in order, without some; they come in order of priority and submission."""
    left = [job for job in jobs if job.job_id not in but] if but else jobs
    if key is submission_key or len(left) < 2:
        return left
    return sorted(left, key=lambda job: (key(job), job.job_id))


def _may_fit(room: PlacementState, job: JobView) -> bool:
    """A quick look for all jobs of a shape: whether there are places enough, however they lie."""
    return any(
        room.has_places(job, gpu_type, job.workers_on(gpu_type).min, if_unbarred=True)
        for gpu_type in types_in_order(room, job)
    )


def _pack_again(room: PlacementState, gangs: list[Gang], shares: Shares, before: _Before) -> bool:
    """Place the admitted gangs again, the largest workers first (best-fit decreasing).

    The jobs that start and their GPU types stay: the order decided them. Returns False and changes
    nothing if the gangs are in that order already or would not all fit in it.
    """
    order = sorted(range(len(gangs)), key=lambda index: -gangs[index].job.gpus_per_worker)
    if order == list(range(len(gangs))):
        return False
    after = _save(room, shares)
    _restore(room, shares, before)
    packed = list(gangs)
    for index in order:
        gang = _find_on(room, gangs[index].job, gangs[index].gpu_type, shares)
        if gang is None:
            _restore(room, shares, after)
            return False
        _take(room, gang, shares)
        packed[index] = gang
    gangs[:] = packed
    return True


def _save(room: PlacementState, shares: Shares) -> _Before:
    return room.save(), {
        job_id: list(share.removed) for job_id, share in shares.made.items() if share.removed
    }


def _restore(room: PlacementState, shares: Shares, saved: _Before) -> None:
    room.restore(saved[0])
    for job_id, share in shares.made.items():
        share.removed = saved[1].get(job_id, [])


def _take(room: PlacementState, gang: Gang, shares: Mapping[JobId, Share]) -> None:
    for worker in gang.evicted:
        room.release(worker)
        shares[worker.job_id].removed.append(worker)
    hold(room, gang.job, gang.gpu_type, gang.placements)


def _find_on(
    room: PlacementState, job: JobView, gpu_type: str, shares: Mapping[JobId, Share]
) -> Gang | None:
    """Room for a base gang on one GPU type, in place of flexible workers only if it must."""
    return _find_free(room, job, gpu_type) or _evict_for(room, job, gpu_type, shares)


def _find_free(room: PlacementState, job: JobView, gpu_type: str) -> Gang | None:
    count = job.workers_on(gpu_type).min
    placements = fill(room, job, gpu_type, count)
    if placed_count(placements) < count:
        return None
    return Gang(job=job, gpu_type=gpu_type, placements=placements)


def find_gang(
    room: PlacementState, job: JobView, shares: Mapping[JobId, Share], *, but: Collection[str] = ()
) -> Gang | None:
    """Room for a base gang: free GPUs of any accepted type, else GPUs of flexible
    workers.

    but: GPU types that others wait for.
    """
    gpu_types = [gpu_type for gpu_type in types_in_order(room, job) if gpu_type not in but]
    free = (_find_free(room, job, gpu_type) for gpu_type in gpu_types)
    cleared = (_evict_for(room, job, gpu_type, shares) for gpu_type in gpu_types)
    return next((gang for gang in chain(free, cleared) if gang is not None), None)


def _evict_for(
    room: PlacementState, job: JobView, gpu_type: str, shares: Mapping[JobId, Share]
) -> Gang | None:
    """A gang on free GPUs as far as they go, the rest where the least running time is lost."""
    size, count = job.gpus_per_worker, job.workers_on(gpu_type).min
    if not room.has_places(job, gpu_type, count):
        return None
    workers = {
        placement.node: placement.worker_count for placement in fill(room, job, gpu_type, count)
    }
    # On any other node no worker could be taken back, and what was free there is filled by now.
    hosts = room.clearable(job, gpu_type)
    free = {name: room.free[name] - workers.get(name, 0) * size for name in hosts}
    toll = _Toll(room, shares, free)
    prices: dict[NodeName, tuple[tuple[int, ...], float, int, NodeName]] = {}
    stale: Iterable[NodeName] = hosts
    for _ in range(count - sum(workers.values())):
        for name in stale:
            prices.pop(name, None)
            if toll.available(name) >= size:
                rank = room.rank(job, name, is_flexible=False)
                prices[name] = (*toll.price(name, size), rank, name)
        name = min(prices.values())[-1]
        stale = toll.pay(name, size)
        workers[name] = workers.get(name, 0) + 1
    placements = tuple(Placement(node=name, worker_count=workers[name]) for name in sorted(workers))
    return Gang(job=job, gpu_type=gpu_type, placements=placements, evicted=toll.settle())


class _Toll:
    """The cost of clearing room on nodes, while nothing is changed yet."""

    def __init__(
        self, room: PlacementState, shares: Mapping[JobId, Share], free: dict[NodeName, int]
    ) -> None:
        self._free = free
        self._shares = shares
        self._left = {name: self._by_value(room.flexible.get(name, ())) for name in free}
        self._nodes_of: dict[JobId, set[NodeName]] = {}
        for name, workers in self._left.items():
            for worker in workers:
                self._nodes_of.setdefault(worker.job_id, set()).add(name)
        self._least = min((shares[each].job.priority for each in self._nodes_of), default=0)
        self._gone: dict[JobId, int] = {}
        self._evicted: list[WorkerView] = []

    def _by_value(self, workers: Iterable[WorkerView]) -> list[WorkerView]:
        """Workers that free no GPU are not among them: removing them would be useless."""
        return sorted(
            (worker for worker in workers if worker.freed_gpus),
            key=lambda worker: (
                self._shares[worker.job_id].job.priority,
                self._shares[worker.job_id].loss_s(1) / worker.freed_gpus,
                worker.job_id,
                -worker.worker_index,
            ),
        )

    def available(self, name: NodeName) -> int:
        return self._free[name] + sum(worker.freed_gpus for worker in self._left[name])

    def price(self, name: NodeName, gpus: int) -> tuple[tuple[int, ...], float]:
        """Priorities above the least that workers go of to clear that many GPUs of a node, the
        highest first; and running time lost."""
        more: dict[JobId, int] = {}
        for worker in self._needed(name, gpus):
            more[worker.job_id] = more.get(worker.job_id, 0) + 1
        found = (self._shares[job_id].job.priority for job_id in more)
        ranks = tuple(sorted((each for each in found if each > self._least), reverse=True))
        lost_s = 0.0
        for job_id, count in more.items():
            share, gone = self._shares[job_id], self._gone.get(job_id, 0)
            lost_s += share.loss_s(gone + count) - share.loss_s(gone)
        return ranks, lost_s

    def _needed(self, name: NodeName, gpus: int) -> list[WorkerView]:
        """Cheapest first until it fits, then without those that were not needed."""
        free = self._free[name]
        taken: list[WorkerView] = []
        for worker in self._left[name]:
            if free >= gpus:
                break
            taken.append(worker)
            free += worker.freed_gpus
        for worker in reversed(taken[:-1]):
            if free - worker.freed_gpus >= gpus:
                taken.remove(worker)
                free -= worker.freed_gpus
        return taken

    def pay(self, name: NodeName, gpus: int) -> set[NodeName]:
        """Clear that many GPUs of a node and hold them; the nodes that now cost something else."""
        stale = {name}
        for worker in self._needed(name, gpus):
            stale |= self._nodes_of.get(worker.job_id, set())
            self._left[name].remove(worker)
            self._free[name] += worker.freed_gpus
            self._evicted.append(worker)
            self._gone[worker.job_id] = self._gone.get(worker.job_id, 0) + 1
        self._free[name] -= gpus
        return stale

    def settle(self) -> tuple[WorkerView, ...]:
        """The workers that leave in the end: a later room on the same node can spare an earlier
        worker.
        """
        kept: list[WorkerView] = []
        for worker in self._evicted:
            if self._free[worker.node] >= worker.freed_gpus:
                self._free[worker.node] -= worker.freed_gpus
                kept.append(worker)
        return tuple(worker for worker in self._evicted if worker not in kept)
