"""The API's request handlers: decode, check, pass an event in, answer.

The subject identifies the caller (NATS permissions fix its tokens), never the payload.
"""

from __future__ import annotations

import logging
import re
from base64 import b32encode
from hashlib import blake2b
from typing import NamedTuple

from msgspec import UNSET, structs

from common import arrays as array_text
from common import node_labels, subjects
from common.api import (
    OPERATORS,
    REQUESTS,
    ApiError,
    ApiErrorCode,
    Cancel,
    Change,
    Describe,
    Done,
    GetEvents,
    GetHistory,
    GetLogs,
    GetUsage,
    Hold,
    ListEndedJobs,
    Operate,
    Order,
    Plan,
    Release,
    Requeue,
    Submit,
    Submitted,
    Throttle,
)
from common.bus import BusMessage
from common.errors import ConfigError, ProtocolError, Unavailable
from common.jobspec import misfit
from common.messages import MAX_MESSAGE_BYTES, Message, decode, encode
from common.model import (
    ArraySpec,
    JobId,
    JobSpec,
    JobState,
    Mode,
    NodeName,
    NodeRole,
    ServiceName,
)
from common.plans import PlanKind
from coordinator.engine.jobs import arrays, changes, prerun_spec, start_gate
from coordinator.engine.nodes import maintenance as nodes_maintenance
from coordinator.engine.nodes.rebuilt_gangs import is_awaited
from coordinator.engine.state.array_entry import ArrayEntry
from coordinator.engine.state.events import (
    JobSubmitted,
    OperatorAction,
    OperatorAsked,
    OrderRefused,
)
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.text import counted
from coordinator.service.api import explain_service, explain_windows, name_lookup
from coordinator.service.api.history_reads import HistoryReads
from coordinator.service.api.job_orders import JobOrder, JobOrders
from coordinator.service.api.name_lookup import Refusal, unknown
from coordinator.service.api.plans import Plans
from coordinator.service.api.queries import Looks, Past
from coordinator.service.api.rate_limit import Rates
from coordinator.service.api.refused_orders import RefusedOrders, client_of
from coordinator.service.api.shared_reads import Reads
from coordinator.service.coordinator import Coordinator
from coordinator.service.request_tasks import is_order

log = logging.getLogger(__name__)


def job_id_of(request_id: str) -> JobId:
    """The id of the job that a request creates: the same request is the same job."""
    digest = blake2b(request_id.encode(), digest_size=5).digest()
    return JobId("j" + b32encode(digest).decode().lower())


_AT = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_NAMED = re.compile(r"(?:unknown|required) field `(?P<field>[^`]+)`|field (?P<own>[\w.]+):")


def field_of(text: str) -> str:
    """The dotted path of the field that a decoder's error is about.

    Empty where the error names none.
    """
    at, named = _AT.search(text), _NAMED.search(text)
    parts = [at["path"] if at else "", (named["field"] or named["own"]) if named else ""]
    return ".".join(part for part in parts if part)


class _Entering(NamedTuple):
    """A job or an array that is on its way into the engine, and how many jobs it will be in the
    line and in all.
    """

    tenant: str
    user: str
    in_line: int
    jobs: int


class Api:
    """Answers every verb of `common.api.REQUESTS`."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._looks = Looks(coordinator)
        self._job_orders = JobOrders(coordinator, self._check_spec, self._check_line)
        self._plans = Plans(coordinator)
        settings = coordinator.settings
        self._rates = Rates(
            per_s=settings.requests_per_s, by_tenant=settings.requests_per_s_by_tenant
        )
        self._history = HistoryReads(coordinator, coordinator.index)
        self._refused = RefusedOrders(settings.refused_orders_per_s)
        self._reads = Reads(clock=coordinator.clock, finish=self._finish)
        self._entering: dict[JobId, _Entering] = {}
        """Jobs that are on their way into the engine."""
        self._kinds: dict[str, type[Message]] = {str(k.__struct_config__.tag): k for k in REQUESTS}

    async def serve(self, message: BusMessage) -> None:
        """Answer one request; an invalid one is counted, answered and changes nothing."""
        tenant, user, verb = subjects.api_caller(message.subject)
        try:
            self._check_rate(tenant, verb)
            request = decode(message.data, self._kind(verb))
            reply: Message | bytes = await self._answer(request, tenant, user, data=message.data)
        except ProtocolError as error:
            self._coordinator.note_bad_request()
            reply = ApiError(
                code=ApiErrorCode.USAGE, message=str(error), field=field_of(str(error)) or verb
            )
        except Refusal as refusal:  # an unknown verb, or one too many
            reply = refusal.error
        except Unavailable as error:
            reply = ApiError(code=ApiErrorCode.UNAVAILABLE, message=str(error))
        data = reply if isinstance(reply, bytes) else encode(reply)
        await message.respond(_fitting(data, verb))

    def _check_rate(self, tenant: str, verb: str) -> None:
        """Refuse requests beyond a tenant's rate; operators can always end what runs, and order."""
        if is_order(tenant, verb):
            return
        wait_s = self._rates.wait_s(tenant, now_s=self._coordinator.clock.now_s())
        if wait_s:
            raise Refusal(
                ApiErrorCode.UNAVAILABLE,
                f"tenant {tenant} exceeds requests_per_s, which is "
                f"{self._rates.limit(tenant):g}; ask again in {wait_s:.2g} s",
                "tenant",
            )

    def _kind(self, verb: str) -> type[Message]:
        kind = self._kinds.get(verb)
        if kind is None:
            self._coordinator.note_bad_request()
            known = ", ".join(sorted(self._kinds))
            raise Refusal(
                ApiErrorCode.USAGE, f"unknown verb {verb!r}; expected one of {known}", "verb"
            )
        return kind

    async def _answer(
        self, request: Message, tenant: str, user: str, *, data: bytes
    ) -> Message | bytes:
        """The answer, or its bytes where several requests share it."""
        if not self._coordinator.is_leading:
            # The engine of a leader that was fenced is ahead of the journal, for ever.
            raise Unavailable("this coordinator does not lead")
        await self._coordinator.decider.begun()
        try:
            return await self._answer_or_refuse(request, tenant, user, data=data)
        except Refusal as refusal:
            self._note_refused(request, tenant, user, refusal.error.message)
            return await self._finish(refusal.error)

    async def _answer_or_refuse(
        self, request: Message, tenant: str, user: str, *, data: bytes
    ) -> Message | bytes:
        match request:
            case (
                Submit()
                | Cancel()
                | Hold()
                | Release()
                | Requeue()
                | Change()
                | Throttle()
                | Operate()
                | GetLogs()
            ):
                return await self._change(request, tenant, user)
            case GetHistory() | GetUsage() | ListEndedJobs():
                return await self._finish(await self._history.answer(request, tenant))
            case Plan():
                plan = self._checked_plan(request, tenant, user)
                return await self._plans.answer(plan, tenant, user)
            case Describe() | GetEvents():
                past = await self._looks.past(request)
                # Shared by callers that asked at the same end of the events.
                key = data + str(past.end).encode()
                return await self._reads.answer(key, lambda: self._look(request, past))
            case _:
                # A read changes nothing: the request's own text is the answer's.
                return await self._reads.answer(data, lambda: self._look(request, Past()))

    def _note_refused(self, request: Message, tenant: str, user: str, why: str) -> None:
        """Log a refused order, and keep it for the audit as far as the rate of records allows."""
        if not isinstance(request, Order):
            return
        log.info("refused order %s by %s/%s: %s", _ordered(request), tenant, user, why)
        now_s = self._coordinator.clock.now_s()
        order = self._refused.record(request, tenant, user, why, now_s=now_s)
        if order is not None:
            self._coordinator.decider.post(OrderRefused(order=order))

    async def _change(
        self, request: Submit | JobOrder | Operate | GetLogs, tenant: str, user: str
    ) -> Message:
        match request:
            case Submit():
                return await self._submit(request, tenant, user)
            case Cancel() | Hold() | Release() | Requeue() | Change() | Throttle():
                return await self._job_orders.give(request, tenant, user)
            case Operate():
                return await self._operate(request, tenant, user)
            case GetLogs():
                return await self._looks.logs(request)

    def _look(self, request: Message, past: Past) -> Message:
        if not self._coordinator.is_leading:
            raise Unavailable("this coordinator does not lead")
        try:
            if isinstance(request, Describe):
                return self._looks.describe(request, past)
            return self._looks.list(request, past)
        except Refusal as refusal:
            return refusal.error

    async def _finish(self, reply: Message) -> bytes:
        """The bytes of an answer that may depend on the record that is being written.

        The answer leaves only once the record is written.
        """
        await self._coordinator.settled()
        return encode(self._coordinator.decider.time.shown(reply))

    # --- changes ----------------------------------------------------------------------------

    async def _submit(self, request: Submit, tenant: str, user: str) -> Submitted:
        job_id = job_id_of(f"{tenant}/{user}/{request.request_id}")
        spec = self._resolved(job_id, request.spec)
        if self._known(job_id) is None:
            self._check_spec(spec)
            self._check_dependencies(job_id, spec)
            self._check_line(tenant, job_id)
            self._check_user(tenant, user, spec, job_id)
            event = JobSubmitted(
                job_id=job_id,
                spec=spec,
                tenant=tenant,
                user=user,
                client=client_of(request),
            )
            self._entering[job_id] = _Entering(tenant, user, *_counts(spec))
            try:
                await self._coordinator.record(event)
            finally:
                self._entering.pop(job_id, None)
        else:
            await self._coordinator.settled()
        # Checked afterwards: another request with this id may have come first.
        job = self._known(job_id)
        if job is None:
            raise Unavailable(f"job {job_id} is not in the journal; ask again")
        if _submitted_spec(job) != self._resolved(job_id, request.spec):
            raise Refusal(
                ApiErrorCode.CONFLICT,
                f"request {request.request_id} already submitted job {job_id}, which is different",
                "request_id",
            )
        engine = self._coordinator.engine
        gate: tuple[str, ...] = ()
        if start_gate.kind(job) is not None:
            gate = start_gate.why_shut(engine.state, job)
        return Submitted(
            job_id=job_id,
            warnings=engine.explain.why_never(job_id),
            gate="; ".join(gate) or UNSET,
        )

    def _resolved(self, job_id: JobId, spec: JobSpec) -> JobSpec:
        """A spec that names jobs by their ids; of a job that is known, by those that it has."""
        if not spec.depends_on:
            return spec
        known = self._known(job_id)
        before = () if known is None else _submitted_spec(known).depends_on or ()
        state = self._coordinator.engine.state
        found = name_lookup.dependencies(state, spec.depends_on, before)
        return structs.replace(spec, depends_on=found)

    def _known(self, job_id: JobId) -> JobEntry | ArrayEntry | None:
        state = self._coordinator.engine.state
        return state.jobs.get(job_id) or state.arrays.get(job_id)

    def _check_line(self, tenant: str, job_id: JobId) -> None:
        """Refuse a new job of a tenant that has its limit of waiting jobs.

        A job let in before passes. Jobs on their way into the engine count, so that no burst goes
        beyond the limit.
        """
        engine = self._coordinator.engine
        if job_id in self._entering:
            return  # the same request once more
        entering = sum(
            one.in_line
            for other, one in self._entering.items()
            if one.tenant == tenant and self._known(other) is None
        )
        waiting = engine.waiting_jobs(tenant) + entering
        # By its own settings: the engine may not have taken those of a new leader yet.
        most, setting = self._coordinator.settings.engine.waiting_jobs_of(tenant)
        if waiting >= most:
            raise Refusal(
                ApiErrorCode.CONFLICT,
                f"tenant {tenant} has {counted(waiting, 'job')} waiting, expected fewer than "
                f"{most} ({setting}): submit again when some have started, or cancel some "
                "(aryl job cancel); an operator can raise the limit",
                "tenant",
            )

    def _check_dependencies(self, job_id: JobId, spec: JobSpec) -> None:
        state, asked = self._coordinator.engine.state, spec.depends_on or ()
        if why := changes.dependency_misfit(state, job_id, asked):
            raise Refusal(ApiErrorCode.USAGE, why, "depends_on")

    def _check_user(self, tenant: str, user: str, spec: JobSpec, job_id: JobId) -> None:
        """Refuse a job of a user that would have more jobs than its tenant's limit; each task of an
        array is one.
        """
        settings = self._coordinator.settings.engine.tenant(tenant)
        if settings is None or settings.user_max_jobs is None or job_id in self._entering:
            return
        most, (_, new) = settings.user_max_jobs, _counts(spec)
        entering = sum(
            one.jobs
            for other, one in self._entering.items()
            if (one.tenant, one.user) == (tenant, user) and self._known(other) is None
        )
        live = self._coordinator.engine.jobs_of_user(tenant, user) + entering
        if live + new > most:
            raise Refusal(
                ApiErrorCode.CONFLICT,
                f"user {user} of tenant {tenant} has {counted(live, 'job')} that wait or run, and "
                f"{new} more exceed {most} (engine.tenants, {tenant}: user_max_jobs); each task of "
                "an array is one",
                "user",
            )

    def _check_spec(self, spec: JobSpec) -> None:
        """Refuse a job that could never run here."""
        found = misfit(spec)
        if found is not None:
            raise Refusal(ApiErrorCode.USAGE, f"field {found.field}: {found.what}", found.field)
        nodes = [n for n in self._coordinator.engine.state.nodes.values() if n.gpus]
        types = sorted({kind for node in nodes for kind in node.gpu_types})
        missing = [name for name in spec.gpu.types if name not in types]
        if nodes and spec.gpu.types and len(missing) == len(spec.gpu.types):
            raise Refusal(
                ApiErrorCode.USAGE,
                f"no node has {' or '.join(missing)}; there are {', '.join(types)}",
                "gpu.types",
            )
        sizes = (n.count_of(kind) for n in nodes for kind in n.gpu_types if spec.accepts(kind))
        largest = max(sizes, default=0)
        if nodes and spec.gpus_per_worker > largest:
            raise Refusal(
                ApiErrorCode.USAGE,
                f"{counted(spec.gpus_per_worker, 'GPU')} on one node, the largest node has "
                f"{largest}",
                "gpus_per_worker",
            )

    def _checked_plan(self, request: Plan, tenant: str, user: str) -> Plan:
        """The plan with the id of the job that it names.

        Raises:
            Refusal: the change would be refused, or the caller may not make it.
        """
        state = self._coordinator.engine.state
        _check_scope(request, tenant)
        match request.kind:
            case PlanKind.JOB if request.spec is None:
                return structs.replace(request, target=self._waiting(request.target))
            case PlanKind.JOB:
                assert request.spec is not None
                if request.target:
                    raise Refusal(ApiErrorCode.USAGE, "expected none beside a spec", "target")
                spec = self._resolved(JobId(""), request.spec)
                self._check_spec(spec)
                self._check_dependencies(JobId(""), spec)
                self._check_line(tenant, JobId(""))
                self._check_user(tenant, user, spec, JobId(""))
                return structs.replace(request, spec=spec)
            case PlanKind.DRAIN:
                self._check_node(OperatorAction.DRAIN, NodeName(request.target))
            case PlanKind.RECALL:
                self._check_service(ServiceName(request.target))
            case PlanKind.LOAN:
                known = sorted(
                    [*state.services, *(n.name for n in state.nodes.values() if n.service)]
                )
                if request.target not in known:
                    raise unknown("service", request.target, known)
            case PlanKind.TENANT | PlanKind.POLICY | PlanKind.QUEUE:
                pass  # the process that plays it checks its settings
        return request

    def _waiting(self, name: str) -> JobId:
        """The id of a job or an array that waits for its start."""
        if not name:
            what = "a plan of kind job has a spec, or the job that waits as its target"
            raise Refusal(ApiErrorCode.USAGE, what, "spec")
        one = name_lookup.job_or_array(self._coordinator.engine.state, name)
        if one.state not in (JobState.PENDING, JobState.PREEMPTING):
            why = f"job {start_gate.id_of(one)} is {one.state}: expected one that waits"
            raise Refusal(ApiErrorCode.CONFLICT, why, "target")
        return start_gate.id_of(one)

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
        _check_times(action, request)
        target = self._target(action, request)
        event = OperatorAsked(
            action=action,
            by=f"{tenant}/{user}",
            target=target,
            value=request.value,
            reason=request.reason,
            deadline_s=request.deadline_s,
            in_s=None if request.in_s is UNSET else request.in_s,
            client=client_of(request),
        )
        await self._coordinator.record(event)
        if action == OperatorAction.REMOVE:
            self._forget_node(NodeName(target))
        if action == OperatorAction.DRAIN_AT:
            return Done(detail=explain_windows.ordered(self._coordinator.engine, target))
        within = "" if request.deadline_s is None else f" within {request.deadline_s:.0f} s"
        return Done(detail=f"{action} {target}".strip() + within)

    def _forget_node(self, name: NodeName) -> None:
        """Forget everything about a removed node, its last report included."""
        state = self._coordinator.engine.state
        node = state.nodes.get(name)
        if node is not None:  # it was heard while the order was on its way
            why = nodes_maintenance.why_not(state, node) or f"node {name} has joined again"
            raise Refusal(ApiErrorCode.CONFLICT, why, "node")
        self._coordinator.folder.remove_node(name)

    def _check_node(self, action: OperatorAction, name: NodeName) -> None:
        state = self._coordinator.engine.state
        node = state.nodes.get(name)
        if node is None:
            if action == OperatorAction.CONFIRM_DEAD and is_awaited(state, name):
                return
            raise unknown("node", name, sorted(state.nodes))
        if action == OperatorAction.CONFIRM_DEAD and node.role != NodeRole.LOST:
            raise Refusal(
                ApiErrorCode.CONFLICT, f"node {node.name} is {node.role}, not lost", "node"
            )
        if action == OperatorAction.REMOVE and (why := nodes_maintenance.why_not(state, node)):
            raise Refusal(ApiErrorCode.CONFLICT, why, "node")

    def _target(self, action: OperatorAction, request: Operate) -> str:
        """The engine's name for a target: a loan by its id, even where the caller names its node.

        Raises:
            Refusal: the target does not exist, or does not allow this action.
        """
        state = self._coordinator.engine.state
        a = OperatorAction
        match action:
            case a.CORDON | a.UNCORDON | a.DRAIN | a.DRAIN_AT | a.CONFIRM_DEAD | a.REMOVE:
                self._check_node(action, NodeName(request.target))
            case a.LABEL:
                self._check_node(action, NodeName(request.target))
                _check_labels(request.value)
            case a.APPROVE_LOAN:
                self._check_recommended(NodeName(request.target))
            case a.REVOKE_LOAN:
                return name_lookup.open_loan(state, request.target).lease_id
            case a.FREEZE | a.THAW | a.RECALL | a.END_RECALL:
                self._check_service(ServiceName(request.target))
            case a.SET_MODE:
                self._check_mode(request.target, request.value)
        return request.target

    def _check_mode(self, service: str, mode: str) -> None:
        """Check an order of a mode. A service that has left the settings is refused: the order
        would change nothing, and count by surprise once the name is used again.
        """
        engine = self._coordinator.engine
        known = sorted(one.name for one in engine.settings.services)
        if service and service not in known:
            raise explain_service.not_there(engine, service, known)
        if mode not in list(Mode):
            raise Refusal(ApiErrorCode.USAGE, f"{mode!r} is not one of {', '.join(Mode)}", "mode")

    def _check_recommended(self, node: NodeName) -> None:
        engine = self._coordinator.engine
        if node in engine.state.recommendations:
            if why := engine.explain.why_not_approved(node):
                raise Refusal(
                    ApiErrorCode.CONFLICT,
                    f"the loan of {node} was recommended, and cannot be approved now: {why}",
                    "loan",
                )
        else:
            known = ", ".join(engine.explain.recommended())
            others = f"those of {known} are" if known else "none is now"
            raise Refusal(
                ApiErrorCode.NOT_FOUND, f"no loan of {node!r} is recommended; {others}", "loan"
            )

    def _check_service(self, name: ServiceName) -> None:
        """Check a service name; an empty name means all of them."""
        services = self._coordinator.engine.state.services
        if name and name not in services:
            raise unknown("service", name, sorted(services))


def _check_labels(text: str) -> None:
    try:
        if text != node_labels.RESET:
            node_labels.parse_changes(text.split())
    except ConfigError as error:
        raise Refusal(ApiErrorCode.USAGE, str(error), "value") from None


def _check_times(action: OperatorAction, request: Operate) -> None:
    """Refuse a time that an order does not have, or lacks."""
    drains = (OperatorAction.DRAIN, OperatorAction.DRAIN_AT)
    if request.deadline_s is not None and action not in drains:
        raise Refusal(
            ApiErrorCode.USAGE, f"{action} has no deadline_s, only drain has", "deadline_s"
        )
    is_at = action == OperatorAction.DRAIN_AT
    if is_at != (request.in_s is not UNSET):
        why = "drain_at needs in_s" if is_at else f"{action} has no in_s, only drain_at has"
        raise Refusal(ApiErrorCode.USAGE, why, "in_s")


def _counts(spec: JobSpec) -> tuple[int, int]:
    """How many jobs a submission brings into the line at once, and in all."""
    if not isinstance(spec.array, ArraySpec):
        return 1, 1
    tasks = len(array_text.indices(spec.array.indices))
    return min(tasks, spec.array.throttle or tasks, arrays.WINDOW), tasks


def _ordered(request: Message) -> str:
    """The change that a request would have made, as text; empty for a read."""
    match request:
        case Submit():
            return f"submit {request.spec.name}"
        case Cancel() | Change():
            return f"{request.__struct_config__.tag} {request.job_id}"
        case Hold() | Release() | Requeue():
            return " ".join((str(request.__struct_config__.tag), *request.job_ids))
        case Throttle():
            return f"throttle {request.job_id} {request.throttle or 'none'}"
        case Operate():
            return " ".join(filter(None, (request.action, request.target, request.value)))
        case _:
            return ""


def _fitting(data: bytes, verb: str) -> bytes:
    """An answer that fits into a message.

    Else the reason, instead of no answer until the timeout.
    """
    if len(data) <= MAX_MESSAGE_BYTES:
        return data
    return encode(
        ApiError(
            code=ApiErrorCode.UNAVAILABLE,
            message=f"the answer to {verb} has {len(data)} bytes, a message carries "
            f"{MAX_MESSAGE_BYTES}",
            field=verb,
        )
    )


def _submitted_spec(one: JobEntry | ArrayEntry) -> JobSpec:
    """The spec as its user gave it."""
    if isinstance(one, ArrayEntry):
        return one.submitted_spec or one.spec
    return one.submitted_spec or prerun_spec.submitted(one)


def _check_scope(request: Plan, tenant: str) -> None:
    """Refuse a plan that the tenant may not make, or a plan of the queue that names something."""
    if request.kind not in (PlanKind.JOB, PlanKind.QUEUE) and tenant != OPERATORS:
        raise Refusal(
            ApiErrorCode.DENIED,
            f"only tenant {OPERATORS} may plan this; every tenant may plan a job or the queue",
            "tenant",
        )
    if request.kind == PlanKind.QUEUE and (request.target or request.spec is not None):
        what = "a plan of kind queue has neither a target nor a spec"
        raise Refusal(ApiErrorCode.USAGE, what, "target" if request.target else "spec")
