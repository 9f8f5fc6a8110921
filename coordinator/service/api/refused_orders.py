"""Records of refused orders for the audit, bounded by a rate for each tenant. Pure."""

from __future__ import annotations

from msgspec import UNSET

from common.api import (
    Cancel,
    Change,
    Hold,
    Operate,
    Order,
    Release,
    Requeue,
    Submit,
    Throttle,
)
from common.history import OrderRecord
from coordinator.service.api.rate_limit import Rates

TEXT_CHARACTERS = 300
"""Limit of each text of a refused order; its target may be any text."""


def client_of(request: Order) -> str:
    """Host and version of the caller, as the caller states them; empty: not stated."""
    return "" if request.client is UNSET else request.client


class RefusedOrders:
    """Decides which refused orders are recorded.

    Args:
        per_s: records of one tenant a second, on average.
    """

    def __init__(self, per_s: float) -> None:
        self._rates = Rates(per_s=per_s, by_tenant={})
        self._unrecorded: dict[str, int] = {}

    def record(
        self, request: Order, tenant: str, user: str, why: str, *, now_s: float
    ) -> OrderRecord | None:
        """The record of a refused order; None: the tenant has too many, and it is only counted."""
        if self._rates.wait_s(tenant, now_s=now_s):
            self._unrecorded[tenant] = self._unrecorded.get(tenant, 0) + 1
            return None
        verb, target, values, reason = _content(request)
        return OrderRecord(
            tenant=tenant,
            user=user,
            verb=_short(verb),
            target=_short(target),
            values={name: _short(value) for name, value in values.items() if value},
            reason=_short(reason),
            client=client_of(request),
            refused=_short(why),
            unrecorded=self._unrecorded.pop(tenant, 0),
        )


def _content(request: Order) -> tuple[str, str, dict[str, str], str]:
    """Verb, target, values and reason."""
    match request:
        case Submit():
            spec = request.spec
            values = {"name": spec.name, "gpus": str(spec.base_demand_gpus)}
            return "submit", spec.name, values, ""
        case Cancel() | Change() | Throttle():
            return str(request.__struct_config__.tag), request.job_id, {}, ""
        case Hold() | Release() | Requeue():
            return str(request.__struct_config__.tag), " ".join(request.job_ids), {}, ""
        case Operate():
            in_s = "" if request.in_s is UNSET else f"{request.in_s:g}"
            values = {"value": request.value, "in_s": in_s}
            return request.action, request.target, values, request.reason
        case _:
            return str(request.__struct_config__.tag), "", {}, ""


def _short(text: str) -> str:
    return text if len(text) <= TEXT_CHARACTERS else f"{text[: TEXT_CHARACTERS - 3]}..."
