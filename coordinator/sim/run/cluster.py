"""Simulated nodes: they obey desired states with delays, by the real life-cycle table.

A simulated node sees what a real agent would be sent, and answers what a real agent would report.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Struct, structs

from common.failures import Failure
from common.messages import DesiredState, OrderPhase, WorkerOrder, WorkerPhase
from common.model import (
    GpuUuid,
    LeaseId,
    NodeName,
    NodeRole,
    Pool,
    ServiceName,
    StopReason,
    WorkerKey,
)
from common.node_role_table import NodeEvent, next_role
from coordinator.engine.state.events import GpuFact, NodeReported, WorkerFact
from coordinator.sim.run.loop import Loop


class Delays(Struct, frozen=True, kw_only=True):
    """How long a node takes for each step, in seconds; all zero is the paper's simulator."""

    report_s: float = 0.0
    ready_s: float = 0.0
    start_s: float = 0.0
    suspend_s: float = 0.0
    """From the order until its GPUs are left, and back below (Gandiva, OSDI'18, section 3.1)."""
    resume_s: float = 0.0
    stop_s: float = 0.0
    """From the order until it has ended; a job that does not save computes on for this long."""
    checkpoint_s: float = 0.0
    """Additional time for a worker that computed and whose job saves."""
    drain_s: float = 0.0
    device_free_s: float = 0.0
    warm_up_s: float = 0.0


class NodeSpec(Struct, frozen=True, kw_only=True):
    """One node of a simulated cluster."""

    name: NodeName
    home_pool: Pool
    gpu_type: str
    gpus: int
    service: ServiceName | None = None
    rack: str = ""
    labels: dict[str, str] = {}
    cpus: int = 0
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0


class _SimWorker(Struct):
    """A worker on a simulated node."""

    order: WorkerOrder
    phase: WorkerPhase
    exit_code: int | None = None
    stop_reason: StopReason | None = None
    failure: Failure | None = None
    is_switching: bool = False
    """It is about to be suspended or to be resumed."""
    began_at_s: float | None = None
    """When its process began; None: not yet, or not known."""
    ended_at_s: float | None = None
    said: WorkerFact | None = None
    """Its last reported fact."""

    def fact(self, endpoint: str, now_s: float) -> WorkerFact:
        """The fact to report of it; the same value again while nothing changed."""
        said = self.said
        if (
            said is None
            or said.phase is not self.phase
            or said.stop_reason is not self.stop_reason
            or self.ended_at_s is not None  # its end is longer ago each time
        ):
            said = self.said = WorkerFact(
                key=self.order.key,
                phase=self.phase,
                endpoint=endpoint,
                exit_code=self.exit_code,
                stop_reason=self.stop_reason,
                failure=self.failure,
                ended_ago_s=0.0 if self.ended_at_s is None else now_s - self.ended_at_s,
            )
        return said


_SITTING = (
    WorkerPhase.READY,
    WorkerPhase.RUNNING,
    WorkerPhase.SUSPENDED,
    WorkerPhase.STOPPING,
)
_STARTED = (WorkerPhase.RUNNING, WorkerPhase.SUSPENDED)


def _boot_id(boots: int) -> str:
    return f"boot-{boots}"


def _aim(role: NodeRole) -> NodeRole:
    """The role that a node is on its way to, by the one that it has."""
    match role:
        case NodeRole.DRAINING:
            return NodeRole.ON_LOAN
        case NodeRole.VACATING | NodeRole.WARMING:
            return NodeRole.SERVING
        case _:
            return role


class PretendNode:
    """One node.

    Args:
        tell: receives its reports.
        started, stopped: called when a worker really begins and ceases to compute.
        asked: called before `stopped` when a worker is asked to stop, with the reason: one that
            saves, or whose work is over, ceases then, and any other one when it ends.
        crashed: called instead of `stopped` when there was no order: its process or its node died.
        suspended, resumed: called when it ceases to compute for a while, and goes on.
    """

    def __init__(
        self,
        spec: NodeSpec,
        loop: Loop,
        delays: Delays,
        *,
        tell: Callable[[NodeReported], None],
        started: Callable[[WorkerOrder], None],
        stopped: Callable[[WorkerKey], None],
        asked: Callable[[WorkerKey, StopReason], None] = lambda key, reason: None,
        crashed: Callable[[WorkerKey], None] | None = None,
        suspended: Callable[[WorkerKey], None] | None = None,
        resumed: Callable[[WorkerOrder], None] | None = None,
    ) -> None:
        self.spec = spec
        self._loop = loop
        self._delays = delays
        self._tell = tell
        self._started = started
        self._stopped = stopped
        self._asked = asked
        self._crashed = crashed or stopped
        self._suspended = suspended or stopped
        self._resumed = resumed or started
        self.left: Callable[[WorkerKey], None] = lambda key: None
        """Called when a worker's process is gone, however it ended."""
        home = spec.home_pool
        self.role = NodeRole.TRAINING if home == Pool.TRAINING else NodeRole.SERVING
        self.is_up = True
        self._epoch = 0
        self._generation = 0
        self._desired_role = self.role
        self._lease_id: LeaseId | None = None
        self._held: dict[WorkerKey, _SimWorker] = {}
        self._forgotten: set[WorkerKey] = set()
        self._has_suspended = False
        """True if any worker here was ever ordered to be suspended."""
        self._boots = 1
        self._said = NodeReported(
            node=spec.name,
            boot_id=_boot_id(self._boots),
            home_pool=home,
            role=self.role,
            epoch=0,
            generation=0,
            gpus=tuple(
                GpuFact(
                    GpuUuid(f"{spec.name}-{index}"),
                    spec.gpu_type,
                    memory_bytes=spec.gpu_memory_bytes,
                )
                for index in range(spec.gpus)
            ),
            service=spec.service,
            rack=spec.rack,
            labels=spec.labels,
            cpus=spec.cpus,
            memory_bytes=spec.memory_bytes,
        )
        """Its last report; most of the next one is the same."""
        self._endpoint = f"{spec.name}:1"
        self._will_report = False

    def take_up(
        self, said: NodeReported, *, desired: DesiredState, delays: Delays, is_up: bool
    ) -> None:
        """Become a node that an engine knows: it reported `said` last and may know `desired`.

        `set_off` follows, once all nodes and jobs are there.
        """
        self._said, self._delays, self.is_up = said, delays, is_up
        self.role, self._lease_id = said.role, said.lease_id
        self._epoch, self._generation = said.epoch, said.generation
        is_current = said.generation >= desired.generation
        self._desired_role = desired.role if is_current else _aim(said.role)
        orders = {order.key: order for order in desired.workers}
        for fact in said.workers if is_up else ():
            if fact.key in orders:
                self._held[fact.key] = _SimWorker(orders[fact.key], fact.phase)
                self._has_suspended |= orders[fact.key].is_suspended

    def set_off(self, desired: DesiredState) -> None:
        """Take the steps that were under way, each from its beginning."""
        if not self.is_up:
            return
        for key, held in list(self._held.items()):
            match held.phase:
                case WorkerPhase.RESERVING:
                    self._loop.after(self._delays.ready_s, partial(self._make_ready, key))
                case WorkerPhase.READY:
                    self._take_order(held.order)
                case WorkerPhase.STOPPING:
                    self._loop.after(self._stop_s(held), partial(self._stop_now, key))
                case _:
                    pass
        if self._generation >= desired.generation:
            for stop in desired.stops:
                self._stop(stop.key, stop.reason)
        self._switch_all()
        if self.role == NodeRole.DRAINING and self._desired_role == NodeRole.ON_LOAN:
            self._later(self._delays.drain_s, NodeRole.DRAINING, NodeEvent.DRAINED)
        self._move()

    def learn(self, **changes: Any) -> None:
        """Other facts of it, as fields of its report; it reports them now."""
        self._said = structs.replace(self._said, **changes)
        self._report()

    @property
    def last_report(self) -> NodeReported:
        """Its last report."""
        return self._said

    #   --- reports ----------------------------------------------------------------------------

    def report_soon(self) -> None:
        """Report the present state, once per instant."""
        if not self._will_report:
            self._will_report = True
            self._loop.after(self._delays.report_s, self._report)

    def _report(self) -> None:
        self._will_report = False
        if not self.is_up:
            return
        held, now_s = self._held, self._loop.now_s
        self._said = structs.replace(
            self._said,
            role=self.role,
            epoch=self._epoch,
            generation=self._generation,
            lease_id=self._lease_id,
            workers=tuple([held[key].fact(self._endpoint, now_s) for key in sorted(held)])
            if held
            else (),
        )
        self._tell(self._said)

    #   --- orders -----------------------------------------------------------------------------

    def obey(self, desired: DesiredState) -> None:
        """Take a desired state, unless it is older than the present one."""
        if not self.is_up:
            return
        if (desired.epoch, desired.generation) <= (self._epoch, self._generation):
            return
        self._epoch, self._generation = desired.epoch, desired.generation
        for key in desired.acknowledged:
            self._held.pop(key, None)
            self._forgotten.add(key)
        for order in desired.workers:
            held = self._held.get(order.key)
            if held is None or held.order is not order:  # the engine repeats what did not change
                self._take_order(order)
        for stop in desired.stops:
            self._stop(stop.key, stop.reason)
        self._switch_all()
        self._desired_role = desired.role
        if desired.lease is not None and self.role != NodeRole.ON_LOAN:
            self._lease_id = LeaseId(desired.lease.lease_id)
        self._move()
        self.report_soon()

    def _take_order(self, order: WorkerOrder) -> None:
        if order.is_suspended:
            self._has_suspended = True
        held = self._held.get(order.key)
        if held is None:
            if order.key in self._forgotten:
                return
            self._held[order.key] = _SimWorker(order, WorkerPhase.RESERVING)
            self._loop.after(self._delays.ready_s, lambda: self._make_ready(order.key))
            return
        held.order = order
        is_to_run = order.phase == OrderPhase.RUN and not order.is_suspended
        if is_to_run and held.phase == WorkerPhase.READY:
            self._loop.after(self._delays.start_s, lambda: self._run(order.key))

    def _make_ready(self, key: WorkerKey) -> None:
        held = self._held.get(key)
        if held is None or held.phase != WorkerPhase.RESERVING:
            return
        if self._is_busy(held):
            return  # the worker that leaves these GPUs triggers this again
        held.phase = WorkerPhase.READY
        self.report_soon()
        if held.order.phase == OrderPhase.RUN:
            self._take_order(held.order)

    def _is_busy(self, wanting: _SimWorker) -> bool:
        """Whether another live worker still sits on the GPUs that this one was promised.

        On shared ones only those are waited for that are leaving or about to be suspended.
        """
        wanted = wanting.order.gpu_uuids
        return any(
            held is not wanting
            and held.phase in _SITTING
            and (not wanting.order.is_sharing or self._gives_way(held))
            and any(uuid in wanted for uuid in held.order.gpu_uuids)
            for held in self._held.values()
        )

    def _gives_way(self, held: _SimWorker) -> bool:
        is_going = held.phase == WorkerPhase.RUNNING and held.order.is_suspended
        return is_going or held.phase == WorkerPhase.STOPPING

    def _switch_all(self) -> None:
        """Suspend and resume workers as ordered; a resumed one waits for those that give way."""
        if not self._has_suspended:
            return
        for key, held in list(self._held.items()):
            if held.is_switching:
                continue
            if held.phase == WorkerPhase.RUNNING and held.order.is_suspended:
                held.is_switching = True
                self._suspended(key)
                self._loop.after(self._delays.suspend_s, partial(self._switched, key, held))
            elif self._may_resume(held):
                held.is_switching = True
                self._loop.after(self._delays.resume_s, partial(self._switched, key, held))

    def _may_resume(self, held: _SimWorker) -> bool:
        is_wanted = held.phase == WorkerPhase.SUSPENDED and not held.order.is_suspended
        return is_wanted and not self._is_busy(held)

    def _switched(self, key: WorkerKey, held: _SimWorker) -> None:
        """It has left its GPUs, or is back on them, whatever was ordered since."""
        if self._held.get(key) is not held:
            return
        held.is_switching = False
        if held.phase == WorkerPhase.RUNNING:
            held.phase = WorkerPhase.SUSPENDED
        elif self._may_resume(held):
            held.phase = WorkerPhase.RUNNING
            self._resumed(held.order)
        else:
            return
        for other in list(self._held):
            self._make_ready(other)
        self._switch_all()
        self.report_soon()

    def _run(self, key: WorkerKey) -> None:
        held = self._held.get(key)
        if held is None or held.phase != WorkerPhase.READY or held.order.is_suspended:
            return
        held.phase, held.began_at_s = WorkerPhase.RUNNING, self._loop.now_s
        self._started(held.order)
        self.report_soon()

    def _stop(self, key: WorkerKey, reason: StopReason) -> None:
        held = self._held.get(key)
        if held is None or held.phase in (WorkerPhase.EXITED, WorkerPhase.STOPPING):
            return
        held.stop_reason = reason
        was_running = held.phase in _STARTED
        held.phase = WorkerPhase.STOPPING
        if was_running:
            self._asked(key, reason)
            self._loop.after(self._stop_s(held), partial(self._stop_now, key))
        else:
            self._loop.after(0.0, partial(self.exited, key, None))
        self.report_soon()

    def _stop_now(self, key: WorkerKey) -> None:
        self._stopped(key)
        self.exited(key, -15)

    def _stop_s(self, held: _SimWorker) -> float:
        saves = held.order.spec.checkpoint.path is not None
        return self._delays.stop_s + (self._delays.checkpoint_s if saves else 0.0)

    def exited(self, key: WorkerKey, exit_code: int | None, failure: Failure | None = None) -> None:
        """A worker's process is gone; one that still computed has lost its unsaved work."""
        held = self._held.get(key)
        if held is None or held.phase == WorkerPhase.EXITED:
            return
        if held.phase in _STARTED:
            self._crashed(key)
        held.phase, held.exit_code, held.failure = WorkerPhase.EXITED, exit_code, failure
        held.ended_at_s = self._loop.now_s
        self.left(key)
        for other in list(self._held):
            self._make_ready(other)
        self._switch_all()
        self._move()
        self.report_soon()

    # --- its own life -----------------------------------------------------------------------

    def _fire(self, event: NodeEvent) -> None:
        self.role = next_role(self.role, event, who=self.spec.name)
        self.report_soon()
        self._move()

    def _later(self, delay_s: float, role: NodeRole, event: NodeEvent) -> None:
        """Fire `event` after a delay, if the node is still in that role then."""
        boots = self._boots

        def fire() -> None:
            if self.role == role and self._boots == boots and self.is_up:
                self._fire(event)

        self._loop.after(delay_s, fire)

    def _move(self) -> None:
        """Take the next step from the present role to the desired one."""
        if self.role == self._desired_role:
            return  # so of a training node at all times
        wants_loan = self._desired_role == NodeRole.ON_LOAN
        match self.role:
            case NodeRole.SERVING if wants_loan:
                self._fire(NodeEvent.LEND)
                self._later(self._delays.drain_s, NodeRole.DRAINING, NodeEvent.DRAINED)
            case NodeRole.DRAINING if not wants_loan:
                self._fire(NodeEvent.LOAD_ROSE)
            case NodeRole.ON_LOAN if not wants_loan:
                for key in list(self._held):
                    self._stop(key, StopReason.PREEMPT)
                self._fire(NodeEvent.VACATE)
            case NodeRole.VACATING if not self._live():
                self._lease_id = None
                self._later(self._delays.device_free_s, NodeRole.VACATING, NodeEvent.DEVICE_FREE)
            case NodeRole.WARMING:
                self._later(self._delays.warm_up_s, NodeRole.WARMING, NodeEvent.HEALTHY)
            case _:
                pass

    def _live(self) -> list[WorkerKey]:
        return [key for key, held in self._held.items() if held.phase != WorkerPhase.EXITED]

    # --- faults -----------------------------------------------------------------------------

    def crash(self) -> None:
        """Power is lost: nothing runs and nothing is reported."""
        self.is_up = False
        running = self.keys(*_STARTED)
        self._held.clear()  # pending preparations and starts are dropped
        for key in running:
            self._crashed(key)
            self.left(key)

    def boot(self) -> None:
        """Power is back: a new boot id, no workers, the server restarts."""
        self.is_up = True
        self._boots += 1
        self._said = structs.replace(self._said, boot_id=_boot_id(self._boots))
        self._held.clear()
        self._lease_id = None
        inference = self.spec.home_pool == Pool.INFERENCE
        self._desired_role = NodeRole.SERVING if inference else NodeRole.TRAINING
        self._fire(NodeEvent.BOOTED if inference else NodeEvent.BOOTED_TRAINING)

    def orders(self, *phases: WorkerPhase) -> tuple[WorkerOrder, ...]:
        """Its ledger; with phases, only the orders in one of them."""
        return tuple(
            held.order for held in self._held.values() if not phases or held.phase in phases
        )

    def began_ago_s(self) -> dict[str, float]:
        """How long ago each of its workers began to run, by key, where it knows that."""
        now_s = self._loop.now_s
        return {
            str(key): now_s - held.began_at_s
            for key, held in self._held.items()
            if held.began_at_s is not None
        }

    def keys(self, *phases: WorkerPhase) -> list[WorkerKey]:
        """Keys of the workers in one of the phases."""
        return [order.key for order in self.orders(*phases)]
