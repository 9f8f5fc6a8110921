"""Within what time a service was promised a lent node back. Must not know what a promise is for."""

from __future__ import annotations

from common.model import ServiceName
from coordinator.engine.context import Context


def reclaim_s(ctx: Context, service: ServiceName) -> float:
    """The reclaim deadline of a service, in seconds: of one that is in no settings any more, the
    last one that it had; of one that never was in any, the TTL of its leases."""
    promised_s = known_s(ctx, service)
    return ctx.settings.lease_ttl_s if promised_s is None else promised_s


def known_s(ctx: Context, service: ServiceName) -> float | None:
    """As `reclaim_s`; None of a service to which nobody ever promised anything."""
    settings = ctx.service_settings(service)
    if settings is not None:
        return settings.reclaim_deadline_s
    entry = ctx.state.services.get(service)
    return None if entry is None else entry.reclaim_deadline_s
