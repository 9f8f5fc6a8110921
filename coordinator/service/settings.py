"""The coordinator's settings file; every duration has its unit in its name."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from common import natsrules
from common.errors import ConfigError
from common.model import NatsAccess, NonNegativeFloat, PositiveFloat, PositiveInt, Token
from common.monitoring.checks import check as check_metrics
from common.monitoring.settings import MetricsSettings
from common.monitoring.settings import warning as warning_of
from coordinator.engine.state.settings import EngineSettings, check_tenants
from coordinator.policies.registry import policy
from coordinator.service.leadership.lease import MAX_TTL_S
from coordinator.service.nodes.gpu_catalogue import read_catalogue


class GpuFaultSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The meaning of GPU faults."""

    catalogue: Annotated[
        str,
        Meta(
            description="XID catalogue of the site; its entries go before the packaged ones; "
            "empty: none"
        ),
    ] = ""


class CoordinatorSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One coordinator of one cell."""

    cell: Annotated[Token, Meta(description="name of the cell; part of every subject")]
    nats_url: Annotated[str, Meta(description="nats://host:port or tls://host:port")]
    insecure: Annotated[bool, Meta(description="allow a plain-text URL off loopback")] = False
    access: Annotated[NatsAccess, Meta(description="keys and certificates for the NATS server")] = (
        NatsAccess()
    )
    has_mqtt_agents: Annotated[
        bool,
        Meta(
            description="accept agents on nats-server's MQTT listener; the coordinator's NATS user "
            "needs the rights of `aryl nats-permissions --mqtt-node`"
        ),
    ] = False
    name: Annotated[Token, Meta(description="name of this coordinator among its standbys")] = (
        "coordinator"
    )
    pass_period_s: Annotated[
        PositiveFloat, Meta(description="time between two scheduling passes without an event")
    ] = 30.0
    coalesce_s: Annotated[
        NonNegativeFloat,
        Meta(description="events are collected this long before a scheduling pass"),
    ] = 0.1
    lost_after_s: Annotated[
        PositiveFloat, Meta(description="a node without a report for this long is LOST")
    ] = 15.0
    load_period_s: Annotated[
        PositiveFloat, Meta(description="time between two load samples of a service")
    ] = 10.0
    progress_period_s: Annotated[
        PositiveFloat,
        Meta(description="shortest time between two journal records of a job's progress"),
    ] = 10.0
    push_timeout_s: Annotated[
        PositiveFloat, Meta(description="longest wait for an agent's answer to a desired state")
    ] = 2.0
    push_retry_s: Annotated[
        PositiveFloat,
        Meta(description="time between two pushes of the desired state to a node that lags behind"),
    ] = 2.0
    leader_ttl_s: Annotated[
        float,
        Meta(
            gt=0,
            le=MAX_TTL_S,
            description="a leader that does not renew its lease for this long is replaced",
        ),
    ] = 6.0
    leader_margin_s: Annotated[
        NonNegativeFloat, Meta(description="a leader stops acting this long before its lease ends")
    ] = 1.0
    leader_stall_s: Annotated[
        float,
        Meta(
            ge=2,
            description="a leader whose decisions make no progress for this long stops renewing "
            "its lease, and a standby takes over; set it longer than the longest "
            "pass and shorter than the unit's WatchdogSec",
        ),
    ] = 20.0
    snapshot_records: Annotated[
        PositiveInt, Meta(description="journal records between two snapshots")
    ] = 500
    snapshot_decide_s: Annotated[
        PositiveFloat,
        Meta(
            description="decision time between two snapshots; a restart replays no more than this"
        ),
    ] = 2.0
    journal_kept_days: Annotated[
        NonNegativeFloat,
        Meta(
            description="journal records older than this are dropped once two later snapshots "
            "exist; 0: never. Applies to a stream when it is created"
        ),
    ] = 0.0
    history_kept_days: Annotated[
        NonNegativeFloat,
        Meta(
            description="how long events, orders and accounts are kept for `explain`, `events`, "
            "`history`, `audit` and `report`; 0: for ever"
        ),
    ] = 365.0
    history_index_dir: Annotated[
        str,
        Meta(
            description="directory of the index of the history, which is made again if it is gone; "
            "empty: $CACHE_DIRECTORY, as the unit sets it, or else a temporary one of this user"
        ),
    ] = ""
    refused_orders_per_s: Annotated[
        PositiveFloat,
        Meta(
            description="refused orders of one tenant that are recorded for `aryl audit` per "
            "second, on average over 10 s; the next record counts the others"
        ),
    ] = 1.0
    journal_replicas: Annotated[
        int,
        Meta(
            ge=1,
            le=5,
            description="copies of journal, snapshots and leader lease, each on its own NATS "
            "server; applies to a stream when it is created",
        ),
    ] = 1
    rebuild_wait_s: Annotated[
        NonNegativeFloat,
        Meta(description="a new leader collects reports for this long before it takes its epoch"),
    ] = 2.0
    requests_per_s: Annotated[
        PositiveFloat,
        Meta(
            description="requests per second of one tenant, on average over 10 s; more are "
            "refused. Cancel and the orders of tenant ops are never refused for this"
        ),
    ] = 500.0
    requests_per_s_by_tenant: Annotated[
        dict[Token, PositiveFloat],
        Meta(description="the same for single tenants by name; replaces `requests_per_s`"),
    ] = msgspec.field(default_factory=dict[str, float])
    metrics: Annotated[MetricsSettings, Meta(description="the coordinator's metrics page")] = (
        MetricsSettings()
    )
    gpu_faults: Annotated[GpuFaultSettings, Meta(description="how GPU faults are classified")] = (
        GpuFaultSettings()
    )
    engine: Annotated[EngineSettings, Meta(description="settings of the scheduling engine")] = (
        EngineSettings()
    )


def check(settings: CoordinatorSettings) -> None:
    """Check that the fields are consistent, and that names are known.

    Raises:
        ConfigError: names the field, and what was expected.
    """
    natsrules.server_urls(settings.nats_url, access=settings.access, insecure=settings.insecure)
    try:
        policy(settings.engine.policy)
    except ConfigError as error:  # which names the field by that name
        raise ConfigError(f"engine.{error}") from error
    if settings.leader_margin_s >= settings.leader_ttl_s:
        raise ConfigError(
            f"leader_margin_s: {settings.leader_margin_s:g}, expected less than leader_ttl_s, "
            f"which is {settings.leader_ttl_s:g}"
        )
    names = [service.name for service in settings.engine.services]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"engine.services: {', '.join(twice)} is listed twice")
    check_tenants(settings.engine.tenants)
    read_catalogue(settings.gpu_faults.catalogue)
    check_metrics(settings.metrics)


def warnings(settings: CoordinatorSettings) -> list[str]:
    """Settings that are valid and hardly meant: an open metrics page, services that can never lend.

    The sum is the one that loan passes use, so no pass would ever lend a node of theirs.
    """
    ttl_s = settings.engine.lease_ttl_s
    open_page = warning_of(settings.metrics)
    return [open_page] * bool(open_page) + [
        f"engine.services: {one.name} never lends a node: it may need "
        f"{settings.engine.return_s(one):g} s to come home (lease_ttl_s {ttl_s:g} + max_grace_s "
        f"{one.max_grace_s:g} + device_free_p99_s {one.device_free_p99_s:g} + warm_up_p99_s "
        f"{one.warm_up_p99_s:g}), more than its reclaim_deadline_s, which is "
        f"{one.reclaim_deadline_s:g}"
        for one in settings.engine.services
        if settings.engine.return_s(one) > one.reclaim_deadline_s
    ]
