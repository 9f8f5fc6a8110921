"""The API's requests that only look: lists, descriptions, logs. Must not let anything in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common import subjects
from common.api import (
    ApiError,
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
    Nodes,
    Services,
    StoryRow,
    Tenants,
)
from common.errors import ProtocolError, Unavailable
from common.messages import LogReply, LogRequest, Message, decode, encode
from common.model import FINAL_JOB_STATES, STORE_INDEX, JobId, LeaseId, NodeName
from coordinator.engine import ended, prerun_shape
from coordinator.engine.state import EndedWorker, JobEntry, LoanEntry
from coordinator.service import explain, rows, trust
from coordinator.service.coordinator import Coordinator


class Refusal(Exception):  # noqa: N818 - an answer, not a fault of ours
    """The request changed nothing; carries what the caller is told."""

    def __init__(self, code: ApiErrorCode, message: str, field: str = "") -> None:
        super().__init__(message)
        self.error = ApiError(code=code, message=message, field=field)


class Looks:
    """Reads the engine's state and the last reports, for callers."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def list(self, request: Message) -> Message:
        c = self._coordinator
        state = c.engine.state
        match request:
            case ListJobs(is_live_only=is_live_only):
                jobs = state.live() if is_live_only else list(state.jobs.values())
                return Jobs(
                    rows=tuple(rows.job_row(c.engine, job, now_s=self._now_s()) for job in jobs)
                )
            case ListNodes():
                return Nodes(
                    rows=tuple(
                        rows.node_row(state.nodes[name], c.folder, boot_now_s=c.clock.now_s())
                        for name in sorted(state.nodes)
                    )
                )
            case ListServices():
                names = sorted(s.name for s in c.engine.settings.services)
                return Services(rows=tuple(rows.service_row(c.engine, name) for name in names))
            case ListTenants():
                return Tenants(rows=rows.tenant_rows(c.engine.snapshot()))
            case ListLoans(is_live_only=is_live_only):
                loans = [
                    rows.loan_row(loan, now_s=self._now_s())
                    for loan in state.loans.values()
                    if not (is_live_only and loan.returned_at_s is not None)
                ]
                return Loans(rows=(*loans, *trust.recommended(c.engine)))
            case GetEvents():
                found = rows.story_rows(
                    state.stories,
                    state.stories_dropped,
                    after=request.after,
                    subject=request.subject,
                )
                return Events(rows=found, last=state.stories_dropped + len(state.stories))
            case _:
                assert isinstance(request, GetStatus)
                return rows.status(
                    c.engine,
                    c.folder,
                    cell=c.settings.cell,
                    bad_messages=c.bad_messages,
                    up_s=c.clock.now_s() - c.started_at_s,
                    now_s=self._now_s(),
                )

    def _now_s(self) -> float:
        return max(self._coordinator.clock.wall_s(), self._coordinator.engine.state.now_s)

    def describe(self, request: Describe) -> Description:
        describers: dict[str, Callable[[str], Description]] = {
            "job": self._describe_job,
            "node": self._describe_node,
            "service": self._describe_service,
            "loan": self._describe_loan,
        }
        return describers[request.kind](request.name)

    def _describe_job(self, name: str) -> Description:
        engine = self._coordinator.engine
        job = self.job(name)
        return Description(
            kind="job",
            name=job.job_id,
            job=rows.job_row(engine, job, now_s=self._now_s()),
            workers=rows.worker_rows(job),
            why=explain.job(engine, job),
            estimate="" if job.state in FINAL_JOB_STATES else explain.estimate(engine, job),
            story=self._story(job.job_id),
            spec=prerun_shape.submitted(job),
        )

    def _describe_node(self, name: str) -> Description:
        c = self._coordinator
        node = c.engine.state.nodes.get(NodeName(name))
        if node is None:
            raise unknown("node", name, sorted(c.engine.state.nodes))
        report = c.folder.reports.get(node.name)
        return Description(
            kind="node",
            name=name,
            agent=report.agent if report else None,
            cost=report.cost if report else None,
            collectors=report.collectors if report else (),
            node=rows.node_row(node, c.folder, boot_now_s=c.clock.now_s()),
            why=explain.node(c.engine, node),
            story=self._story(name),
        )

    def _describe_service(self, name: str) -> Description:
        engine = self._coordinator.engine
        names = sorted(s.name for s in engine.settings.services)
        if name not in names:
            raise unknown("service", name, names)
        return Description(
            kind="service",
            name=name,
            service=rows.service_row(engine, name),
            why=trust.why(engine, name),
        )

    def _describe_loan(self, name: str) -> Description:
        loan = self.loan(name)
        return Description(
            kind="loan",
            name=loan.lease_id,
            loan=rows.loan_row(loan, now_s=self._now_s()),
            why=explain.loan(loan),
            story=self._story(loan.node),
        )

    async def logs(self, request: GetLogs) -> Logs:
        job = self.job(request.job_id)
        worker = _worker(job, request)
        c = self._coordinator
        answer = await c.bus.request(
            subjects.node_logs(c.settings.cell, worker.node),
            encode(LogRequest(node=worker.node, key=worker.key, max_bytes=request.max_bytes)),
            timeout_s=c.settings.push_timeout_s,
        )
        try:
            reply = decode(answer, LogReply)
        except ProtocolError as error:  # the node's fault, not the caller's
            c.bad_requests += 1
            raise Unavailable(f"logs of node {worker.node}: {error}") from error
        index, attempt = worker.key.worker_index, worker.key.attempt
        if reply.error:
            whose = f"log of worker {index} of attempt {attempt} on {worker.node}"
            raise Refusal(ApiErrorCode.NOT_FOUND, f"{whose}: {reply.error}", "worker_index")
        return Logs(text=reply.text, node=worker.node, worker_index=index, attempt=attempt)

    # --- looking up -------------------------------------------------------------------------

    def _story(self, subject: str) -> tuple[StoryRow, ...]:
        state = self._coordinator.engine.state
        return rows.story_rows(state.stories, state.stories_dropped, subject=subject)

    def job(self, name: str) -> JobEntry:
        """By id, or by a name that only one live job has, or else only one job at all."""
        state = self._coordinator.engine.state
        job = state.jobs.get(JobId(name))
        if job is not None:
            return job
        named = [job for job in state.live() if job.spec.name == name]
        named = named or [job for job in state.jobs.values() if job.spec.name == name]
        if len(named) == 1:
            return named[0]
        if named:
            ids = ", ".join(job.job_id for job in named[-5:])
            raise Refusal(
                ApiErrorCode.CONFLICT, f"{len(named)} jobs are named {name!r}: {ids}", "job_id"
            )
        raise unknown("job", name, list(state.live_jobs))

    def loan(self, name: str) -> LoanEntry:
        """By lease id, or by the node that is lent."""
        loans = self._coordinator.engine.state.loans
        loan = loans.get(LeaseId(name))
        if loan is not None:
            return loan
        of_node = [loan for loan in loans.values() if loan.node == name]
        if of_node:
            return of_node[-1]
        raise unknown("loan", name, list(loans)[-5:])


def _worker(job: JobEntry, request: GetLogs) -> EndedWorker:
    """The worker whose log is asked for, and where it runs or ran.

    Raises:
        Refusal: nothing is known of the attempt, or of the worker in it.
    """
    found = ended.of_attempt(job, request.attempt)
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


def unknown(kind: str, name: str, known: Sequence[str]) -> Refusal:
    """There is none of this name; says which there are."""
    some = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
    hint = f"; there are {some}" if known else "; there are none"
    return Refusal(ApiErrorCode.NOT_FOUND, f"no {kind} {name!r}{hint}", kind)
