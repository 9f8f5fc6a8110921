"""Nodes that refuse to start workers, and an engine that is told so: a helper of tests."""

from __future__ import annotations

from typing import NamedTuple

from common.faults import NODE_FAULT, Fault
from common.messages import WorkerPhase
from common.model import GpuUuid, JobId, JobSpec, NodeName, NodeRole, Pool, WorkerRange
from coordinator.engine.engine import Engine
from coordinator.engine.state.commands import Outcome
from coordinator.engine.state.events import (
    Event,
    GpuFact,
    JobSubmitted,
    LeaderStarted,
    NodeReported,
    OperatorAction,
    OperatorAsked,
    PassDue,
    TrespassFact,
    WorkerFact,
)
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import JobEntry, NodeEntry, WorkerEntry
from tests.engine.journalled import journalled
from tests.engine.reporting import GPUS


class Refusal(NamedTuple):
    """Why a node cannot run a worker."""

    error: str
    fault: Fault = Fault.NODE
    refused_for: str = ""

    def of(self, worker: WorkerEntry) -> WorkerFact:
        """What the node says of the worker."""
        return WorkerFact(
            key=worker.key,
            phase=WorkerPhase.REFUSED,
            error=self.error,
            fault=self.fault,
            refused_for=self.refused_for,
        )

    @property
    def told(self) -> str:
        """What people are told of it."""
        return f"{NODE_FAULT}: {self.error}" if self.fault.is_nodes else self.error


BROKEN = Refusal("cannot start the worker: systemd-run failed")
FAULT = BROKEN.told
SETTINGS = EngineSettings()
REST_S, BACK_OFF_S = SETTINGS.retry_backoff_max_s, SETTINGS.retry_backoff_s


class BlackHole:
    """Training nodes of two GPUs whose reports a test writes; those that are `bad` start no worker.

    What the engine holds is checked after each event.
    """

    def __init__(self, nodes: int = 2) -> None:
        self.engine = Engine(SETTINGS)
        self.now_s = 0.0
        self.bad = {"t0"}
        self.boots = {NodeName(f"t{number}"): "b1" for number in range(nodes)}
        self.handle(LeaderStarted(epoch=1, holder="t", settings=SETTINGS))
        for name in self.boots:
            self.report(name)

    def handle(self, event: Event) -> Outcome:
        """One event, a tenth of a second after the one before it."""
        self.now_s += 0.1
        outcome = self.engine.handle(journalled(event), now_s=self.now_s)
        assert self.engine.check() == []
        return outcome

    def node(self, name: str) -> NodeEntry:
        """A node as the engine sees it."""
        return self.engine.state.nodes[NodeName(name)]

    def report(
        self,
        name: str,
        *workers: WorkerFact,
        gpus: tuple[str, ...] = GPUS,
        trespassed: tuple[str, ...] = (),
    ) -> Outcome:
        """A node says what it holds. trespassed: GPUs on which process 77 sits, which it does not
        know."""
        known = self.engine.state.nodes.get(NodeName(name))
        return self.handle(
            NodeReported(
                node=NodeName(name),
                boot_id=self.boots[NodeName(name)],
                home_pool=Pool.TRAINING,
                role=NodeRole.TRAINING,
                epoch=1,
                generation=known.desired.generation if known else 0,
                gpus=tuple(GpuFact(GpuUuid(f"{name}-{uuid}"), "H100") for uuid in gpus),
                workers=workers,
                trespasses=tuple(
                    TrespassFact(77, GpuUuid(f"{name}-{uuid}")) for uuid in trespassed
                ),
            )
        )

    def submit(self, name: str, *, workers: int = 1, gpus: int = 2, most: int = 0) -> JobEntry:
        """A job that waits."""
        span = WorkerRange(min=workers, max=max(workers, most))
        spec = JobSpec(name=name, command=("x",), workers=span, gpus_per_worker=gpus)
        self.handle(JobSubmitted(job_id=JobId(name), spec=spec, tenant="t", user="u"))
        return self.engine.state.jobs[JobId(name)]

    def passes(self) -> None:
        """A scheduling pass, and what comes of it: gangs get ready, and begin or are refused."""
        self.handle(PassDue())
        self.say(WorkerPhase.READY)
        self.say(WorkerPhase.RUNNING)
        self.say(WorkerPhase.RUNNING)
        for name in self.boots:
            if not self._held(name):
                self.report(name)

    def _held(self, name: str) -> list[WorkerEntry]:
        workers = [w for job in self.engine.state.live() for w in job.workers.values()]
        return [worker for worker in workers if worker.node == name]

    def say(self, phase: WorkerPhase) -> None:
        """Every node says this of all that it holds."""
        for name in self.boots:
            held = self._held(name)
            if held:
                self.report(name, *(self.fact(worker, phase) for worker in held))

    def fact(self, worker: WorkerEntry, phase: WorkerPhase) -> WorkerFact:
        """What its node says of a worker that should be so far."""
        if worker.stop is not None:
            return WorkerFact(key=worker.key, phase=WorkerPhase.EXITED, stop_reason=worker.stop)
        if phase == WorkerPhase.RUNNING and worker.node in self.bad:
            return BROKEN.of(worker)
        return WorkerFact(key=worker.key, phase=phase, endpoint="h:1")

    def wait(self, seconds: float) -> None:
        """Time passes; then a pass."""
        self.now_s += seconds
        self.passes()

    def operate(self, action: OperatorAction, name: str = "") -> None:
        """An operator's order of a node, or of the cell."""
        self.handle(OperatorAsked(action=action, by="ops/ada", target=name))

    def told(self, subject: str) -> list[str]:
        """What was told of a node or a job."""
        return [line.what for line in self.engine.state.stories if line.subject == subject]
