"""An agent, or its node alone, on a model of its machine, and a coordinator that a test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agent.agent import Agent
from agent.core.node_lifecycle import Life
from agent.core.state import first_memory
from agent.driver import Node
from agent.telemetry.machine import Machine, ThisMachine
from agent.watchdog import Duties
from common import subjects
from common.bus import BusMessage
from common.messages import (
    DesiredReply,
    DesiredState,
    NodeReport,
    RenewReply,
    RenewRequest,
    StopOrder,
    WorkerOrder,
    WorkerPhase,
    WorkerReport,
    decode,
    encode,
)
from common.model import Lease, LeaseId, NodeRole, StopReason, WorkerKey
from common.natsrules import BusCounters
from tests.harness.fakes import FakeBus, FakeClock, FakeNetwork
from tests.harness.node.life import key, lease, order, settings
from tests.harness.node.models import (
    MemoryLedger,
    ModelLastResort,
    ModelMachine,
    ModelRunner,
    Stall,
)

ANSWER_S = 5.0
LIMIT_S = 120.0
"""Virtual time within which a node must have done what it was asked."""


Renewal = Callable[[RenewRequest], RenewReply | bytes | None]


def grant(request: RenewRequest) -> RenewReply:
    """A coordinator that prolongs every lease."""
    return RenewReply(lease_id=request.lease_id, nonce=request.nonce, is_granted=True, epoch=1)


class AgentHarness:
    """One agent that runs, and a coordinator that says what a test wants.

    Args:
        before: the harness of an agent that died; this one starts on its disk, machine and network.
    """

    def __init__(
        self, *, inference: bool = False, before: AgentHarness | None = None,
        boot_id: str = "boot-1", world: Machine | None = None, instance: str = "one",
        **changes: object,
    ) -> None:  # fmt: skip
        self.settings = settings(inference=inference, **changes)
        self.clock: FakeClock = before.clock if before else FakeClock()
        self.network: FakeNetwork = before.network if before else FakeNetwork()
        self.runner: ModelRunner = before.runner if before else ModelRunner()
        self.machine: ModelMachine = before.machine if before else ModelMachine(self.clock)
        self.last_resort: ModelLastResort = (
            before.last_resort if before else ModelLastResort(self.clock)
        )
        self.ledger: MemoryLedger = MemoryLedger(before.ledger.saved if before else b"")
        self.stall = Stall()
        for model in (self.runner, self.machine, self.last_resort, self.ledger):
            model.stall = self.stall
        memory = self.ledger.load() or first_memory(self.settings, boot_id)
        self.life = Life(self.settings, memory, boot_id=boot_id, now_s=self.clock.now_s())
        self.steps = 0
        self.node = Node(
            self.settings,
            self.life,
            ledger=self.ledger,
            clock=self.clock,
            runner=self.runner,
            sampler=self.machine,
            commands=self.machine,
            machine=world or ThisMachine(),
            duties=Duties(self.clock.now_s, progress=self._count_step),
        )
        self.bus = FakeBus(self.network, clock=self.clock)
        self.peer = FakeBus(self.network, clock=self.clock)
        self.bus_counters = BusCounters()
        self.agent = Agent(
            self.node,
            bus=self.bus,
            clock=self.clock,
            last_resort=self.last_resort,
            bus_counters=self.bus_counters,
            instance=instance,
        )
        self.reports: list[NodeReport] = []
        self.renewal: Renewal = grant
        self.renewals: list[RenewRequest] = []
        self.generation = memory.generation
        self._task: asyncio.Task[None] | None = None

    def _count_step(self) -> None:
        self.steps += 1

    # --- life ---------------------------------------------------------------------------------

    async def __aenter__(self) -> AgentHarness:
        cell = self.settings.cell
        await self.peer.subscribe(subjects.node_report(cell), self._on_report)
        await self.peer.subscribe(subjects.node_renew(cell), self._on_renew)
        self._task = asyncio.create_task(self.agent.run(), name="agent")
        await self.clock.settle()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def die(self) -> None:
        """The agent's process ends, whatever it was doing; its disk and machine stay."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for left in (self.bus, self.peer, self.node):
            await left.close()

    async def _on_report(self, message: BusMessage) -> None:
        self.reports.append(decode(message.data, NodeReport))

    async def _on_renew(self, message: BusMessage) -> None:
        request = decode(message.data, RenewRequest)
        self.renewals.append(request)
        answer = self.renewal(request)
        if answer is not None:
            await message.respond(answer if isinstance(answer, bytes) else encode(answer))

    # --- the coordinator's side ---------------------------------------------------------------

    async def want(
        self,
        role: NodeRole,
        *orders: WorkerOrder,
        lease: Lease | None = None,
        stops: tuple[StopOrder, ...] = (),
        acknowledged: tuple[WorkerKey, ...] = (),
        node: str = "n1",
        epoch: int = 1,
        generation: int | None = None,
    ) -> DesiredReply:
        """Send a desired state, a newer one unless said otherwise."""
        if generation is None:
            self.generation += 1
            generation = self.generation
        desired = DesiredState(
            node=node, epoch=epoch, generation=generation, role=role, workers=orders, lease=lease,
            stops=stops, acknowledged=acknowledged,
        )  # fmt: skip
        answer = await self.ask(subjects.node_desired(self.settings.cell, "n1"), encode(desired))
        return decode(answer, DesiredReply)

    async def lend(self, *, ttl_s: float = 30.0) -> None:
        """Bring an inference node on loan."""
        await self.until_role(NodeRole.SERVING)
        await self.want(NodeRole.ON_LOAN, lease=lease(ttl_s=ttl_s))
        await self.until_role(NodeRole.ON_LOAN)

    async def ask(self, subject: str, data: bytes) -> bytes:
        """A request to the agent."""
        answer = await self.peer.request(subject, data, timeout_s=ANSWER_S)
        await self.clock.settle()
        return answer

    # --- looking ------------------------------------------------------------------------------

    @property
    def report(self) -> NodeReport:
        """The last one."""
        return self.reports[-1]

    def worker(self, key: WorkerKey) -> WorkerReport | None:
        """What the last report says of a worker."""
        return next((worker for worker in self.report.workers if worker.key == key), None)

    def phase(self, key: WorkerKey) -> WorkerPhase | None:
        """Its phase in the last report."""
        worker = self.worker(key)
        return worker.phase if worker else None

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let virtual time pass until it is so."""
        await self.clock.advance_until(condition, limit_s=LIMIT_S)

    async def until_role(self, role: NodeRole) -> None:
        """Let virtual time pass until the node says that it has a role."""
        await self.until(lambda: bool(self.reports) and self.report.role == role)

    async def until_phase(self, key: WorkerKey, phase: WorkerPhase | None) -> None:
        """Let virtual time pass until the node says this of a worker; None is no word of it."""
        await self.until(lambda: bool(self.reports) and self.phase(key) == phase)


class NodeHarness(AgentHarness):
    """A node without an agent: a test calls its driver."""

    async def turn(self, count: int = 1, *, after_s: float = 1.0) -> None:
        """Look and do, so often."""
        for _ in range(count):
            await self.clock.advance(after_s)
            await self.node.sample()
            await self.node.step()
            await self.clock.settle()

    def accept(
        self,
        role: NodeRole,
        *orders: WorkerOrder,
        stops: tuple[StopOrder, ...] = (),
        acknowledged: tuple[WorkerKey, ...] = (),
        is_lent: bool = False,
    ) -> None:
        """A newer desired state."""
        self.generation += 1
        desired = DesiredState(
            node="n1", epoch=1, generation=self.generation, role=role, workers=orders, stops=stops,
            acknowledged=acknowledged, lease=lease() if is_lent else None,
        )  # fmt: skip
        assert self.life.accept(desired, now_s=self.clock.now_s()).is_accepted

    def role(self) -> NodeRole:
        """A call, so that a type checker does not think that it stays the same."""
        return self.life.memory.role

    def said(self, worker: WorkerKey | None = None) -> WorkerReport:
        """What the node would report of a worker."""
        wanted = worker or key()
        return next(report for report in self.life.workers.reports() if report.key == wanted)

    async def run_one(self, *orders: WorkerOrder) -> None:
        """Bring workers to RUNNING."""
        orders = orders or (order(),)
        self.accept(NodeRole.TRAINING, *orders)
        await self.turn(3)
        assert [self.said(one.key).phase for one in orders] == [WorkerPhase.RUNNING] * len(orders)

    def stop_one(self, *, grace_s: float = 9.0) -> None:
        """Order the default worker to stop."""
        stop = StopOrder(key=key(), reason=StopReason.CANCEL, grace_s=grace_s)
        self.accept(NodeRole.TRAINING, order(), stops=(stop,))

    async def lend_with(self, *orders: WorkerOrder, until_s: float = 1e6) -> None:
        """Bring an inference node on loan, with workers that run."""
        await self.turn(5)
        self.accept(NodeRole.ON_LOAN, *orders, is_lent=True)
        await self.turn()
        self.life.renewed(LeaseId("l1-1"), until_s)
        await self.turn(8)
        assert self.role() == NodeRole.ON_LOAN
        assert [self.said(one.key).phase for one in orders] == [WorkerPhase.RUNNING] * len(orders)
