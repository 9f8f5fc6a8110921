"""Training's demand for loans: which spare nodes jobs could use if they were lent now.

A scheduling pass is tried first: a job that starts or grows without a loan demands none. `covering`
gives lendable nodes to the jobs that remain. A node that no job got stays home.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from common.model import JobState, Mode, NodeName, Preemptibility
from coordinator.policies.aryl.gpu_types import may_use
from coordinator.policies.aryl.lending.balance import Balance, balance, lendable, loan_limit
from coordinator.policies.aryl.lending.covering import Offer, Plan, Unmet
from coordinator.policies.contract.index import draining, nodes_of, open_jobs, open_kinds
from coordinator.policies.contract.snapshot import (
    ClusterSnapshot,
    JobView,
    NodeView,
    ServiceView,
    Shadow,
)


class Demand:
    """Answers for one snapshot which of the offered nodes a job could use.

    Args:
        unmet: what a scheduling pass leaves over; computed only when there are nodes on offer.
        is_scaling: whether the policy gives flexible workers.
    """

    def __init__(
        self, snapshot: ClusterSnapshot, unmet: Callable[[], Unmet], *, is_scaling: bool
    ) -> None:
        self._snapshot = snapshot
        self._unmet = unmet
        self._is_scaling = is_scaling
        self._wanting: list[JobView] | None = None
        self._acting: tuple[NodeName, ...] | None = None
        self._max_grace_s = {service.name: service.max_grace_s for service in snapshot.services}

    def choose(self, service: ServiceView, have: Balance) -> tuple[NodeName, ...]:
        """Nodes of a service that a job could use, among those that it could lend.

        Services in mode act are planned together, because a gang may need nodes of two of them. Any
        other service comes after them and covers no demand: its nodes are not really lent.
        """
        if service.mode == Mode.ACT:
            planned = self._planned(service, have)
            mine = {node.name for node in have.ready} if planned else ()
            return tuple(name for name in planned if name in mine)
        offer = _offer(self._snapshot, service, have)
        if not offer.limit:
            return ()
        covered = set(self._planned(service, have))
        sure = [node for node in self._snapshot.nodes if node.name in covered]
        sure += [node for node in self._snapshot.nodes if node.service == service.name
                 and node.shadow == Shadow.LENT]  # fmt: skip
        return self._plan([offer], sure)

    def _planned(self, its: ServiceView, have: Balance) -> tuple[NodeName, ...]:
        if self._acting is None:
            offers = [
                _offer(self._snapshot, one, have if one is its else balance(self._snapshot, one))
                for one in self._snapshot.services
                if one.mode == Mode.ACT and self._is_wanted(one)
            ]
            self._acting = self._plan([offer for offer in offers if offer.limit], ())
        return self._acting

    def _plan(self, offers: Sequence[Offer], sure: Iterable[NodeView]) -> tuple[NodeName, ...]:
        offered = {node.gpu_type for offer in offers for node in offer.nodes}
        if not self._may_use(offered):
            return ()
        plan = Plan(self._unmet(), offers, [*draining(self._snapshot), *sure])
        plan.start_gangs()
        if self._is_scaling:
            plan.grow_jobs()
        return tuple(plan.chosen)

    def _is_wanted(self, service: ServiceView) -> bool:
        """Whether any job could use a GPU type that the service has ready; seldom so."""
        return self._may_use(nodes_of(self._snapshot, service.name).gpu_types)

    def _may_use(self, gpu_types: Collection[str]) -> bool:
        """Whether any job that wants more GPUs could use one of these types."""
        kinds = open_kinds(self._snapshot)
        return any(may_use(job, gpu_types) and self._wants(job) for job in kinds)

    # --- for explanations -------------------------------------------------------------------

    @property
    def wanting(self) -> list[JobView]:
        """Jobs that wait or could grow, and may have workers on lent nodes."""
        if self._wanting is None:
            self._wanting = [job for job in open_jobs(self._snapshot) if self._wants(job)]
        return self._wanting

    def _wants(self, job: JobView) -> bool:
        if job.preemptibility == Preemptibility.NON or job.nodes.wants_no_loan:
            return False
        can_grow = self._is_scaling and job.is_elastic
        if job.state == JobState.PENDING:
            return can_grow or job.preemptibility == Preemptibility.FULL
        return can_grow and job.is_resizable

    def accepts(self, node: NodeView) -> bool:
        """True if a worker of any of these jobs could run on this node if it were lent."""
        grace_s = self._max_grace_s.get(node.service, -1.0) if node.service else -1.0
        return any(
            job.grace_s <= grace_s
            and node.name not in job.nodes.avoided
            and job.gpus_per_worker <= node.free_gpus
            and (
                job.accepts(node.gpu_type)
                if job.gpu_type is None
                else job.gpu_type == node.gpu_type
            )
            for job in self.wanting
        )


def _offer(snapshot: ClusterSnapshot, service: ServiceView, have: Balance) -> Offer:
    nodes = lendable(snapshot, service, have) if have.spare else ()
    return Offer(service=service.name, nodes=nodes, limit=loan_limit(have, nodes))


def choose_loans(
    snapshot: ClusterSnapshot, service: ServiceView, have: Balance, demand: Demand | None
) -> tuple[NodeName, ...]:
    """Spare nodes to lend: the longest serving first, none within its hold-off or in the place of
    one that is.

    demand: lend only nodes that a job could use (None: all spare nodes, as in the paper).
    """
    if demand is not None:
        return demand.choose(service, have)
    offer = _offer(snapshot, service, have)
    return tuple(node.name for node in offer.nodes[: offer.limit])
