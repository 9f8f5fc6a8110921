"""Orders of people as records of the history: who ordered what, from where. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import UNSET

from common.history import OrderRecord, StoryKind
from common.model import NODE_FIELDS, JobChange
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import (
    ArrayThrottled,
    Event,
    JobCancelRequested,
    JobChanged,
    JobsHeld,
    JobsReleased,
    JobsRequeued,
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
            return _about(event, "cancel", event.job_id, {"tasks": event.indices})
        case JobsHeld():
            return _about(event, "hold", " ".join(event.job_ids))
        case JobsReleased():
            return _about(event, "release", " ".join(event.job_ids))
        case JobsRequeued():
            values = {"held": "yes" if event.is_held else ""}
            return _about(event, "requeue", " ".join(event.job_ids), values)
        case JobChanged():
            return _about(event, "change", event.job_id, _changed(event.change))
        case ArrayThrottled():
            values = {"throttle": str(event.throttle or "none")}
            return _about(event, "throttle", event.job_id, values)
        case OperatorAsked():
            return _operator(event)
        case _:
            return None


def _about(
    event: JobCancelRequested
    | JobsHeld
    | JobsReleased
    | JobsRequeued
    | JobChanged
    | ArrayThrottled,
    verb: str,
    target: str,
    values: Mapping[str, str] = MappingProxyType({}),
) -> OrderRecord:
    """An order about jobs; values without a text are left out."""
    tenant, _, user = event.by.partition("/")
    return OrderRecord(
        tenant=tenant,
        user=user,
        verb=verb,
        target=target,
        values={name: text for name, text in values.items() if text},
        client=event.client,
    )


def _changed(change: JobChange) -> dict[str, str]:
    """The fields of a change as texts."""
    texts: dict[str, str] = {}
    if change.priority is not UNSET:
        texts["priority"] = str(change.priority)
    for name, limit_s in (("time_limit_s", change.time_limit_s), ("deadline_s", change.deadline_s)):
        if limit_s is not UNSET:
            texts[name] = "none" if limit_s is None else f"{limit_s:g}"
    if change.workers is not UNSET:
        texts["workers"] = f"{change.workers.min}:{change.workers.max}"
    if change.depends_on is not UNSET:
        after = (f"{one.when}:{one.job}" for one in change.depends_on)
        texts["depends_on"] = " ".join(after) or "none"
    for name in NODE_FIELDS:
        asked = getattr(change, name)
        if asked is not UNSET:
            texts[name] = " ".join(asked) or "none"
    return texts


def _operator(event: OperatorAsked) -> OrderRecord:
    tenant, _, user = event.by.partition("/")
    values = {"value": event.value} if event.value else {}
    if event.deadline_s is not None:
        values["deadline_s"] = f"{event.deadline_s:g}"
    if event.in_s is not None:
        values["in_s"] = f"{event.in_s:g}"
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
