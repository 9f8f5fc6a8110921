"""What an operator can set of the engine; every duration has its unit in its name.

Read from files by `common.settings`; this module must not know where the values came from.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from common.model import Mode, NonNegativeFloat, NonNegativeInt, PositiveFloat, Ratio, Token


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
    hold_off_s: Annotated[
        NonNegativeFloat, Meta(description="a node that became ready is not lent before this")
    ] = 300.0


class EngineSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the engine decides."""

    policy: Annotated[str, Meta(description="policy bundle; `aryl policies` lists them")] = "aryl"
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
        Meta(description="a job is not preempted twice within this without an outside event"),
    ] = 60.0
    silence_margin_s: Annotated[
        NonNegativeFloat,
        Meta(description="added to a job's `stop_after_s` and grace before it restarts elsewhere"),
    ] = 30.0
    loan_period_s: Annotated[
        PositiveFloat, Meta(description="time between two loan passes without an outside event")
    ] = 300.0
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
    job_histories_kept: Annotated[
        NonNegativeInt,
        Meta(description="kinds of jobs whose running times are remembered; the latest seen stay"),
    ] = 10_000
    services: Annotated[
        tuple[ServiceSettings, ...], Meta(description="the inference services of this cell")
    ] = ()

    def return_s(self, service: ServiceSettings) -> float:
        """Longest way home of a lent node: TTL + grace + device free + warm-up (design 6)."""
        return (
            self.lease_ttl_s
            + service.max_grace_s
            + service.device_free_p99_s
            + service.warm_up_p99_s
        )
