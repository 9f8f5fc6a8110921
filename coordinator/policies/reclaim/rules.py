"""The rules by which lent nodes are taken back, by name. Must not know why they are wanted."""

from __future__ import annotations

from enum import StrEnum

from coordinator.policies.decisions import Decision
from coordinator.policies.reclaim.baselines import choose_at_random, choose_fewest_jobs
from coordinator.policies.reclaim.costs import CostModel, Costs
from coordinator.policies.reclaim.occupancy import Occupancy, lent_nodes
from coordinator.policies.reclaim.orders import carry_out
from coordinator.policies.reclaim.reclaiming import Choice, Reclaiming, choose_nodes
from coordinator.policies.services import ServiceView
from coordinator.policies.snapshot import ClusterSnapshot, NodeView


class ReclaimRule(StrEnum):
    """Which lent nodes go home, and so who is preempted."""

    COST = "cost"
    """Least preemption cost, node by node: the paper's greedy (`greedy`)."""
    NEAR_OPTIMUM = "near-optimum"
    """Never more than by the greedy, and near what is possible at all (`search`)."""
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
        """A recalled service gets all its nodes, and waits for nobody's end."""
        lent = lent_nodes(self._snapshot, service.name)
        return self._order(service, lent, len(lent), 0.0, f"{service.name} was recalled")

    def __call__(
        self, service: ServiceView, wanted_count: int, because: str
    ) -> tuple[Decision, ...]:
        """So many nodes go home: workers released, jobs waited for or stopped, as costs least.

        because: why the service wants them, with numbers.
        """
        slack_s = 0.0
        if self._waits_for_finish:
            slack_s = max(0.0, service.reclaim_deadline_s - service.return_s)
        lent = lent_nodes(self._snapshot, service.name)
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
