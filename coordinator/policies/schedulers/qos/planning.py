"""The promises of one pass on all GPU types: kept, moved, put off, and made to newcomers."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Protocol

from msgspec import structs

from common.model import JobId
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.parts.restart_cost import loss_gpu_s
from coordinator.policies.schedulers.qos.admission import Book, Plans
from coordinator.policies.schedulers.qos.applicants import applicants, fixed_gpus
from coordinator.policies.schedulers.qos.capacity import Capacity
from coordinator.policies.schedulers.qos.claims import Claims
from coordinator.policies.schedulers.qos.gpu_pools import Asking, Pool, Tried, move_on
from coordinator.policies.schedulers.qos.minimum_shares import Claim
from coordinator.policies.schedulers.qos.overheads import Overheads, handed_over
from coordinator.policies.schedulers.qos.quotas import Quotas


class Remembered(Protocol):
    """The knowledge of the pass before.

    promises: plans by job.
    late: jobs with a promise that they cannot meet any more. dates: promised to these instead.
    unpromised: refused jobs that are admitted all the same.
    kinds: GPU types of the promises to those that take several. overheads: measured for attempts.
    """

    @property
    def promises(self) -> Plans: ...
    @property
    def late(self) -> Sequence[str]: ...
    @property
    def dates(self) -> Mapping[str, float]: ...
    @property
    def unpromised(self) -> Sequence[str]: ...
    @property
    def kinds(self) -> Mapping[str, str]: ...
    @property
    def overheads(self) -> Overheads: ...


class Bearing:
    """The books of one pass, of all GPU types: which jobs may move to make room for a share.

    A move is a stop; from then on its pause is part of the moved job's plan.
    """

    def __init__(self, now_s: float) -> None:
        self._now_s = now_s
        self._books: list[Book] = []

    def add(self, book: Book) -> None:
        """The promises on GPUs of one more type."""
        self._books.append(book)

    @property
    def plans(self) -> Plans:
        """The plans of all books, with the pauses of moved jobs."""
        return {name: plan for book in self._books for name, plan in book.plans.items()}

    def may_move(self, job: JobView, pause_s: float) -> bool:
        """True if a job may stand still for this long; it is then planned so.

        No job loses work to make room for others.
        """
        if loss_gpu_s(job, self._now_s) > 0:
            return False
        return all(book.bears(job.job_id, pause_s) for book in self._books)


class Planning:
    """One pass.

    pools: the plans, by GPU type. kinds: the types that jobs could have. bearing: all plans.
    late, dates, overheads, unpromised: as in `Remembered`.
    has_quotas: whether tenants have rules that plans have to heed.

    Args:
        margin, restart_s, powers_of_two: of claims, see `Claims`.
    """

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        before: Remembered,
        *,
        margin: float,
        restart_s: float,
        powers_of_two: bool,
    ) -> None:
        self._before = before
        self._now_s = snapshot.now_s
        self._let_in = {*before.promises, *before.late}
        self._capacity = Capacity(snapshot, self._let_in, before.kinds)
        self._claims = Claims(
            snapshot,
            before.overheads,
            margin=margin,
            restart_s=restart_s,
            powers_of_two=powers_of_two,
            tenancy=self._capacity.tenancy,
        )
        self.kinds = self._capacity.kinds
        self.has_quotas = self._capacity.tenancy is not None
        self.overheads = self._claims.overheads
        self.bearing = Bearing(snapshot.now_s)
        self.late: list[str] = []
        self.dates: dict[str, float] = {}
        self.unpromised: set[str] = set()
        self._kept = {**before.promises}  # on types that are not planned again yet
        self._newcomers: dict[str, list[JobView]] = {}
        self.pools = {kind: self._opened(kind) for kind in self._capacity.gpu_types}
        move_on(self.pools, self.kinds, self._claim_on, self._now_s)
        for pool in self.pools.values():
            self._put_off(pool)

    def answer(self, refuse: Callable[[JobView, Tried], None], *, together: bool) -> list[Claim]:
        """Promise newcomers their deadlines, or refuse them; those that a later pass answers."""
        asking = Asking(self.pools, self.kinds, self._claims_on, refuse, together=together)
        return asking.answer(self._newcomers)

    def reckon(self, pool: Pool) -> None:
        """Compute the quotas of a pool again: plans on other types since then count against
        tenants.
        """
        if self.has_quotas and len(self._capacity.gpu_types) > 1:
            pool.book.reckon(self._quotas(pool.jobs))

    def _opened(self, kind: str) -> Pool:
        """The promises on a GPU type, planned again; newcomers there come later."""
        jobs = self._capacity.jobs(kind)
        by_id = {job.job_id: job for job in jobs if not fixed_gpus(job)}
        asking = applicants(by_id.values(), self._let_in, self._before.unpromised)
        self.unpromised |= {job.job_id for job in asking.soft} & {*self._before.unpromised}
        gpus = self._capacity.gpus(kind, jobs)
        book = Book(self._now_s, gpus, self._before.promises, self._quotas(by_id))
        pool = Pool(kind=kind, gpus=gpus, jobs=by_id, book=book, soft=[], asked=[])
        pool.soft += [self._claim_on(pool, job) for job in asking.soft]
        book.promise([self._claim_on(pool, job) for job in asking.promised], pool.soft)
        self.bearing.add(book)
        self._kept = {name: plan for name, plan in self._kept.items() if name not in by_id}
        if asking.newcomers:
            self._newcomers[kind] = list(asking.newcomers)
        return pool

    def _quotas(self, here: Container[JobId]) -> Quotas:
        """What tenants leave to these jobs, beside the plans for the others so far."""
        return self._capacity.quotas(here, {**self._kept, **self.bearing.plans}, self._now_s)

    def _claim_on(self, pool: Pool, job: JobView) -> Claim:
        claim = self._claims.of(job, pool.kind, pool.gpus)
        if self.kinds.could_hold(job, pool.kind):
            return claim
        return structs.replace(claim, sizes=(), rates=())

    def _claims_on(self, pool: Pool, jobs: Sequence[JobView]) -> list[Claim]:
        """The claims of newcomers, behind those that asked there before."""
        self.reckon(pool)
        claims = [self._claim_on(pool, job) for job in jobs]
        pool.asked += claims
        if not self._claims.has_costs:
            return claims
        there = self._capacity.jobs(pool.kind)
        return handed_over(pool.asked, self._capacity.nodes, pool.kind, there)[-len(claims) :]

    def _put_off(self, pool: Pool) -> None:
        """A late job is promised another date, where changes take time."""
        dates: dict[str, float] = {}
        if pool.book.late and self._claims.has_costs:
            self.reckon(pool)
            dates = pool.book.put_off(self._before.dates, self._before.promises)
        self.late += [*(claim.job_id for claim in pool.book.late), *dates]
        self.dates |= dates
