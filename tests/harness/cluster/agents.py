"""Agents that speak the wire's messages: the simulator's pretend nodes behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from msgspec import UNSET

from common import subjects
from common.bus import BusMessage
from common.messages import (
    CollectorReport,
    DesiredReply,
    DesiredState,
    GpuReport,
    InferenceReport,
    LedgerReply,
    LedgerRequest,
    LogReply,
    LogRequest,
    NodeReport,
    RenewReply,
    RenewRequest,
    WorkerPhase,
    WorkerReport,
    decode,
    encode,
)
from common.model import (
    Checkpoint,
    Lease,
    LeaseId,
    NodeRole,
    ServiceName,
    WorkerKey,
)
from coordinator.engine.state.events import NodeReported
from coordinator.sim.run.cluster import Delays, NodeSpec, PretendNode
from coordinator.sim.run.loop import Loop
from tests.harness.fakes import (
    FakeBus,
    FakeClock,
    FakeNetwork,
)

CELL = "c"
CHAT = ServiceName("chat")
LEASE_TTL_S = 30.0
DELAYS = Delays(ready_s=0.2, start_s=0.1, stop_s=0.3, drain_s=1.0, device_free_s=0.5, warm_up_s=2.0)
STEP_S = 0.25
LIMIT_S = 120.0
"""Virtual time that a test waits for what must come."""

T = TypeVar("T")


async def meanwhile(clock: FakeClock, awaitable: Awaitable[T]) -> T:
    """The result of a request while virtual time passes."""
    task = asyncio.ensure_future(awaitable)
    await clock.advance_until(task.done, limit_s=LIMIT_S)
    return task.result()


class Agent:
    """A pretend node behind the wire; persists nothing, reports each second.

    Args:
        boot_id: of its machine; None is the pretend node's own.
        instance: which start of an agent this is.
        up_s: how long its machine has been up.
        delays: how long its own life takes it.
    """

    def __init__(
        self,
        network: FakeNetwork,
        clock: FakeClock,
        spec: NodeSpec,
        *,
        boot_id: str | None = None,
        instance: str = "one",
        up_s: float = 0.0,
        delays: Delays = DELAYS,
    ) -> None:
        self.name = spec.name
        self.boot_id = boot_id
        self.instance = instance
        self.spec = spec
        self.bus = FakeBus(network, clock=clock)
        self.epoch = 0
        self.generation = 0
        self.desired: list[DesiredState] = []
        """Every desired state that it accepted."""
        self.refused: list[DesiredState] = []
        self.started: list[WorkerKey] = []
        """Every worker that ever began to compute."""
        self.load_per_s = 0.0
        self.page_error = ""
        """Why the metrics page of its server cannot be read; empty while it can."""
        self.checkpoint: Checkpoint | None = None
        """What each of its workers has saved."""
        self.may_tell_ledger = asyncio.Event()
        self.may_tell_ledger.set()
        self.is_silent = False
        self._clock = clock
        self._loop = Loop()
        self._loop.now_s = clock.now_s()
        self._facts: NodeReported | None = None
        self._boot = ""
        """The boot of its machine that it reported last, whose clock numbers its reports."""
        self._up_s = up_s - clock.now_s()
        self._sequence = int(up_s * 1000)
        self._nonce = 0
        self._served = 0.0
        self._task: asyncio.Task[None] | None = None
        self.log_text = "step 1\n"
        self.node = PretendNode(
            spec,
            self._loop,
            delays,
            tell=self._tell,
            started=lambda order: self.started.append(order.key),
            stopped=lambda _: None,
        )

    async def start(self) -> None:
        """Answer requests and report."""
        await self.bus.subscribe(subjects.node_desired(CELL, self.name), self._on_desired)
        await self.bus.subscribe(subjects.node_ledger(CELL, self.name), self._on_ledger)
        await self.bus.subscribe(subjects.node_logs(CELL, self.name), self._on_logs)
        self._task = asyncio.create_task(self._live(), name=f"agent {self.name}")

    async def stop(self) -> None:
        """Its process is gone; workers are not."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.bus.close()

    async def _live(self) -> None:
        steps = 0
        while True:
            await self._clock.sleep(STEP_S)
            self._loop.run(until_s=self._clock.now_s())
            steps += 1
            if steps % 4 == 0:
                self._served += self.load_per_s
                await self.report()

    async def report(self) -> None:
        """Say what is, now."""
        self.node.report_soon()
        self._loop.run(until_s=self._clock.now_s())
        if not self.is_silent and self._facts is not None:
            await self.bus.publish(
                subjects.node_report(CELL, self.name), encode(self.make_report())
            )

    def make_report(self) -> NodeReport:
        """The report of this moment."""
        facts = self._facts
        assert facts is not None
        if facts.boot_id != self._boot:
            if self._boot:
                self._up_s, self._sequence = -self._clock.now_s(), 0
            self._boot = facts.boot_id
        up_s = self._up_s + self._clock.now_s()
        self._sequence = max(self._sequence + 1, int(up_s * 1000))
        held = {order.key: order for order in self.node.orders()}
        began_ago_s = self.node.began_ago_s()
        is_serving = facts.role == NodeRole.SERVING
        return NodeReport(
            node=self.name,
            boot_id=self.boot_id or facts.boot_id,
            instance=self.instance,
            period_s=1.0,
            sequence=self._sequence,
            home_pool=facts.home_pool,
            role=facts.role,
            epoch=max(self.epoch, facts.epoch),
            generation=facts.generation,
            service=facts.service,
            lease=None
            if facts.lease_id is None
            else Lease(lease_id=facts.lease_id, service=CHAT, ttl_s=LEASE_TTL_S),
            gpus=tuple(
                GpuReport(uuid=gpu.uuid, index=index, gpu_type=gpu.gpu_type, memory_total_bytes=1)
                for index, gpu in enumerate(facts.gpus)
            ),
            inference=InferenceReport(
                running_count=0.0, waiting_count=0.0, success_total=self._served
            )
            if is_serving and not self.page_error
            else None,
            collectors=(
                CollectorReport(
                    name="inference",
                    is_success=not self.page_error,
                    duration_s=0.0,
                    error=self.page_error,
                ),
            ),
            workers=tuple(
                WorkerReport(
                    key=worker.key,
                    phase=worker.phase,
                    gpu_uuids=held[worker.key].gpu_uuids,
                    endpoint=worker.endpoint,
                    exit_code=worker.exit_code,
                    stop_reason=worker.stop_reason,
                    ended_ago_s=worker.ended_ago_s,
                    checkpoint=self.checkpoint,
                    running_s=max(0.0, began_ago_s.get(str(worker.key), 0.0) - worker.ended_ago_s),
                )
                for worker in facts.workers
                if worker.key in held
            ),
        )

    def running(self) -> list[WorkerKey]:
        """Workers that compute."""
        return self.node.keys(WorkerPhase.RUNNING)

    async def renew(self) -> RenewReply:
        """Ask to keep the lease, as an agent on loan does.

        Raises:
            Unavailable: nobody answers.
        """
        lease_id = self._facts.lease_id if self._facts else None
        self._nonce += 1
        request = RenewRequest(
            node=self.name, lease_id=lease_id or LeaseId("none"), nonce=self._nonce
        )
        answer = await meanwhile(
            self._clock,
            self.bus.request(subjects.node_renew(CELL, self.name), encode(request), timeout_s=2.0),
        )
        return decode(answer, RenewReply)

    def _tell(self, facts: NodeReported) -> None:
        self._facts = facts

    async def _on_desired(self, message: BusMessage) -> None:
        desired = decode(message.data, DesiredState)
        if desired.instance not in (UNSET, self.instance):
            return
        is_newer = (desired.epoch, desired.generation) >= (self.epoch, self.generation)
        (self.desired if is_newer else self.refused).append(desired)
        if is_newer:
            self.epoch, self.generation = desired.epoch, desired.generation
            self.node.obey(desired)
        reply = DesiredReply(
            is_accepted=is_newer,
            epoch=self.epoch,
            generation=self.generation,
            error="" if is_newer else f"epoch {self.epoch} is known",
        )
        await message.respond(encode(reply))

    async def _on_ledger(self, message: BusMessage) -> None:
        request = decode(message.data, LedgerRequest)
        if request.instance not in (UNSET, self.instance):
            return
        await self.may_tell_ledger.wait()
        await message.respond(encode(LedgerReply(node=request.node, orders=self.node.orders())))

    async def _on_logs(self, message: BusMessage) -> None:
        request = decode(message.data, LogRequest)
        if request.instance not in (UNSET, self.instance):
            return
        await message.respond(encode(LogReply(text=self.log_text)))
