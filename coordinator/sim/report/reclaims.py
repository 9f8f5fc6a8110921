"""The effect of reclaims on jobs, by decisions and by how delayed reclaims end."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec import Struct

from common.model import NodeName
from coordinator.engine.engine import Engine
from coordinator.engine.state.tables import JobEntry, LoanEntry
from coordinator.policies.contract.decisions import Decision, Preempt, Reclaim


class Toll(Struct, frozen=True, kw_only=True):
    """All reclaims of a run; None where there was none.

    gentle_ratio: nodes that were taken back without a preemption, over all that were.
    collateral_ratio: GPUs that preempted jobs left elsewhere, over the GPUs taken back: "collateral
        damage" (Lyra, EuroSys'23, section 7.3).
    """

    gentle_ratio: float | None = None
    collateral_ratio: float | None = None


class TollKeeper:
    """Listens to an engine's decisions, and watches how delayed reclaims end.

    `hear` must be called right after the event that made them, and `look` after each event: workers
    that were ordered to stop are then still there.
    """

    def __init__(self, engine: Engine) -> None:
        self._state = engine.state
        self._nodes = self._gentle = 0
        self._gpus = self._elsewhere_gpus = 0
        self._waiting: dict[NodeName, LoanEntry] = {}
        """Nodes that wait for their jobs to end; gentle until one of these is stopped."""

    def hear(self, decisions: Iterable[Decision]) -> None:
        """Count the reclaims among them, and what their victims held on other nodes."""
        made = list(decisions)
        reclaims = [decision for decision in made if isinstance(decision, Reclaim)]
        if not reclaims:
            return
        nodes = {decision.node for decision in reclaims}
        new = nodes - self._waiting.keys()  # the others are called a second time
        named = [d.job_id for d in made if isinstance(d, Preempt) and d.node is not None]
        victims = [self._state.jobs[job_id] for job_id in named]
        taken = nodes | self._waiting.keys()  # one that waits is taken back too, by and by
        harmed = _bases(victims) & taken
        self._nodes += len(new)
        self._gentle += len(new) - len(harmed)
        self._gpus += sum(len(self._state.nodes[name].gpus) for name in new)
        self._elsewhere_gpus += _gpus_off(victims, taken)
        for name in harmed & self._waiting.keys():
            del self._waiting[name]
        for name in new - harmed:
            if name in self._state.awaited:
                lease_id = self._state.nodes[name].homecoming.lease_id
                assert lease_id is not None  # it is lent
                self._waiting[name] = self._state.loans[lease_id]

    def look(self) -> None:
        """Count the jobs that were stopped after all, as the loans of useless waits show."""
        if not self._waiting:
            return
        awaited = self._state.awaited
        over = {
            name: loan
            for name, loan in self._waiting.items()
            if loan.realised_preemptions or name not in awaited
        }
        taken = set(self._waiting)
        for name in over:
            del self._waiting[name]
        vain = {name: loan.lease_id for name, loan in over.items() if loan.realised_preemptions}
        if not vain:
            return
        leases = set(vain.values())
        victims = [
            job
            for job in self._state.jobs.values()
            if job.loss is not None and job.loss.lease_id in leases
        ]
        harmed = vain.keys() | (_bases(victims) & taken)
        self._gentle -= len(harmed)
        self._elsewhere_gpus += _gpus_off(victims, taken)
        for name in harmed & self._waiting.keys():
            del self._waiting[name]

    def toll(self) -> Toll:
        """The total toll so far."""
        self.look()
        if not self._nodes:
            return Toll()
        return Toll(
            gentle_ratio=self._gentle / self._nodes,
            collateral_ratio=self._elsewhere_gpus / self._gpus,
        )


def _bases(jobs: Iterable[JobEntry]) -> set[NodeName]:
    """Nodes of jobs' base workers; other workers leave with a node without harm."""
    return {
        worker.node for job in jobs for worker in job.workers.values() if not worker.is_flexible
    }


def _gpus_off(jobs: Iterable[JobEntry], nodes: Collection[NodeName]) -> int:
    """GPUs that jobs hold on other nodes than these."""
    return sum(
        len(worker.gpu_uuids)
        for job in jobs
        for worker in job.workers.values()
        if worker.node not in nodes
    )
