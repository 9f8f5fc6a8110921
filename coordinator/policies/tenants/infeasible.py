"""Infeasible jobs: jobs that could not run in the fleet even if it were empty, and why.

A tenant's limits count in the same way, with all other tenants idle.

Nodes that an operator may open again count as open, and so do lost nodes: a job that needs them
waits. It blocks no queue meanwhile (Slurm: `ReqNodeNotAvail`), see `Fleet.hosts`, because the time
of their return is unknown. A service's nodes count as far as it may lend them without any load. A
gang that needs more of them at one time would wait for ever, and the GPUs that are free or lent now
would not show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, cached_property

from msgspec import Struct
from msgspec.structs import replace

from common.model import (
    WHOLE_GPU,
    JobSpec,
    NodeName,
    NodeRole,
    Preemptibility,
    ServiceName,
    is_mig,
)
from coordinator.policies.contract.node_names import set_of
from coordinator.policies.contract.snapshot import (
    ClusterSnapshot,
    JobView,
    NodeView,
    ServiceView,
    nodes_for,
)
from coordinator.policies.contract.text import counted
from coordinator.policies.tenants.tenancy import Tenancy

NO_NODES = "no nodes are known"
_WISHES_KEPT = 10_000
Hosts = Callable[[JobView, Iterable[str]], list[str]]
"""Which of these GPU types could hold a job's base gang on the nodes that are there: see
`Fleet.hosts`."""


class Wish(Struct, frozen=True, cache_hash=True):
    """The fields of a job that decide whether its base gang could ever have room.

    types: in the job's order; empty: any. multipliers: workers for one, where a type needs more.
    spans_types: its gang may be on several of them at one time.
    excluded_nodes: nodes that it may not use, by the labels and names that it selects.
    """

    gpus_per_worker: int
    min_workers: int
    types: tuple[str, ...]
    multipliers: tuple[tuple[str, int], ...]
    preemptibility: Preemptibility
    grace_s: float
    spans_types: bool
    excluded_nodes: tuple[NodeName, ...] = ()


def wish_of(job: JobView | JobSpec, excluded_nodes: tuple[NodeName, ...] = ()) -> Wish:
    """The requirements of a job, as a policy or its user sees them.

    excluded_nodes: of a `JobSpec`; a view has its own.
    """
    return Wish(
        gpus_per_worker=job.gpus_per_worker,
        min_workers=job.workers.min,
        types=tuple(dict.fromkeys(job.gpu.types)),
        multipliers=tuple(sorted(job.gpu.worker_multiplier.items())),
        preemptibility=job.preemptibility,
        grace_s=job.checkpoint.grace_s if isinstance(job, JobSpec) else job.grace_s,
        spans_types=job.gpu.heterogeneous_speed_ratio > 0,
        excluded_nodes=excluded_nodes if isinstance(job, JobSpec) else job.nodes.excluded,
    )


class _Places(Struct, frozen=True):
    """Workers of one kind that the nodes of a GPU type could hold together.

    usable: the nodes that rules let it use, lent at one time or not. count: on those, lent or not.
    lent_count: on as many of them as may be lent at one time. limits: what makes that fewer.
    """

    usable: tuple[NodeView, ...]
    count: int
    lent_count: int
    limits: tuple[str, ...]


class Fleet:
    """The nodes of a snapshot, by type: made once for many jobs.

    Args:
        is_present: only nodes count that are not absent: lost, quarantined, cordoned, or closed.
        lends: whether a service's serving nodes may be lent some day. Under a policy that lends
            none only nodes count that are lent already: a job that waits for others would wait for
            ever.
        tenants: tenants to check in addition to those of the snapshot's jobs.
    """

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        *,
        lends: bool = True,
        tenants: Iterable[str] = (),
        is_present: bool = False,
    ) -> None:
        self._snapshot = snapshot
        self._lends = lends
        self._services = {service.name: service for service in snapshot.services}
        self._nodes: dict[str, list[NodeView]] = {}
        self._own: dict[ServiceName, list[NodeView]] = {}
        self._said: dict[Wish, tuple[str, ...]] = {}
        self._never: dict[tuple[object, ...], bool] = {}
        for node in snapshot.nodes:
            if node.service and not lends and node.role != NodeRole.ON_LOAN:
                continue
            if node.gpus and not (is_present and is_absent(node)):
                self._nodes.setdefault(node.gpu_type, []).append(node)
            if node.service:
                self._own.setdefault(node.service, []).append(node)
        self._idle = None
        if snapshot.tenants:
            self._idle = Tenancy(snapshot, tenants).idle(self._most_gpus())

    def _most_gpus(self) -> int:
        """GPUs that jobs could have at one time: those of no service, and the most that are lent.

        Which nodes of a service are lent is not known; the largest are counted.
        """
        found = sum(n.gpus for nodes in self._nodes.values() for n in nodes if not n.service)
        for name, own in self._own.items():
            service = self._services.get(name)
            most = 0 if service is None else most_lent(service, own)
            found += sum(sorted((node.gpus for node in own), reverse=True)[:most])
        return found

    def why_never(self, wish: Wish, tenant: str | None = None) -> tuple[str, ...]:
        """Why no GPU type that a job accepts would do, type by type; empty if one would.

        tenant: the job's owner; then its limits are a reason too. None: limits are not checked.
        """
        said = self._said.get(wish)
        if said is None:
            if len(self._said) >= _WISHES_KEPT:
                self._said.clear()  # bounded, because submitters choose the keys
            said = self._said[wish] = self._why_never(wish)
        if said or tenant is None:
            return said
        return tuple(filter(None, (self._beyond_limits(wish, tenant),)))

    def _beyond_limits(self, wish: Wish, tenant: str) -> str:
        """Why the limits of its tenant can never hold a job's base gang; empty if they may."""
        if self._idle is None:
            return ""
        factors = dict(wish.multipliers)
        factor = min((factors.get(name, 1) for name in wish.types), default=1)
        gpus = wish.min_workers * wish.gpus_per_worker * factor
        return self._idle.why_never(tenant, gpus)

    def is_never(self, job: JobView) -> bool:
        """Whether no GPU type that a job accepts would do; for many jobs in a pass."""
        if job.gpu.worker_multiplier or job.gpu.heterogeneous_speed_ratio:
            return bool(self.why_never(wish_of(job)))
        gang = (job.workers.min, job.gpus_per_worker, job.gpu.types)
        alike = (gang, job.preemptibility, job.grace_s, job.nodes.excluded)
        if alike not in self._never:
            self._never[alike] = bool(self.why_never(wish_of(job)))
        return self._never[alike]

    def may_use(self, wish: Wish, node: NodeView, *, is_elastic: bool) -> bool:
        """Whether a job could ever have a worker on a node, in a gang that fits the fleet.

        is_elastic: it may have flexible workers, and `semi` allows these on a lent node.
        """
        accepts = node.gpu_type in wish.types if wish.types else not is_mig(node.gpu_type)
        has_room = node.gpus - node.sick_gpus >= wish.gpus_per_worker
        if not (accepts and has_room) or node.name in set_of(wish.excluded_nodes):
            return False
        is_semi = wish.preemptibility == Preemptibility.SEMI
        worker = replace(wish, preemptibility=Preemptibility.FULL) if is_semi else wish
        if is_semi and node.service and not is_elastic:
            return False
        kinds = wish.types if wish.spans_types else (node.gpu_type,)
        return self._may_host(worker, node.service) and not all(
            self.of_type(wish, kind) for kind in kinds
        )

    def hosts(self, job: JobView, gpu_types: Iterable[str]) -> list[str]:
        """The GPU types among these on which a job may have its base gang without absent nodes."""
        wish = wish_of(job)
        return [name for name in gpu_types if not self._present.of_type(wish, name)]

    @property
    def _present(self) -> Fleet:
        """The same without nodes that are absent now."""
        return self._without_absent or self

    @cached_property
    def _without_absent(self) -> Fleet | None:
        """None where nothing is: one that kept itself would be garbage for a collector."""
        if not any(map(is_absent, self._snapshot.nodes)):
            return None
        return Fleet(self._snapshot, lends=self._lends, is_present=True)

    def why_absent(self, wish: Wish, gpu_types: Iterable[str] = ()) -> tuple[str, ...]:
        """For each GPU type: why only absent nodes could hold a job that could run here some day;
        empty if it could run without them.

        gpu_types: of these; none: all that it accepts.
        """
        asked = tuple(gpu_types) or wish.types or tuple(sorted(self._nodes))
        able = [name for name in asked if not self.of_type(wish, name)]
        if self._without_absent is None or any(
            not self._present.of_type(wish, name) for name in able
        ):
            return ()
        return tuple(
            f"waits for absent nodes, and does not block the jobs behind it: without "
            f"{', '.join(names)} (lost, quarantined, cordoned or closed) the nodes of "
            f"type {name} have no room for it"
            for name in able
            if (names := self._absent(wish, name))
        )

    def _absent(self, wish: Wish, gpu_type: str) -> list[NodeName]:
        """The absent nodes of a type that could hold a worker of a job."""
        nodes = _left(self._nodes.get(gpu_type, []), wish)
        return sorted(
            node.name
            for node in nodes
            if is_absent(node)
            and node.gpus >= wish.gpus_per_worker
            and self._may_host(wish, node.service)
        )

    def _why_never(self, wish: Wish) -> tuple[str, ...]:
        if not self._nodes:
            return (NO_NODES,)
        said = [self.of_type(wish, name) for name in wish.types or self._whole()]
        return tuple(said) if all(said) else ()

    def _whole(self) -> list[str]:
        """The types that a job to which any is right may have."""
        return sorted(name for name in self._nodes if not is_mig(name)) or [WHOLE_GPU]

    def of_type(self, wish: Wish, gpu_type: str) -> str:
        """Why a job can never have its base gang on one GPU type; empty if it may."""
        nodes, size = self._nodes.get(gpu_type, []), wish.gpus_per_worker
        if not nodes:
            return absent(gpu_type)
        if wish.excluded_nodes:
            nodes = _left(nodes, wish)
            if not nodes:
                return f"can never run here: no node of type {gpu_type} fits what it asks of nodes"
        largest = max(node.gpus for node in nodes)
        if largest < size:
            return (
                f"can never run here: no node of type {gpu_type} has {counted(size, 'GPU')}; "
                f"the largest has {largest}"
            )
        count = wish.min_workers * dict(wish.multipliers).get(gpu_type, 1)
        found = self._places(wish, nodes)
        if found.lent_count >= count or self._spans(wish, count):
            return ""
        is_all = len(found.usable) == len(nodes)
        which = "all" if is_all and len(nodes) > 1 else "the"
        limit = "" if is_all and not wish.excluded_nodes else " that it may use"
        has = "has" if len(found.usable) == 1 else "have"
        gpus = sum(node.gpus for node in found.usable)
        said = (
            f"can never run here: {which} {counted(len(found.usable), 'node')} of type {gpu_type}"
            f"{limit} {has} {counted(gpus, 'GPU')} together, "
            f"room for {counted(found.count, 'worker')}"
        )
        if not found.limits:
            return said
        return f"{said}, but {'; '.join(found.limits)}: room for {found.lent_count} at one time"

    def _spans(self, wish: Wish, count: int) -> bool:
        """Whether a gang that may span its types has places enough on all of them together."""
        if not wish.spans_types:
            return False
        every = (self._places(wish, _left(self._nodes.get(name, []), wish)) for name in wish.types)
        return sum(places.lent_count for places in every) >= count

    def _places(self, wish: Wish, nodes: Iterable[NodeView]) -> _Places:
        size = wish.gpus_per_worker
        usable = tuple([node for node in nodes if self._may_host(wish, node.service)])
        count = sum(node.gpus // size for node in usable)
        lent_count = sum(node.gpus // size for node in usable if not node.service)
        limits: list[str] = []
        for name in sorted({node.service for node in usable if node.service}):
            service, own = self._services[name], self._own[name]
            there = sorted([n.gpus // size for n in usable if n.service == name], reverse=True)
            most = most_lent(service, own)
            lent_count += sum(there[:most])
            if sum(there[most:]):
                limits.append(lends(service, len(own), most))
        return _Places(usable, count, lent_count, tuple(limits))

    def _may_host(self, wish: Wish, service: ServiceName | None) -> bool:
        if not service:
            return True
        if wish.preemptibility != Preemptibility.FULL or service not in self._services:
            return False
        return wish.grace_s <= self._services[service].max_grace_s


def _left(nodes: list[NodeView], wish: Wish) -> list[NodeView]:
    """Nodes without those that a job may not use."""
    if not wish.excluded_nodes:
        return nodes
    barred = set_of(wish.excluded_nodes)
    return [node for node in nodes if node.name not in barred]


def is_absent(node: NodeView) -> bool:
    """True if no work may start on a node until an unknown time: it is away, an operator closed it,
    or it can take nothing.
    """
    is_away = node.role in (NodeRole.LOST, NodeRole.QUARANTINED)
    return is_away or node.is_drained_by_operator or node.takes_nothing


def hosts_of(snapshot: ClusterSnapshot, *, lends: bool = True) -> Hosts:
    """`Fleet.hosts` of a snapshot, computed at first use."""
    fleet = cache(lambda: Fleet(snapshot, lends=lends))
    return lambda job, gpu_types: fleet().hosts(job, gpu_types)


def absent(gpu_type: str) -> str:
    """That no node has a GPU type."""
    return f"GPU type {gpu_type} not present"


def most_lent(service: ServiceView, own: Iterable[NodeView]) -> int:
    """How many of its nodes a service may have lent at one time, at the very most: with no load at
    all, or as many as it has lent now."""
    nodes = list(own)
    now_count = sum(1 for node in nodes if node.role == NodeRole.ON_LOAN)
    return max(now_count, len(nodes) - nodes_for(service, 0.0, len(nodes)))


def lends(service: ServiceView, count: int, most: int) -> str:
    """Text: a service with this number of nodes lends no more than `most`, by which setting."""
    keeps = nodes_for(service, 0.0, count)
    is_minimum = keeps <= service.min_serving
    why = (
        f"min_serving is {service.min_serving}"
        if is_minimum
        else f"headroom_ratio {service.headroom_ratio:g} keeps {keeps}"
    )
    some = f"at most {most}" if most else "none"
    return f"{service.name} lends {some} of its {counted(count, 'node')} ({why})"
