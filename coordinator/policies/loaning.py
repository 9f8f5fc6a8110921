"""How many nodes a service can lend or must have back, and which it lends. Must not know costs.

Per service (Lyra, EuroSys'23, section 6, made per service and by load):
needed = max(min_serving, ceil(forecast / capacity_per_node) + headroom), and what is ready beyond
that is spare. Two levels keep a node from flapping: to lend, the peak of the last loan period
counts too, so a dip lends nothing; to reclaim, only last value and forecast count.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from math import ceil, inf

from msgspec import Struct

from common.model import JobState, NodeName, NodeRole, Preemptibility
from coordinator.policies.forecast import forecast_peak, peak_between
from coordinator.policies.snapshot import ClusterSnapshot, JobView, NodeView, ServiceView


class Balance(Struct, frozen=True, kw_only=True):
    """What a service has and needs, in nodes.

    ready: serving and not cordoned. coming: on their way home.
    forecast_load: None when nothing was measured.
    horizon_s: how far the forecast looks: a return and one loan period.
    needed: below that, nodes are reclaimed. needed_to_lend: above that, nodes are lent.
    """

    ready: tuple[NodeView, ...]
    coming: tuple[NodeView, ...]
    forecast_load: float | None
    horizon_s: float
    needed: int
    needed_to_lend: int

    @property
    def spare(self) -> int:
        """Nodes that can be lent."""
        return max(0, len(self.ready) - self.needed_to_lend)

    @property
    def shortfall(self) -> int:
        """Nodes to call home."""
        return max(0, self.needed - len(self.ready) - len(self.coming))


def balance(snapshot: ClusterSnapshot, service: ServiceView) -> Balance:
    """What a service has and needs now."""
    own = [node for node in snapshot.nodes if node.service == service.name]
    usable = [node for node in own if not node.is_drained_by_operator]
    horizon_s = service.return_s + service.loan_period_s
    forecast = forecast_peak(service.load, now_s=snapshot.now_s, horizon_s=horizon_s)
    recent = peak_between(service.load, snapshot.now_s - service.loan_period_s, snapshot.now_s)
    needed = nodes_for(service, forecast or 0.0, len(own))
    return Balance(
        ready=tuple(node for node in usable if node.role == NodeRole.SERVING),
        coming=tuple(node for node in usable if _is_coming(node)),
        forecast_load=forecast,
        horizon_s=horizon_s,
        needed=needed,
        needed_to_lend=max(needed, nodes_for(service, recent or 0.0, len(own))),
    )


def _is_coming(node: NodeView) -> bool:
    return node.role in (NodeRole.VACATING, NodeRole.WARMING) or (
        node.role == NodeRole.ON_LOAN and node.is_reclaimed
    )


def nodes_for(service: ServiceView, load: float, node_count: int) -> int:
    """Nodes that a load needs, headroom included, but no more than the service has."""
    headroom_nodes = ceil(service.headroom_ratio * node_count - 1e-9)
    needed = ceil(load / service.capacity_per_node - 1e-9) + headroom_nodes
    return min(node_count, max(service.min_serving, needed))


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


class _Want(Struct):
    """GPUs that jobs which accept the same nodes want; types: what they accept, empty is any."""

    types: tuple[str, ...]
    gpus_per_worker: int
    grace_s: float
    jobs: int = 0
    gpus: int = 0


class Demand:
    """GPUs that training could use on lent nodes; taken down as nodes are chosen."""

    def __init__(self, snapshot: ClusterSnapshot, *, is_scaling: bool) -> None:
        wants: dict[tuple[tuple[str, ...], int, float], _Want] = {}
        self._is_scaling = is_scaling
        for job in snapshot.jobs:
            gpus = self._wanted_gpus(job)
            if gpus > 0 and job.preemptibility != Preemptibility.NON:
                types = job.gpu.types if job.state == JobState.PENDING else (job.gpu_type or "",)
                key = (types, job.gpus_per_worker, job.grace_s)
                want = wants.setdefault(key, _Want(*key))
                want.jobs += 1
                want.gpus += gpus
        self._wants = list(wants.values())
        self._max_grace_s = {service.name: service.max_grace_s for service in snapshot.services}
        for node in snapshot.nodes:
            if node.role == NodeRole.DRAINING:
                self.take(node)  # it is already on its way

    def copy(self) -> Demand:
        """The same demand, to be taken down apart: what is only recommended covers nothing."""
        other = copy(self)
        other._wants = [copy(want) for want in self._wants]
        return other

    def accepts(self, node: NodeView) -> bool:
        """Whether somebody could use this node, whatever else is lent."""
        return any(want.gpus > 0 and self._accepts(want, node) for want in self._wants)

    def __len__(self) -> int:
        """Jobs that want more GPUs than they have."""
        return sum(want.jobs for want in self._wants if want.gpus > 0)

    def _wanted_gpus(self, job: JobView) -> int:
        if job.state == JobState.PENDING:
            if job.preemptibility == Preemptibility.SEMI:
                return 0
            workers = job.workers.max if self._is_scaling else job.workers.min
            factor = max(job.gpu.worker_multiplier.values(), default=1)
            return workers * factor * job.gpus_per_worker
        if not self._is_scaling or not job.is_resizable or job.gpu_type is None:
            return 0
        stay = sum(1 for worker in job.placed if not worker.is_leaving)
        return (job.workers_on(job.gpu_type).max - stay) * job.gpus_per_worker

    def _accepts(self, want: _Want, node: NodeView) -> bool:
        grace_s = self._max_grace_s.get(node.service, -1.0) if node.service else -1.0
        is_type = not want.types or node.gpu_type in want.types
        return is_type and want.gpus_per_worker <= node.gpus and want.grace_s <= grace_s

    def take(self, node: NodeView) -> bool:
        """Cover demand with a node; False when nobody could use it."""
        left = node.gpus
        for want in self._wants:
            if left <= 0:
                break
            if want.gpus > 0 and self._accepts(want, node):
                used = min(left, want.gpus)
                want.gpus -= used
                left -= used
        return left < node.gpus


def choose_loans(
    snapshot: ClusterSnapshot, service: ServiceView, have: Balance, demand: Demand | None
) -> tuple[NodeName, ...]:
    """Spare nodes to lend: the longest serving first, none within its hold-off.

    demand: lend only what somebody could use (None: all that is spare, as in the paper).
    """
    if not is_lending(snapshot, service):
        return ()
    rested = [node for node in have.ready if rest_left_s(snapshot, service, node) <= 0]
    chosen: list[NodeName] = []
    for node in _longest_serving_first(rested):
        if len(chosen) >= have.spare:
            break
        if demand is None or demand.take(node):
            chosen.append(node.name)
    return tuple(chosen)


def rest_left_s(snapshot: ClusterSnapshot, service: ServiceView, node: NodeView) -> float:
    """Seconds until its hold-off ends; endless for a node that does not serve."""
    if node.serving_since_s is None:
        return inf
    return node.serving_since_s + service.hold_off_s - snapshot.now_s


def _longest_serving_first(nodes: Iterable[NodeView]) -> list[NodeView]:
    return sorted(nodes, key=lambda node: (node.serving_since_s or 0.0, node.name))


def numbers(service: ServiceView, have: Balance) -> str:
    """A balance as a sentence, for the reason of a loan or a reclaim."""
    load = "unknown" if have.forecast_load is None else f"{have.forecast_load:.4g}"
    return (
        f"load forecast {load} over {have.horizon_s:.0f} s at {service.capacity_per_node:g} per "
        f"node needs {have.needed} nodes with headroom ({have.needed_to_lend} before lending); "
        f"{len(have.ready)} ready, {len(have.coming)} coming"
    )
