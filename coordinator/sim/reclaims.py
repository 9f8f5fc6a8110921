"""What taking nodes back does to jobs, counted decision by decision. Must not change anything."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from coordinator.engine.engine import Engine
from coordinator.policies.decisions import Decision, Preempt, Reclaim


class Toll(Struct, frozen=True, kw_only=True):
    """All reclaims of a run; None where there was none.

    gentle_ratio: nodes that were taken back without a preemption, over all that were.
    collateral_ratio: GPUs that preempted jobs left elsewhere, over the GPUs taken back: "collateral
        damage" (Lyra, EuroSys'23, section 7.3).
    """

    gentle_ratio: float | None = None
    collateral_ratio: float | None = None


class TollKeeper:
    """Listens to an engine's decisions.

    `hear` must be called right after the event that made them: workers that were told to stop are
    then still there.
    """

    def __init__(self, engine: Engine) -> None:
        self._state = engine.state
        self._nodes = self._gentle = 0
        self._gpus = self._elsewhere_gpus = 0

    def hear(self, decisions: Iterable[Decision]) -> None:
        """Count the reclaims among them, and what their victims held on other nodes."""
        made = list(decisions)
        reclaims = [decision for decision in made if isinstance(decision, Reclaim)]
        if not reclaims:
            return
        nodes = {decision.node for decision in reclaims}
        victims = [d.job_id for d in made if isinstance(d, Preempt) and d.node is not None]
        harmed = {
            worker.node
            for job_id in victims
            for worker in self._state.jobs[job_id].workers.values()
            if not worker.is_flexible
        }
        self._nodes += len(nodes)
        self._gentle += len(nodes - harmed)
        self._gpus += sum(len(self._state.nodes[name].gpus) for name in nodes)
        self._elsewhere_gpus += sum(
            len(worker.gpu_uuids)
            for job_id in victims
            for worker in self._state.jobs[job_id].workers.values()
            if worker.node not in nodes
        )

    def toll(self) -> Toll:
        """All of it so far."""
        if not self._nodes:
            return Toll()
        return Toll(
            gentle_ratio=self._gentle / self._nodes,
            collateral_ratio=self._elsewhere_gpus / self._gpus,
        )
