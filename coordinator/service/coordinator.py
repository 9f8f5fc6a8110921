"""The live coordinator: gathers events, runs the engine, journals, then lets effects out.

One record a batch, one append in flight; acknowledgements and commands leave after the append.
Clock, bus, journal, snapshots and lease are arguments; this module must not create any of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from msgspec import Struct

from common import subjects
from common.bus import Bus, BusMessage, Handler
from common.clock import Clock
from common.errors import Fenced, ProtocolError, Unavailable
from common.messages import NodeReport, decode
from common.model import NodeName
from coordinator.engine.commands import AskLedger, Outcome, PushDesired
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.events import (
    Event,
    LeaderStarted,
    LoanPassDue,
    NodeReported,
    OrdersRecovered,
    PassDue,
)
from coordinator.policies.decisions import Decision
from coordinator.service.dispatch import Dispatcher
from coordinator.service.explain import describe
from coordinator.service.folding import Folder
from coordinator.service.journal import Entry, Record, decode_record, encode_record, replay
from coordinator.service.ports import JournalPort, LeasePort, SnapshotsPort
from coordinator.service.renewals import Renewals
from coordinator.service.settings import CoordinatorSettings

log = logging.getLogger(__name__)

JOURNAL_RETRY_S = 0.2


class _Waiting(Struct):
    """An event on its way in, and who waits for it to be journaled."""

    event: Event
    done: asyncio.Future[Outcome] | None = None


class Coordinator:
    """One coordinator; leads while its lease holds."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        holder: str,
        clock: Clock,
        bus: Bus,
        journal: JournalPort,
        snapshots: SnapshotsPort,
        lease: LeasePort,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.holder = holder
        self.clock = clock
        self.bus = bus
        self.folder = Folder(
            lost_after_s=settings.lost_after_s,
            load_period_s=settings.load_period_s,
            progress_period_s=settings.progress_period_s,
        )
        self.engine = Engine(settings.engine)
        self.bad_messages = 0
        self.is_leading = False
        self.started_at_s = clock.now_s()
        self.passed_at_s = float("-inf")
        self.leading = asyncio.Event()
        self._journal = journal
        self._snapshots = snapshots
        self._lease = lease
        self._progress = progress
        self._inbox: list[_Waiting] = []
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._fenced: Fenced | None = None
        self._records_since_snapshot = 0
        self._highest_reported_epoch = 0
        self._asking: set[NodeName] = set()
        self._pass_at_s = 0.0
        self._loan_pass_at_s = 0.0
        self.renewals = Renewals(
            refusal=self._refusal,
            ttl_s=lambda: self.engine.settings.lease_ttl_s,
            epoch=lambda: self.engine.state.epoch,
        )
        self.dispatcher = Dispatcher(
            cell=settings.cell,
            bus=bus,
            clock=clock,
            timeout_s=settings.push_timeout_s,
            retry_s=settings.push_retry_s,
            desired=lambda node: self.engine.desired(node),
            may_act=self.may_act,
            fenced=self._on_fenced,
        )

    def may_act(self) -> bool:
        """Whether the lease still holds by this machine's own clock."""
        return self.is_leading and self.clock.now_s() < self._lease.valid_until_s

    def stop(self) -> None:
        """Finish the batch in hand, save a snapshot, give the lease up, and return from `run`."""
        self._stopping.set()
        self._wake.set()

    # --- life -------------------------------------------------------------------------------

    async def run(self, serve: Handler) -> None:
        """Lead when it is our turn, until told to stop; `serve` answers API requests.

        Raises:
            Fenced: somebody else leads; the process should start afresh as a standby.
            Unavailable: the journal did not answer; what was not acknowledged may be lost.
        """
        cell = self.settings.cell
        await self.bus.subscribe(subjects.node_report(cell), self._on_report)
        await self.clock.sleep(self.settings.rebuild_wait_s)
        epoch = await self._take_lease()
        if epoch is None:
            return
        await self._rebuild()
        self.is_leading = True
        self._inbox.insert(
            0,
            _Waiting(LeaderStarted(epoch=epoch, holder=self.holder, settings=self.settings.engine)),
        )
        self.folder.forget_facts()
        for report in list(self.folder.reports.values()):
            self._take_facts(self.folder.say_again(report))
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._keep_lease(), name="lease"),
                group.create_task(self.dispatcher.run(), name="dispatch"),
                group.create_task(self._tick(), name="tick"),
            ]
            await self.bus.subscribe(subjects.node_renew(cell), self.renewals.answer)
            await self.bus.subscribe(subjects.api_all(cell), serve)
            self.leading.set()
            try:
                await self._decide()
            finally:
                self.is_leading = False
                for task in tasks:
                    task.cancel()
        await self._leave()

    async def _take_lease(self) -> int | None:
        acquiring = asyncio.ensure_future(
            self._lease.acquire(self.holder, self._highest_reported_epoch)
        )
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({acquiring, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not acquiring.done():
            acquiring.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await acquiring
            return None
        return acquiring.result()

    async def _rebuild(self) -> None:
        """Newest snapshot + journal tail; what agents report comes on top, as events."""
        await self._journal.open()
        loaded = await self._snapshots.load()
        after = 0
        if loaded is not None and loaded[0] <= self._journal.last_sequence:
            after = loaded[0]
            self.engine = Engine(self.settings.engine, decode_state(loaded[1]))
        records = mismatches = 0
        async for sequence, data in self._journal.read(after + 1):
            record = decode_record(data, sequence=sequence)
            mismatches += not replay(self.engine, record)
            records += 1
        log.info(
            "rebuilt from snapshot %d and %d records, %d decided otherwise now",
            after,
            records,
            mismatches,
        )

    async def _leave(self) -> None:
        if self._fenced is not None:
            raise self._fenced
        with contextlib.suppress(Unavailable, Fenced):
            await self._save_snapshot()
        with contextlib.suppress(Unavailable, Fenced):
            await self._lease.release()

    async def _keep_lease(self) -> None:
        while True:
            await self.clock.sleep(self.settings.leader_ttl_s / 4)
            try:
                await self._lease.renew()
            except Fenced as error:
                self._on_fenced(error)
                return
            except Unavailable as error:
                log.warning("lease not renewed: %s", error)
            if not self.may_act():
                self._on_fenced(Fenced("the leader lease ran out"))
                return

    def _on_fenced(self, error: Fenced) -> None:
        log.error("fenced: %s", error)
        self._fenced = error
        self.stop()

    # --- intake -----------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """Let an event in; nobody waits for it."""
        self._inbox.append(_Waiting(event))
        self._wake.set()

    async def record(self, event: Event) -> Outcome:
        """Let an event in and return when it is in the journal.

        Raises:
            Unavailable: this coordinator stopped leading before it was.
        """
        if not self.is_leading:
            raise Unavailable("this coordinator does not lead")
        waiting = _Waiting(event, asyncio.get_running_loop().create_future())
        self._inbox.append(waiting)
        self._wake.set()
        assert waiting.done is not None
        return await waiting.done

    async def _on_report(self, message: BusMessage) -> None:
        try:
            report = decode(message.data, NodeReport)
        except ProtocolError as error:
            self.bad_messages += 1
            log.warning("bad report on %s: %s", message.subject, error)
            return
        if report.node != subjects.node_of(message.subject):
            self.bad_messages += 1
            log.warning("report on %s is signed %s", message.subject, report.node)
            return
        self._highest_reported_epoch = max(self._highest_reported_epoch, report.epoch)
        self._take_facts(self.folder.fold(report, now_s=self.clock.now_s()))
        self._compare(report)

    def _take_facts(self, facts: NodeReported | None) -> None:
        if facts is not None and self.is_leading:
            self.post(facts)

    def _compare(self, report: NodeReport) -> None:
        """Push again to a node that shows another generation than the one that we want."""
        node = self.engine.state.nodes.get(NodeName(report.node))
        if not self.is_leading or node is None or not node.is_heard:
            return
        if (report.epoch, report.generation) != (self.engine.state.epoch, node.generation):
            self.dispatcher.lags(node.name)

    def _refusal(self, node: NodeName, lease_id: str) -> str:
        """A lease is renewed only by a leader that passes and hears the node (design 6)."""
        now_s = self.clock.now_s()
        if not self.may_act():
            return "not leading"
        if now_s - self.passed_at_s > 3 * self.settings.pass_period_s:
            return "no scheduling pass lately"
        if now_s - self.folder.heard_at_s.get(node, float("-inf")) > self.settings.lost_after_s:
            return "no report of the node lately"
        return self.engine.may_renew(node, lease_id)

    # --- the loop ---------------------------------------------------------------------------

    async def _tick(self) -> None:
        """Time passes: folding windows close and passes fall due."""
        period_s = min(self.settings.pass_period_s, self.settings.load_period_s, 1.0)
        while True:
            await self.clock.sleep(period_s)
            for event in self.folder.due(now_s=self.clock.now_s()):
                self.post(event)
            self._wake.set()

    async def _decide(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._inbox and not self._stopping.is_set():
                await self.clock.sleep(self.settings.coalesce_s)
            if self._fenced is None:
                await self._batch()
            if self._stopping.is_set():
                self._give_up()
                return
            self._progress()

    def _give_up(self) -> None:
        for waiting in self._inbox:
            if waiting.done is not None and not waiting.done.done():
                waiting.done.set_exception(Unavailable("the coordinator is stopping"))
        self._inbox = []

    async def _batch(self) -> None:
        inbox, self._inbox = self._inbox, []
        entries: list[Entry] = []
        outcomes = [self._handle(waiting.event, entries) for waiting in inbox]
        self._passes(entries, outcomes)
        if not entries:
            return
        decisions = tuple(d for outcome in outcomes for d in outcome.decisions)
        if not await self._append(entries, decisions, inbox):
            return
        for waiting, outcome in zip(inbox, outcomes, strict=False):
            if waiting.done is not None and not waiting.done.done():
                waiting.done.set_result(outcome)
        for outcome in outcomes:
            self._let_out(outcome)
        for decision in decisions:
            log.info("decided %s", describe(decision))
        if self._records_since_snapshot >= self.settings.snapshot_records:
            await self._save_snapshot()

    def _handle(self, event: Event, entries: list[Entry]) -> Outcome:
        now_s = max(self.clock.wall_s(), self.engine.state.now_s)
        entries.append(Entry(now_s, event))
        outcome = self.engine.handle(event, now_s=now_s)
        for refused in outcome.refused:
            log.info("refused %s: %s", describe(refused.decision), refused.why)
        return outcome

    def _passes(self, entries: list[Entry], outcomes: list[Outcome]) -> None:
        """Run the passes that are due or asked for; a loan pass first, since it frees nodes."""
        now_s = self.clock.now_s()
        if now_s >= self._loan_pass_at_s or any(o.needs_loan_pass for o in outcomes):
            self._loan_pass_at_s = now_s + self.engine.settings.loan_period_s
            outcomes.append(self._handle(LoanPassDue(), entries))
        wakes = [o.wake_at_s for o in outcomes if o.wake_at_s is not None]
        is_woken = bool(wakes) and min(wakes) <= self.engine.state.now_s
        if now_s >= self._pass_at_s or is_woken or any(o.needs_pass for o in outcomes):
            self._pass_at_s = now_s + self.settings.pass_period_s
            outcomes.append(self._handle(PassDue(), entries))
            self.passed_at_s = now_s

    async def _append(
        self, entries: list[Entry], decisions: tuple[Decision, ...], inbox: list[_Waiting]
    ) -> bool:
        record = Record(
            epoch=self.engine.state.epoch,
            writer=self.holder,
            entries=tuple(entries),
            decisions=decisions,
        )
        try:
            await self._append_or_give_up(encode_record(record))
        except (Fenced, Unavailable) as error:
            # The engine is ahead of the journal now: nothing of this batch may leave.
            self._inbox = inbox + self._inbox
            self._on_fenced(error if isinstance(error, Fenced) else Fenced(f"journal: {error}"))
            return False
        self._records_since_snapshot += 1
        return True

    async def _append_or_give_up(self, data: bytes) -> None:
        """Append, again and again while the leader lease lasts; the same bytes count once."""
        while True:
            try:
                await self._journal.append(data)
            except Unavailable as error:
                if not self.may_act() or self._stopping.is_set():
                    raise
                log.warning("journal: %s; trying again", error)
                await self.clock.sleep(JOURNAL_RETRY_S)
            else:
                return

    async def _save_snapshot(self) -> None:
        await self._snapshots.save(self._journal.last_sequence, self.engine.encode_state())
        self._records_since_snapshot = 0

    def _let_out(self, outcome: Outcome) -> None:
        for command in outcome.commands:
            match command:
                case PushDesired():
                    self.dispatcher.push(NodeName(command.desired.node))
                case AskLedger():
                    self._ask_ledger(command.node)

    def _ask_ledger(self, node: NodeName) -> None:
        if node in self._asking:
            return
        self._asking.add(node)
        task = asyncio.get_running_loop().create_task(self._fetch_ledger(node))
        task.add_done_callback(lambda _: self._asking.discard(node))

    async def _fetch_ledger(self, node: NodeName) -> None:
        try:
            reply = await self.dispatcher.ledger(node)
        except (Unavailable, ProtocolError) as error:
            log.warning("ledger of %s: %s", node, error)
            self.folder.forget_node(node)  # its next report asks again
            return
        self.post(OrdersRecovered(node=node, orders=reply.orders))
