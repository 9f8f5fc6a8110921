"""The balance of a service: how many nodes it can lend or must get back, and which go first.

Per service (Lyra, EuroSys'23, section 6, made per service and by load): needed = max(min_serving,
ceil(forecast / capacity_per_node) + headroom). Ready nodes beyond that are spare. Two levels keep a
node from flapping. To lend, the peak of the last loan period counts too, so a dip lends nothing. To
reclaim, only the last value and the forecast count.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import ceil, inf

from msgspec import Struct
from msgspec.structs import replace

from coordinator.policies.aryl.lending.forecast import forecast_peak, peak_between
from coordinator.policies.contract.index import nodes_of
from coordinator.policies.contract.snapshot import (
    ClusterSnapshot,
    NodeView,
    ServiceView,
    UnknownLoad,
    nodes_for,
)
from coordinator.policies.contract.text import counted


class Balance(Struct, frozen=True, kw_only=True):
    """What a service has and needs, in nodes.

    ready: serving, neither cordoned nor about to close. coming: on their way home, likewise.
    longest_serving: ready nodes with a known start of serving that can be lent, the longest first.
    forecast_load: None without a measurement.
    horizon_s: how far the forecast looks: a return and one loan period.
    needed: below that, nodes are reclaimed. needed_to_lend: above that, nodes are lent.
    unknown: serving nodes whose load is unknown, with the number of all serving nodes. Their
        possible load is not lent on, and after `unknown_load_s` nodes are reclaimed for it.
    """

    ready: tuple[NodeView, ...]
    coming: tuple[NodeView, ...]
    longest_serving: tuple[NodeView, ...]
    forecast_load: float | None
    horizon_s: float
    needed: int
    needed_to_lend: int
    unknown: tuple[UnknownLoad, ...] = ()
    serving: int = 0

    @property
    def spare(self) -> int:
        """Nodes that can be lent."""
        return max(0, len(self.ready) - self.needed_to_lend)

    @property
    def shortfall(self) -> int:
        """Nodes to call home."""
        return max(0, self.needed - len(self.ready) - len(self.coming))


def balance(snapshot: ClusterSnapshot, service: ServiceView) -> Balance:
    """The present balance of a service."""
    own = nodes_of(snapshot, service.name)
    horizon_s = service.return_s + service.loan_period_s
    forecast = _foreseen(service, now_s=snapshot.now_s, horizon_s=horizon_s)
    recent = peak_between(service.load, snapshot.now_s - service.loan_period_s, snapshot.now_s)
    over = [one for one in service.unknown if one.is_over]
    needed = _nodes_for(service, forecast or 0.0, over, own.count)
    highest = max(forecast or 0.0, recent or 0.0)
    return Balance(
        ready=own.ready,
        coming=own.coming,
        longest_serving=own.longest_serving,
        forecast_load=forecast,
        horizon_s=horizon_s,
        needed=needed,
        needed_to_lend=max(needed, _nodes_for(service, highest, service.unknown, own.count)),
        unknown=service.unknown,
        serving=service.serving,
    )


def _nodes_for(
    service: ServiceView, load: float, nodes: Sequence[UnknownLoad], node_count: int
) -> int:
    """Nodes that a load needs, apart from what nodes of unknown load may carry.

    Each of these counts as full, and as many other nodes stay, so that most of the served load is
    known. Where no serving node is known, the service needs all its nodes.
    """
    if not nodes:
        return nodes_for(service, load, node_count)
    if len(nodes) >= service.serving:
        return node_count
    full = len(nodes) * service.capacity_per_node
    held = sum(one.load or 0.0 for one in nodes)  # which the samples have
    needed = nodes_for(service, load + max(0.0, full - held), node_count)
    return min(node_count, max(needed, 2 * len(nodes)))


def by_quantile(snapshot: ClusterSnapshot, quantile: float | None) -> ClusterSnapshot:
    """The same, with the quantile that loads are forecast by; None: without one."""
    if quantile is None:
        return snapshot
    services = tuple(replace(service, quantile=quantile) for service in snapshot.services)
    return replace(snapshot, services=services)


def _foreseen(service: ServiceView, *, now_s: float, horizon_s: float) -> float | None:
    """The load to be ready for: by quantile where one is asked for and the load's day is known."""
    if service.quantile is not None:
        foreseen = service.season.quantile(service.quantile, now_s=now_s, horizon_s=horizon_s)
        if foreseen is not None:
            return foreseen
    return forecast_peak(service.load, now_s=now_s, horizon_s=horizon_s)


def is_lending(snapshot: ClusterSnapshot, service: ServiceView) -> bool:
    """Whether a loan of this service could come home in time, and its load is known now.

    A load that was last measured more than a loan period ago is not known.
    """
    return (
        not service.is_recalled
        and service.return_s <= service.reclaim_deadline_s
        and bool(service.load)
        and service.load[-1].at_s >= snapshot.now_s - service.loan_period_s
    )


def lendable(
    snapshot: ClusterSnapshot, service: ServiceView, have: Balance
) -> tuple[NodeView, ...]:
    """Nodes that could be lent, if as many are spare: the longest serving first, none within its
    hold-off; none of a service that lends nothing now."""
    if not is_lending(snapshot, service):
        return ()
    rested = bisect_left(
        have.longest_serving, True, key=lambda node: rest_left_s(snapshot, service, node) > 0
    )
    return have.longest_serving[:rested]


def loan_limit(have: Balance, nodes: Sequence[NodeView]) -> int:
    """The maximum number of nodes to lend: the spare ones, less those within their hold-off.

    A node that has just come home was needed. If another node went in its place, the hold-off would
    keep the node and not the service's capacity, and a small service would swap nodes for ever.
    """
    return max(0, min(len(nodes), have.spare - (len(have.longest_serving) - len(nodes))))


def rest_left_s(snapshot: ClusterSnapshot, service: ServiceView, node: NodeView) -> float:
    """Seconds until its hold-off ends; endless for a node that does not serve."""
    if node.serving_since_s is None:
        return inf
    return node.serving_since_s + service.hold_off_s - snapshot.now_s


def numbers(service: ServiceView, have: Balance) -> str:
    """A balance as a sentence, for the reason of a loan or a reclaim."""
    load = "unknown" if have.forecast_load is None else f"{have.forecast_load:.4g}"
    needs = f"{counted(have.needed, 'node')} with headroom"
    loaded = ceil((have.forecast_load or 0.0) / service.capacity_per_node - 1e-9)
    if loaded > have.needed:  # which is no more than there are: an overload must not read as enough
        needs = f"{counted(loaded, 'node')}, and the service has {have.needed}"
    return (
        f"load forecast {load} over {have.horizon_s:.0f} s at {service.capacity_per_node:g} per "
        f"node needs {needs} ({have.needed_to_lend} before lending); "
        f"{len(have.ready)} ready, {len(have.coming)} coming{of_unknown(service, have)}"
    )


def of_unknown(service: ServiceView, have: Balance) -> str:
    """The nodes with unknown load and the consequence, as the end of a sentence; mostly empty."""
    if not have.unknown:
        return ""
    over = sum(one.is_over for one in have.unknown)
    limit_s = service.unknown_load_s
    if over:
        so = f"lent nodes come home for {over} of them, unknown for more than {limit_s:g} s"
    else:
        so = f"nothing is lent on it, and after {limit_s:g} s lent nodes come home"
    first = have.unknown[0]
    return (
        f"; the load of {len(have.unknown)} of {counted(have.serving, 'serving node')} is unknown "
        f"({first.node}: {first.why}): {so}"
    )
