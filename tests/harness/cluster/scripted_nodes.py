"""An engine and nodes whose reports a test writes: one in detail, training nodes, lent nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from common.faults import NODE_FAULT, Fault
from common.messages import GpuHealth, RecoveryAction, WorkerPhase
from common.model import (
    GpuUuid,
    JobId,
    JobSpec,
    Launcher,
    LeaseId,
    Mode,
    NodeName,
    NodeRole,
    Pool,
    RendezvousSpec,
    RetrySpec,
    ServiceName,
)
from coordinator.engine.engine import Engine
from coordinator.engine.record import Entry, Record, decode_record, encode_record
from coordinator.engine.state.commands import Outcome
from coordinator.engine.state.events import (
    Event,
    GpuFact,
    GpuFaultFact,
    JobSubmitted,
    LeaderStarted,
    LoadMeasured,
    LoanPassDue,
    NodeReported,
    OperatorAction,
    OperatorAsked,
    PassDue,
    TrespassFact,
    WorkerFact,
)
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from coordinator.engine.state.tables import JobEntry, NodeEntry, WorkerEntry
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import CHAT

E = TypeVar("E", bound=Event)


def journalled(event: E) -> E:
    """An event that was written and is read again; it is of the kind that it was."""
    record = Record(
        number=1, after=0, epoch=1, writer="w", entries=(Entry(0.0, event),), decisions=()
    )
    [entry] = decode_record(encode_record(record), sequence=1).entries
    assert isinstance(entry.event, type(event))
    return entry.event


CODE = ServiceName("code")
N = NodeName("n")
GPUS = ("GPU-0", "GPU-1")


def service(
    name: ServiceName = CHAT, *, reclaim_deadline_s: float = 600.0, mode: Mode = Mode.ACT
) -> ServiceSettings:
    """One that lends whatever its load does not need."""
    return ServiceSettings(
        name=name,
        capacity_per_node=10.0,
        mode=mode,
        min_serving=0,
        headroom_ratio=0.0,
        hold_off_s=0.0,
        reclaim_deadline_s=reclaim_deadline_s,
    )


def settings(*services: ServiceSettings) -> EngineSettings:
    """Of a cell with these services."""
    return EngineSettings(services=services, loan_period_s=30.0, lease_ttl_s=30.0)


class ScriptedEngine:
    """An engine, and a clock that each event moves; what the engine holds is checked after each."""

    step_s = 0.1

    def __init__(self, settings: EngineSettings) -> None:
        self.engine = Engine(settings)
        self.now_s = 0.0

    def handle(self, event: Event) -> Outcome:
        """One event, a step after the one before it."""
        self.now_s += self.step_s
        outcome = self.engine.handle(journalled(event), now_s=self.now_s)
        assert self.engine.check() == []
        return outcome

    def submitted(self, spec: JobSpec) -> JobEntry:
        """A job that waits, by the name in its spec."""
        job_id = JobId(spec.name)
        self.handle(JobSubmitted(job_id=job_id, spec=spec, tenant="t", user="u"))
        return self.engine.state.jobs[job_id]


class Reporting(ScriptedEngine):
    """An engine and the latest report of its one node; each event is a second after the last."""

    step_s = 1.0

    def __init__(self, pool: Pool, *services: ServiceSettings) -> None:
        super().__init__(settings(*services))
        self.pool = pool
        self.role = NodeRole.TRAINING if pool == Pool.TRAINING else NodeRole.SERVING
        self.service: ServiceName | None = None if pool == Pool.TRAINING else CHAT
        self.boot = "b1"
        self.gpus: tuple[str, ...] = GPUS
        self.health: dict[str, GpuHealth] = {}
        self.kinds: dict[str, str] = {}
        self.faults: dict[str, tuple[GpuFaultFact, ...]] = {}
        self.recovery: dict[str, RecoveryAction] = {}
        self.lease_id: LeaseId | None = None
        self.workers: tuple[WorkerFact, ...] = ()
        self.lead(*services)
        self.report()

    def lead(self, *services: ServiceSettings) -> Outcome:
        """Somebody begins to lead, with these services in its settings."""
        epoch = self.engine.state.epoch + 1
        return self.handle(LeaderStarted(epoch=epoch, holder="t", settings=settings(*services)))

    def report(self, *, is_current: bool = True) -> Outcome:
        """The node says how it is. is_current: it acts on the latest order."""
        state = self.engine.state
        known = state.nodes.get(N)
        return self.handle(
            NodeReported(
                node=N,
                boot_id=self.boot,
                home_pool=self.pool,
                role=self.role,
                epoch=state.epoch if is_current else 0,
                generation=known.desired.generation if known and is_current else 0,
                gpus=tuple(map(self._gpu, self.gpus)),
                service=self.service,
                lease_id=self.lease_id,
                workers=self.workers,
            )
        )

    def _gpu(self, uuid: str) -> GpuFact:
        return GpuFact(
            GpuUuid(uuid),
            self.kinds.get(uuid, "H100"),
            self.health.get(uuid, GpuHealth.OK),
            faults=self.faults.get(uuid, ()),
            recovery=self.recovery.get(uuid),
        )

    def reboot(
        self, pool: Pool, role: NodeRole, *, gpus: tuple[str, ...] = GPUS, boot: str = "b2"
    ) -> Outcome:
        """The machine comes back with other settings, or other GPUs, and holds nothing."""
        self.pool, self.role, self.gpus, self.boot = pool, role, gpus, boot
        self.service = None if pool == Pool.TRAINING else CHAT
        self.lease_id, self.workers = None, ()
        return self.report()

    def submit(
        self, name: str, *, gpus: int = 2, workers: tuple[int, int] = (1, 1), restarts: int = 0
    ) -> JobEntry:
        """A job that waits."""
        spec = make_spec(
            name, workers=workers, gpus_per_worker=gpus, retry=RetrySpec(max_restarts=restarts)
        )
        return self.submitted(spec)

    def passes(self) -> Outcome:
        """A scheduling pass."""
        return self.handle(PassDue())

    def loan_pass(self) -> Outcome:
        """A loan pass after a period without any load."""
        for _ in range(4):
            self.now_s += 10.0
            self.handle(LoadMeasured(service=CHAT, load=0.0))
        return self.handle(LoanPassDue())

    def lend(self) -> LeaseId:
        """The node is lent and begins its loan, with a job that wants it; its lease."""
        self.loan_pass()
        lease = self.node.lease
        assert lease is not None, self.engine.explain.why_kept(N)
        self.lease_id = lease.lease_id
        for self.role in (NodeRole.DRAINING, NodeRole.ON_LOAN):
            self.report()
        return lease.lease_id

    def run(self, job: JobEntry) -> None:
        """What a pass placed of a job on the node becomes ready, and runs."""
        self.passes()
        for phase in (WorkerPhase.READY, WorkerPhase.RUNNING):
            self.workers = facts(job.workers.values(), phase)
            self.report()

    @property
    def node(self) -> NodeEntry:
        """The node as the engine sees it."""
        return self.engine.state.nodes[N]

    def told(self) -> list[str]:
        """All that was told, in short."""
        return [line.what for line in self.engine.state.stories]


def facts(
    workers: Iterable[WorkerEntry], phase: WorkerPhase, *, error: str = ""
) -> tuple[WorkerFact, ...]:
    """What a node says of workers in one phase."""
    is_over = phase == WorkerPhase.EXITED
    return tuple(
        WorkerFact(
            key=worker.key,
            phase=phase,
            endpoint="h:1",
            exit_code=0 if is_over and not error else None,
            error=error,
        )
        for worker in workers
    )


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


class BlackHole(ScriptedEngine):
    """Training nodes of two GPUs whose reports a test writes; those in `bad` start no worker."""

    def __init__(self, nodes: int = 2) -> None:
        super().__init__(SETTINGS)
        self.bad = {"t0"}
        self.boots = {NodeName(f"t{number}"): "b1" for number in range(nodes)}
        self.handle(LeaderStarted(epoch=1, holder="t", settings=SETTINGS))
        for name in self.boots:
            self.report(name)

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
        span = (workers, max(workers, most))
        return self.submitted(make_spec(name, workers=span, gpus_per_worker=gpus))

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


TYPE = "H100"
T0 = NodeName("t0")


def _last(job: JobEntry) -> WorkerEntry:
    return max(job.workers.values(), key=lambda worker: worker.key.worker_index)


class Lending(ScriptedEngine):
    """Nodes of two GPUs whose reports a test writes: a training node on which a job runs for ever,
    and the nodes of a service without load."""

    def __init__(self, nodes: int = 3) -> None:
        self.settings = settings(service())
        super().__init__(self.settings)
        self.names = [NodeName(f"i{number}") for number in range(nodes)]
        self.handle(LeaderStarted(epoch=1, holder="t", settings=self.settings))
        for name in self.names:
            self.report(name, NodeRole.SERVING)
        self.report(T0, NodeRole.TRAINING)
        self.run(self.submit("busy"))
        self.quiet(40.0)

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
        return self.submitted(spec)

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
        return view.nodes.wants_no_loan
