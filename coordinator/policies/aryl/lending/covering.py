"""Which lendable nodes go to which job.

A scheduling pass is tried first. Then each job that still waits, in the policy's order, gets the
fewest further nodes that let its whole base gang start, on one GPU type, together with free GPUs. A
gang that cannot be completed gets none. Last, elastic jobs grow where one more worker is worth its
rendezvous.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from common.model import GpuRequest, NodeName, Preemptibility, ServiceName, WorkerRange
from coordinator.policies.aryl.elastic_jobs import Share
from coordinator.policies.aryl.gang_admission import Gang, find_gang
from coordinator.policies.aryl.gpu_types import hold
from coordinator.policies.aryl.placement import PlacementState, fill
from coordinator.policies.contract.decisions import Placement, placed_count
from coordinator.policies.contract.index import shape
from coordinator.policies.contract.snapshot import JobShape, JobView, NodeView
from coordinator.policies.tenants.infeasible import Hosts


class Unmet(Struct, frozen=True, kw_only=True):
    """Demand that a scheduling pass leaves unmet. The caller may change it.

    held: jobs that go on waiting, in order.
    strict: a job that does not fit blocks those behind it that want the same GPU types, where those
        could host it some day; None: it blocks none.
    shares: elastic jobs that run or start; none where the policy does not scale.
    resize_cost_s: running time that each further flexible worker must save.
    trusts_profiles: whether jobs are as fast as their profiles state; else linear in their workers.
    """

    room: PlacementState
    held: tuple[JobView, ...]
    shares: tuple[Share, ...]
    strict: Hosts | None
    resize_cost_s: float
    trusts_profiles: bool = True


class Offer(Struct, frozen=True, kw_only=True):
    """Nodes of a service that could be lent, the first one first, and how many of them may be."""

    service: ServiceName
    nodes: tuple[NodeView, ...]
    limit: int


class _Place(Struct):
    """A node that is or could be lent, while workers are put on it."""

    node: NodeView
    service: ServiceName
    left: int
    is_sure: bool
    """The node comes anyway, or was chosen for an earlier job."""


def _places(nodes: Iterable[NodeView], *, is_sure: bool) -> Iterator[_Place]:
    for node in nodes:
        if node.service is not None and node.free_gpus > 0:
            yield _Place(node, node.service, node.free_gpus, is_sure)


class Plan:
    """One try: the job of each offered node."""

    def __init__(self, unmet: Unmet, offers: Sequence[Offer], sure: Iterable[NodeView]) -> None:
        self._unmet = unmet
        self._room = unmet.room
        self._limits = {offer.service: offer.limit for offer in offers}
        self.chosen: list[NodeName] = []
        """Nodes on offer that a job got, in order."""
        self._sure: dict[str, list[_Place]] = {}
        self._fresh: dict[str, list[_Place]] = {}
        """By GPU type, at first use: there are many types, and most are never used."""
        self._started: list[Share] = []
        self._full: set[tuple[str, int, Preemptibility, float, tuple[NodeName, ...]]] = set()
        self._by_id = {share.job.job_id: share for share in unmet.shares}
        for place in _places(sure, is_sure=True):
            self._sure.setdefault(place.node.gpu_type, []).append(place)
        self._offers = offers
        self._offered = {
            node.gpu_type
            for offer in offers
            for node in offer.nodes
            if node.service is not None and node.free_gpus > 0
        }

    def start_gangs(self) -> None:
        """Base gangs in the order of the jobs; of like jobs none fits after one did not."""
        failed: set[JobShape] = set()
        blocked: set[str] = set()
        for job in self._unmet.held:
            like = shape(job)
            if like in failed:
                continue
            types = [name for name in self._types(job) if name not in blocked]
            if not (
                any(self._start(job, gpu_type) for gpu_type in types)
                or any(self._start_spanning(job, gpu_type) for gpu_type in types)
            ):
                failed.add(like)
                if strict := self._unmet.strict:
                    wanted = job.gpu.types or (*self._sure, *self._offered)
                    blocked.update(strict(job, (name for name in wanted if name not in blocked)))

    def grow_jobs(self) -> None:
        """Flexible workers, one job after the other, those that run first."""
        for share in (*self._unmet.shares, *self._started):
            self._grow(share)

    def _types(self, job: JobView) -> list[str]:
        """GPU types on offer that the job accepts, in the order in which a pass tries them."""
        offered = self._sure.keys() | self._offered
        if job.gpu.types:
            return [name for name in dict.fromkeys(job.gpu.types) if name in offered]
        return sorted(
            offered,
            key=lambda name: (
                name not in self._room.home_types,
                job.gpu.worker_multiplier.get(name, 1),
                name,
            ),
        )

    def _open(
        self, job: JobView, gpu_type: str, *, is_flexible: bool, gpus_for_one: int = 1
    ) -> Iterator[_Place]:
        """Places with room for a worker of the job: sure ones, then those that may be lent."""
        left = dict(self._limits)
        size, avoided = job.gpus_per_worker * gpus_for_one, job.nodes.avoided
        for place in (*self._sure.get(gpu_type, ()), *self._fresh_of(gpu_type)):
            has_room = place.left >= size and place.node.name not in avoided
            if not has_room or not self._room.may_host(job, place.service, is_flexible=is_flexible):
                continue
            if not place.is_sure:
                if job.nodes.wants_no_loan or left[place.service] <= 0:
                    continue
                left[place.service] -= 1
            yield place

    def _fresh_of(self, gpu_type: str) -> list[_Place]:
        """Places of a type on offer that no job has yet, the first one first."""
        found = self._fresh.get(gpu_type)
        if found is None:
            nodes = [
                node for offer in self._offers for node in offer.nodes if node.gpu_type == gpu_type
            ]
            found = self._fresh[gpu_type] = list(_places(nodes, is_sure=False))
        return found

    def _take(self, place: _Place, gpus: int) -> None:
        place.left -= gpus
        if not place.is_sure:
            place.is_sure = True
            gpu_type = place.node.gpu_type
            self._fresh[gpu_type] = [one for one in self._fresh[gpu_type] if one is not place]
            self._sure.setdefault(gpu_type, []).append(place)
            self._limits[place.service] -= 1
            self.chosen.append(place.node.name)

    # --- base gangs -------------------------------------------------------------------------

    def _start(self, job: JobView, gpu_type: str) -> bool:
        """Give a base gang the fewest places in addition to free GPUs; False if it stays
        incomplete.
        """
        size, left = job.gpus_per_worker, job.workers_on(gpu_type).min
        used: list[tuple[_Place, int]] = []
        open_places = list(self._open(job, gpu_type, is_flexible=False))
        offered = sum(place.left // size for place in open_places)
        if not self._room.has_places(job, gpu_type, left - offered):
            return False
        for place in open_places:
            if left <= 0 or self._room.has_places(job, gpu_type, left):
                break
            count = min(left, place.left // size)
            used.append((place, count))
            left -= count
        if left > 0 and not self._hold(job, gpu_type, left):
            return False
        for place, count in used:
            self._take(place, count * size)
        self._note_started(job, gpu_type)
        return True

    def _note_started(self, job: JobView, gpu_type: str) -> None:
        if job.is_elastic:
            trusts = self._unmet.trusts_profiles
            share = Share(job, gpu_type, now_s=job.as_of_s, is_new=True, trusts_profiles=trusts)
            self._started.append(share)

    def _start_spanning(self, job: JobView, gpu_type: str) -> bool:
        """Complete a base gang over several GPU types, on free GPUs first and then on offered
        nodes.
        """
        if not job.gpu.heterogeneous_speed_ratio:
            return False
        left = job.workers_on(gpu_type).min
        kinds = [(gpu_type, 1), *self._others(job, gpu_type)]
        placements: list[Placement] = []
        for name, each in kinds:
            found = fill(self._room, job, name, left, gpus_for_one=each) if left else ()
            placements += found
            left -= placed_count(found)
        used, left = self._seats(job, kinds, left, is_flexible=False)
        if left > 0:
            return False
        hold(self._room, job, gpu_type, placements)
        for place, gpus in used:
            self._take(place, gpus)
        self._note_started(job, gpu_type)
        return True

    def _others(self, job: JobView, gpu_type: str) -> list[tuple[str, int]]:
        """Types that an attempt of a type can also use, and how many GPUs there stand for one."""
        found = ((name, job.gpu.gpus_for_one(name, gpu_type)) for name in job.gpu.types)
        return [(name, each) for name, each in found if each is not None and name != gpu_type]

    def _seats(
        self, job: JobView, kinds: Iterable[tuple[str, int]], count: int, *, is_flexible: bool
    ) -> tuple[list[tuple[_Place, int]], int]:
        """Places with the GPUs to take there for up to `count` workers; how many are left over."""
        used: list[tuple[_Place, int]] = []
        for name, each in kinds:
            size = job.gpus_per_worker * each
            places = self._open(job, name, is_flexible=is_flexible, gpus_for_one=each)
            for place in places if count else ():
                if not count:
                    break
                workers = min(count, place.left // size)
                used += [(place, workers * size)] if workers else []
                count -= workers
        return used, count

    def _hold(self, job: JobView, gpu_type: str, count: int) -> bool:
        """Take room for the rest of a gang where it is free, or where flexible workers make it."""
        span = WorkerRange(min=count, max=count)
        part = replace(job, workers=span, gpu=GpuRequest(types=(gpu_type,)))
        gang: Gang | None = find_gang(self._room, part, self._by_id)
        if gang is None:
            return False
        for worker in gang.evicted:
            self._room.release(worker)
            self._by_id[worker.job_id].removed.append(worker)
        self._room.hold(gang.placements, job.gpus_per_worker)
        return True

    # --- flexible workers -------------------------------------------------------------------

    def _grow(self, share: Share) -> None:
        """One step after the other, while each saves more than its rendezvous cost."""
        job = share.job
        cost_s = self._unmet.resize_cost_s
        is_measured = job.resizes.cost_s is not None  # it pays once, for all that it grows by
        count = share.count
        while count < share.most:
            target = share.next_count(count)
            is_first = count == share.current and not share.removed
            paid_for = share.most if is_measured else target
            price_s = share.change_cost_s(cost_s, target - count)
            price_s = 0.0 if is_measured and not is_first else price_s
            if share.saved_s(paid_for) - share.saved_s(count) <= price_s:
                return
            put = self._put_flexible(share, count, target - count)
            count += put
            if count < target:
                break
        if job.gpu.heterogeneous_speed_ratio and not share.removed:
            self._grow_spanning(share, count, share.most - count)

    def _grow_spanning(self, share: Share, count: int, wanted: int) -> None:
        """On other types all at once or not at all: the whole gang slows down with the first."""
        job = share.job
        kinds = self._others(job, share.gpu_type)
        used, left = self._seats(job, kinds, wanted, is_flexible=True)
        more = share.best(count, count + wanted - left) - count
        if more < wanted - left:
            used, _ = self._seats(job, kinds, more, is_flexible=True)
        before_s = share.left_s(count, spans_types=share.spans_types)
        after_s = share.left_s(count + more, spans_types=True)
        if before_s - after_s > share.change_cost_s(self._unmet.resize_cost_s, more):
            for place, gpus in used:
                self._take(place, gpus)

    def _put_flexible(self, share: Share, count: int, more: int) -> int:
        """Take places for up to this number of further workers, and for no more than help; returns
        the count.
        """
        found, used = self._flexible_seats(share, more)
        fitting = placed_count(found) + sum(gpus for _, gpus in used) // share.job.gpus_per_worker
        helping = share.best(count, count + fitting) - count
        if helping < fitting:  # the rest of the way through a dip of its profile has no place
            found, used = self._flexible_seats(share, helping)
        self._room.hold(found, share.job.gpus_per_worker)
        for place, gpus in used:
            self._take(place, gpus)
        return helping

    def _flexible_seats(
        self, share: Share, count: int
    ) -> tuple[Sequence[Placement], list[tuple[_Place, int]]]:
        """Seats for workers: free GPUs first, then offered nodes; nothing is taken yet."""
        job, gpu_type = share.job, share.gpu_type
        like = (
            gpu_type,
            job.gpus_per_worker,
            job.preemptibility,
            job.grace_s,
            job.nodes.avoided,
        )
        found: Sequence[Placement] = ()
        if count and like not in self._full:
            found = fill(self._room, job, gpu_type, count, is_flexible=True)
            if not found:
                self._full.add(like)  # room only falls from here on
        left = count - placed_count(found)
        return found, self._seats(job, [(gpu_type, 1)], left, is_flexible=True)[0]
