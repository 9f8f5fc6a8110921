"""Nodes of a service that are lent, beside one of training that is full: a helper of tests."""

from __future__ import annotations

from common.faults import Fault
from common.messages import WorkerPhase
from common.model import (
    GpuUuid,
    JobId,
    Launcher,
    LeaseId,
    NodeName,
    NodeRole,
    Pool,
    RendezvousSpec,
)
from coordinator.engine.engine import Engine
from coordinator.engine.state.commands import Outcome
from coordinator.engine.state.events import (
    Event,
    GpuFact,
    JobSubmitted,
    LeaderStarted,
    LoadMeasured,
    LoanPassDue,
    NodeReported,
    PassDue,
    WorkerFact,
)
from coordinator.engine.state.tables import JobEntry, NodeEntry, WorkerEntry
from tests.builders import make_spec
from tests.engine.black_hole import Refusal
from tests.engine.journalled import journalled
from tests.engine.reporting import CHAT, GPUS, service, settings

TYPE = "H100"
T0 = NodeName("t0")


def _last(job: JobEntry) -> WorkerEntry:
    return max(job.workers.values(), key=lambda worker: worker.key.worker_index)


class Lending:
    """Nodes of two GPUs whose reports a test writes: one of training, on which a job runs for ever,
    and those of a service that nobody asks for anything.

    What the engine holds is checked after each event.
    """

    def __init__(self, nodes: int = 3) -> None:
        self.settings = settings(service())
        self.engine = Engine(self.settings)
        self.now_s = 0.0
        self.names = [NodeName(f"i{number}") for number in range(nodes)]
        self.handle(LeaderStarted(epoch=1, holder="t", settings=self.settings))
        for name in self.names:
            self.report(name, NodeRole.SERVING)
        self.report(T0, NodeRole.TRAINING)
        self.run(self.submit("busy"))
        self.quiet(40.0)

    def handle(self, event: Event) -> Outcome:
        """One event, a tenth of a second after the one before it."""
        self.now_s += 0.1
        outcome = self.engine.handle(journalled(event), now_s=self.now_s)
        assert self.engine.check() == []
        return outcome

    def node(self, name: NodeName) -> NodeEntry:
        """A node as the engine sees it."""
        return self.engine.state.nodes[name]

    def report(self, name: NodeName, role: NodeRole, *workers: WorkerFact) -> None:
        """A node says what it is and holds; it acts on the latest order."""
        known = self.engine.state.nodes.get(name)
        lease: LeaseId | None = known.lease.lease_id if known and known.lease else None
        self.handle(
            NodeReported(
                node=name,
                boot_id="b1",
                home_pool=Pool.TRAINING if name == T0 else Pool.INFERENCE,
                role=role,
                epoch=1,
                generation=known.desired.generation if known else 0,
                gpus=tuple(GpuFact(GpuUuid(f"{name}-{uuid}"), TYPE) for uuid in GPUS),
                service=None if name == T0 else CHAT,
                lease_id=lease,
                workers=workers,
            )
        )

    def submit(
        self, name: str, *, workers: int = 1, most: int = 0, launcher: Launcher = Launcher.NONE
    ) -> JobEntry:
        """A job of two GPUs a worker that waits; under torchrun it has a rendezvous store."""
        is_torchrun = launcher == Launcher.TORCHRUN
        spec = make_spec(
            name,
            workers=(workers, max(workers, most)),
            gpus_per_worker=2,
            launcher=launcher,
            rendezvous=RendezvousSpec(command=("store",) if is_torchrun else ()),
            expected_runtime_s=1e6,
        )
        self.handle(JobSubmitted(job_id=JobId(name), spec=spec, tenant="t", user="u"))
        return self.engine.state.jobs[JobId(name)]

    def lends(self) -> list[NodeName]:
        """Nodes lent by a loan pass now; each of them begins its loan."""
        self.handle(LoadMeasured(service=CHAT, load=0.0))
        before = {name for name in self.names if self.node(name).lease is not None}
        self.handle(LoanPassDue())
        fresh = [n for n in self.names if self.node(n).lease is not None and n not in before]
        for name in fresh:
            for role in (NodeRole.DRAINING, NodeRole.ON_LOAN):
                self.report(name, role)
        return fresh

    def quiet(self, seconds: float) -> None:
        """Time passes without any load, with the passes that the engine asks for."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(self.now_s + 10.0, until_s)
            self.handle(LoadMeasured(service=CHAT, load=0.0))
            self.handle(PassDue())

    def says(
        self, job: JobEntry, phase: WorkerPhase, error: str = "", fault: Fault = Fault.NONE
    ) -> NodeName:
        """What its node says of the worker of a job that was placed last; which node that is."""
        worker = _last(job)
        fact = WorkerFact(key=worker.key, phase=phase, endpoint="h:1", error=error, fault=fault)
        self._hear(worker, fact)
        return worker.node

    def _hear(self, worker: WorkerEntry, fact: WorkerFact) -> None:
        role = NodeRole.TRAINING if worker.node == T0 else NodeRole.ON_LOAN
        self.report(worker.node, role, fact)
        if fact.phase == WorkerPhase.REFUSED:
            self.report(worker.node, role)

    def run(self, job: JobEntry) -> NodeName:
        """A pass places a worker of a job, and it runs; where."""
        self.handle(PassDue())
        self.says(job, WorkerPhase.READY)
        return self.says(job, WorkerPhase.RUNNING)

    def run_all(self, job: JobEntry) -> None:
        """A pass places the workers of a job and its store, one a node, and they run."""
        self.handle(PassDue())
        for phase in (WorkerPhase.READY, WorkerPhase.RUNNING):
            for worker in job.workers.values():
                held = [worker, job.store] if worker.key.worker_index == 0 else [worker]
                facts = [
                    WorkerFact(key=one.key, phase=phase, endpoint="h:1") for one in held if one
                ]
                self.report(worker.node, NodeRole.ON_LOAN, *facts)

    def refuse(self, job: JobEntry, why: Refusal) -> NodeName:
        """A pass places a worker of a job, which its node refuses; which node that was."""
        self.handle(PassDue())
        worker = _last(job)
        self._hear(worker, why.of(worker))
        return worker.node

    def held_until_s(self, job: JobEntry) -> float:
        """Up to when no further node is lent for a job; the engine wakes then at the latest."""
        until_s = job.retry.no_loan_until_s
        assert until_s is not None
        wake_at_s = self.handle(PassDue()).wake_at_s
        assert wake_at_s is not None
        assert wake_at_s <= until_s
        return until_s

    def seen(self, job: JobEntry) -> bool:
        """Whether policies are told that no node is to be lent for it."""
        (view,) = (one for one in self.engine.snapshot().jobs if one.job_id == job.job_id)
        return view.wants_no_loan
