"""The API's read-only requests: lists, descriptions, logs.

A list comes in pages: as many rows as one message carries and one time slice builds.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from typing import TypeVar

import msgspec
from msgspec import Struct, structs

from common.api import (
    ApiErrorCode,
    Describe,
    Description,
    Events,
    GetEvents,
    GetLogs,
    GetStatus,
    Jobs,
    ListJobs,
    ListLoans,
    ListNodes,
    ListServices,
    ListTenants,
    Loans,
    Logs,
    NodeRow,
    Nodes,
    Services,
    StoryRow,
    Tenants,
)
from common.errors import ProtocolError, Unavailable
from common.history import TOLD
from common.messages import Message
from common.model import FINAL_JOB_STATES, STORE_INDEX, TOKEN_PATTERN, JobId, NodeName
from coordinator.engine.jobs import ended_workers, prerun_spec, start_gate
from coordinator.engine.state.array_entry import ArrayEntry
from coordinator.engine.state.job_groups import EndedWorker
from coordinator.engine.state.tables import JobEntry, NodeEntry
from coordinator.service.api import (
    array_rows,
    explain_job,
    explain_node,
    explain_service,
    name_lookup,
    rows,
)
from coordinator.service.api.name_lookup import Refusal, Subject
from coordinator.service.api.shared_reads import BUILD_S
from coordinator.service.coordinator import Coordinator

K = TypeVar("K", bound=str)
E = TypeVar("E")
Row = TypeVar("Row")

PAGE_BYTES = 800_000
"""Rows of one answer; below `MAX_MESSAGE_BYTES` by more than the largest row."""


def page(
    rows: Iterable[Row],
    *,
    is_over: Callable[[], bool] = lambda: False,
    most_bytes: int = PAGE_BYTES,
) -> tuple[tuple[Row, ...], bool]:
    """The first rows that one message carries, at least one, and whether there are more.

    is_over: whether the time for this page is over; the remaining rows are for the next one.
    """
    taken: list[Row] = []
    size_bytes = 0
    for row in rows:
        size_bytes += len(msgspec.msgpack.encode(row))
        if taken and (size_bytes > most_bytes or is_over()):
            return tuple(taken), True
        taken.append(row)
    return tuple(taken), False


def after(entries: Mapping[K, E], name: str) -> Iterable[E]:
    """Entries behind the one of this name; from the first on where it is gone.

    A caller that pages through then sees some again, and misses none.
    """
    names = list(map(str, entries))
    begin = names.index(name) + 1 if name in names else 0
    return islice(entries.values(), begin, None)


R = TypeVar("R")

log = logging.getLogger(__name__)

STORY_BYTES = 500_000
"""Bytes of event lines in one description, the newest ones; the rest of it needs some room as
well."""


class Past(Struct, frozen=True, kw_only=True):
    """Event lines of a subject.

    end: the number to continue from.
    has_more: whether older lines than those of the state are left out.
    """

    about: Subject = name_lookup.ANYTHING
    rows: tuple[StoryRow, ...] = ()
    end: int = 0
    has_more: bool = False


class Looks:
    """Reads the engine's state and the last reports, for callers."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def past(self, request: Message) -> Past:
        """Event lines for a request; lines that the state has forgotten come from the history.

        Raises:
            Refusal: the subject is unknown, also to the history.
        """
        state = self._coordinator.engine.state
        match request:
            case GetEvents():
                try:
                    about = name_lookup.about(state, request.subject)
                except Refusal as refusal:
                    about = await self._forgotten(request.subject, refusal)
                # Without a subject and a number, the newest lines.
                is_recent = request.after >= state.stories_dropped
                is_recent |= not (request.after or about.words)
                return await self._past(about, after=request.after, is_recent=is_recent)
            case Describe(kind="job"):
                about = name_lookup.about_job(state, request.name)
            case Describe(kind="node"):
                about = name_lookup.about_node(state, name_lookup.node(state, request.name).name)
            case Describe(kind="service") if request.name in state.services:
                about = name_lookup.about_service(state, request.name)
            case Describe(kind="loan"):
                is_recommended = NodeName(request.name) in state.recommendations
                find = name_lookup.about_node if is_recommended else name_lookup.about_loan
                about = find(state, request.name)
            case _:
                return Past()
        return await self._past(about, is_newest=True)

    async def _past(
        self, about: Subject, *, after: int = 0, is_newest: bool = False, is_recent: bool = False
    ) -> Past:
        c = self._coordinator
        state = c.engine.state
        first, end = state.stories_dropped + 1, state.stories_dropped + len(state.stories)
        recent = rows.story_rows(state.stories, first - 1, after=after, about=about)
        if c.history is None or is_recent or first == 1:
            return Past(about=about, rows=recent, end=end)
        try:
            found, has_more = await c.history.read(
                about.words,
                after=after,
                before=first,
                most_bytes=STORY_BYTES if is_newest else PAGE_BYTES,
                newest=is_newest,
            )
        except Unavailable as error:
            log.warning("history cannot be read, so the newest lines are shown: %s", error)
            return Past(about=about, rows=recent, end=end)
        told = (line for line in found if line.kind in TOLD and about.covers(line))
        old = tuple(rows.told_row(line) for line in told)
        if has_more:
            return Past(about=about, rows=old, end=found[-1].number, has_more=True)
        return Past(about=about, rows=(*old, *recent), end=end)

    async def _forgotten(self, asked: str, refusal: Refusal) -> Subject:
        """A subject that only the history has: a job that ended long ago, a node that left."""
        kind, _, name = asked.rpartition("/")
        history = self._coordinator.history
        is_unknown = refusal.error.code == ApiErrorCode.NOT_FOUND and kind in ("", "job", "node")
        if not is_unknown or history is None or not re.fullmatch(TOKEN_PATTERN, name):
            raise refusal
        try:
            before = self._coordinator.engine.state.stories_dropped + 1
            found, _ = await history.read(
                {name}, after=0, before=before, most_bytes=1, newest=False
            )
        except Unavailable:
            raise refusal from None
        if not found:
            raise refusal
        return Subject(name=f"{kind or 'job'}/{name}", words=frozenset({name}))

    def list(self, request: Message, past: Past) -> Message:
        """Any list: jobs, nodes, services, tenants, loans, events, the cell's status.

        Raises:
            Refusal: the subject of the events is unknown.
            TypeError: the request is none of these.
        """
        c = self._coordinator
        state = c.engine.state
        match request:
            case ListJobs():
                return self._jobs(request)
            case ListNodes():
                names = sorted(name for name in state.nodes if name > request.after)
                nodes, has_more = self._page(
                    self._node_row(state.nodes[name], in_full=request.in_full) for name in names
                )
                return Nodes(rows=nodes, has_more=has_more)
            case ListServices():
                served = sorted(s.name for s in c.engine.settings.services)
                now_s = self._now_s()
                return Services(
                    rows=tuple(
                        rows.service_row(c.engine, c.folder, name, now_s=now_s) for name in served
                    )
                )
            case ListTenants():
                return Tenants(
                    rows=rows.tenant_rows(c.engine.snapshot(), c.engine.settings.tenants)
                )
            case ListLoans():
                return self._loans(request)
            case GetEvents():
                found, is_cut = page(past.rows)
                last = found[-1].number if is_cut else past.end
                has_more = is_cut or past.has_more
                return Events(rows=found, last=last, subject=past.about.name, has_more=has_more)
            case GetStatus():
                return rows.status(
                    c.engine,
                    c.folder,
                    cell=c.settings.cell,
                    bad_messages=c.bad_messages,
                    reports_shed=c.inflow.lately_shed_count,
                    up_s=c.clock.now_s() - c.started_at_s,
                    now_s=self._now_s(),
                    clock_warning=c.decider.time.warning(),
                )
            case _:
                raise TypeError(f"no rows answer a {type(request).__name__}")

    def _page(self, all_rows: Iterable[R]) -> tuple[tuple[R, ...], bool]:
        """The rows of one turn of the event loop; the caller asks for the next page."""
        clock = self._coordinator.clock
        until_s = clock.now_s() + BUILD_S
        return page(all_rows, is_over=lambda: clock.now_s() > until_s)

    def _jobs(self, request: ListJobs) -> Jobs:
        engine, now_s = self._coordinator.engine, self._now_s()
        live_ids = engine.state.live_jobs | engine.state.live_arrays
        both: dict[JobId, JobEntry | ArrayEntry] = {**engine.state.arrays, **engine.state.jobs}
        found, has_more = self._page(
            array_rows.row(engine, one, now_s=now_s, in_full=request.in_full)
            if isinstance(one, ArrayEntry)
            else rows.job_row(engine, one, now_s=now_s, in_full=request.in_full)
            for one in after(both, request.after)
            if not request.is_live_only or start_gate.id_of(one) in live_ids
        )
        return Jobs(rows=found, has_more=has_more)

    def _loans(self, request: ListLoans) -> Loans:
        engine, now_s = self._coordinator.engine, self._now_s()
        found, has_more = self._page(
            rows.loan_row(loan, now_s=now_s)
            for loan in after(engine.state.loans, request.after)
            if not request.is_live_only or loan.returned_at_s is None
        )
        recommended = () if has_more else explain_service.recommended(engine)
        if found and page((*found, *recommended))[1]:  # a page of their own
            return Loans(rows=found, has_more=True)
        return Loans(rows=(*found, *recommended), has_more=has_more)

    def _node_row(self, node: NodeEntry, *, in_full: bool = False) -> NodeRow:
        c = self._coordinator
        drain = c.engine.state.drains.get(node.name)
        return rows.node_row(
            node,
            c.folder,
            boot_now_s=c.clock.now_s(),
            drain_left_s=None if drain is None else max(0.0, drain.until_s - self._now_s()),
            unknown_load=rows.unknown_load(c.engine, node, now_s=self._now_s()),
            closed=rows.closed(c.engine, node, now_s=self._now_s()),
            window=rows.window(c.engine, node, now_s=self._now_s()),
            in_full=in_full,
        )

    def _now_s(self) -> float:
        return self._coordinator.decider.time.now_s()

    def describe(self, request: Describe, past: Past) -> Description:
        """The full description of one job, node, service or loan.

        Raises:
            Refusal: the name is unknown.
        """
        describers: dict[str, Callable[[str], Description]] = {
            "job": partial(self._describe_job, in_full=request.in_full),
            "node": partial(self._describe_node, in_full=request.in_full),
            "service": self._describe_service,
            "loan": self._describe_loan,
        }
        found = describers[request.kind](request.name)
        story = _newest(past.rows)
        if request.kind == "service":
            story = story[-explain_service.STORY_LINES :]
        return structs.replace(found, story=story)

    def _describe_job(self, name: str, *, in_full: bool) -> Description:
        engine = self._coordinator.engine
        if (task := name_lookup.waiting_task(engine.state, name)) is not None:
            return array_rows.task_described(engine, *task, in_full=in_full)
        job = name_lookup.job_or_array(engine.state, name)
        now_s = self._now_s()
        if isinstance(job, ArrayEntry):
            return array_rows.described(engine, job, now_s=now_s, in_full=in_full)
        is_over = job.state in FINAL_JOB_STATES
        return Description(
            kind="job",
            name=job.job_id,
            job=rows.job_row(engine, job, now_s=now_s, in_full=in_full),
            workers=rows.worker_rows(job),
            saves=rows.save_rows(job),
            why=explain_job.reasons(engine, job, now_s=now_s),
            estimate="" if is_over else explain_job.estimate(engine, job, now_s=now_s),
            spec=prerun_spec.submitted(job),
        )

    def _describe_node(self, name: str, *, in_full: bool) -> Description:
        c = self._coordinator
        node = name_lookup.node(c.engine.state, name)
        report = c.folder.reports.get(node.name)
        slow_command = rows.slow_command(node.name, c.folder, boot_now_s=c.clock.now_s())
        return Description(
            kind="node",
            name=name,
            agent=report.agent if report else None,
            cost=report.cost if report else None,
            collectors=report.collectors if report else (),
            node=self._node_row(node, in_full=in_full),
            telemetry=rows.telemetry(node.name, c.folder, boot_now_s=c.clock.now_s()),
            why=explain_node.reasons(
                c.engine,
                node,
                now_s=self._now_s(),
                slow_command=slow_command,
                refused_report=c.refused_reports.of(node.name),
            ),
        )

    def _describe_service(self, name: str) -> Description:
        c = self._coordinator
        names = sorted(s.name for s in c.engine.settings.services)
        if name not in names:
            raise explain_service.not_there(c.engine, name, names)
        now_s = self._now_s()
        return Description(
            kind="service",
            name=name,
            service=rows.service_row(c.engine, c.folder, name, now_s=now_s),
            nodes=tuple(self._node_row(node) for node in explain_service.nodes_of(c.engine, name)),
            loans=tuple(
                rows.loan_row(loan, now_s=now_s)
                for loan in explain_service.loans_of(c.engine, name)
            ),
            why=explain_service.why(c.engine, name, now_s=now_s),
        )

    def _describe_loan(self, name: str) -> Description:
        engine = self._coordinator.engine
        for row in explain_service.recommended(engine):
            if row.lease_id == name:
                said = f"waits for an operator (aryl loan approve {name}): {row.reason}"
                return Description(
                    kind="loan",
                    name=name,
                    loan=row,
                    why=(said, *explain_service.limit(engine, row.service)),
                )
        loan = name_lookup.loan(engine.state, name)
        return Description(
            kind="loan",
            name=loan.lease_id,
            loan=rows.loan_row(loan, now_s=self._now_s()),
            why=(
                *explain_node.loan_reasons(loan),
                *(
                    explain_service.limit(engine, loan.service)
                    if loan.returned_at_s is None
                    else ()
                ),
            ),
        )

    async def logs(self, request: GetLogs) -> Logs:
        """The end of a worker's log, from its node.

        Raises:
            Refusal: the job, attempt or worker is unknown, or its node has no log of it.
            Unavailable: the node does not answer, or its answer is invalid.
        """
        job = name_lookup.job(self._coordinator.engine.state, request.job_id)
        worker = _worker(job, request)
        dispatcher = self._coordinator.dispatcher
        try:
            reply = await dispatcher.log(worker.node, worker.key, max_bytes=request.max_bytes)
        except ProtocolError as error:  # the node's fault, not the caller's
            raise Unavailable(f"logs of node {worker.node}: {error}") from error
        index, attempt = worker.key.worker_index, worker.key.attempt
        if reply.error:
            whose = f"log of worker {index} of attempt {attempt} on {worker.node}"
            raise Refusal(ApiErrorCode.NOT_FOUND, f"{whose}: {reply.error}", "worker_index")
        return Logs(text=reply.text, node=worker.node, worker_index=index, attempt=attempt)


def _newest(story: tuple[StoryRow, ...]) -> tuple[StoryRow, ...]:
    """As many of the last lines as a description can carry beside the rest."""
    found, _ = page(reversed(story), most_bytes=STORY_BYTES)
    return tuple(reversed(found))


def _worker(job: JobEntry, request: GetLogs) -> EndedWorker:
    """The worker whose log is requested, and its node.

    Raises:
        Refusal: the attempt, or the worker in it, is unknown.
    """
    found = ended_workers.of_attempt(job, request.attempt)
    if job.attempt.number == 0:
        raise Refusal(
            ApiErrorCode.NOT_FOUND,
            f"job {job.job_id} is {job.state} and never started, so it has no log",
            "worker_index",
        )
    if request.attempt is not None and not found:
        known = ", ".join(map(str, ended_workers.attempts(job))) or "none"
        raise Refusal(
            ApiErrorCode.NOT_FOUND,
            f"job {job.job_id} is at attempt {job.attempt.number} and has no record of attempt "
            f"{request.attempt}: none ran, or too many came after; known attempts: {known}",
            "attempt",
        )
    index = request.worker_index
    if index is None:
        running = () if request.attempt is not None else job.workers
        index = min((i for i in running or found if i != STORE_INDEX), default=0)
    if index not in found:
        which = "" if request.attempt is None else f" of attempt {request.attempt}"
        raise Refusal(
            ApiErrorCode.NOT_FOUND,
            f"job {job.job_id} has no worker {index}{which} and no record of one: none ran, "
            "or newer ones came after it",
            "worker_index",
        )
    return found[index]
