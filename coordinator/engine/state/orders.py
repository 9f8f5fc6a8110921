"""Orders of people as records of the history: who ordered what, from where. Pure."""

from __future__ import annotations

from common.history import OrderRecord, StoryKind
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import (
    Event,
    JobCancelRequested,
    JobSubmitted,
    OperatorAsked,
    OrderRefused,
)

CELL = "cell"
"""The subject of a line that is of no job, node or service."""


def of(event: Event) -> OrderRecord | None:
    """The order that an event is; None: no person ordered it.

    The first line that the event logs gets it.
    """
    match event:
        case JobSubmitted():
            spec = event.spec
            return OrderRecord(
                tenant=event.tenant,
                user=event.user,
                verb="submit",
                target=event.job_id,
                values={"name": spec.name, "gpus": str(spec.base_demand_gpus)},
                client=event.client,
            )
        case JobCancelRequested():
            tenant, _, user = event.by.partition("/")
            return OrderRecord(
                tenant=tenant, user=user, verb="cancel", target=event.job_id, client=event.client
            )
        case OperatorAsked():
            return _operator(event)
        case _:
            return None


def _operator(event: OperatorAsked) -> OrderRecord:
    tenant, _, user = event.by.partition("/")
    values = {"value": event.value} if event.value else {}
    if event.deadline_s is not None:
        values["deadline_s"] = f"{event.deadline_s:g}"
    return OrderRecord(
        tenant=tenant,
        user=user,
        verb=event.action,
        target=event.target,
        values=values,
        reason=event.reason,
        client=event.client,
    )


def refused(ctx: Context, event: OrderRefused) -> None:
    """Keep a refused order; its target may be any text, so the line is the cell's."""
    order = event.order
    what = f"{order.verb} {order.target}".strip()
    said = f"by {order.tenant}/{order.user}: {order.refused}"
    ctx.log_event(CELL, what, said, kind=StoryKind.REFUSED, detail=order)
