"""The reclaim rules by name: Aryl's, and the two that the paper compares with.

Those two take nodes at random, or the node with the fewest jobs first (Lyra, EuroSys'23, section
7.1). Both choose nodes one by one and look at no job twice, so that one preemption empties two
nodes only by luck. The preemption cost in `greedy` improves on that. The lowest priorities go first
here as well, as operators expect; the paper has no priorities.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from hashlib import sha256

from common.model import NodeName
from coordinator.policies.aryl.reclaim.choose_nodes import Choice, Chooser, Reclaiming, choose_nodes
from coordinator.policies.aryl.reclaim.decisions import carry_out
from coordinator.policies.aryl.reclaim.occupancy import Occupancy, Ranks, lent_nodes
from coordinator.policies.aryl.reclaim.preemption_cost import CostModel, Costs
from coordinator.policies.contract.decisions import Decision
from coordinator.policies.contract.snapshot import ClusterSnapshot, NodeView, ServiceView


def choose_at_random(now_s: float) -> Chooser:
    """Nodes in an order that looks like chance and follows from the instant and their names."""

    def draw(name: NodeName) -> bytes:
        return sha256(f"{now_s!r} {name}".encode()).digest()

    def choose(occupancy: Occupancy, candidates: Sequence[NodeView], wanted: int) -> Choice:
        def key(name: NodeName) -> tuple[Ranks, bytes]:
            return _ranks(occupancy, name), draw(name)

        return _first(occupancy, sorted((node.name for node in candidates), key=key), wanted)

    return choose


def choose_fewest_jobs(
    occupancy: Occupancy, candidates: Sequence[NodeView], wanted_count: int
) -> Choice:
    """The nodes with the fewest jobs, wherever else these run ("SCF", smallest count first)."""
    names = sorted(
        (_ranks(occupancy, node.name), jobs_on(occupancy, node.name), node.name)
        for node in candidates
    )
    return _first(occupancy, [name for *_, name in names], wanted_count)


def _ranks(occupancy: Occupancy, name: NodeName) -> Ranks:
    return occupancy.ranks(occupancy.base_jobs(name))


def jobs_on(occupancy: Occupancy, name: NodeName) -> int:
    """Jobs with any worker on a node, base or flexible."""
    flexible = {worker.job_id for worker in occupancy.flexible_workers(name)}
    return len(flexible.union(occupancy.base_jobs(name)))


def _first(occupancy: Occupancy, names: Sequence[NodeName], wanted_count: int) -> Choice:
    taken = names[:wanted_count]
    victims = {job_id for name in taken for job_id in occupancy.base_jobs(name)}
    return Choice(nodes=tuple(taken), victims=tuple(sorted(victims)))


class ReclaimRule(StrEnum):
    """Which lent nodes go home, and so who is preempted."""

    COST = "cost"
    """Least preemption cost, node by node: the paper's greedy (`greedy`)."""
    NEAR_OPTIMUM = "near-optimum"
    """Never more cost than the greedy, and near the optimum (`search`)."""
    RANDOM = "random"
    FEWEST_JOBS = "fewest-jobs"


class TakeBack:
    """Takes nodes of one service after the other back, from the same occupancy.

    So no job is a victim twice, and what one preemption empties is idle for the next service.
    """

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        rule: ReclaimRule,
        model: CostModel,
        *,
        waits_for_finish: bool,
    ) -> None:
        self._snapshot = snapshot
        self._rule = rule
        self._model = model
        self._waits_for_finish = waits_for_finish
        self._costs = Costs(snapshot)
        self._occupancy = Occupancy(snapshot)

    def all_of(self, service: ServiceView) -> tuple[Decision, ...]:
        """A recalled service gets all its nodes, without waiting for jobs to end."""
        lent = lent_nodes(self._snapshot, service.name)
        return self._order(service, lent, len(lent), 0.0, f"{service.name} was recalled")

    def __call__(
        self, service: ServiceView, wanted_count: int, because: str
    ) -> tuple[Decision, ...]:
        """The cheapest way to send this number of nodes home: workers released, jobs waited for or
        stopped.

        A node that is about to close would replace nothing; its own window calls it home.

        because: why the service wants them, with numbers.
        """
        slack_s = 0.0
        if self._waits_for_finish:
            slack_s = max(0.0, service.reclaim_deadline_s - service.return_s)
        lent = [one for one in lent_nodes(self._snapshot, service.name) if not one.is_closing]
        return self._order(service, lent, wanted_count, slack_s, because)

    def _order(
        self,
        service: ServiceView,
        lent: list[NodeView],
        wanted_count: int,
        slack_s: float,
        because: str,
    ) -> tuple[Decision, ...]:
        is_by_work = self._model == CostModel.LOST_GPU_S
        return carry_out(
            self._occupancy,
            service,
            self._choose(lent, wanted_count, slack_s),
            because,
            price=self._costs.expected_lost_gpu_s if is_by_work else None,
        )

    def _choose(self, lent: list[NodeView], wanted_count: int, slack_s: float) -> Choice:
        match self._rule:
            case ReclaimRule.RANDOM:
                choose = choose_at_random(self._snapshot.now_s)
            case ReclaimRule.FEWEST_JOBS:
                choose = choose_fewest_jobs
            case ReclaimRule.COST | ReclaimRule.NEAR_OPTIMUM:
                how = Reclaiming(
                    costs=self._costs,
                    model=self._model,
                    is_searching=self._rule == ReclaimRule.NEAR_OPTIMUM,
                    slack_s=slack_s,
                )
                return choose_nodes(self._occupancy, lent, wanted_count, how)
        return choose(self._occupancy, lent, wanted_count)
