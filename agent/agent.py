"""The agent: connects one node's driver to the coordinator over the bus.

The agent fails static: without a bus the node goes on as before, and only an expired lease moves
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from agent.driver import Node
from agent.lease.renewal import LAST_RESORT_MARGIN_S, LastResort, LeaseKeeper
from agent.telemetry.report_size import encoded
from common import subjects
from common.bus import Bus, BusMessage
from common.clock import Clock
from common.errors import ArylError, ProtocolError, Unavailable
from common.log import Throttle
from common.messages import (
    AgentReport,
    DesiredReply,
    DesiredState,
    LedgerReply,
    LedgerRequest,
    LogReply,
    LogRequest,
    NodeReport,
    decode,
    encode,
)
from common.natsrules import BusCounters

log = logging.getLogger(__name__)

Asked = TypeVar("Asked", LedgerRequest, LogRequest)

MIN_REPORT_GAP_S = 0.1
MAX_LOG_BYTES = 256 * 1024


class Agent:
    """One agent.

    Args:
        bus_counters: errors of the bus, where it counts them; each report carries them.
        instance: names this start of the agent, so the coordinator can tell apart two agents that
            report as one node. A caller that passes it holds the lock of the state directory, so
            the start named in the memory is over.
    """

    def __init__(
        self,
        node: Node,
        *,
        bus: Bus,
        clock: Clock,
        last_resort: LastResort,
        lease_ttl_margin_s: float = LAST_RESORT_MARGIN_S,
        bus_counters: BusCounters | None = None,
        instance: str,
    ) -> None:
        self._instance = instance
        self._follows = node.life.memory.instance
        node.life.memory.instance = instance
        self.node = node
        self.bad_messages = 0
        self._warn = Throttle(clock)
        self._life = node.life
        self._settings = node.settings
        self._bus = bus
        self._clock = clock
        self._duties = node.duties
        self._bus_counters = bus_counters
        self._keeper = LeaseKeeper(
            node.life,
            cell=node.settings.cell,
            bus=bus,
            clock=clock,
            last_resort=last_resort,
            margin_s=lease_ttl_margin_s,
            changed=self._lease_changed,
            tried=node.changed.set,
        )
        self._desired = asyncio.Event()
        """Set when there may be a new lease, or none any more."""
        self._leased: object = None
        """The role and the lease of the last step."""
        self._reported: object = None
        self._reported_at_s = float("-inf")
        self._sequence = 0

    async def run(self) -> None:
        """Run until cancelled. An error in any part ends all parts, with a log line."""
        cell, name = self._settings.cell, self._settings.node
        handlers = {
            subjects.node_desired(cell, name): self._on_desired,
            subjects.node_ledger(cell, name): self._on_ledger,
            subjects.node_logs(cell, name): self._on_logs,
        }
        self._life.may_begin = self._keeper.may_begin
        for subject, handler in handlers.items():
            await self._bus.subscribe(subject, handler)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.node.sample_for_ever(), name="sample")
            group.create_task(self._step_for_ever(), name="step")
            group.create_task(self._keep_lease(), name="lease")
            group.create_task(self._keep_contact(), name="contact")

    async def _step_for_ever(self) -> None:
        while True:
            await self._wait_for_change()
            await self.node.step()
            leased = (self._life.memory.role, self._life.memory.lease)
            if leased != self._leased:
                self._leased = leased
                self._desired.set()
            with self._duties.leg("report"):
                await self._report()
            self._duties.progressed()

    async def _wait_for_change(self) -> None:
        try:
            async with self._clock.timeout(self.node.period_s):
                await self.node.changed.wait()
        except TimeoutError:
            pass
        self.node.changed.clear()

    # --- the lease ----------------------------------------------------------------------------

    async def _keep_lease(self) -> None:
        while True:
            with self._duties.leg("lease", within_s=self._keeper.step_limit_s):
                await self._keeper.step()
            wait_s = self._keeper.wait_s
            if wait_s is None:  # a lease, or the end of one, sets the event
                look_s = self._settings.report_period_s
            else:
                look_s = min(wait_s, self._settings.step_period_s)
            with contextlib.suppress(TimeoutError):
                async with self._clock.timeout(look_s):
                    await self._desired.wait()
            self._desired.clear()

    async def _lease_changed(self) -> None:
        await self.node.save()
        self.node.changed.set()

    # --- contact ------------------------------------------------------------------------------

    async def _keep_contact(self) -> None:
        """Ask for an answer to a report while some job would stop without contact.

        The requests are frequent enough that one answer of three may be lost, as with a lease.
        """
        while True:
            look_s = self._settings.report_period_s
            stop_after_s = self._life.workers.least_stop_after_s
            if stop_after_s is not None:
                period_s = stop_after_s / 3
                look_s = max(MIN_REPORT_GAP_S, min(look_s, period_s))
                contact_at_s = self.node.contact_at_s
                if contact_at_s is None or self._clock.now_s() - contact_at_s >= period_s:
                    timeout_s = max(look_s, period_s)
                    with self._duties.leg("contact", within_s=timeout_s):
                        await self._ask_contact(timeout_s=timeout_s)
            await self._clock.sleep(look_s)

    async def _ask_contact(self, *, timeout_s: float) -> None:
        """Send one report that asks for an answer.

        Contact counts from the instant of sending, because the coordinator counts silence from the
        instant of receipt.
        """
        if not self.node.may_report:
            return
        subject = subjects.node_report(self._settings.cell, self._settings.node)
        sent_at_s = self._clock.now_s()
        try:
            report = self.report()
            await self._bus.request(subject, encoded(report), timeout_s=timeout_s)
        except Unavailable as error:
            log.debug("report not answered: %s", error)
            return
        self.node.told(report.gpus)
        self.node.contacted(sent_at_s)
        self.node.changed.set()

    # --- reports ------------------------------------------------------------------------------

    def report(self) -> NodeReport:
        """Build the node's report for the present instant.

        The boot clock numbers reports, so that a restarted agent never falls behind itself.
        """
        memory, sample, settings = self._life.memory, self.node.last_sample, self._settings
        now_s = self._clock.now_s()
        self._sequence = max(self._sequence + 1, int(now_s * 1000))
        remaining_s = None if memory.lease_until_s is None else memory.lease_until_s - now_s
        home_ago_s = None if memory.home_at_s is None else now_s - memory.home_at_s
        return NodeReport(
            node=settings.node,
            boot_id=memory.boot_id,
            sequence=self._sequence,
            home_pool=settings.home_pool,
            role=memory.role,
            epoch=memory.epoch,
            generation=memory.generation,
            service=settings.service,
            rack=settings.rack,
            labels=settings.labels or UNSET,
            instance=self._instance,
            follows=self._follows,
            period_s=settings.report_period_s,
            lease=memory.lease,
            lease_remaining_s=remaining_s,
            gpus=sample.gpus or (),
            host=sample.host,
            inference=sample.inference,
            workers=self._life.workers.reports(now_s),
            collectors=sample.collectors,
            cost=sample.cost,
            agent=self.counters(),
            trespasses=self._life.trespasses,
            detail=self._life.detail,
            is_server_down=self._life.is_server_down,
            ledger_error=self._life.takes_nothing,
            stage_durations_s=memory.stage_durations_s,
            home_ago_s=home_ago_s,
            turned_back=memory.turned_back,
            slow_command=self._life.slow_command(now_s),
        )

    @property
    def is_connected(self) -> bool:
        """True while the bus is connected."""
        return self._bus.is_connected

    def counters(self) -> AgentReport:
        """The errors that this agent and its bus have counted."""
        bus = self._bus_counters or BusCounters()
        return AgentReport(
            bad_messages=self.bad_messages + bus.foreign_reply_count,
            lease_failures=self._keeper.failures,
            bus_errors=bus.error_count,
            bus_handler_errors=bus.handler_error_count,
            bus_dropped_messages=bus.dropped_message_count,
            bus_reconnects=bus.reconnect_count,
        )

    async def _report(self) -> None:
        """Send a report each period, and at once after a change that others wait for.

        Without a connection it sends nothing: a report that the client buffers arrives late, with
        old facts, or never, when the client has to be replaced. A report that was sent counts as
        delivered.
        """
        if not self.node.may_report:
            return
        if not self._bus.is_connected:
            return  # the first report after it carries all facts
        memory = self._life.memory
        news = (
            memory.role,
            memory.epoch,
            memory.generation,
            memory.lease,
            self._life.detail,
            self._life.is_server_down,
            tuple(
                (worker.key, worker.phase, worker.endpoint, worker.error)
                for worker in self._life.workers.reports()
            ),
        )
        elapsed_s = self._clock.now_s() - self._reported_at_s
        is_due = elapsed_s >= self._settings.report_period_s * 0.95
        if not is_due and (news == self._reported or elapsed_s < MIN_REPORT_GAP_S):
            if news != self._reported:
                self.node.changed.set()
                await self._clock.sleep(MIN_REPORT_GAP_S)
            return
        self._reported, self._reported_at_s = news, self._clock.now_s()
        subject = subjects.node_report(self._settings.cell, self._settings.node)
        try:
            report = self.report()
            await self._bus.publish(subject, encoded(report))
        except Unavailable as error:
            log.debug("report not sent: %s", error)  # the next report carries all facts again
        else:
            self.node.told(report.gpus)

    # --- requests of the coordinator ----------------------------------------------------------

    async def _on_desired(self, message: BusMessage) -> None:
        memory = self._life.memory
        try:
            desired = decode(message.data, DesiredState)
            if self._is_for_another(desired.instance):
                return
            reply = self._life.accept(desired, now_s=self._clock.now_s())
        except ProtocolError as error:
            self._count_bad(message, error)
            reply = DesiredReply(
                is_accepted=False,
                epoch=memory.epoch,
                generation=memory.generation,
                error=str(error),
            )
        if not await self.node.save() and reply.is_accepted:
            # Its stops take effect all the same; its starts wait, and the report gives the reason.
            why = self._life.ledger_error
            reply = msgspec.structs.replace(reply, is_accepted=False, error=why)
        self.node.changed.set()
        self._desired.set()
        await message.respond(encode(reply))

    async def _on_ledger(self, message: BusMessage) -> None:
        if self._asked(message, LedgerRequest) is None:
            return
        orders = tuple(held.order for held in self._life.workers.held())
        await message.respond(encode(LedgerReply(node=self._settings.node, orders=orders)))

    async def _on_logs(self, message: BusMessage) -> None:
        request = self._asked(message, LogRequest)
        if request is None:
            return
        try:
            tail = await self.node.runner.log_tail(
                request.key, min(request.max_bytes, MAX_LOG_BYTES)
            )
            reply = LogReply(text=tail.decode(errors="replace"))
        except (ArylError, OSError) as error:
            reply = LogReply(error=f"worker {request.key} has no log here: {error}")
        await message.respond(encode(reply))

    def _asked(self, message: BusMessage, kind: type[Asked]) -> Asked | None:
        """Decode a request to this agent.

        None if it is invalid, which is counted, or for another agent.
        """
        try:
            request = decode(message.data, kind)
            self._check_node(request.node)
        except ProtocolError as error:
            self._count_bad(message, error)
            return None
        return None if self._is_for_another(request.instance) else request

    def _is_for_another(self, instance: str | UnsetType) -> bool:
        """True if the coordinator means another agent of this name, or the one before this one.

        That agent answers. The coordinator hears of this one by its next report, if it accepts
        that.
        """
        return instance is not UNSET and instance != self._instance

    def _check_node(self, name: str) -> None:
        if name != self._settings.node:
            raise ProtocolError(f"node: this is {self._settings.node}, not {name}")

    def _count_bad(self, message: BusMessage, error: Exception) -> None:
        self.bad_messages += 1
        if self._warn.is_due(message.subject):
            dropped = "message on %s dropped: %s (%d)"
            log.warning(dropped, message.subject, error, self.bad_messages)
