"""Answers questions about the past: lines of the history, usage reports, jobs that ended.

The index has the lines that are in the stream. What happened since then, and what still runs, comes
from the engine's state, so that an answer is of this moment.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET, Struct, structs

from common.api import (
    OPERATORS,
    ApiErrorCode,
    EndedJobRow,
    EndedJobs,
    GetHistory,
    GetUsage,
    History,
    ListEndedJobs,
    Usage,
    UsageRow,
)
from common.history import HistoryLine, JobRecord
from common.messages import Message
from coordinator.engine.state import usage
from coordinator.engine.state.tables import ClusterState
from coordinator.service.api import name_lookup, rows
from coordinator.service.api.name_lookup import Refusal
from coordinator.service.api.queries import page
from coordinator.service.coordinator import Coordinator
from coordinator.service.history import facts
from coordinator.service.history.facts import Fact
from coordinator.service.history.index import Asked
from coordinator.service.history.keeper import READ_LINES, IndexKeeper
from coordinator.service.history.usage_sum import DIMENSIONS, Sums

WAIT_S = 1.0
"""How long a question waits for the newest lines to be in the index."""
PAGE_JOBS = 1000
REPORTS_KEPT = 4
"""Reports whose further pages need not be added up again."""

Question = GetHistory | GetUsage | ListEndedJobs


class _Scope(Struct, frozen=True):
    """Whose lines a caller sees; None: of any."""

    tenant: str | None
    user: str | None


class HistoryReads:
    """Answers questions about the past.

    Args:
        keeper: None: this coordinator keeps no index.
    """

    def __init__(self, coordinator: Coordinator, keeper: IndexKeeper | None) -> None:
        self._coordinator = coordinator
        self._keeper = keeper
        self._reports: dict[tuple[object, ...], Usage] = {}

    async def answer(self, request: Question, tenant: str) -> Message:
        """The answer to a caller of a tenant; instants are engine time.

        Raises:
            Refusal: the question is of another tenant, or is none.
            Unavailable: no index, or no answer in time.
        """
        if self._keeper is None:
            raise Refusal(ApiErrorCode.UNAVAILABLE, "this coordinator keeps no history", "history")
        asked = self._resolved(request)
        asked = _in_engine_time(asked, self._coordinator.decider.time.ahead_s())
        scope = _scope(asked, tenant)
        await self._wait_for_lines(self._keeper)
        match asked:
            case GetHistory():
                return await self._history(asked, scope, self._keeper)
            case GetUsage():
                return await self._usage(asked, scope, self._keeper)
            case ListEndedJobs():
                return await self._ended_jobs(asked, scope, self._keeper)

    def _resolved(self, request: Question) -> Question:
        """The question with ids in place of numbers and names of jobs."""
        match request:
            case GetHistory():
                return structs.replace(request, names=self._ids(request.names))
            case ListEndedJobs():
                return structs.replace(request, job_ids=self._ids(request.job_ids))
            case _:
                return request

    def _ids(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name_lookup.known_id(self._state, name) or name for name in names)

    async def _wait_for_lines(self, keeper: IndexKeeper) -> None:
        if keeper.lag_lines < READ_LINES:
            await keeper.caught_up(_last_line(self._state), within_s=WAIT_S)

    @property
    def _state(self) -> ClusterState:
        return self._coordinator.engine.state

    def _now_s(self) -> float:
        return self._coordinator.decider.time.now_s()

    def _newer(self, number: int) -> tuple[list[HistoryLine], int]:
        """Lines of the state behind a number, and how many before them are nowhere."""
        state = self._state
        first = max(number, state.stories_dropped)
        kept = state.stories[first - state.stories_dropped :]
        return list(rows.history_lines(state, kept, first)), first - number

    async def _history(self, asked: GetHistory, scope: _Scope, keeper: IndexKeeper) -> History:
        words = [facts.about(name) for name in dict.fromkeys(asked.names)]
        question = Asked(
            words=(*words, *_words(scope)),
            kinds=frozenset(asked.kinds),
            after=asked.after,
            before=asked.before or None,
            since_s=asked.since_at_s,
            until_s=asked.until_at_s,
            limit=asked.limit + 1,
            is_newest=asked.is_newest,
        )
        newer, missing = self._newer(keeper.number)
        found = await keeper.ask(lambda index: index.lines(question))
        last = found[-1].number if found else 0
        found += [line for line in newer if line.number > last and _fits(line, question)]
        has_more = len(found) > asked.limit
        if has_more:
            found = found[-asked.limit :] if asked.is_newest else found[: asked.limit]
        if asked.is_newest:
            shown, is_cut = page(reversed(found))
            shown = tuple(reversed(shown))
        else:
            shown, is_cut = page(found)
        if not (shown or asked.after or asked.before):
            await self._check_names(asked.names, scope, keeper)
        return History(
            rows=shown,
            has_more=has_more or is_cut,
            missing_lines=missing,
            kept_since_at_s=await keeper.ask(lambda index: index.first_at_s()),
        )

    async def _check_names(
        self, names: tuple[str, ...], scope: _Scope, keeper: IndexKeeper
    ) -> None:
        """Refuse a name that stands for nothing: neither in the state nor in any line."""
        for name in names:
            if name_lookup.known_id(self._state, name) is not None:
                continue
            if not await _has_line(name, scope, keeper):
                hint = "; a job that is not kept any more goes by its id" * name.isdecimal()
                raise Refusal(
                    ApiErrorCode.NOT_FOUND,
                    f"the history has no line about {name!r}: no job, node, service or loan is "
                    f"known by it{hint}",
                    "names",
                )

    async def _usage(self, asked: GetUsage, scope: _Scope, keeper: IndexKeeper) -> Usage:
        unknown = [name for name in asked.by if name not in DIMENSIONS]
        if unknown or not asked.by or len(set(asked.by)) < len(asked.by):
            what = f"{unknown[0]!r}" if unknown else ",".join(asked.by) or "nothing"
            raise Refusal(
                ApiErrorCode.USAGE,
                f"{what}, expected some of {', '.join(DIMENSIONS)}, each once",
                "by",
            )
        now_s = self._now_s()
        until_s = now_s if asked.until_at_s is None else min(asked.until_at_s, now_s)
        if asked.since_at_s >= until_s:
            raise Refusal(ApiErrorCode.USAGE, "the time ends before it begins", "since")
        key = (scope.tenant, scope.user, asked.by, asked.since_at_s, asked.until_at_s)
        known = self._reports.get(key) if asked.after else None
        whole = known or await self._sum(asked, scope, keeper, until_s=until_s, now_s=now_s)
        self._reports[key] = whole
        while len(self._reports) > REPORTS_KEPT:
            del self._reports[next(iter(self._reports))]
        shown, has_more = page(
            row for row in whole.rows if row.key > asked.after or not asked.after
        )
        return structs.replace(whole, rows=shown, has_more=has_more)

    async def _sum(
        self, asked: GetUsage, scope: _Scope, keeper: IndexKeeper, *, until_s: float, now_s: float
    ) -> Usage:
        """All rows of a report, by key."""
        sums = Sums(asked.by, since_s=asked.since_at_s, until_s=until_s)
        number = await keeper.ask(
            lambda index: index.usage(sums, tenant=scope.tenant, user=scope.user)
        )
        # After it, and all in one moment: each line is either there or here, and what is still
        # open has no line.
        newer, missing = self._newer(number)
        recent = [fact for line in newer for fact in facts.facts(line)]
        recent += open_facts(self._state, max(now_s, self._now_s()))
        sums.add_facts(
            fact
            for fact in recent
            if scope.tenant in (None, fact.tenant) and scope.user in (None, fact.user)
        )
        return Usage(
            by=asked.by,
            rows=tuple(
                UsageRow(key=key, **structs.asdict(row)) for key, row in sorted(sums.rows.items())
            ),
            since_at_s=asked.since_at_s,
            until_at_s=until_s,
            missing_lines=missing,
            kept_since_at_s=await keeper.ask(lambda index: index.first_at_s()),
        )

    async def _ended_jobs(
        self, asked: ListEndedJobs, scope: _Scope, keeper: IndexKeeper
    ) -> EndedJobs:
        until_s = self._now_s() + 1.0 if asked.until_at_s is None else asked.until_at_s
        numbers = asked.job_numbers or ()
        submitted_s = asked.submitted_until_at_s
        submitted_until_s = submitted_s if isinstance(submitted_s, float) else None
        number = keeper.number
        newer, missing = self._newer(number)
        found = await keeper.ask(
            lambda index: index.ended_jobs(
                since_s=asked.since_at_s,
                until_s=until_s,
                tenant=scope.tenant,
                user=scope.user,
                job_ids=asked.job_ids,
                job_numbers=numbers,
                submitted_until_s=submitted_until_s,
                after=asked.after,
                limit=PAGE_JOBS + 1,
            )
        )
        seen = {place for place, _ in found}
        found += [
            (line.number, job)
            for line in newer
            if isinstance(job := line.detail, JobRecord)
            and line.number > asked.after
            and line.number not in seen
            and asked.since_at_s <= job.ended_at_s < until_s
            and scope.tenant in (None, job.tenant)
            and scope.user in (None, job.user)
            and (not asked.job_ids or job.job_id in asked.job_ids)
            and (not numbers or job.number in numbers or job.array_number in numbers)
            and (submitted_until_s is None or job.submitted_at_s < submitted_until_s)
        ]
        shown, is_cut = page(EndedJobRow(number=place, job=job) for place, job in found[:PAGE_JOBS])
        return EndedJobs(
            rows=shown,
            has_more=is_cut or len(found) > PAGE_JOBS,
            missing_lines=missing or UNSET,
        )


def open_facts(state: ClusterState, now_s: float) -> Iterator[Fact]:
    """What the lines do not have yet: GPUs that are held or lent now, and jobs that wait."""
    for name, uses in state.held_uses.items():
        for use in uses:
            until_now = usage.as_use(use, name, now_s)
            if use.job_id == usage.NO_JOB:
                yield facts.lent(until_now)
                continue
            job = state.jobs.get(use.job_id)
            whose = ("", "") if job is None else (job.tenant, job.user)
            yield facts.held(until_now, tenant=whose[0], user=whose[1], job=use.job_id)
    for job_id, used in state.job_uses.items():
        job = state.jobs.get(job_id)
        whose = ("", "") if job is None else (job.tenant, job.user)
        for _, closed in used.closed:
            yield facts.held(closed, tenant=whose[0], user=whose[1], job=job_id)
    for job in state.live():
        wait = usage.open_wait(job, now_s)
        if wait is not None:
            yield facts.waited(
                wait.began_at_s,
                wait.ended_at_s,
                job.spec.base_demand_gpus,
                tenant=job.tenant,
                user=job.user,
                job=job.job_id,
            )


async def _has_line(name: str, scope: _Scope, keeper: IndexKeeper) -> bool:
    question = Asked(words=(facts.about(name), *_words(scope)), limit=1)
    return bool(await keeper.ask(lambda index: index.lines(question)))


def _words(scope: _Scope) -> Iterator[str]:
    """The words of lines that a caller sees."""
    if scope.tenant is not None:
        yield facts.of_tenant(scope.tenant)
    if scope.user is not None:
        yield facts.of_user(scope.user)


def _last_line(state: ClusterState) -> int:
    return state.stories_dropped + len(state.stories)


def _fits(line: HistoryLine, asked: Asked) -> bool:
    """Whether a line that is not in the index yet answers a question."""
    return (
        line.number > asked.after
        and (asked.before is None or line.number < asked.before)
        and (asked.since_s is None or line.at_s >= asked.since_s)
        and (asked.until_s is None or line.at_s < asked.until_s)
        and (not asked.kinds or line.kind in asked.kinds)
        and set(asked.words) <= set(facts.words(line))
    )


def _in_engine_time(request: Question, ahead_s: float) -> Question:
    """The question with its instants on the clock of decisions."""
    since_s, until_s = request.since_at_s, request.until_at_s
    if isinstance(request, ListEndedJobs) and isinstance(request.submitted_until_at_s, float):
        submitted_s = request.submitted_until_at_s + ahead_s
        request = structs.replace(request, submitted_until_at_s=submitted_s)
    return structs.replace(
        request,
        since_at_s=None if since_s is None else since_s + ahead_s,
        until_at_s=None if until_s is None else until_s + ahead_s,
    )


def _scope(asked: Question, tenant: str) -> _Scope:
    """Whose lines the caller sees.

    Raises:
        Refusal: the caller asked for those of another tenant.
    """
    if tenant != OPERATORS and asked.tenant not in ("", tenant):
        raise Refusal(
            ApiErrorCode.DENIED,
            f"tenant {tenant} sees its own history; only tenant {OPERATORS} sees that of "
            f"{asked.tenant}",
            "tenant",
        )
    whose = asked.tenant if tenant == OPERATORS else tenant
    return _Scope(whose or None, asked.user or None)
