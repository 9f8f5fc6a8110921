"""Victims: which borrowed GPUs go to a due job, keeping the most of all tenants' guarantees.

Jobs are whole, so a stopped one may be more than its tenant borrows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable

from msgspec import Struct

from common.model import JobId
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.tenants.borrowers import Lenders, Ranks
from coordinator.policies.tenants.free_counts import Counts
from coordinator.policies.tenants.giveback import Source
from coordinator.policies.tenants.gpu_flow import Gang
from coordinator.policies.tenants.tenancy import Count

MOST_TRIES = 32
"""Attempts of one way, for one bound on what guarantees may lose: each leaves out more of the
expensive ones.
"""

Way = Callable[[], Iterable[Source]]
"""The possible sources, in order; read again by each call."""

_Key = tuple[JobId, bool, tuple[int, ...]]


class _Try(Struct, frozen=True, kw_only=True):
    """The sources taken in one way. lost: GPUs of guarantees beyond the loss before.

    is_enough: for the job. next_lost: the least that one left out for its size would have lost.
    """

    given: tuple[Source, ...]
    lost: Count
    is_enough: bool
    next_lost: Count | None


class Choosing:
    """Takes from lenders, and looks what tenants have left."""

    def __init__(self, counts: Counts, lenders: Lenders) -> None:
        self._counts = counts
        self._lenders = lenders

    def has_room(self, job: JobView, gang: Gang) -> bool:
        """Whether siblings leave its tenant enough of what their parent may use."""
        return gang.count * job.gpus_per_worker <= self._counts.tenancy.room(job)

    def take(self, ways: Iterable[Way], job: JobView, gang: Gang) -> tuple[Source, ...] | None:
        """Let those be given that are enough for the job and take least from guarantees, then stop
        the fewest of the highest priorities, of the first way where several do; None: none is
        enough, and nothing has changed."""
        best: _Try | None = None
        least: tuple[Count, Ranks] = (0, ())
        for way in ways:
            found = self._of(way, job, gang)
            if found is not None:
                price = (found.lost, self._lenders.ranks(found.given))
                if best is None or price < least:
                    best, least = found, price
            if best is not None and least == (0, ()):
                break
        if best is None:
            return None
        for source in best.given:
            self._lenders.give(source)
        return best.given

    def _smaller(self, first: _Try, way: Way, job: JobView, gang: Gang) -> _Try:
        """Fewer victims that leave fewer unused GPUs, if guarantees and stopped jobs lose no more:
        the most expensive one is left out, as long as others do for the same.
        """
        best = last = first
        without = frozenset[_Key]()
        cost = self._lenders.cost(first.given)
        for _ in range(MOST_TRIES):
            stops = [source for source in last.given if source.seat is not None]
            if not stops or _used(best) <= self._needed(best, job, gang):
                break
            without |= {_key(stops[-1])}
            last = self._attempt(way, job, gang, without=without, most=first.lost)
            if not last.is_enough or self._lenders.cost(last.given) > cost:
                break
            if _used(last) < _used(best):
                best = last
        return best

    def _needed(self, found: _Try, job: JobView, gang: Gang) -> Count | float:
        """GPUs that borrowers lose at least, if they give on the same nodes: free GPUs there and
        the room of its tenant count, too.
        """
        there = {name for source in found.given for name in source.gpus}
        least = gang.lacks(self._counts.free, there)
        return max(least, gang.count * job.gpus_per_worker - self._counts.tenancy.room(job))

    def _of(self, way: Way, job: JobView, gang: Gang) -> _Try | None:
        """The first that are enough; where guarantees lose by them, those by which they lose
        least."""
        first = self._attempt(way, job, gang)
        if not first.is_enough:
            return None
        most: Count | None = 0
        while most is not None and most < first.lost:
            found, most = self._within(way, job, gang, most)
            if found is not None:
                return self._smaller(found, way, job, gang)
        return self._smaller(first, way, job, gang)

    def _within(
        self, way: Way, job: JobView, gang: Gang, most: Count
    ) -> tuple[_Try | None, Count | None]:
        """The first that are enough without any by which guarantees would lose more; and the least
        that they would lose by one left out for that.

        Where those that come first leave no room for others that would do, each of them is left
        out in turn, then pairs of them, and so on.
        """
        left_out = deque([frozenset[_Key]()])
        seen, following = set(left_out), list[Count]()
        for _ in range(MOST_TRIES):
            if not left_out:
                break
            without = left_out.popleft()
            found = self._attempt(way, job, gang, without=without, most=most)
            if found.is_enough:
                return found, None
            if found.next_lost is None:
                continue  # fewer would not do either
            following.append(found.next_lost)
            for source in reversed(found.given):
                more = without | {_key(source)}
                if more not in seen:
                    seen.add(more)
                    left_out.append(more)
        return None, min(following, default=None)

    def _attempt(
        self,
        way: Way,
        job: JobView,
        gang: Gang,
        *,
        without: Collection[_Key] = (),
        most: Count | None = None,
    ) -> _Try:
        """Take the first that are enough, and give all back. most: None is any."""
        free, workers = self._counts.free, gang.workers(self._counts.free)
        given, before, is_enough = list[Source](), self._lost(job, gang), False
        larger = list[Count]()
        for source in way():
            if _key(source) in without or not self._counts.borrows(source, job):
                continue
            there = {name: free[name] for name in source.gpus if name in free}
            self._lenders.give(source)
            if most is not None and (lost := self._lost(job, gang) - before) > most:
                self._lenders.give(source, sign=-1)
                larger.append(lost)
                continue
            given.append(source)
            workers += gang.workers({name: free[name] for name in there}) - gang.workers(there)
            is_enough = workers >= gang.count and self.has_room(job, gang)
            if is_enough:
                self._spare(given, job, gang)
                break
        lost = self._lost(job, gang) - before
        for source in reversed(given):
            self._lenders.give(source, sign=-1)
        return _Try(
            given=tuple(given),
            lost=lost,
            is_enough=is_enough,
            next_lost=min(larger, default=None),
        )

    def _spare(self, given: list[Source], job: JobView, gang: Gang) -> None:
        """Spare victims that were not needed after all, the most expensive first."""
        for source in list(reversed(given)):
            if source.seat is None and self._lenders.goes_whole(source.job):
                continue  # it goes with its job
            self._lenders.give(source, sign=-1)
            if gang.fits(self._counts.free) and self.has_room(job, gang):
                given.remove(source)
            else:
                self._lenders.give(source)

    def _lost(self, job: JobView, gang: Gang) -> Count:
        """GPUs that tenants lack of their guarantees, or of their earlier use where that was less,
        once the job has its own; of a tenant of several levels at each.
        """
        wanted, path = gang.count * job.gpus_per_worker, self._counts.tenancy.path(job)
        return sum(
            max(0, gpus - (wanted if name in path else 0))
            for name, gpus in self._counts.lost().items()
        )


def _used(found: _Try) -> Count:
    """GPUs that lenders have less."""
    return sum(source.used for source in found.given)


def _key(source: Source) -> _Key:
    """The identity of a source, also after some of the job's workers were given by themselves."""
    workers = () if source.seat else tuple(worker.worker_index for worker in source.workers)
    return (source.job.job_id, source.decision is None, workers)
