"""Admission: which deadlines are promised on a pool of GPUs, and by which plan. Pure arithmetic.

ElasticFlow (ASPLOS 2023), section 4.1, algorithm 1.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from math import ceil, inf
from operator import is_

from msgspec import structs

from coordinator.policies.schedulers.qos.earliest_date import earliest, spread
from coordinator.policies.schedulers.qos.minimum_shares import Claim, fill
from coordinator.policies.schedulers.qos.plan_sequence import Row
from coordinator.policies.schedulers.qos.quotas import Quotas, Room, Rooms
from coordinator.policies.schedulers.qos.timeline import Plan, Timeline

PLANS_TRIED, LEAST_TRIES = 2048, 32
"""Plans of single jobs that a search for a date makes, about; dates that it tries at least."""

NO_QUOTAS = Quotas()

Plans = dict[str, Plan]
"""By job."""


class Book:
    """Promises on the GPUs of one type.

    plans: of the claims that meet their deadline. late: those that cannot any more.
    spared: jobs without a promise that a stop would set back, and that no promise needs to stop.
    tried: plans of single jobs that were looked for so far: what it costs to ask.
    """

    def __init__(self, now_s: float, gpus: int, kept: Plans, quotas: Quotas = NO_QUOTAS) -> None:
        self._rooms = Rooms(quotas)
        self._now_s = now_s
        self._gpus = gpus
        self._kept = kept
        self._rows: dict[tuple[bool, bool], Row] = {}
        self.claims: list[Claim] = []
        self.plans: Plans = {}
        self.late: list[Claim] = []
        self.spared: list[Claim] = []
        self.tried = 0

    def promise(self, claims: Sequence[Claim], soft: Sequence[Claim] = ()) -> None:
        """Plan for jobs with a promised deadline: from scratch, or as before if that keeps more.

        A job that cannot be in time with the margin is planned without it, at worst all are.

        soft: those without a promise; with the late ones they are planned around where they can be.
        """
        everyone = sorted(claims, key=by_deadline)
        self.plans = self._most(everyone, ())
        in_time = frozenset(self.plans)
        for spared in (in_time, frozenset[str]()):
            lean = [claim if claim.job_id in spared else claim.lean() for claim in everyone]
            if len(self.plans) == len(everyone) or lean == everyone:
                break
            plans = self._most(lean, ())
            if len(plans) > len(self.plans):
                everyone, self.plans = lean, plans
        self.late = [claim for claim in everyone if claim.job_id not in self.plans]
        self.claims = [claim for claim in everyone if claim.job_id in self.plans]
        keeping = (claim for claim in (*self.late, *soft) if claim.keeps)
        self.spared = sorted(keeping, key=lambda claim: (-claim.stop_gpu_s, claim.job_id))
        self._spare(self.plans, self._around)

    def _most(self, claims: Sequence[Claim], spared: Sequence[Claim]) -> Plans:
        """Plans for most of them: the first that works for all.

        No job with a promise is stopped for one without.
        """
        best: Plans = {}
        for stops in (False,) if spared else (False, True):
            for kept in ({}, self._kept):
                plans = self._planned(claims, kept, spared, stops=stops)
                if len(plans) == len(claims):
                    return plans
                best = plans if len(plans) > len(best) else best
        return best

    def _around(self, spared: Sequence[Claim]) -> Plans | None:
        """Plans for all that were promised, beside others that go on; None: there are none."""
        plans = self._most(self.claims, spared)
        return plans if len(plans) == len(self.claims) else None

    def _spare(self, plans: Plans, plan: Callable[[Sequence[Claim]], Plans | None]) -> None:
        """As many of those whose stop costs most as there are plans beside.

        plans: those if none is. The plans that hold stay until the end: looking for others is with
        them in sight.
        """
        most, least, tried = len(self.spared), 0, len(self.spared)
        while least < most:
            found = plan(self.spared[:tried])
            if found is None:
                most = tried - 1
            else:
                least, plans = tried, found
            tried = (least + most + 1) // 2
        self.plans = plans
        self.spared = self.spared[:least]

    def _planned(
        self,
        claims: Sequence[Claim],
        kept: Plans,
        spared: Sequence[Claim],
        *,
        stops: bool,
        is_all: bool = False,
    ) -> Plans:
        """Plans in order of deadline; first those that are kept, where they still do.

        stops: running jobs that do not pause may be stopped and do their work over, if they are in
        time all the same. Else they have at least their base gangs; not if they are late.
        is_all: plans for some of them are no use, and need not be complete.
        """
        gangs = [each for each in claims if _is_held(each) and each.sizes]
        holding = [] if stops else gangs
        row = self._row_of(spared, holding, stops=stops and bool(gangs), keeps=bool(kept))
        before = row.made
        plans = row.plans(claims, kept, is_all=is_all)
        self.tried += row.made - before
        held = {each.job_id for each in holding}
        rest = [each for each in claims if each.job_id in plans or each.job_id not in held]
        if is_all or len(rest) == len(claims):
            return plans
        return self._planned(rest, kept, spared, stops=stops)

    def _row_of(
        self, spared: Sequence[Claim], holding: Sequence[Claim], *, stops: bool, keeps: bool
    ) -> Row:
        """One that mostly begins as a row that was planned before: of its own for each way to plan,
        as these are tried in turn."""
        if spared:
            return Row(self._beside(spared), self._now_s, holding, stops=stops)
        row = self._rows.get((stops, keeps))
        if row is None or not _are_same(row.holding, holding):
            row = Row(self._beside(()), self._now_s, holding, stops=stops)
            self._rows[stops, keeps] = row
        return row

    def with_more(
        self, newcomers: Sequence[Claim], spared: Sequence[Claim] = (), left: Room | None = None
    ) -> Plans | None:
        """Plans for all that were promised and for newcomers; None: some promise would break.

        left: what the plans that hold leave beside `spared`, if that is known.
        """
        claims = sorted((*self.claims, *newcomers), key=by_deadline)
        has_costs = any(claim.has_costs for claim in claims)
        for stops in (False,) if spared or not any(map(_is_held, claims)) else (False, True):
            plans = self._planned(claims, {}, spared, stops=stops, is_all=not has_costs)
            if len(plans) == len(claims):
                return plans
            if not has_costs:
                continue
            # The time of changes can leave a job in time only by its present plan.
            firm = {name: plan for name, plan in self.plans.items() if name not in plans}
            plans = self._planned(claims, firm, spared, stops=stops, is_all=True)
            if len(plans) == len(claims):
                return plans
        # The greedy order is not the only one: newcomers may fit around the plans that hold.
        room, around = (left.copy() if left else self.room(spared)), {**self.plans}
        for claim in sorted(newcomers, key=by_deadline):
            plan = fill(room.line(claim), claim, self._now_s)
            if plan is None:
                return None
            room.take(plan, claim)
            around[claim.job_id] = plan
        return around

    def admit(self, newcomers: Sequence[Claim]) -> bool:
        """Promise newcomers their deadlines, if that breaks no promise; all of them or none."""
        plans = self.with_more(newcomers)
        if plans is None:
            return False
        self._spare(plans, lambda spared: self.with_more(newcomers, spared))
        self.claims = sorted((*self.claims, *newcomers), key=by_deadline)
        return True

    def take_in(self, claim: Claim, plan: Plan) -> None:
        """Promise a job its deadline by a plan for which the present plans leave room."""
        self.claims = sorted((*self.claims, claim), key=by_deadline)
        self.plans[claim.job_id] = plan

    def drop(self, name: str) -> None:
        """Drop a job's promise here: it was promised elsewhere."""
        self.claims = [each for each in self.claims if each.job_id != name]
        self.late = [each for each in self.late if each.job_id != name]
        self.plans.pop(name, None)

    def reckon(self, quotas: Quotas) -> None:
        """Tenants leave something else from now on; plans are not looked at again for that."""
        self._rooms = Rooms(quotas)
        self._rows.clear()

    def bears(self, name: str, pause_s: float) -> bool:
        """True if a job is in time though it stands still for a time from now on.

        It is then planned with that, around the plans of others. A job without a plan bears it.
        """
        claim = next((each for each in self.claims if each.job_id == name), None)
        if claim is None:
            return True
        room = self.room()
        room.give(self.plans[name], claim)
        paused = structs.replace(claim, begins_s=claim.begins_s + pause_s)
        plan = fill(room.line(claim), paused, self._now_s)
        if plan is None:
            return False
        self.plans[name] = plan
        return True

    def put_off(self, dates: Mapping[str, float], promised: Container[str]) -> dict[str, float]:
        """Promise late jobs the earliest date that breaks no other promise; dates by job.

        dates: earlier promises of this kind, which are kept where they can be. promised: jobs with
            a promise; of the others none is put off.
        """
        late, self.late, found = self.late, [], dict[str, float]()
        for claim in late:
            name, date_s = claim.job_id, dates.get(claim.job_id, -inf)
            if name in promised and not self._is_admitted_by(claim, date_s):
                date_s = self.earliest_s(claim, self._now_s)
                date_s = date_s if self._is_admitted_by(claim, date_s) else -inf
            if name in promised and date_s > -inf:
                found[name] = date_s
            else:
                self.late.append(claim)
        return found

    def _is_admitted_by(self, claim: Claim, date_s: float) -> bool:
        possible = self._now_s < date_s < inf
        return possible and self.admit([structs.replace(claim, deadline_s=date_s)])

    def earliest_s(self, claim: Claim, since_s: float = 0.0) -> float:
        """The earliest deadline at which a newcomer would be admitted; inf: it never fits.

        One that `admit` accepts, not before its own, in whole seconds after `since_s`. What fits by
        a date need not fit by a later one: others have to make room at another time then. So
        whole seconds are tried one by one, from the first by which it could be done alone to that
        by which it fits around all plans. Where these are too far apart (`PLANS_TRIED`) dates with
        equal gaps are, and then the gap in front: an earlier date can hide within one of the gaps.
        """
        if not claim.sizes:
            return inf

        def at(date: int) -> Claim:
            return structs.replace(claim, deadline_s=since_s + date)

        def least(line: Timeline, first: int, last: int) -> int:
            dates = range(first, last + 1)  # one plan on a line is the easier the later it ends
            return first + bisect_left(
                dates, True, key=lambda date: fill(line, at(date), self._now_s) is not None
            )

        left = self.room(())
        alone, around = self._beside(()).line(claim), left.line(claim)
        first = ceil(max(self._now_s, claim.deadline_s) - since_s)
        # Nothing changes behind the last step.
        settled_s = max(at_s for at_s, _ in around.steps() if at_s < inf)
        whole_s = claim.work_s / claim.rates[0] + claim.begins_s + claim.again_s + claim.resize_s
        last = max(first, ceil(settled_s - since_s)) + ceil(whole_s) + 1
        first = least(alone, first, last)
        last = min(last, least(around, first, last))
        dates = spread(first, last, max(LEAST_TRIES, PLANS_TRIED // (1 + len(self.claims))))
        found = earliest(dates, lambda date: self.with_more((at(date),), left=left) is not None)
        return inf if found is None else since_s + found

    def room(self, spared: Iterable[Claim] | None = None) -> Room:
        """The room that the plans leave, except those that are spared; None: all that are."""
        room = self._beside(self.spared if spared is None else spared)
        for claim in self.claims:
            room.take(self.plans[claim.job_id], claim)
        return room

    def _beside(self, spared: Iterable[Claim]) -> Room:
        room = Room(self._now_s, self._gpus, self._rooms)
        for claim in spared:
            room.take(claim.hold(self._now_s), claim)
        return room


def _is_held(claim: Claim) -> bool:
    """Whether it has at least its base gang unless it is stopped for others."""
    return claim.runs and not claim.pauses


def _are_same(some: Sequence[Claim], others: Sequence[Claim]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def by_deadline(claim: Claim) -> tuple[float, str]:
    return claim.deadline_s, claim.job_id
