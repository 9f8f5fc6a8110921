"""An engine and one node whose reports a test writes word by word."""

from __future__ import annotations

from collections.abc import Iterable

from common.messages import GpuHealth, RecoveryAction, WorkerPhase
from common.model import (
    GpuUuid,
    JobId,
    LeaseId,
    Mode,
    NodeName,
    NodeRole,
    Pool,
    RetrySpec,
    ServiceName,
)
from coordinator.engine.engine import Engine
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
    PassDue,
    WorkerFact,
)
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from coordinator.engine.state.tables import JobEntry, NodeEntry, WorkerEntry
from tests.builders import make_spec
from tests.engine.journalled import journalled

CHAT, CODE = ServiceName("chat"), ServiceName("code")
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


class Reporting:
    """The engine, the node's latest report, and a clock that each event moves by a second.

    What the engine holds is checked after each event.
    """

    def __init__(self, pool: Pool, *services: ServiceSettings) -> None:
        self.engine = Engine(settings(*services))
        self.now_s = 0.0
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

    def handle(self, event: Event) -> Outcome:
        """One event, a second after the one before it."""
        self.now_s += 1.0
        outcome = self.engine.handle(journalled(event), now_s=self.now_s)
        assert self.engine.check() == []
        return outcome

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
        job_id = JobId(name)
        self.handle(JobSubmitted(job_id=job_id, spec=spec, tenant="t", user="u"))
        return self.engine.state.jobs[job_id]

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
