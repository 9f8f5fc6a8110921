"""Settings of the engine that an operator can change; each duration has its unit in its name.

`common.settings` reads them from files.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from msgspec import Meta, Struct

from common.errors import ConfigError
from common.model import (
    Mode,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Ratio,
    Token,
    Weight,
)
from coordinator.policies.names import DEFAULT


class ServiceSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One inference service and what it lends."""

    name: Annotated[Token, Meta(description="name that its nodes report")]
    capacity_per_node: Annotated[
        PositiveFloat, Meta(description="requests per second that one node carries")
    ]
    mode: Annotated[Mode, Meta(description="observe, recommend or act")] = Mode.OBSERVE
    min_serving: Annotated[NonNegativeInt, Meta(description="nodes that are never lent")] = 1
    headroom_ratio: Annotated[
        Ratio, Meta(description="share of the service's nodes kept above the forecast")
    ] = 0.02
    reclaim_deadline_s: Annotated[
        PositiveFloat, Meta(description="a node is serving again this long after it was asked back")
    ] = 300.0
    max_grace_s: Annotated[
        NonNegativeFloat, Meta(description="longest grace of a job that may run on its lent nodes")
    ] = 60.0
    device_free_p99_s: Annotated[
        NonNegativeFloat, Meta(description="99th percentile from worker exit to device free")
    ] = 10.0
    warm_up_p99_s: Annotated[
        NonNegativeFloat, Meta(description="99th percentile from device free to serving")
    ] = 60.0
    unknown_load_s: Annotated[
        NonNegativeFloat,
        Meta(
            description="lent nodes come home when the load of serving nodes is unknown for longer"
        ),
    ] = 120.0
    hold_off_s: Annotated[
        NonNegativeFloat,
        Meta(
            description="a node that became ready is not lent before this, nor another in its place"
        ),
    ] = 300.0


class TenantSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant and its guarantee; GPUs count whatever their type."""

    name: Annotated[Token, Meta(description="name that its users submit under")]
    parent: Annotated[str, Meta(description="tenant that it is part of; empty: none")] = ""
    weight: Annotated[
        Weight, Meta(description="its part of what guarantees leave, against its siblings'")
    ] = 1.0
    guarantee_gpus: Annotated[
        NonNegativeInt, Meta(description="its quota and its children's: never lost to others")
    ] = 0
    borrow_limit_gpus: Annotated[
        NonNegativeInt | None, Meta(description="most that it uses beyond its guarantee")
    ] = None
    lend_limit_gpus: Annotated[
        NonNegativeInt | None, Meta(description="most that others use of its idle guarantee")
    ] = None
    waiting_jobs_max: Annotated[
        PositiveInt | None,
        Meta(description="most jobs of it that may wait; none: `engine.waiting_jobs_max`"),
    ] = None


class EngineSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the engine decides."""

    policy: Annotated[str, Meta(description="policy bundle; `aryl policies` lists them")] = DEFAULT
    gang_ready_timeout_s: Annotated[
        PositiveFloat, Meta(description="a gang that is not ready by then queues again, free")
    ] = 300.0
    resize_cooldown_s: Annotated[
        NonNegativeFloat, Meta(description="shortest time between two growths of one job")
    ] = 60.0
    lease_ttl_s: Annotated[
        PositiveFloat, Meta(description="a lent node that hears nothing this long goes home")
    ] = 30.0
    min_runtime_s: Annotated[
        NonNegativeFloat,
        Meta(
            description="a job that was preempted and runs again is not stopped for another within"
        ),
    ] = 60.0
    start_p99_s: Annotated[
        NonNegativeFloat,
        Meta(description="99th percentile from a start on idle GPUs to the first step"),
    ] = 15.0
    restart_p99_s: Annotated[
        NonNegativeFloat,
        Meta(description="what an attempt after a stop takes beyond that until it computes"),
    ] = 35.0
    resize_p99_s: Annotated[
        NonNegativeFloat,
        Meta(description="how long a gang stands still when its worker count changes"),
    ] = 30.0
    stalled_after_s: Annotated[
        NonNegativeFloat,
        Meta(
            description="a job that told progress is STALLED after so long without any, or after "
            "ten times its usual gap if that is longer"
        ),
    ] = 120.0
    silence_margin_s: Annotated[
        NonNegativeFloat,
        Meta(description="added to a job's `stop_after_s` and grace before it restarts elsewhere"),
    ] = 30.0
    retry_by_failure_class: Annotated[
        bool,
        Meta(description="within a job's own retries, what kind of failure it was decides on one"),
    ] = True
    retry_backoff_s: Annotated[
        NonNegativeFloat,
        Meta(
            description="wait before the first retry after a failure that passes, or a node fault; "
            "doubles each time"
        ),
    ] = 30.0
    retry_backoff_max_s: Annotated[
        NonNegativeFloat,
        Meta(
            description="and is never longer than this; a node that refused three starts in a row "
            "takes nothing new for so long"
        ),
    ] = 600.0
    retry_reset_s: Annotated[
        PositiveFloat,
        Meta(
            description="an attempt that ran this long ends a row of own faults: the next pause is "
            "short again"
        ),
    ] = 3600.0
    retry_avoid_s: Annotated[
        NonNegativeFloat,
        Meta(description="a job waits so long for other nodes than the one on which it failed"),
    ] = 3600.0
    cordon_suspect_nodes: Annotated[
        bool,
        Meta(description="cordon a node whose hardware a job's log names; else it is recommended"),
    ] = False
    gpus_out_ratio_max: Annotated[
        Ratio,
        Meta(
            description="share of the cell's GPUs that faults may take out by themselves; beyond "
            "it an operator decides"
        ),
    ] = 0.1
    gpus_out_min: Annotated[
        NonNegativeInt,
        Meta(description="so many GPUs may be out in any case, however small the cell is"),
    ] = 8
    suspect_score_max: Annotated[
        PositiveFloat,
        Meta(
            description="a GPU is out on which so many programs had faults of their own, each of "
            "them counted less as time passes"
        ),
    ] = 2.5
    suspect_half_life_s: Annotated[
        PositiveFloat, Meta(description="such a fault counts half after this")
    ] = 86400.0
    loan_period_s: Annotated[
        PositiveFloat, Meta(description="time between two loan passes without an outside event")
    ] = 300.0
    idle_return_s: Annotated[
        PositiveFloat | None,
        Meta(
            description="a lent node on which nothing ran for so long goes home at the next loan "
            "pass, if no job waits; none: it stays until its service needs it"
        ),
    ] = None
    default_expected_runtime_s: Annotated[
        PositiveFloat,
        Meta(description="assumed running time of a job of which nothing is known"),
    ] = 3600.0
    load_window_samples: Annotated[
        NonNegativeInt, Meta(description="load samples kept per service for the forecast")
    ] = 600
    finished_jobs_kept: Annotated[
        NonNegativeInt, Meta(description="ended jobs that `job list` still shows")
    ] = 10_000
    ended_loans_kept: Annotated[
        NonNegativeInt, Meta(description="loans that came home that `loan list --all` still shows")
    ] = 10_000
    story_lines_kept: Annotated[
        int,
        Meta(ge=1, description="lines of the newest events that the coordinator has in memory"),
    ] = 5000
    job_histories_kept: Annotated[
        NonNegativeInt,
        Meta(description="kinds of jobs whose running times are remembered; the latest seen stay"),
    ] = 10_000
    waiting_jobs_max: Annotated[
        PositiveInt,
        Meta(description="a tenant with this many jobs that wait is refused further submissions"),
    ] = 10_000
    services: Annotated[
        tuple[ServiceSettings, ...], Meta(description="the inference services of this cell")
    ] = ()
    tenants: Annotated[
        tuple[TenantSettings, ...],
        Meta(description="who is promised what; others have no guarantee and weight 1"),
    ] = ()

    def waiting_jobs_of(self, tenant: str) -> tuple[int, str]:
        """Most jobs of a tenant that may wait, and the setting that says so."""
        own = next((each for each in self.tenants if each.name == tenant), None)
        if own is not None and own.waiting_jobs_max is not None:
            return own.waiting_jobs_max, f"engine.tenants, {tenant}: waiting_jobs_max"
        return self.waiting_jobs_max, "engine.waiting_jobs_max"

    def return_s(self, service: ServiceSettings) -> float:
        """Longest way home of a lent node: TTL + grace + device free + warm-up."""
        return (
            self.lease_ttl_s
            + service.max_grace_s
            + service.device_free_p99_s
            + service.warm_up_p99_s
        )


def check_tenants(tenants: tuple[TenantSettings, ...]) -> None:
    """Tenants must be one tree, and guarantees must hold in each of its levels.

    Raises:
        ConfigError: names the tenant, and what was expected.
    """
    by_name = {tenant.name: tenant for tenant in tenants}
    for name, count in Counter(tenant.name for tenant in tenants).items():
        if count > 1:
            raise ConfigError(f"engine.tenants: {name} is there twice")
    for tenant in tenants:
        if tenant.parent and tenant.parent not in by_name:
            known = ", ".join(sorted(by_name))
            raise ConfigError(
                f"engine.tenants: {tenant.name}: parent {tenant.parent!r} is not one of {known}"
            )
    for tenant in tenants:
        path = [tenant.name]
        while parent := by_name[path[-1]].parent:
            path.append(parent)
            if path.count(parent) > 1:
                circle = " in ".join(path[path.index(parent) :])
                raise ConfigError(f"engine.tenants: {circle} is a circle")
    for tenant in tenants:
        children = [child for child in tenants if child.parent == tenant.name]
        promised = sum(child.guarantee_gpus for child in children)
        if promised > tenant.guarantee_gpus:
            names = ", ".join(child.name for child in children)
            raise ConfigError(
                f"engine.tenants: {names} are guaranteed {promised} GPUs, more than the "
                f"{tenant.guarantee_gpus} of their parent {tenant.name}"
            )


def overpromised(tenants: tuple[TenantSettings, ...], training_gpus: int) -> str:
    """A warning if the cell's own GPUs are too few for all guarantees together; else empty.

    It is no error: nodes come and go, and lent ones help out, but no guarantee may rely on those.
    """
    roots = [tenant for tenant in tenants if not tenant.parent]
    promised = sum(tenant.guarantee_gpus for tenant in roots)
    if promised <= training_gpus:
        return ""
    return (
        f"tenants: {promised} GPUs are guaranteed, and the training nodes have {training_gpus}: "
        "not all guarantees can be kept at a time"
    )
