"""The first instant of a plan: the change, and the passes that follow it at once.

The engine and the order of its events are those of the live loop, so that the decisions are those
of the leader, if the change came at this instant.
"""

from __future__ import annotations

from msgspec import UNSET, Struct, structs

from common.errors import ConfigError
from common.model import JobId, Mode, NodeName
from common.plans import PlanKind
from coordinator.engine.engine import Engine
from coordinator.engine.state.commands import Outcome, Refused
from coordinator.engine.state.events import (
    Event,
    JobSubmitted,
    LoanPassDue,
    OperatorAction,
    OperatorAsked,
    PassDue,
)
from coordinator.engine.state.settings import EngineSettings, TenantSettings, check_tenants
from coordinator.engine.what_if import WhatIf
from coordinator.policies.contract.decisions import Decision, Loan
from coordinator.policies.registry import policy

JOB_ID = JobId("planned")
"""The job or the array in question; no submission makes this id."""


class Change(Struct, frozen=True, kw_only=True):
    """A change: other settings, an event, or a loan; nothing of them: the time without it."""

    settings: EngineSettings
    event: Event | None = None
    loan: Loan | None = None


class Decided(Struct, frozen=True, kw_only=True):
    """The decisions of the first instant, and its last outcome."""

    decisions: tuple[Decision, ...]
    refused: tuple[Refused, ...]
    last: Outcome
    has_loan_pass: bool


def change_of(question: WhatIf) -> Change:
    """The change in question.

    Raises:
        ConfigError: names the setting, and what was expected.
    """
    request, settings = question.request, question.settings
    by = f"{question.tenant}/{question.user}"
    match request.kind:
        case PlanKind.JOB:
            if request.spec is None:
                return Change(settings=settings)  # the job in question waits already
            event: Event = JobSubmitted(
                job_id=JOB_ID, spec=request.spec, tenant=question.tenant, user=question.user
            )
            return Change(settings=settings, event=event)
        case PlanKind.DRAIN:
            is_at = request.in_s is not UNSET
            event = OperatorAsked(
                action=OperatorAction.DRAIN_AT if is_at else OperatorAction.DRAIN,
                by=by,
                target=request.target,
                deadline_s=request.deadline_s,
                in_s=None if request.in_s is UNSET else request.in_s,
            )
            return Change(settings=settings, event=event)
        case PlanKind.RECALL:
            event = OperatorAsked(action=OperatorAction.RECALL, by=by, target=request.target)
            return Change(settings=settings, event=event)
        case PlanKind.LOAN:
            return _loan(question, by)
        case PlanKind.TENANT:
            return Change(settings=_with_guarantee(settings, request.target, _gpus(question)))
        case PlanKind.QUEUE:
            return Change(settings=settings)
        case PlanKind.POLICY:
            policy(request.target)
            return Change(settings=structs.replace(settings, policy=request.target))


def _loan(question: WhatIf, by: str) -> Change:
    """A node: this one is lent. A service: whatever it would lend in mode act."""
    settings, target = question.settings, question.request.target
    if any(service.name == target for service in settings.services):
        event = OperatorAsked(action=OperatorAction.SET_MODE, by=by, target=target, value=Mode.ACT)
        return Change(settings=settings, event=event)
    node = question.engine().state.nodes.get(NodeName(target))
    if node is None or node.service is None:
        raise ConfigError(f"field target: {target!r} is neither a service nor a node of one")
    loan = Loan(node=node.name, service=node.service, reason=f"planned by {by}")
    return Change(settings=settings, loan=loan)


def _gpus(question: WhatIf) -> int:
    if question.request.guarantee_gpus is None:
        raise ConfigError("field guarantee_gpus is missing; a plan of kind tenant needs it")
    return question.request.guarantee_gpus


def _with_guarantee(settings: EngineSettings, name: str, gpus: int) -> EngineSettings:
    """The settings with another guarantee of one tenant, which they may not know yet."""
    known = {tenant.name: tenant for tenant in settings.tenants}
    own = known.get(name, TenantSettings(name=name))
    known[name] = structs.replace(own, guarantee_gpus=gpus)
    tenants = tuple(known.values())
    check_tenants(tenants)
    return structs.replace(settings, tenants=tenants)


def decide(engine: Engine, change: Change, *, now_s: float, loan_pass_at_s: float) -> Decided:
    """Let the change happen, and what the live loop does in the same batch."""
    outcomes: list[Outcome] = []
    if change.loan is not None:
        outcomes.append(engine.carry_out((change.loan,), now_s=now_s))
    elif change.event is not None:
        outcomes.append(engine.handle(change.event, now_s=now_s))
    has_loan_pass = now_s >= loan_pass_at_s or any(one.needs_loan_pass for one in outcomes)
    if has_loan_pass:  # first, since it frees nodes
        outcomes.append(engine.handle(LoanPassDue(), now_s=now_s))
    outcomes.append(engine.handle(PassDue(), now_s=now_s))
    return Decided(
        decisions=tuple(decision for one in outcomes for decision in one.decisions),
        refused=tuple(refused for one in outcomes for refused in one.refused),
        last=outcomes[-1],
        has_loan_pass=has_loan_pass,
    )
