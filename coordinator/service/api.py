"""The API's request handlers: decode, check, let an event in, answer. Must not decide.

Who calls is the subject (its tokens are fixed by NATS permissions), never the payload.
"""

from __future__ import annotations

import logging
from base64 import b32encode
from collections.abc import Callable, Sequence
from hashlib import blake2b

from common import subjects
from common.api import (
    REQUESTS,
    ApiError,
    ApiErrorCode,
    Cancel,
    Describe,
    Description,
    Done,
    Events,
    GetEvents,
    GetLogs,
    GetStatus,
    Jobs,
    ListJobs,
    ListLoans,
    ListNodes,
    ListServices,
    Loans,
    Logs,
    Nodes,
    Operate,
    Services,
    StoryRow,
    Submit,
    Submitted,
)
from common.bus import BusMessage
from common.errors import ProtocolError, Unavailable
from common.messages import LogReply, LogRequest, Message, decode, encode
from common.model import FINAL_JOB_STATES, JobId, JobSpec, LeaseId, Mode, NodeName, ServiceName
from coordinator.engine.events import (
    JobCancelRequested,
    JobSubmitted,
    OperatorAction,
    OperatorAsked,
)
from coordinator.engine.state import JobEntry, LoanEntry
from coordinator.service import explain, rows
from coordinator.service.coordinator import Coordinator

log = logging.getLogger(__name__)

OPERATORS = "ops"
"""The tenant whose users may order the cell."""


class Refusal(Exception):  # noqa: N818 - an answer, not a fault of ours
    """The request changed nothing; carries what the caller is told."""

    def __init__(self, code: ApiErrorCode, message: str, field: str = "") -> None:
        super().__init__(message)
        self.error = ApiError(code=code, message=message, field=field)


def job_id_of(request_id: str) -> JobId:
    """The id of the job that a request makes: the same request is the same job."""
    digest = blake2b(request_id.encode(), digest_size=5).digest()
    return JobId("j" + b32encode(digest).decode().lower())


class Api:
    """Answers every verb of `common.api.REQUESTS`."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._kinds: dict[str, type[Message]] = {str(k.__struct_config__.tag): k for k in REQUESTS}

    async def serve(self, message: BusMessage) -> None:
        """Answer one request; a bad one is counted, answered and changes nothing."""
        tenant, user, verb = subjects.api_caller(message.subject)
        try:
            request = decode(message.data, self._kind(verb))
            reply = await self._answer(request, tenant, user)
        except ProtocolError as error:
            self._coordinator.bad_messages += 1
            reply = ApiError(code=ApiErrorCode.USAGE, message=str(error), field=verb)
        except Refusal as refusal:
            reply = refusal.error
        except Unavailable as error:
            reply = ApiError(code=ApiErrorCode.UNAVAILABLE, message=str(error))
        await message.respond(encode(reply))

    def _kind(self, verb: str) -> type[Message]:
        kind = self._kinds.get(verb)
        if kind is None:
            known = ", ".join(sorted(self._kinds))
            raise Refusal(ApiErrorCode.USAGE, f"no verb {verb!r}; there are {known}", "verb")
        return kind

    async def _answer(self, request: Message, tenant: str, user: str) -> Message:
        match request:
            case Submit():
                return await self._submit(request, tenant, user)
            case Cancel():
                return await self._cancel(request, tenant, user)
            case Operate():
                return await self._operate(request, tenant, user)
            case GetLogs():
                return await self._logs(request)
            case Describe():
                return self._describe(request)
            case _:
                return self._list(request)

    # --- what changes something -------------------------------------------------------------

    async def _submit(self, request: Submit, tenant: str, user: str) -> Submitted:
        job_id = job_id_of(f"{tenant}/{user}/{request.request_id}")
        if job_id not in self._coordinator.engine.state.jobs:
            self._check_spec(request.spec)
        event = JobSubmitted(job_id=job_id, spec=request.spec, tenant=tenant, user=user)
        await self._coordinator.record(event)
        return Submitted(job_id=job_id)

    def _check_spec(self, spec: JobSpec) -> None:
        """Refuse what could never run here."""
        if spec.workers.min > spec.workers.max:
            raise Refusal(
                ApiErrorCode.USAGE,
                f"min is {spec.workers.min}, expected at most max, which is {spec.workers.max}",
                "workers",
            )
        nodes = [n for n in self._coordinator.engine.state.nodes.values() if n.gpus]
        types = sorted({node.gpu_type for node in nodes})
        unknown = [name for name in spec.gpu.types if name not in types]
        if nodes and spec.gpu.types and len(unknown) == len(spec.gpu.types):
            raise Refusal(
                ApiErrorCode.USAGE,
                f"no node has {' or '.join(unknown)}; there are {', '.join(types)}",
                "gpu.types",
            )
        largest = max((len(n.gpus) for n in nodes if spec.accepts(n.gpu_type)), default=0)
        if nodes and spec.gpus_per_worker > largest:
            raise Refusal(
                ApiErrorCode.USAGE,
                f"{spec.gpus_per_worker} GPUs on one node, the largest node has {largest}",
                "gpus_per_worker",
            )

    async def _cancel(self, request: Cancel, tenant: str, user: str) -> Done:
        job = self._job(request.job_id)
        if tenant not in (job.tenant, OPERATORS):
            raise Refusal(
                ApiErrorCode.DENIED, f"job {job.job_id} belongs to {job.tenant}", "job_id"
            )
        if job.state in FINAL_JOB_STATES:
            raise Refusal(ApiErrorCode.CONFLICT, f"job {job.job_id} is {job.state}", "job_id")
        event = JobCancelRequested(job_id=job.job_id, by=f"{tenant}/{user}")
        await self._coordinator.record(event)
        return Done(detail=f"job {job.job_id} is being cancelled")

    async def _operate(self, request: Operate, tenant: str, user: str) -> Done:
        if tenant != OPERATORS:
            raise Refusal(ApiErrorCode.DENIED, f"only tenant {OPERATORS} may do this", "tenant")
        try:
            action = OperatorAction(request.action)
        except ValueError:
            known = ", ".join(OperatorAction)
            raise Refusal(
                ApiErrorCode.USAGE, f"{request.action!r} is not one of {known}", "action"
            ) from None
        self._check_target(action, request)
        event = OperatorAsked(
            action=action,
            by=f"{tenant}/{user}",
            target=request.target,
            value=request.value,
            reason=request.reason,
        )
        await self._coordinator.record(event)
        return Done(detail=f"{action} {request.target}".strip())

    def _check_target(self, action: OperatorAction, request: Operate) -> None:
        state = self._coordinator.engine.state
        a = OperatorAction
        if action in (a.CORDON, a.UNCORDON, a.DRAIN, a.CONFIRM_DEAD):
            node = state.nodes.get(NodeName(request.target))
            if node is None:
                raise self._unknown("node", request.target, sorted(state.nodes))
            if action == a.CONFIRM_DEAD and node.role != "lost":
                raise Refusal(
                    ApiErrorCode.CONFLICT, f"node {node.name} is {node.role}, not lost", "node"
                )
        elif action == a.REVOKE_LOAN:
            loan = self._loan(request.target)
            if loan.returned_at_s is not None:
                raise Refusal(ApiErrorCode.CONFLICT, "the loan came home already", "lease_id")
        elif request.target and ServiceName(request.target) not in state.services:
            raise self._unknown("service", request.target, sorted(state.services))
        if action == a.SET_MODE and request.value not in list(Mode):
            raise Refusal(
                ApiErrorCode.USAGE, f"{request.value!r} is not one of {', '.join(Mode)}", "mode"
            )

    # --- what only looks --------------------------------------------------------------------

    def _list(self, request: Message) -> Message:
        c = self._coordinator
        state = c.engine.state
        match request:
            case ListJobs(is_live_only=is_live_only):
                jobs = state.live() if is_live_only else list(state.jobs.values())
                return Jobs(rows=tuple(rows.job_row(job, now_s=self._now_s()) for job in jobs))
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
            case ListLoans(is_live_only=is_live_only):
                loans = [
                    rows.loan_row(loan)
                    for loan in state.loans.values()
                    if not (is_live_only and loan.returned_at_s is not None)
                ]
                return Loans(rows=tuple(loans))
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
                    bad_messages=c.bad_messages + c.renewals.bad_messages,
                    up_s=c.clock.now_s() - c.started_at_s,
                )

    def _now_s(self) -> float:
        return max(self._coordinator.clock.wall_s(), self._coordinator.engine.state.now_s)

    def _describe(self, request: Describe) -> Description:
        describers: dict[str, Callable[[str], Description]] = {
            "job": self._describe_job,
            "node": self._describe_node,
            "service": self._describe_service,
            "loan": self._describe_loan,
        }
        return describers[request.kind](request.name)

    def _describe_job(self, name: str) -> Description:
        engine = self._coordinator.engine
        job = self._job(name)
        return Description(
            kind="job",
            name=job.job_id,
            job=rows.job_row(job, now_s=self._now_s()),
            workers=rows.worker_rows(job),
            why=explain.job(engine, job),
            estimate="" if job.state in FINAL_JOB_STATES else explain.estimate(engine, job),
            story=self._story(job.job_id),
            spec=job.spec,
        )

    def _describe_node(self, name: str) -> Description:
        c = self._coordinator
        node = c.engine.state.nodes.get(NodeName(name))
        if node is None:
            raise self._unknown("node", name, sorted(c.engine.state.nodes))
        return Description(
            kind="node",
            name=name,
            node=rows.node_row(node, c.folder, boot_now_s=c.clock.now_s()),
            why=explain.node(c.engine, node),
            story=self._story(name),
        )

    def _describe_service(self, name: str) -> Description:
        engine = self._coordinator.engine
        names = sorted(s.name for s in engine.settings.services)
        if name not in names:
            raise self._unknown("service", name, names)
        return Description(kind="service", name=name, service=rows.service_row(engine, name))

    def _describe_loan(self, name: str) -> Description:
        loan = self._loan(name)
        return Description(
            kind="loan",
            name=loan.lease_id,
            loan=rows.loan_row(loan),
            why=explain.loan(loan),
            story=self._story(loan.node),
        )

    async def _logs(self, request: GetLogs) -> Logs:
        job = self._job(request.job_id)
        indices = sorted(job.workers)
        index = request.worker_index
        if index is None:
            index = indices[0] if indices else 0
        worker = job.workers.get(index)
        if worker is None:
            raise Refusal(
                ApiErrorCode.NOT_FOUND,
                f"job {job.job_id} has no worker {index} now; logs of ended workers stay on "
                "their nodes until the coordinator has acknowledged them",
                "worker_index",
            )
        c = self._coordinator
        answer = await c.bus.request(
            subjects.node_logs(c.settings.cell, worker.node),
            encode(LogRequest(node=worker.node, key=worker.key, max_bytes=request.max_bytes)),
            timeout_s=c.settings.push_timeout_s,
        )
        reply = decode(answer, LogReply)
        if reply.error:
            raise Refusal(ApiErrorCode.NOT_FOUND, reply.error, "worker_index")
        return Logs(text=reply.text, node=worker.node, worker_index=index)

    # --- looking up -------------------------------------------------------------------------

    def _story(self, subject: str) -> tuple[StoryRow, ...]:
        state = self._coordinator.engine.state
        return rows.story_rows(state.stories, state.stories_dropped, subject=subject)

    def _job(self, name: str) -> JobEntry:
        """By id, or by a name that only one live job has."""
        state = self._coordinator.engine.state
        job = state.jobs.get(JobId(name))
        if job is not None:
            return job
        named = [job for job in state.jobs.values() if job.spec.name == name]
        if len(named) == 1:
            return named[0]
        if named:
            ids = ", ".join(job.job_id for job in named[-5:])
            raise Refusal(
                ApiErrorCode.CONFLICT, f"{len(named)} jobs are named {name!r}: {ids}", "job_id"
            )
        raise self._unknown("job", name, list(state.live_jobs))

    def _loan(self, name: str) -> LoanEntry:
        """By lease id, or by the node that is lent."""
        loans = self._coordinator.engine.state.loans
        loan = loans.get(LeaseId(name))
        if loan is not None:
            return loan
        of_node = [loan for loan in loans.values() if loan.node == name]
        if of_node:
            return of_node[-1]
        raise self._unknown("loan", name, list(loans)[-5:])

    @staticmethod
    def _unknown(kind: str, name: str, known: Sequence[str]) -> Refusal:
        some = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
        hint = f"; there are {some}" if known else "; there are none"
        return Refusal(ApiErrorCode.NOT_FOUND, f"no {kind} {name!r}{hint}", kind)
