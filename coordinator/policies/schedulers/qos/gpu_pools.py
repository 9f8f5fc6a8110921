"""The promises on all GPU types in a pass: which jobs change type, and where newcomers ask.

A job that waits for one type goes to another where no promise has to make room for it. A newcomer
is refused only where no type that it accepts can promise its deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from common.model import JobId
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.parts.pooling import by_submission
from coordinator.policies.schedulers.qos.admission import Book
from coordinator.policies.schedulers.qos.admission_batch import MOST_PLANS, answer
from coordinator.policies.schedulers.qos.minimum_shares import Claim, fill
from coordinator.policies.schedulers.qos.quotas import Room
from coordinator.policies.schedulers.qos.timeline import Plan
from coordinator.policies.schedulers.qos.type_choice import Kinds


class Pool(Struct, kw_only=True):
    """The GPUs of one type, and the plans on them.

    gpus: that plans may use. jobs: planned or asked for there, by id. soft: claims of those without
        a promise. asked: those of newcomers so far.
    """

    kind: str
    gpus: int
    jobs: dict[JobId, JobView]
    book: Book
    soft: list[Claim]
    asked: list[Claim]


Pools = Mapping[str, Pool]
"""By GPU type."""

Tried = list[tuple[Pool, Claim]]
"""Where a newcomer asked, and its claim there."""


def move_on(
    pools: Pools, kinds: Kinds, claim_on: Callable[[Pool, JobView], Claim], now_s: float
) -> None:
    """Move a waiting job with a promise to a type where it is in time, if it is late on its own; or
    to free GPUs of another type, if it has none on its own and is done no later there or late
    anywhere.
    """
    rooms: dict[str, Room] = {}
    waiting = [(pool, (*pool.book.late, *pool.book.claims)) for pool in pools.values()]
    for pool, claims in waiting:
        for claim in claims:
            name, plan = JobId(claim.job_id), pool.book.plans.get(claim.job_id)
            free = [kinds.free[name]] if name in kinds.free else []
            for kind in kinds.others(name, (pool.kind,)) if plan is None else free:
                room = rooms[kind] if kind in rooms else pools[kind].book.room()
                beside = room.without(plan or (), claim)
                asked = claim_on(pools[kind], pool.jobs[name])
                if _is_taken(pools[kind].book, asked, beside, now_s, plan):
                    rooms[kind] = beside
                    _change(name, pool, pools[kind], kinds)
                    break
                rooms[kind] = room
            else:
                if plan is None and free:
                    there = pools[free[0]]
                    there.book.late.append(claim_on(there, pool.jobs[name]))
                    _change(name, pool, there, kinds)


def _change(name: JobId, pool: Pool, there: Pool, kinds: Kinds) -> None:
    """One leaves a type, and is planned on another one by now."""
    pool.book.drop(name)
    there.jobs[name] = pool.jobs.pop(name)
    kinds.of[name] = there.kind


def _is_taken(book: Book, claim: Claim, room: Room, now_s: float, has: Plan | None) -> bool:
    """Whether the plans that hold leave room; then it has a plan of its own beside them.

    has: its plan elsewhere, which this one must not end behind; None: it is late there.
    """
    for asked in (claim, claim.lean()) if has is None else (claim,):
        plan = fill(room.line(asked), asked, now_s)
        if plan is not None and (has is None or plan[-1].end_s <= has[-1].end_s):
            room.take(plan, asked)
            book.take_in(asked, plan)
            return True
    return False


class Asking:
    """Newcomers of one pass, on one type after another until one can promise their deadline.

    Args:
        claims_on: the claims of jobs on a pool, within what tenants leave there by then.
        refuse: called for one that no type admits, with where it asked; nothing was changed since.
        together: the newcomers of one type are admitted all or none.
        most_plans: of single jobs, after which no more are answered on a type.
    """

    def __init__(
        self,
        pools: Pools,
        kinds: Kinds,
        claims_on: Callable[[Pool, Sequence[JobView]], list[Claim]],
        refuse: Callable[[JobView, Tried], None],
        *,
        together: bool,
        most_plans: int = MOST_PLANS,
    ) -> None:
        self._pools = pools
        self._kinds = kinds
        self._claims_on = claims_on
        self._refuse = refuse
        self._together = together
        self._most_plans = most_plans
        self._tried: dict[str, Tried] = {}

    def answer(self, newcomers: Mapping[str, Sequence[JobView]]) -> list[Claim]:
        """Those that a later pass answers. newcomers: by the type on which they ask first."""
        later: list[Claim] = []
        while newcomers:
            goes_on: dict[str, list[JobView]] = {}
            for kind, jobs in newcomers.items():
                line = sorted(jobs, key=by_submission)
                for job in self._refused(self._pools[kind], line, later):
                    tried = self._tried[job.job_id]
                    left = self._kinds.others(job.job_id, [pool.kind for pool, _ in tried])
                    goes_on.setdefault(left[0], []).append(job)
            newcomers = goes_on
        return later

    def _refused(
        self, pool: Pool, jobs: Sequence[JobView], later: list[Claim]
    ) -> Iterator[JobView]:
        """Asks them on one type; those that are to be asked on another one."""
        refused: list[JobView] = []
        pool.jobs |= {job.job_id: job for job in jobs}
        self._kinds.of |= {job.job_id: pool.kind for job in jobs}

        def refuse(claim: Claim) -> None:
            job = pool.jobs[JobId(claim.job_id)]
            tried = self._tried.setdefault(claim.job_id, [])
            tried.append((pool, claim))
            if self._kinds.others(job.job_id, [pool.kind for pool, _ in tried]):
                del pool.jobs[job.job_id]  # a promise elsewhere counts against its tenant
                refused.append(job)
            else:
                self._refuse(job, tried)

        claims = self._claims_on(pool, jobs)
        later += answer(
            pool.book,
            claims,
            refuse,
            tried=self._plans,
            together=self._together,
            most_plans=self._most_plans,
        )
        yield from refused

    def _plans(self) -> int:
        """Plans of single jobs that were looked for so far."""
        return sum(pool.book.tried for pool in self._pools.values())
