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

    name: Annotated[Token, Meta(description="name of the service, as its nodes report it")]
    capacity_per_node: Annotated[
        PositiveFloat, Meta(description="requests per second that one node can serve")
    ]
    mode: Annotated[Mode, Meta(description="observe, recommend or act")] = Mode.OBSERVE
    min_serving: Annotated[NonNegativeInt, Meta(description="nodes that are never lent")] = 1
    headroom_ratio: Annotated[
        Ratio,
        Meta(description="share of the service's nodes kept as headroom above the load forecast"),
    ] = 0.02
    reclaim_deadline_s: Annotated[
        PositiveFloat,
        Meta(description="a lent node serves again at most this long after a reclaim begins"),
    ] = 300.0
    max_grace_s: Annotated[
        NonNegativeFloat,
        Meta(description="longest stop grace of a job that may run on the service's lent nodes"),
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
            description="reclaim lent nodes when the load of the serving nodes has been unknown "
            "for longer than this"
        ),
    ] = 120.0
    hold_off_s: Annotated[
        NonNegativeFloat,
        Meta(
            description="after a node becomes ready, neither it nor another in its place is "
            "lent for this long"
        ),
    ] = 300.0


class TenantSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant and its guarantee; GPUs count whatever their type."""

    name: Annotated[Token, Meta(description="name of the tenant; its users submit jobs under it")]
    parent: Annotated[str, Meta(description="parent tenant; empty: none")] = ""
    weight: Annotated[
        Weight,
        Meta(
            description="share of the capacity left over after guarantees, relative to sibling "
            "tenants"
        ),
    ] = 1.0
    guarantee_gpus: Annotated[
        NonNegativeInt,
        Meta(
            description="quota of this tenant and its children in GPUs; other tenants never "
            "keep it from them"
        ),
    ] = 0
    borrow_limit_gpus: Annotated[
        NonNegativeInt | None,
        Meta(description="most GPUs this tenant may use beyond its guarantee; none: no limit"),
    ] = None
    lend_limit_gpus: Annotated[
        NonNegativeInt | None,
        Meta(description="most GPUs of its idle guarantee that others may use; none: no limit"),
    ] = None
    waiting_jobs_max: Annotated[
        PositiveInt | None,
        Meta(description="most waiting jobs of this tenant; none: `engine.waiting_jobs_max`"),
    ] = None
    user_max_gpus: Annotated[
        PositiveInt | None,
        Meta(
            description="most GPUs that jobs of one user of this tenant hold at once; none: no "
            "limit"
        ),
    ] = None
    user_max_jobs: Annotated[
        PositiveInt | None,
        Meta(
            description="most jobs of one user of this tenant that wait or run, each task of an "
            "array counted; further submissions are refused; none: no limit"
        ),
    ] = None


class EngineSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the engine decides."""

    policy: Annotated[str, Meta(description="scheduling policy; `aryl policies` lists them")] = (
        DEFAULT
    )
    gang_ready_timeout_s: Annotated[
        PositiveFloat,
        Meta(
            description="a gang that is not ready after this time is queued again at no cost to "
            "its retries"
        ),
    ] = 300.0
    resize_cooldown_s: Annotated[
        NonNegativeFloat, Meta(description="shortest time between two growths of a job")
    ] = 60.0
    lease_ttl_s: Annotated[
        PositiveFloat,
        Meta(
            description="lease TTL: a lent node that gets no renewal for this long returns to "
            "its service"
        ),
    ] = 30.0
    min_runtime_s: Annotated[
        NonNegativeFloat,
        Meta(
            description="a preempted job that runs again is not preempted for another job "
            "within this time"
        ),
    ] = 60.0
    start_p99_s: Annotated[
        NonNegativeFloat,
        Meta(description="99th percentile from a start on idle GPUs to the first step"),
    ] = 15.0
    restart_p99_s: Annotated[
        NonNegativeFloat,
        Meta(
            description="99th percentile of the extra time until an attempt after a stop makes "
            "progress"
        ),
    ] = 35.0
    resize_p99_s: Annotated[
        NonNegativeFloat,
        Meta(description="99th percentile of a gang's pause when its worker count changes"),
    ] = 30.0
    stalled_after_s: Annotated[
        NonNegativeFloat,
        Meta(
            description="a job that reports progress is STALLED after this long without any, or "
            "after ten times its usual gap if that is longer"
        ),
    ] = 120.0
    silence_margin_s: Annotated[
        NonNegativeFloat,
        Meta(
            description="time added to a lost job's `stop_after_s` and grace before it restarts "
            "elsewhere"
        ),
    ] = 30.0
    retry_by_failure_class: Annotated[
        bool,
        Meta(
            description="decide on a retry by the failure class, within the job's own number of "
            "retries"
        ),
    ] = True
    retry_backoff_s: Annotated[
        NonNegativeFloat,
        Meta(
            description="wait before the first retry after a transient failure or a node fault; "
            "doubles each time"
        ),
    ] = 30.0
    retry_backoff_max_s: Annotated[
        NonNegativeFloat,
        Meta(
            description="longest wait before a retry; also how long a node that refused three "
            "starts in a row gets no new workers"
        ),
    ] = 600.0
    retry_reset_s: Annotated[
        PositiveFloat,
        Meta(
            description="an attempt that runs this long resets `retry_backoff_s` of the job's own "
            "faults"
        ),
    ] = 3600.0
    retry_avoid_s: Annotated[
        NonNegativeFloat,
        Meta(description="how long a job waits for other nodes than the one on which it failed"),
    ] = 3600.0
    cordon_suspect_nodes: Annotated[
        bool,
        Meta(
            description="cordon a node when a job's log shows a hardware fault of it; false: only "
            "recommend it"
        ),
    ] = False
    gpus_out_ratio_max: Annotated[
        Ratio,
        Meta(
            description="share of the cell's GPUs that faults may take out of use automatically; "
            "beyond it an operator decides"
        ),
    ] = 0.1
    gpus_out_min: Annotated[
        NonNegativeInt,
        Meta(
            description="number of GPUs that faults may take out of use in any case, even in a "
            "small cell"
        ),
    ] = 8
    suspect_score_max: Annotated[
        PositiveFloat,
        Meta(
            description="a GPU goes out of use when its suspect score reaches this; each "
            "program that failed there adds 1, and less as time passes"
        ),
    ] = 2.5
    suspect_half_life_s: Annotated[
        PositiveFloat, Meta(description="half-life of a failure in the suspect score")
    ] = 86400.0
    loan_period_s: Annotated[
        PositiveFloat, Meta(description="time between two loan passes without an event")
    ] = 300.0
    idle_return_s: Annotated[
        PositiveFloat | None,
        Meta(
            description="a lent node that is idle for this long returns at the next loan pass "
            "if no waiting job could use it; none: it stays until its service needs it"
        ),
    ] = None
    default_expected_runtime_s: Annotated[
        PositiveFloat,
        Meta(description="assumed running time of a job without any estimate"),
    ] = 3600.0
    load_window_samples: Annotated[
        NonNegativeInt, Meta(description="load samples kept per service for the forecast")
    ] = 600
    finished_jobs_kept: Annotated[
        NonNegativeInt, Meta(description="number of ended jobs kept for `job list`")
    ] = 10_000
    ended_loans_kept: Annotated[
        NonNegativeInt, Meta(description="number of ended loans kept for `loan list --all`")
    ] = 10_000
    story_lines_kept: Annotated[
        int,
        Meta(ge=1, description="number of newest event lines that the coordinator keeps in memory"),
    ] = 5000
    job_histories_kept: Annotated[
        NonNegativeInt,
        Meta(description="number of job kinds whose running times are kept; those seen last stay"),
    ] = 10_000
    waiting_jobs_max: Annotated[
        PositiveInt,
        Meta(description="most waiting jobs of a tenant; further submissions are refused"),
    ] = 10_000
    services: Annotated[
        tuple[ServiceSettings, ...], Meta(description="the inference services of this cell")
    ] = ()
    tenants: Annotated[
        tuple[TenantSettings, ...],
        Meta(
            description="tenants and their guarantees; a tenant not listed has no guarantee and "
            "weight 1"
        ),
    ] = ()

    def tenant(self, name: str) -> TenantSettings | None:
        """Settings of a tenant by name."""
        return next((each for each in self.tenants if each.name == name), None)

    def waiting_jobs_of(self, tenant: str) -> tuple[int, str]:
        """Most jobs of a tenant that may wait, and the setting that says so."""
        own = self.tenant(tenant)
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
            raise ConfigError(f"engine.tenants: {name} is listed twice")
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
