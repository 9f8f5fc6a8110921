"""A small cell for engine tests: the real engine, pretend nodes, scripted decisions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from msgspec import UNSET
from msgspec.structs import replace

from common.messages import DesiredState
from common.model import (
    CheckpointSpec,
    JobId,
    JobState,
    Launcher,
    Mode,
    NodeName,
    NodeRole,
    Pool,
    RetrySpec,
    ServiceName,
)
from coordinator.engine.engine import Engine
from coordinator.engine.loans import lifecycle as loans_lifecycle
from coordinator.engine.state.commands import Outcome
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import GpuFact, LeaderStarted, NodeReported, PassDue
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from coordinator.engine.state.tables import JobEntry, NodeEntry, WorkerEntry
from coordinator.policies.contract.decisions import (
    Allocation,
    Decision,
    Loan,
    Placement,
    Reclaim,
    Start,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.registry import Policy
from coordinator.sim.run.cluster import Delays, NodeSpec
from coordinator.sim.run.runtime import RunRules
from coordinator.sim.run.simulation import Simulation, Submission
from tests.harness.builders import make_spec

CHAT = ServiceName("chat")


class EngineHarness:
    """Two training and two inference nodes of 8 GPUs, unless said otherwise."""

    def __init__(
        self,
        *,
        training: int = 2,
        inference: int = 2,
        delays: Delays | None = None,
        settings: EngineSettings | None = None,
        gpu_type: str = "H100",
        gpu_memory_bytes: int = 0,
        rules: RunRules | None = None,
        gang_ready_timeout_s: float | None = None,
    ) -> None:
        nodes = [
            NodeSpec(
                name=NodeName(f"t{index}"),
                home_pool=Pool.TRAINING,
                gpu_type=gpu_type,
                gpus=8,
                gpu_memory_bytes=gpu_memory_bytes,
            )
            for index in range(training)
        ] + [
            NodeSpec(
                name=NodeName(f"i{index}"),
                home_pool=Pool.INFERENCE,
                gpu_type=gpu_type,
                gpus=8,
                service=CHAT,
            )
            for index in range(inference)
        ]
        service = ServiceSettings(
            name=CHAT, capacity_per_node=10.0, mode=Mode.ACT, reclaim_deadline_s=60.0
        )
        settings = settings or EngineSettings(policy="fifo", services=(service,), min_runtime_s=0.0)
        if gang_ready_timeout_s is not None:
            settings = replace(settings, gang_ready_timeout_s=gang_ready_timeout_s)
        self.sim = Simulation(
            settings,
            nodes,
            delays=delays,
            rules=rules,
            check=True,
        )
        self.engine = self.sim.engine
        self._script: list[Decision] = []
        self._lend_script: list[Decision] = []
        self.engine.policy = Policy(
            name="scripted",
            description="what the test says",
            allocate=self._allocate,
            lend=self._lend,
        )
        self.deaf: set[NodeName] = set()
        for node in self.sim.nodes.values():
            node.obey = partial(self._deliver, node.spec.name, node.obey)  # type: ignore[method-assign]  # a lossy wire
        self.sim.run(until_s=0.0)

    def _deliver(
        self, name: NodeName, obey: Callable[[DesiredState], None], desired: DesiredState
    ) -> None:
        if name not in self.deaf:
            obey(desired)

    def toggle_deaf(self, name: NodeName) -> None:
        """Orders to a node are lost until the next call; then it is told what it should be."""
        if name not in self.deaf:
            self.deaf.add(name)
            return
        self.deaf.discard(name)
        if name in self.engine.state.nodes:
            self.sim.nodes[name].obey(self.engine.desired(name))

    def lose_journal(self) -> None:
        """A coordinator with an empty journal takes over; the nodes stay as they are."""
        fresh = Engine(self.engine.settings)
        fresh.policy = self.engine.policy
        epoch = self.engine.state.epoch + 1
        self.sim.engine = fresh
        self.engine = fresh
        self.sim.handle(LeaderStarted(epoch=epoch, holder="new"))
        for node in self.sim.nodes.values():
            node.report_soon()
        self.wait(2.0)

    def workers_on(self, name: NodeName) -> list[tuple[JobEntry, WorkerEntry]]:
        """Live workers of a node as the engine sees them."""
        context = Context(self.engine.state, self.engine.settings, self.engine.state.now_s)
        node = self.engine.state.nodes.get(name)
        return [] if node is None else loans_lifecycle.workers_on(context, node)

    def _allocate(self, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        decisions, self._script = tuple(self._script), []
        return Allocation(decisions=decisions, memory=memory)

    def _lend(self, snapshot: ClusterSnapshot) -> tuple[Decision, ...]:
        decisions, self._lend_script = tuple(self._lend_script), []
        return decisions

    def decide(self, *decisions: Decision, lend: bool = False) -> None:
        """Let the next pass decide this, and run until the instant is over."""
        (self._lend_script if lend else self._script).extend(decisions)
        call: Callable[[], None] = self.sim.ask_loan_pass if lend else self.sim.ask_pass
        call()
        self.settle()

    def script(self, outcome: Outcome) -> None:
        """Let the next pass propose what an earlier run committed and refused."""
        proposed = [*outcome.decisions, *(refused.decision for refused in outcome.refused)]
        self._script = [d for d in proposed if not isinstance(d, Loan | Reclaim)]
        self._lend_script = [d for d in proposed if isinstance(d, Loan | Reclaim)]

    def refusals(self, *decisions: Decision) -> list[str]:
        """Why a pass that decides this is refused parts of it."""
        self._script.extend(decisions)
        outcome = self.engine.handle(PassDue(), now_s=self.sim.loop.now_s)
        return [refused.why for refused in outcome.refused]

    def settle(self) -> None:
        """Run everything that happens at this instant."""
        self.sim.loop.run(until_s=self.sim.loop.now_s)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.sim.loop.run(until_s=self.sim.loop.now_s + seconds)

    def submit(
        self,
        name: str = "j",
        *,
        workers: tuple[int, int] = (1, 1),
        gpus_per_worker: int = 8,
        work_s: float = 1000.0,
        max_restarts: int = 0,
        launcher: Launcher = Launcher.NONE,
        stop_after_s: float | None = None,
        grace_s: float = 30.0,
        path: str | None = None,
        tenant: str = "trace",
        require: tuple[str, ...] = (),
        exclude: tuple[str, ...] = (),
        time_limit_s: float | None = None,
    ) -> JobEntry:
        """A job that waits; elastic and under torchrun it has a rendezvous store.

        path: where it saves when it is asked to stop; None: it never does.
        """
        spec = make_spec(
            name,
            workers=workers,
            gpus_per_worker=gpus_per_worker,
            expected_runtime_s=work_s / workers[0],
            retry=RetrySpec(max_restarts=max_restarts),
            launcher=launcher,
            stop_after_s=stop_after_s,
            checkpoint=CheckpointSpec(grace_s=grace_s, path=path),
            require=require or UNSET,
            exclude=exclude or UNSET,
            time_limit_s=time_limit_s,
        )
        job_id = JobId(name)
        now_s = self.sim.loop.now_s
        self.sim.submit(
            [Submission(at_s=now_s, job_id=job_id, spec=spec, work_s=work_s, tenant=tenant)]
        )
        self.settle()
        return self.engine.state.jobs[job_id]

    def start(self, job: JobEntry, *nodes: str, flexible: tuple[str, ...] = ()) -> None:
        """Place one base worker per named node, and flexible ones."""
        self.decide(start(job, *nodes, flexible=flexible))

    def node(self, name: str) -> NodeEntry:
        """A node as the engine sees it."""
        return self.engine.state.nodes[NodeName(name)]

    def report(self, name: str, role: NodeRole) -> NodeReported:
        """What a node in this role says that knows the latest order and holds no lease."""
        node = self.node(name)
        return NodeReported(
            node=node.name,
            boot_id=node.boot_id,
            home_pool=node.home_pool,
            role=role,
            epoch=self.engine.state.epoch,
            generation=node.desired.generation,
            gpus=tuple(GpuFact(slot.uuid, slot.gpu_type) for slot in node.gpus),
            service=node.service,
        )


def state(job: JobEntry) -> JobState:
    """The state as it is now; a call, because type checkers think that an attribute stays."""
    return job.state


def start(job: JobEntry, *nodes: str, flexible: tuple[str, ...] = ()) -> Start:
    """One base worker per named node."""
    placements = [Placement(node=NodeName(node), worker_count=1) for node in nodes]
    placements += [
        Placement(node=NodeName(node), worker_count=1, is_flexible=True) for node in flexible
    ]
    return Start(
        job_id=job.job_id,
        gpu_type="H100",
        placements=tuple(placements),
        estimated_runtime_s=1.0,
        estimate_source="test",
        reason="the test says so",
    )
