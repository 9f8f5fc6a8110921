"""The tables' entries of loans: those made, awaited, only watched, or recommended. Data only.

Like all of `coordinator.engine.state` they are the engine's; nothing else may write them.
"""

from __future__ import annotations

from msgspec import Struct, field

from common.model import LeaseId, NodeName, ServiceName
from coordinator.policies.decisions import Reclaim


class LoanEntry(Struct, kw_only=True):
    """One loan, from the decision to the node serving again."""

    lease_id: LeaseId
    node: NodeName
    service: ServiceName
    decided_at_s: float
    reason: str
    begun_at_s: float | None = None
    is_server_stopped: bool = False
    """Its node stopped its server for it, and was called back or turned back before it was heard to
    be on loan; `coordinator.engine.returns.has_left`."""
    is_drain_late: bool = False
    """Its node was called back while it drained, and was heard to drain, out of its service's
    routing, until after its deadline."""
    reclaim_ordered_at_s: float | None = None
    reclaim_deadline_s: float | None = None
    reclaim_reason: str = ""
    decide_s: float = 0.0
    """How old the load was that the policy decided the order by; 0 of an operator's order."""
    called_home_at_s: float | None = None
    """When its node was told, which is after the order if the order waits for jobs."""
    called_home_boot_id: str = ""
    """That of its node then."""
    returned_at_s: float | None = None
    ended_reason: str = ""
    """Why it is over although its node did not come back to the service that had lent it."""
    is_lapsed: bool = False
    """It ended by its own TTL, before any order had reached its node; or, of a node of an older
    version, its node turned back."""
    lapsed_at_s: float | None = None
    """When that was heard."""
    lapse_s: float | None = None
    """From the lease's end to serving again, once it does; None of a node that had not left."""
    lapse_deadline_s: float | None = None
    """The longest that may be: what the lease's TTL leaves of the service's reclaim deadline."""
    turned_back: str = ""
    """Why its node gave it up by itself before it began; empty: it did not."""
    turned_back_at_s: float | None = None
    """When that was heard."""
    turn_back_s: float | None = None
    """From then to serving again, once it does; None of a node that had not left."""
    turn_back_deadline_s: float | None = None
    """The longest that may be: the service's reclaim deadline, as if it had asked at that time."""
    predicted_preemptions: int = 0
    predicted_cost_gpu_s: float = 0.0
    realised_preemptions: int = 0
    realised_cost_gpu_s: float = 0.0
    stage_durations_s: dict[str, float] = field(default_factory=dict[str, float])
    """Of its way home; see `coordinator.engine.stages`."""


class ShadowLoan(Struct, kw_only=True):
    """A loan that a watched service would have made; see `coordinator.engine.watching`."""

    service: ServiceName
    reclaimed_at_s: float | None = None
    is_late: bool = False


class Awaited(Struct, frozen=True, kw_only=True):
    """A lent node that goes home when its jobs have ended, at `until_s` in any case."""

    decision: Reclaim
    began_at_s: float
    until_s: float


class Recommendation(Struct, frozen=True, kw_only=True):
    """A loan that waits for an operator."""

    service: ServiceName
    at_s: float
    reason: str
