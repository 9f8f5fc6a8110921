"""An inference service as policies see it. Must not know nodes, jobs, or who forecasts its load."""

from __future__ import annotations

from msgspec import Struct

from common.model import Mode, NodeName, ServiceName
from coordinator.policies.loans.seasonal import Season


class LoadSample(Struct, frozen=True):
    """Offered load of a service at one instant, in its own unit (requests per second)."""

    at_s: float
    load: float


class UnknownLoad(Struct, frozen=True, kw_only=True):
    """A node that serves and whose load is unknown.

    since_s: when its load was last known, or when it was first heard to serve.
    load: the last known one; None: it never had one.
    is_over: it is unknown for longer than its service waits (`unknown_load_s`).
    """

    node: NodeName
    since_s: float
    load: float | None
    why: str
    is_over: bool = False


class ServiceView(Struct, frozen=True, kw_only=True):
    """One inference service.

    capacity_per_node: load that one node carries, in the unit of the samples.
    return_s: TTL + grace + device-free p99 + warm-up p99: how long a node needs to come home.
    """

    name: ServiceName
    mode: Mode
    capacity_per_node: float
    min_serving: int
    headroom_ratio: float
    reclaim_deadline_s: float
    return_s: float
    max_grace_s: float
    """Longest grace that a job on a lent node of this service may have."""
    hold_off_s: float
    loan_period_s: float
    load: tuple[LoadSample, ...] = ()
    unknown: tuple[UnknownLoad, ...] = ()
    """Nodes that serve and whose load is unknown, by name."""
    serving: int = 0
    """All that are there to serve; counted only where a load is unknown."""
    unknown_load_s: float = 120.0
    """How long a load may be unknown before lent nodes come home for it."""
    season: Season = Season()
    """What is remembered of its load beyond the samples."""
    quantile: float | None = None
    """Of the load that is to be carried; None forecasts without one. Set by the policy."""
    is_recalled: bool = False
