"""A whole agent on a model of its machine: ledger, workers, GPUs, server and bus in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from agent.agent import Agent
from agent.duties import Duties
from agent.life import Life
from agent.machine import Machine, ThisMachine
from agent.node import Node, Sample
from agent.runner import Refusal, WorkerStatus
from agent.state import Memory, first_memory
from common import subjects
from common.bus import BusMessage
from common.errors import ConfigError, Unavailable
from common.messages import (
    DesiredReply,
    DesiredState,
    GpuHealth,
    GpuReport,
    InferenceReport,
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
from common.model import Lease, NodeRole, StopReason, WorkerKey
from common.natsrules import BusCounters
from tests.agent.bench import lease, page, settings, two_gpus
from tests.agent.stall import Stall
from tests.fakes import FakeBus, FakeClock, FakeNetwork

ANSWER_S = 5.0
LIMIT_S = 120.0
"""Virtual time within which a node must have done what it was asked."""


class MemoryLedger:
    """`LedgerPort` in memory: what a new agent would find on disk."""

    def __init__(self, saved: bytes = b"") -> None:
        self.saved = saved
        self.stall = Stall()
        self.is_full = False

    def load(self) -> Memory | None:
        return msgspec.msgpack.decode(self.saved, type=Memory) if self.saved else None

    async def save(self, memory: Memory) -> None:
        await self.stall.at("ledger")
        if self.is_full:
            raise Unavailable("ledger: no space left on device")
        self.saved = msgspec.msgpack.encode(memory)

    def close(self) -> None:
        pass


class ModelRunner:
    """`WorkerRunner` whose workers run until they are stopped or a test ends them."""

    def __init__(self) -> None:
        self.known: dict[WorkerKey, WorkerStatus] = {}
        self.kept_logs: dict[WorkerKey, bytes] = {}
        self.calls: list[tuple[str, WorkerKey]] = []
        self.stops: list[tuple[WorkerKey, StopReason, float]] = []
        self.contacts_s: list[float] = []
        self.refusal: Refusal | None = None
        self.is_deaf = False
        """While set, workers do not end when they are told to."""
        self.watch: Callable[[str, WorkerKey], None] = lambda _name, _key: None
        """Called before each call that acts."""
        self.failures: list[Exception] = []
        """Raised by the next calls that act, one each."""
        self.stall = Stall()

    async def _call(self, name: str, key: WorkerKey) -> None:
        self.watch(name, key)
        self.calls.append((name, key))
        if self.failures:
            raise self.failures.pop(0)
        await self.stall.at(name, key.job_id)

    async def start(self, order: WorkerOrder, *, endpoint: str) -> None:
        await self._call("start", order.key)
        self.known.setdefault(order.key, running(order.key))

    async def stop(self, key: WorkerKey, reason: StopReason, grace_s: float) -> None:
        await self._call("stop", key)
        self.stops.append((key, reason, grace_s))
        if key in self.known and not self.is_deaf:
            self.end(key, exit_code=-15, reason=reason)

    async def resize(self, key: WorkerKey, worker_count: int) -> None:
        await self._call("resize", key)

    async def pause(self, key: WorkerKey, *, is_suspended: bool) -> None:
        await self._call("suspend" if is_suspended else "resume", key)
        phase = WorkerPhase.SUSPENDED if is_suspended else WorkerPhase.RUNNING
        self.known[key] = msgspec.structs.replace(self.known[key], phase=phase)

    def contacted(self, at_s: float) -> None:
        self.contacts_s.append(at_s)

    async def statuses(self) -> tuple[WorkerStatus, ...]:
        await self.stall.at("statuses")
        return tuple(self.known[key] for key in sorted(self.known))

    async def forget(self, key: WorkerKey) -> None:
        await self._call("forget", key)
        self.known.pop(key, None)

    async def log_tail(self, key: WorkerKey, max_bytes: int) -> bytes:
        if "/" in key.job_id:
            raise ConfigError(f"key: {key}, expected a token and two counts")
        if key not in self.kept_logs:
            raise Unavailable("it never ran here")
        return self.kept_logs[key][-max_bytes:]

    async def adopt(self) -> tuple[WorkerKey, ...]:
        return tuple(self.known)

    async def check_reserve(self, order: WorkerOrder) -> Refusal | None:
        await self._call("check", order.key)
        return self.refusal

    def end(self, key: WorkerKey, *, exit_code: int = 0, reason: StopReason | None = None) -> None:
        """A worker exits."""
        self.known[key] = WorkerStatus(
            key=key, phase=WorkerPhase.EXITED, pid=0, exit_code=exit_code, stop_reason=reason
        )


def running(key: WorkerKey, pid: int = 4000) -> WorkerStatus:
    """A worker that runs."""
    return WorkerStatus(key=key, phase=WorkerPhase.RUNNING, pid=pid)


class ModelMachine:
    """`Sampler` and `Commands`: two GPUs and an inference server that obeys its commands."""

    def __init__(self, clock: FakeClock) -> None:
        self.is_healthy = False
        self.health = GpuHealth.OK
        self.is_blind = False
        """While set, the GPUs do not answer."""
        self.pids: dict[int, int] = {}
        """GPU processes, by the index of their GPU."""
        self.xids: tuple[int, ...] = ()
        """What the next look finds at the first GPU, and no later one."""
        self.requests = 0.0
        self.commands: list[str] = []
        self.variables: dict[str, str] = {}
        """What the last command was told."""
        self.gate: asyncio.Event | None = None
        """Commands end when it is set."""
        self.left_behind = ""
        """Who does not end of a command that is ended; empty: all do."""
        self.stall = Stall()
        self.command_errors: list[str] = []
        """What the next commands say, one each; then they succeed."""
        self._clock = clock

    async def sample(self) -> Sample:
        await self.stall.at("sample")
        return Sample(
            began_at_s=self._clock.now_s(),
            gpus=None if self.is_blind else self.gpus(),
            inference=self._page(),
            is_healthy=self.is_healthy,
        )

    def _page(self) -> InferenceReport | None:
        return page(running=self.requests) if self.is_healthy else None

    def gpus(self) -> tuple[GpuReport, ...]:
        xids, self.xids = self.xids, ()
        first, *others = two_gpus(self.pids, health=self.health)
        return (msgspec.structs.replace(first, xids=xids), *others)

    async def close(self) -> None:
        self.commands.append("closed")

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, variables: Mapping[str, str]
    ) -> str:
        self.commands.append(argv[0])
        self.variables = dict(variables)
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError as ended:
            self.commands.append("cancelled")
            if self.left_behind:
                ended.add_note(self.left_behind)
            raise
        error = self.command_errors.pop(0) if self.command_errors else ""
        if not error and argv[0] in ("start", "stop"):
            self.is_healthy = argv[0] == "start"
        return error


class ModelLastResort:
    """`LastResort` that keeps when it fires; a test moves the time."""

    def __init__(self, clock: FakeClock) -> None:
        self.fires_at_s: float | None = None
        self.arm_count = 0
        self.failures: list[Exception] = []
        self.stall = Stall()
        self.fired_count = 0
        self._clock = clock

    def is_armed(self) -> bool:
        """Whether it would still fire."""
        return self.fires_at_s is not None and self._clock.now_s() < self.fires_at_s

    async def arm(self, after_s: float) -> None:
        await self.stall.at("arm")
        self.arm_count += 1
        if self.failures:
            raise self.failures.pop(0)
        self._count_if_fired()
        self.fires_at_s = self._clock.now_s() + after_s

    async def disarm(self) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self._count_if_fired()
        self.fires_at_s = None

    def _count_if_fired(self) -> None:
        self.fired_count += self.fires_at_s is not None and not self.is_armed()


Renewal = Callable[[RenewRequest], RenewReply | bytes | None]


def grant(request: RenewRequest) -> RenewReply:
    """A coordinator that prolongs every lease."""
    return RenewReply(lease_id=request.lease_id, nonce=request.nonce, is_granted=True, epoch=1)


class AgentHouse:
    """One agent that runs, and a coordinator that says what a test wants.

    Args:
        before: the house of an agent that died; this one starts on its disk, machine and network.
    """

    def __init__(
        self, *, inference: bool = False, before: AgentHouse | None = None, boot_id: str = "boot-1",
        world: Machine | None = None, instance: str | None = None,
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

    async def __aenter__(self) -> AgentHouse:
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
