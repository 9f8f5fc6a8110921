"""The API's requests that only look: lists, descriptions, logs. Must not let anything in."""

from __future__ import annotations

from collections.abc import Callable

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
from common.messages import Message
from common.model import FINAL_JOB_STATES, STORE_INDEX
from coordinator.engine import ended, prerun_shape
from coordinator.engine.state import EndedWorker, JobEntry, NodeEntry
from coordinator.service import explain, finding, rows, services, trust
from coordinator.service.coordinator import Coordinator
from coordinator.service.finding import Refusal, Subject
from coordinator.service.paging import after, page


class Looks:
    """Reads the engine's state and the last reports, for callers."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def list(self, request: Message) -> Message:
        """Whatever has rows: jobs, nodes, services, tenants, loans, events, the cell's status.

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
                by_name = {name: state.nodes[name] for name in sorted(state.nodes)}
                nodes, has_more = page(
                    self._node_row(node) for node in after(by_name, request.after)
                )
                return Nodes(rows=nodes, has_more=has_more)
            case ListServices():
                names = sorted(s.name for s in c.engine.settings.services)
                now_s = self._now_s()
                return Services(
                    rows=tuple(
                        rows.service_row(c.engine, c.folder, name, now_s=now_s) for name in names
                    )
                )
            case ListTenants():
                return Tenants(rows=rows.tenant_rows(c.engine.snapshot()))
            case ListLoans():
                return self._loans(request)
            case GetEvents():
                about = finding.about(state, request.subject)
                all_rows = rows.story_rows(
                    state.stories, state.stories_dropped, after=request.after, about=about
                )
                found, has_more = page(all_rows)
                last = found[-1].number if has_more else state.stories_dropped + len(state.stories)
                return Events(rows=found, last=last, subject=about.name, has_more=has_more)
            case GetStatus():
                return rows.status(
                    c.engine,
                    c.folder,
                    cell=c.settings.cell,
                    bad_messages=c.bad_messages,
                    up_s=c.clock.now_s() - c.started_at_s,
                    now_s=self._now_s(),
                    clock_warning=c.decider.time.warning(),
                )
            case _:
                raise TypeError(f"no rows answer a {type(request).__name__}")

    def _jobs(self, request: ListJobs) -> Jobs:
        engine, now_s = self._coordinator.engine, self._now_s()
        live = engine.state.live_jobs
        found, has_more = page(
            rows.job_row(engine, job, now_s=now_s)
            for job in after(engine.state.jobs, request.after)
            if not request.is_live_only or job.job_id in live
        )
        return Jobs(rows=found, has_more=has_more)

    def _loans(self, request: ListLoans) -> Loans:
        engine, now_s = self._coordinator.engine, self._now_s()
        found, has_more = page(
            rows.loan_row(loan, now_s=now_s)
            for loan in after(engine.state.loans, request.after)
            if not request.is_live_only or loan.returned_at_s is None
        )
        recommended = () if has_more else trust.recommended(engine)
        if found and page((*found, *recommended))[1]:  # a page of their own
            return Loans(rows=found, has_more=True)
        return Loans(rows=(*found, *recommended), has_more=has_more)

    def _node_row(self, node: NodeEntry) -> NodeRow:
        c = self._coordinator
        drain = c.engine.state.drains.get(node.name)
        return rows.node_row(
            node,
            c.folder,
            boot_now_s=c.clock.now_s(),
            drain_left_s=None if drain is None else max(0.0, drain.until_s - self._now_s()),
            unknown_load=rows.unknown_load(c.engine, node, now_s=self._now_s()),
        )

    def _now_s(self) -> float:
        return self._coordinator.decider.time.now_s()

    def describe(self, request: Describe) -> Description:
        """All that is known of one job, node, service or loan.

        Raises:
            Refusal: there is none of that name.
        """
        describers: dict[str, Callable[[str], Description]] = {
            "job": self._describe_job,
            "node": self._describe_node,
            "service": self._describe_service,
            "loan": self._describe_loan,
        }
        return describers[request.kind](request.name)

    def _describe_job(self, name: str) -> Description:
        engine = self._coordinator.engine
        job = finding.job(engine.state, name)
        now_s = self._now_s()
        is_over = job.state in FINAL_JOB_STATES
        return Description(
            kind="job",
            name=job.job_id,
            job=rows.job_row(engine, job, now_s=now_s),
            workers=rows.worker_rows(job),
            why=explain.job(engine, job, now_s=now_s),
            estimate="" if is_over else explain.estimate(engine, job, now_s=now_s),
            story=self._story(finding.about_job(engine.state, job.job_id)),
            spec=prerun_shape.submitted(job),
        )

    def _describe_node(self, name: str) -> Description:
        c = self._coordinator
        node = finding.node(c.engine.state, name)
        report = c.folder.reports.get(node.name)
        slow_command = rows.slow_command(node.name, c.folder, boot_now_s=c.clock.now_s())
        return Description(
            kind="node",
            name=name,
            agent=report.agent if report else None,
            cost=report.cost if report else None,
            collectors=report.collectors if report else (),
            node=self._node_row(node),
            telemetry=rows.telemetry(node.name, c.folder, boot_now_s=c.clock.now_s()),
            why=explain.node(
                c.engine,
                node,
                now_s=self._now_s(),
                slow_command=slow_command,
                refused_report=c.refused_reports.of(node.name),
            ),
            story=self._story(finding.about_node(c.engine.state, name)),
        )

    def _describe_service(self, name: str) -> Description:
        c = self._coordinator
        names = sorted(s.name for s in c.engine.settings.services)
        if name not in names:
            raise services.not_there(c.engine, name, names)
        now_s = self._now_s()
        story = self._story(finding.about_service(c.engine.state, name))
        return Description(
            kind="service",
            name=name,
            service=rows.service_row(c.engine, c.folder, name, now_s=now_s),
            nodes=tuple(self._node_row(node) for node in services.nodes_of(c.engine, name)),
            loans=tuple(
                rows.loan_row(loan, now_s=now_s) for loan in services.loans_of(c.engine, name)
            ),
            why=services.why(c.engine, name, now_s=now_s),
            story=story[-services.STORY_LINES :],
        )

    def _describe_loan(self, name: str) -> Description:
        engine = self._coordinator.engine
        for row in trust.recommended(engine):
            if row.lease_id == name:
                said = f"waits for an operator (aryl loan approve {name}): {row.reason}"
                about = finding.about_node(engine.state, name)
                return Description(
                    kind="loan",
                    name=name,
                    loan=row,
                    why=(said, *services.limit(engine, row.service)),
                    story=self._story(about),
                )
        loan = finding.loan(engine.state, name)
        return Description(
            kind="loan",
            name=loan.lease_id,
            loan=rows.loan_row(loan, now_s=self._now_s()),
            why=(
                *explain.loan(loan),
                *(services.limit(engine, loan.service) if loan.returned_at_s is None else ()),
            ),
            story=self._story(finding.about_loan(engine.state, loan.lease_id)),
        )

    async def logs(self, request: GetLogs) -> Logs:
        """The end of a worker's log, as its node has it.

        Raises:
            Refusal: there is no such job, attempt or worker, or its node has no log of it.
            Unavailable: the node does not answer, or what it answers does not fit.
        """
        job = finding.job(self._coordinator.engine.state, request.job_id)
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

    def _story(self, about: Subject) -> tuple[StoryRow, ...]:
        state = self._coordinator.engine.state
        return rows.story_rows(state.stories, state.stories_dropped, about=about)


def _worker(job: JobEntry, request: GetLogs) -> EndedWorker:
    """The worker whose log is asked for, and where it runs or ran.

    Raises:
        Refusal: nothing is known of the attempt, or of the worker in it.
    """
    found = ended.of_attempt(job, request.attempt)
    if job.attempt == 0:
        raise Refusal(
            ApiErrorCode.NOT_FOUND,
            f"job {job.job_id} is {job.state} and never started, so it has no log",
            "worker_index",
        )
    if request.attempt is not None and not found:
        known = ", ".join(map(str, ended.attempts(job))) or "none"
        raise Refusal(
            ApiErrorCode.NOT_FOUND,
            f"job {job.job_id} is at attempt {job.attempt} and remembers no worker of attempt "
            f"{request.attempt}: none ran, or too many came after; attempts to ask for: {known}",
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
            f"job {job.job_id} has no worker {index}{which} and remembers none: it never ran one, "
            "or newer ones came after it",
            "worker_index",
        )
    return found[index]
