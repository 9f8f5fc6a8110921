"""A harness for one node's life: say what is wanted and what is, read what it would do."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agent.core.node_lifecycle import Life
from agent.core.state import (
    Action,
    EndHook,
    Facts,
    HookKind,
    Memory,
    RunHook,
    WorkerFact,
    first_memory,
)
from agent.settings import AgentSettings, ServerSettings
from common.messages import (
    DesiredReply,
    DesiredState,
    GpuHealth,
    GpuProcess,
    GpuReport,
    InferenceReport,
    OrderPhase,
    StopOrder,
    WorkerOrder,
    WorkerPhase,
)
from common.model import (
    CheckpointSpec,
    GpuUuid,
    JobId,
    Lease,
    LeaseId,
    NodeRole,
    Pool,
    ServiceName,
    StopReason,
    WorkerKey,
)
from tests.harness.builders import make_spec

CHAT = ServiceName("chat")
SERVER = ServerSettings(
    health_url="http://127.0.0.1:1/health",
    metrics_url="http://127.0.0.1:1/metrics",
    start=("start",),
    stop=("stop",),
    route=("route",),
    unroute=("unroute",),
)


def settings(*, inference: bool = True, **changes: object) -> AgentSettings:
    """An agent's settings; `changes` replace fields."""
    base = AgentSettings(
        cell="c1",
        node="n1",
        home_pool=Pool.INFERENCE if inference else Pool.TRAINING,
        nats_url="nats://127.0.0.1:4222",
        state_dir="state",
        service=CHAT if inference else None,
        server=SERVER if inference else None,
    )
    return msgspec.structs.replace(base, **changes)


def key(index: int = 0, *, job: str = "j1", attempt: int = 1) -> WorkerKey:
    """A worker's key."""
    return WorkerKey(JobId(job), attempt, index)


def order(
    worker: WorkerKey | None = None,
    *,
    gpus: tuple[int, ...] = (0,),
    phase: OrderPhase = OrderPhase.RUN,
    worker_count: int = 1,
    grace_s: float = 30.0,
    stop_after_s: float | None = None,
) -> WorkerOrder:
    """An order for a worker of one process per GPU; for a rendezvous store, by a key of one."""
    return WorkerOrder(
        key=worker or key(),
        spec=make_spec(
            "train",
            workers=(1, 4),
            gpus_per_worker=max(1, len(gpus)),
            checkpoint=CheckpointSpec(grace_s=grace_s),
            stop_after_s=stop_after_s,
        ),
        tenant="ops",
        user="ann",
        submitted_at_s=0.0,
        gpu_uuids=tuple(GpuUuid(f"GPU-{index}") for index in gpus),
        gpu_type="H100",
        is_flexible=False,
        phase=phase,
        worker_count=worker_count,
        endpoint="n1:29500",
    )


def lease(name: str = "l1-1", *, ttl_s: float = 30.0) -> Lease:
    """A lease of the service."""
    return Lease(lease_id=LeaseId(name), service=CHAT, ttl_s=ttl_s)


def two_gpus(
    pids: Mapping[int, int],
    *,
    health: GpuHealth = GpuHealth.OK,
    sick: Mapping[int, GpuHealth] | None = None,
    memory_used_bytes: Mapping[int, int] | None = None,
) -> tuple[GpuReport, ...]:
    """Two GPUs; those in `pids` have a process. sick: those that are in another health."""
    sick = sick or {}
    return tuple(
        GpuReport(
            uuid=GpuUuid(f"GPU-{index}"),
            index=index,
            gpu_type="H100",
            memory_total_bytes=1000,
            health=sick.get(index, health),
            memory_used_bytes=None if index in sick else (memory_used_bytes or {}).get(index, 0),
            processes=(GpuProcess(pid=pids[index]),) if index in pids else (),
        )
        for index in range(2)
    )


class LifeHarness:
    """One node's life and a world that the test sets by its attributes."""

    def __init__(
        self, *, inference: bool = True, memory: Memory | None = None, boot_id: str = "boot-1",
        at_s: float = 0.0, **changes: object,
    ) -> None:  # fmt: skip
        self.settings = settings(inference=inference, **changes)
        self.memory = memory or first_memory(self.settings, boot_id)
        self.now_s = at_s
        self.life = Life(self.settings, self.memory, boot_id=boot_id, now_s=at_s)
        self.pids: dict[int, int] = {}
        self.sick: dict[int, GpuHealth] = {}
        self.memory_used_bytes: dict[int, int] = {}
        """Of 1000 bytes, by GPU."""
        self.strangers: tuple[int, ...] = ()
        """GPUs whose process is a stranger's for certain."""
        self.others: tuple[int, ...] = ()
        """GPUs whose process is alive and no worker's, while they change hands."""
        self.page: InferenceReport | None = None
        self.is_page_whole = True
        self.is_healthy = False
        self.workers: dict[WorkerKey, WorkerFact] = {}
        self.leaving: frozenset[WorkerKey] = frozenset()
        self.listening_ports: frozenset[int] = frozenset()
        self.contact_at_s: float | None = None
        self.sampled_at_s: float | None = None
        """When the newest sample of the GPUs was begun; None: each look has one of its own."""
        self.answers_hooks = True
        self.ends_hooks = True
        """Whether a command that is to end does so at once."""
        self.hooks: list[HookKind] = []
        self.ended_hooks: list[HookKind] = []
        self.generation = self.memory.generation

    def step(self, after_s: float = 1.0) -> list[Action]:
        """Let time pass, look, and answer the commands that are asked for."""
        self.now_s += after_s
        actions = self.life.step(
            Facts(
                now_s=self.now_s,
                gpus=two_gpus(self.pids, sick=self.sick, memory_used_bytes=self.memory_used_bytes),
                sampled_at_s=self.now_s if self.sampled_at_s is None else self.sampled_at_s,
                inference=self.page,
                is_page_whole=self.is_page_whole,
                is_healthy=self.is_healthy,
                statuses=tuple(self.workers.values()),
                leaving=self.leaving,
                listening_ports=self.listening_ports,
                contact_at_s=self.contact_at_s,
                trespassers=tuple(
                    (self.pids[gpu], GpuUuid(f"GPU-{gpu}")) for gpu in self.strangers
                ),
                others=frozenset(self.pids[gpu] for gpu in self.others),
            )
        )
        for action in actions:
            if isinstance(action, RunHook):
                self.hooks.append(action.kind)
                if self.answers_hooks:
                    self.answer(action.kind)
            elif isinstance(action, EndHook):
                self.ended_hooks.append(action.kind)
                if self.ends_hooks:
                    self.answer(action.kind, error="was ended")
        return actions

    def answer(self, kind: HookKind, error: str = "") -> None:
        """A command has ended; a server that was started or stopped is what it then is."""
        if not error and kind in (HookKind.START, HookKind.STOP):
            self.is_healthy = kind == HookKind.START
            self.page = page() if self.is_healthy else None
        self.life.hook_done(kind, error=error, now_s=self.now_s)

    def role(self) -> NodeRole:
        """A call, so that a type checker does not think that it stays the same."""
        return self.memory.role

    def steps(self, count: int = 8) -> list[Action]:
        """Several steps of a second each."""
        return [action for _ in range(count) for action in self.step()]

    def want(
        self,
        role: NodeRole,
        *orders: WorkerOrder,
        lease: Lease | None = None,
        stops: tuple[StopOrder, ...] = (),
        acknowledged: tuple[WorkerKey, ...] = (),
        reclaim_in_s: float | None = None,
        epoch: int = 1,
    ) -> DesiredReply:
        """A newer desired state."""
        self.generation += 1
        return self.life.accept(
            DesiredState(
                node="n1", epoch=epoch, generation=self.generation, role=role, lease=lease,
                workers=orders, stops=stops, acknowledged=acknowledged, reclaim_in_s=reclaim_in_s,
            ),
            now_s=self.now_s,
        )  # fmt: skip

    def runs(self, worker: WorkerKey, phase: WorkerPhase = WorkerPhase.RUNNING) -> None:
        """A shim says this of its worker."""
        self.workers[worker] = WorkerFact(key=worker, phase=phase)

    def ends(self, worker: WorkerKey, exit_code: int = 0, reason: StopReason | None = None) -> None:
        """A shim says that its worker exited."""
        self.workers[worker] = WorkerFact(
            key=worker, phase=WorkerPhase.EXITED, exit_code=exit_code, stop_reason=reason
        )

    def serve(self) -> None:
        """Bring an inference node to SERVING."""
        self.steps(4)
        assert self.role() == NodeRole.SERVING
        self.hooks.clear()

    def lend(self, *, until_s: float | None = None) -> None:
        """Bring it on loan."""
        self.want(NodeRole.ON_LOAN, lease=lease())
        self.step()
        self.life.renewed(LeaseId("l1-1"), until_s if until_s is not None else self.now_s + 1000.0)
        self.steps(6)
        assert self.role() == NodeRole.ON_LOAN


def page(*, running: float = 0, waiting: float = 0, success: float = 10) -> InferenceReport:
    """What the server's metrics page says."""
    return InferenceReport(running_count=running, waiting_count=waiting, success_total=success)
