"""The live coordinator: takes the lead, receives reports, runs the decision loop, sends orders.

Clock, bus, journal, snapshots and lease are arguments; this module creates none of them. The
coordinator also compares the guarantees of its tenants with the capacity of its known nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry

from common import subjects
from common.bus import Bus, BusMessage, Handler, Subscription
from common.clock import Clock
from common.errors import Fenced, ProtocolError, Unavailable
from common.messages import LedgerReply, NodeReport
from common.model import NodeName, NodeRole, Pool, ServiceName
from common.natsrules import BusCounters
from coordinator.engine.engine import Engine
from coordinator.engine.state.commands import AskLedger, Command, Outcome, PushDesired
from coordinator.engine.state.events import (
    Event,
    LeaderStarted,
    LoadUnknown,
    NodeReported,
    NodeSilent,
    OrdersRecovered,
    ProgressReported,
    ProgressStopped,
)
from coordinator.engine.state.settings import TenantSettings, overpromised
from coordinator.engine.state.tables import ClusterState
from coordinator.service.cancellation import beside, end, is_done_first, until_told
from coordinator.service.decision_loop import Decider
from coordinator.service.history.keeper import IndexKeeper
from coordinator.service.journal.history import Historian, HistoryPort
from coordinator.service.leadership.pause_detector import Listening
from coordinator.service.metrics.measures import Measures
from coordinator.service.nodes import report_validation
from coordinator.service.nodes.desired_state_push import Dispatcher
from coordinator.service.nodes.gpu_catalogue import read_catalogue
from coordinator.service.nodes.lease_renewal import Renewals
from coordinator.service.nodes.ledger_fetch import LedgerAsker
from coordinator.service.nodes.log_throttle import Complaints
from coordinator.service.nodes.report_folding import Folder
from coordinator.service.nodes.report_queue import Inflow
from coordinator.service.nodes.service_load import LastKnown
from coordinator.service.ports import JournalPort, LeasePort, SnapshotsPort
from coordinator.service.request_tasks import Requests
from coordinator.service.settings import CoordinatorSettings


def unkept(state: ClusterState, tenants: tuple[TenantSettings, ...]) -> str:
    """A line about guarantees that the nodes cannot cover.

    Empty where they can, and in a new cell, before any node has reported.
    """
    nodes = state.nodes.values()
    gpus = sum(len(node.gpus) for node in nodes if node.home_pool == Pool.TRAINING)
    return overpromised(tenants, gpus) if gpus else ""


log = logging.getLogger(__name__)

STOP_S = 2.5
"""Time for the batch in hand, its answers, a snapshot and the lease after a stop, even if NATS
hangs. Later acknowledgements never come, and the next leader needs the journal."""
RELEASE_S = 0.5
"""Part of that for the lease alone: if it is not given up the next leader waits for its TTL."""


class Coordinator:
    """One coordinator; leads while its lease holds.

    Args:
        reports: the bus that node reports come on; None: `bus`, as everything else.
        progress: called when it has done its part, leading or standing by.
        index: of the history, for questions about the past; None: they are refused.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        holder: str,
        clock: Clock,
        bus: Bus,
        reports: Bus | None = None,
        journal: JournalPort,
        snapshots: SnapshotsPort,
        lease: LeasePort,
        progress: Callable[[], None] = lambda: None,
        bus_counters: Sequence[BusCounters] = (),
        history: HistoryPort | None = None,
        index: IndexKeeper | None = None,
    ) -> None:
        self.settings = settings
        self.holder = holder
        self.clock = clock
        self.bus = bus
        self._reports = reports or bus
        self.inflow = Inflow(self._on_report, clock=clock)
        self.folder = Folder(
            lost_after_s=settings.lost_after_s,
            load_period_s=settings.load_period_s,
            progress_period_s=settings.progress_period_s,
            catalogue=read_catalogue(settings.gpu_faults.catalogue),
        )
        self.bad_reports = 0
        self.reports_heard = 0
        self.registry = CollectorRegistry()
        """Counts of the facts that pass by; `metrics.page` adds what a scrape reads."""
        self.refused_reports = Complaints(clock, "bad reports")
        self._rivals = Complaints(clock, "reports of rivals")
        self._bad_requests = 0
        self.bus_counters = bus_counters
        self.is_leading = False
        self.leads_since_s = float("inf")
        """When this process began to lead."""
        self._tick_s = min(settings.pass_period_s, settings.load_period_s, 1.0)
        self.started_at_s = clock.now_s()
        self.leading = asyncio.Event()
        self._progress = progress
        self._decided_at_s = self.started_at_s
        self.history = history
        self.index = index
        self._historian = None if history is None else Historian(history, clock=clock)
        self._is_standby = True
        self._listening = Listening(
            self.folder, clock=clock, period_s=self._tick_s, looked=self._stand_by
        )
        self._lease = lease
        self._stopping = asyncio.Event()
        self._stop_by_s: float | None = None
        self._fenced: Fenced | None = None
        self._highest_reported_epoch = 0
        self._subscriptions: list[Subscription] = []
        self.decider = Decider(
            settings,
            holder=holder,
            clock=clock,
            journal=journal,
            snapshots=snapshots,
            may_act=self.may_act,
            let_out=self._let_out,
            fenced=self._on_fenced,
            progress=self._decided,
            tried=progress,
            measures=Measures(self.registry, services=settings.engine.services),
            written=lease.note_record,
            told=self._on_told,
            last_line=self._last_line,
            dropped=self._on_dropped,
        )
        self.renewals = Renewals(
            clock=clock,
            doubt=self._doubt,
            refusal=lambda node, lease_id: self.engine.may_renew(node, lease_id),
            ttl_s=lambda: self.engine.settings.lease_ttl_s,
            epoch=lambda: self.engine.state.epoch,
        )
        self.dispatcher = Dispatcher(
            cell=settings.cell,
            bus=bus,
            clock=clock,
            timeout_s=settings.push_timeout_s,
            retry_s=settings.push_retry_s,
            may_act=self.may_act,
            fenced=self._on_fenced,
            instance=self.folder.instance,
        )
        self._ledgers = LedgerAsker(
            self.dispatcher.ledger,
            got=self._got_ledger,
            lacked=self.folder.forget_node,  # its next report requests it again
        )

    @property
    def engine(self) -> Engine:
        """The engine as it is now; the rebuild replaces it."""
        return self.decider.engine

    @property
    def bad_messages(self) -> int:
        """Invalid messages of any kind, counted and dropped."""
        return sum(self.bad_messages_by_kind.values())

    @property
    def bad_messages_by_kind(self) -> Mapping[str, int]:
        """The same, by what they were."""
        return {
            "report": self.bad_reports,
            "request": self._bad_requests,
            "foreign_reply": sum(one.foreign_reply_count for one in self.bus_counters),
            "rival": self.folder.rivals.dropped_count,
            "renewal": self.renewals.bad_messages,
            "answer": self.dispatcher.bad_messages,
            "journal": self.decider.foreign_count,
        }

    def note_bad_request(self) -> None:
        """Count an invalid request; the caller got an error and it changed nothing."""
        self._bad_requests += 1

    def may_act(self) -> bool:
        """True if the lease still holds by this machine's own clock."""
        return self.is_leading and self.clock.now_s() < self._lease.valid_until_s

    def stop(self) -> None:
        """Finish the batch in hand, save a snapshot, give the lease up, and return from `run`.

        It takes at most `STOP_S`, whether or not NATS answers.
        """
        if self._stop_by_s is None:
            self._stop_by_s = self.clock.now_s() + STOP_S
        self._stopping.set()
        self.decider.stop()

    # --- life -------------------------------------------------------------------------------

    async def run(self, serve: Handler) -> None:
        """Lead when it is our turn, until a stop; `serve` answers API requests.

        Raises:
            Fenced: another coordinator leads; the process should start afresh as a standby.
            ProtocolError: a journal record cannot be read.
            Unavailable: the journal did not answer; unacknowledged events may be lost.
        """
        doing = self._run(serve)
        limit_s = STOP_S - RELEASE_S
        if not await until_told(doing, told=self._stopping, limit_s=limit_s, clock=self.clock):
            log.warning("not all tasks ended within %g s of stopping", STOP_S)

    async def _run(self, serve: Handler) -> None:
        self._subscriptions.append(
            await self._reports.subscribe(subjects.node_report(self.settings.cell), self.inflow.put)
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._unsubscribe)
            listening = beside(self._listening.run(), name="listen", broke=self.stop)
            await stack.enter_async_context(listening)
            taking = beside(self.inflow.run(), name="reports", broke=self.stop)
            await stack.enter_async_context(taking)
            if self.index is not None:
                # A standby reads as well, so that it has the history when it leads.
                reading = beside(self.index.run(), name="history index", broke=self.stop)
                await stack.enter_async_context(reading)
            # The rest of the last leader's TTL passes while this one listens to the nodes.
            with contextlib.suppress(Unavailable):
                await self._lease.look()
            await self.clock.sleep(self.settings.rebuild_wait_s)
            epoch = await self._take_lease()
            if epoch is None:
                return
            self._is_standby = False
            stack.push_async_callback(self._leave)
            # Without its lease's keeper it would lead no nodes, and feed its watchdog for ever.
            keeping = beside(self._keep_lease(), name="lease", broke=self.stop)
            await stack.enter_async_context(keeping)
            await self.decider.rebuild(last_number=self._lease.record_before)
            if not self._stopping.is_set():
                await self._lead(epoch, serve)

    def _on_told(self) -> None:
        if self._historian is not None:
            self._historian.journaled(self.engine.state)

    @property
    def history_pending_lines(self) -> int:
        """Lines in the journal that are not known to be in the history yet."""
        return 0 if self._historian is None else self._historian.pending_lines

    async def _last_line(self) -> int:
        return 0 if self._historian is None else await self._historian.last_number()

    async def _unsubscribe(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    def _stand_by(self) -> None:
        """Report progress while standing by.

        A standby's part is to wait; a lease holder must do more.
        """
        if self._is_standby:
            self._progress()

    async def _subscribe(self, subject: str, handler: Handler) -> None:
        self._subscriptions.append(await self.bus.subscribe(subject, handler))

    async def _take_lease(self) -> int | None:
        acquiring = asyncio.ensure_future(
            self._lease.acquire(self.holder, lambda: self._highest_reported_epoch)
        )
        try:
            is_taken = await is_done_first(acquiring, told=self._stopping)
            return acquiring.result() if is_taken else None
        finally:
            await end(acquiring)

    async def _lead(self, epoch: int, serve: Handler) -> None:
        cell = self.settings.cell
        self.is_leading = True
        self.leads_since_s = self.clock.now_s()
        engine, clock = self.settings.engine, self.decider.time.mark()
        started = LeaderStarted(epoch=epoch, holder=self.holder, settings=engine, clock=clock)
        self.decider.begin(started)
        self._hear_everybody_again()
        if warning := unkept(self.engine.state, engine.tenants):
            log.warning("%s", warning)
        await self._subscribe(subjects.node_renew(cell), self.renewals.answer)
        async with Requests(serve, clock=self.clock) as requests, asyncio.TaskGroup() as group:
            await self._subscribe(subjects.api_all(cell), requests.take)
            tasks = [
                group.create_task(self.dispatcher.run(), name="dispatch"),
                group.create_task(self._tick(), name="tick"),
                group.create_task(self._ledgers.run(), name="ledgers"),
            ]
            if self._historian is not None:
                tasks.append(group.create_task(self._historian.run(), name="history"))
            self.leading.set()
            try:
                await self.decider.run()
            finally:
                self.is_leading = False
                for task in tasks:
                    task.cancel()
        if self._fenced is None:
            with contextlib.suppress(TimeoutError):
                async with self.clock.timeout(self._left_s(but_s=RELEASE_S)):
                    await self.decider.save_snapshot()

    def _hear_everybody_again(self) -> None:
        """Take every node's facts again when this lead begins, and find nodes that are silent too
        long.

        These are reports from before this lead. A node that died while the cell had no leader would
        otherwise be neither heard nor lost, for ever.
        """
        self._listening.look()
        now_s = self.clock.now_s()
        self.folder.forget_facts()
        self.folder.loads.lead(self._last_known_loads(now_s), now_s=now_s)
        for entry in self.engine.state.nodes.values():
            self.folder.prefer(entry.name, entry.boot_id)
        for report in list(self.folder.reports.values()):
            if self.folder.silent_s(NodeName(report.node), now_s=now_s) <= self.folder.lost_after_s:
                self._take_facts(self.folder.say_again(report, now_s=now_s))
        for node in self.engine.state.nodes:
            self.folder.expect(node, now_s=now_s)

    def _last_known_loads(self, now_s: float) -> dict[NodeName, LastKnown]:
        """Nodes of an unknown load by the journal, on this machine's clock."""
        ahead_s = self.decider.time.now_s() - now_s
        state = self.engine.state
        return {
            name: LastKnown(
                service=node.service or ServiceName(""),
                load=found.load,
                at_s=found.since_s - ahead_s,
                why=found.why,
                is_serving=node.role == NodeRole.SERVING and node.service is not None,
            )
            for name, found in state.unknown_loads.items()
            if (node := state.nodes.get(name)) is not None
        }

    async def _leave(self) -> None:
        if self._fenced is not None:
            raise self._fenced
        left_s = self._left_s()
        with contextlib.suppress(Unavailable, Fenced, TimeoutError):
            async with self.clock.timeout(None if left_s is None else max(RELEASE_S, left_s)):
                await self._lease.release()

    def _left_s(self, *, but_s: float = 0.0) -> float | None:
        """Time left for a stop; None without one."""
        return None if self._stop_by_s is None else self._stop_by_s - but_s - self.clock.now_s()

    async def _keep_lease(self) -> None:
        """Renew the lease from the first moment on: a rebuild may take longer than the TTL."""
        self._decided()
        try:
            await self._lease.keep(lambda: self._decided_at_s, stall_s=self.settings.leader_stall_s)
        except Fenced as error:
            self._on_fenced(error)

    def _decided(self) -> None:
        """Record that a batch, or a step of the rebuild, is done: only this work keeps the lease.

        A failed append does not count: a leader that cannot write must not keep the others from
        trying.
        """
        self._decided_at_s = self.clock.now_s()
        self._progress()

    def _on_fenced(self, error: Fenced) -> None:
        log.error("fenced: %s", error)
        self._fenced = error
        self.is_leading = False
        self.stop()

    # --- intake -----------------------------------------------------------------------------

    async def record(self, event: Event) -> Outcome:
        """Take an event in and return when it is in the journal.

        Raises:
            Unavailable: this coordinator does not lead, or stopped before the append.
        """
        if not self.is_leading:
            raise Unavailable("this coordinator does not lead")
        return await self.decider.record(event)

    async def settled(self) -> None:
        """Return when the engine's present state is in the journal.

        Raises:
            Unavailable: this coordinator stopped leading before that.
        """
        await self.decider.settled()

    async def _on_report(self, message: BusMessage, at_s: float) -> None:
        """Fold one report that arrived at an instant; answer it if the node may rely on that."""
        try:
            report = report_validation.node_report(message.data, message.subject)
        except ProtocolError as error:
            self.bad_reports += 1
            self.refused_reports.note(subjects.node_of(message.subject), str(error))
            return
        self.reports_heard += 1
        self.refused_reports.cured(report.node)
        known = report_validation.trusted_epoch(report.epoch)
        self._highest_reported_epoch = max(self._highest_reported_epoch, known)
        self._take_facts(self.folder.fold(report, now_s=at_s))
        if not self.folder.rivals.speaks(report):
            if why := self.folder.rivals.told(NodeName(report.node), now_s=at_s):
                self._rivals.note(report.node, "two agents report as one node", said=why)
            return  # neither ordered nor answered: its workers have no owner
        self._compare(report)
        if self.may_act():
            # A job with `stop_after_s` runs on for an answer: only to a report that was taken, and
            # only by the coordinator that counts the silence that follows
            # (coordinator.engine.nodes.lost).
            with contextlib.suppress(Unavailable):
                await message.respond(b"")

    def _take_facts(self, facts: NodeReported | None) -> None:
        if facts is not None and self.is_leading:
            self.decider.post(facts)

    def _on_dropped(self, event: Event) -> None:
        """Handle an event that the engine did not get.

        It is repeated until its quarantine is over.
        """
        match event:
            case NodeReported():
                self.folder.forget_node(event.node)
                self.refused_reports.note(
                    event.node, "its events made the engine fail; see the coordinator's log"
                )
            case OrdersRecovered():
                self.folder.forget_node(event.node)  # its next report asks again
                why = "its ledger made the engine fail; see the coordinator's log"
                self.refused_reports.note(event.node, why)
            case NodeSilent():
                self.folder.forget_silence(event.node)
            case ProgressReported() | ProgressStopped():
                self.folder.forget_progress(event.job_id)
            case LoadUnknown():
                self.folder.loads.tell_again(event)
            case _:
                pass  # a request gets an answer; each period has a load of its own

    def _got_ledger(self, node: NodeName, reply: LedgerReply) -> None:
        began_ago_s = self.folder.began_ago_s(node, now_s=self.clock.now_s())
        self.decider.post(OrdersRecovered(node=node, orders=reply.orders, began_ago_s=began_ago_s))
        for order in reply.orders:  # the engine dropped the saves of a job that it did not know yet
            self.folder.forget_progress(order.key.job_id)

    def _compare(self, report: NodeReport) -> None:
        """Push again to a node that shows another generation than the one ordered."""
        if self.is_leading:
            self.dispatcher.compare(
                NodeName(report.node), epoch=report.epoch, generation=report.generation
            )

    def _doubt(self, node: NodeName) -> str:
        """Why a renewal gets no answer.

        Only a leader that runs passes and hears the node renews a lease. These doubts are temporary
        (docs/decisions/0007-leases-enforced-by-the-agent.md): an agent without an answer asks
        again, and goes home when its TTL ends. A refusal would end every loan at each change of the
        leader.
        """
        now_s = self.clock.now_s()
        if not self.may_act():
            return "not leading"
        if now_s - self.decider.passed_at_s > 3 * self.settings.pass_period_s:
            return "no scheduling pass lately"
        silent_s = 0.0 if node in self.inflow else self.folder.silent_s(node, now_s=now_s)
        if silent_s > self.settings.lost_after_s:
            return "no report of the node lately"
        entry = self.engine.state.nodes.get(node)
        if entry is None or not entry.contact.is_heard:
            return "its report is not in the journal yet"
        return ""

    async def _tick(self) -> None:
        """Handle the passage of time: folding windows close and passes fall due."""
        while True:
            await self.clock.sleep(self._tick_s)
            self._listening.look()
            self.refused_reports.look()
            self.inflow.look()
            self._rivals.look()
            now_s = self.clock.now_s()
            proving = self.folder.proving(
                self.engine.awaited_silence_s(), since_s=self.leads_since_s, now_s=now_s
            )
            proven = (event for event in proving if event.node not in self.inflow)
            stopped = self.folder.stopped(
                self.engine.watched_stalls(self.decider.time.now_s()),
                now_s=now_s,
                unread=self.inflow,
            )
            due = self.folder.due(now_s=now_s, unread=self.inflow)
            for event in (*due, *proven, *stopped):
                self.decider.post(event)
            self.decider.wake()

    # --- outgoing messages ------------------------------------------------------------------

    def _let_out(self, command: Command) -> None:
        match command:
            case PushDesired():
                if command.node in self.engine.state.nodes:  # otherwise removed in the same record
                    self.dispatcher.push(self.engine.desired(command.node))
            case AskLedger():
                self._ledgers.ask(command.node)
