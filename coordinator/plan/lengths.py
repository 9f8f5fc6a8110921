"""How long the steps of nodes take in a plan: as measured before, else by the settings."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from msgspec import Struct

from common.model import NodeName, ServiceName
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from coordinator.engine.state.tables import ClusterState, LoanEntry, NodeEntry
from coordinator.sim.run.cluster import Delays

REPORT_S = 1.0
"""An agent reports news within this; no reaction of a node falls into the instant of the change."""


class Lengths(Struct, frozen=True, kw_only=True):
    """The steps of a service's nodes, and where their lengths come from."""

    delays: Delays
    source: str


class NodeLengths:
    """The steps of every node of a cell, by its state before the change."""

    def __init__(self, state: ClusterState, settings: EngineSettings) -> None:
        self._by_service = {
            ServiceName(service.name): _of_service(service, state.loans.values())
            for service in settings.services
        }
        self._grace_s: dict[NodeName, float] = {}
        """The longest grace of a job on each node that saves."""
        for job in state.live():
            if job.spec.checkpoint.path is None:
                continue
            for worker in job.workers.values():
                known_s = self._grace_s.get(worker.node, 0.0)
                self._grace_s[worker.node] = max(known_s, job.spec.checkpoint.grace_s)

    def of(self, node: NodeEntry) -> Delays:
        """The lengths of one node's steps."""
        found = self._by_service.get(node.service) if node.service is not None else None
        if found is not None:
            return found.delays
        return Delays(report_s=REPORT_S, checkpoint_s=self._grace_s.get(node.name, 0.0))

    def source(self, service: ServiceName | None) -> str:
        """Where the lengths of a service's steps come from."""
        found = self._by_service.get(service) if service is not None else None
        return "the longest grace there" if found is None else found.source


def _of_service(service: ServiceSettings, loans: Iterable[LoanEntry]) -> Lengths:
    own = [loan for loan in loans if loan.service == service.name]
    returned = [loan.stage_durations_s for loan in own if loan.stage_durations_s]
    drain_s = _median(
        loan.begun_at_s - loan.decided_at_s for loan in own if loan.begun_at_s is not None
    )
    found = {
        name: _median(stages[name] for stages in returned if name in stages)
        for name in ("checkpoint", "exit", "device_free", "server_ready")
    }
    source = f"median of {len(returned)} returns" if returned else "settings of the service"
    return Lengths(
        delays=Delays(
            report_s=REPORT_S,
            stop_s=found["exit"] or 0.0,
            checkpoint_s=_known(found["checkpoint"], service.max_grace_s),
            drain_s=drain_s or 0.0,
            device_free_s=_known(found["device_free"], service.device_free_p99_s),
            warm_up_s=_known(found["server_ready"], service.warm_up_p99_s),
        ),
        source=source,
    )


def _known(measured_s: float | None, otherwise_s: float) -> float:
    return otherwise_s if measured_s is None else measured_s


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None
