"""The loop of a leader: events in, one journal record a batch, then effects out.

One append is in flight; acknowledgements and commands leave after it. An event with a waiting
caller is appended at once, together with all events that came during the append before it. Only
passes wait for more events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from common.clock import Clock
from common.errors import ConfigError, Fenced, Unavailable
from coordinator.engine.engine import Engine
from coordinator.engine.nodes.lost_records import span
from coordinator.engine.nodes.membership import unknown_services
from coordinator.engine.record import Entry, Record, decode_record, encode_record
from coordinator.engine.state.commands import Command, Outcome
from coordinator.engine.state.events import (
    ArrayThrottled,
    Event,
    JobCancelRequested,
    JobChanged,
    JobsHeld,
    JobsReleased,
    JobsRequeued,
    JobSubmitted,
    LeaderStarted,
    LoanPassDue,
    OperatorAsked,
    PassDue,
    RecordsLost,
)
from coordinator.policies.contract.decisions import Decision
from coordinator.service.journal.recovery import Saved, lost_in_words, rebuild
from coordinator.service.leadership.engine_clock import EngineTime
from coordinator.service.metrics.measures import Measures
from coordinator.service.ports import JournalPort, SnapshotsPort, Wounded
from coordinator.service.quarantine import Quarantine, source_of
from coordinator.service.settings import CoordinatorSettings

log = logging.getLogger(__name__)

JOURNAL_RETRY_S = 0.2
BATCH_BYTES = 512 * 1024
"""Bytes of events in one record, except for the last event; the rest is the next record's. No
flood, such as a whole fleet's first reports, makes a record that nats-server refuses
(`MAX_PAYLOAD_BYTES`)."""


DAY_S = 86_400.0
SLOW_SHARE = 0.25
"""A record that took this part of the leader's TTL is logged, with the event that took longest."""
SNAPSHOT_SHARE = 0.2
"""Share of snapshots in the time of decisions and snapshots, where decisions are slow."""


class _Broke(Exception):  # noqa: N818 - it carries what broke
    """Handling an event raised; the engine is half changed."""

    def __init__(self, event: Event) -> None:
        super().__init__(source_of(event))
        self.event = event


_BROKE = "the coordinator failed on this request; see its log"
_READ_BACK = "the coordinator failed on another request and has read its journal again; ask again"


async def _no_line() -> int:
    return 0


class Numbers(NamedTuple):
    """The number of the last record known to be written, and of the last one in the engine."""

    known: int = 0
    taken: int = 0


class _Since(Struct):
    """The newest snapshot, and the work since then.

    sequence: of the last record in the snapshot; 0: there is none.
    records: the number of records after it.
    decide_s: work of their decisions, which a restart repeats.
    took_s: the duration of the snapshot.
    server: the run of the server that has all of these records.
    """

    sequence: int = 0
    records: int = 0
    decide_s: float = 0.0
    took_s: float = 0.0
    server: str = ""


class _Waiting(Struct):
    """An event on its way in, and the caller that waits for its record."""

    event: Event
    done: asyncio.Future[Outcome] | None = None


_JOB_ORDERS = {JobsHeld: "hold", JobsReleased: "release", JobsRequeued: "requeue"}


def ordered(event: Event) -> str:
    """A person's order, and the person; empty for other events."""
    match event:
        case JobSubmitted():
            by = f"{event.tenant}/{event.user}"
            said = f"submit {event.job_id} ({event.spec.name}) by {by}"
        case JobCancelRequested():
            tasks = f" tasks {event.indices}" if event.indices else ""
            said = f"cancel {event.job_id}{tasks} by {event.by}"
        case JobsHeld() | JobsReleased() | JobsRequeued():
            is_held = isinstance(event, JobsRequeued) and event.is_held
            words = (_JOB_ORDERS[type(event)], *event.job_ids, "held" if is_held else "")
            said = f"{' '.join(filter(None, words))} by {event.by}"
        case JobChanged():
            said = f"change {event.job_id} by {event.by}"
        case ArrayThrottled():
            said = f"throttle {event.job_id} {event.throttle or 'none'} by {event.by}"
        case OperatorAsked():
            within = "" if event.deadline_s is None else f"within {event.deadline_s:g} s"
            what = (event.action, event.target, event.value, within, f"by {event.by}")
            said = " ".join(filter(None, what)) + (f": {event.reason}" if event.reason else "")
        case _:
            return ""
    return f"{said} (from {event.client})" if event.client else said


def _log(inbox: Sequence[_Waiting], decisions: Sequence[Decision]) -> None:
    """Log one line for each order of a person and for each decision."""
    for waiting in inbox:
        if said := ordered(waiting.event):
            log.info("ordered %s", said)
    for decision in decisions:
        log.info("decided %s", _described(decision))


class Decider:
    """The engine, its inbox and its journal.

    Args:
        holder: the writer; stands in each record.
        may_act: whether this coordinator's lease still holds.
        let_out: gets every command, once its record is in the journal.
        fenced: called with the reason when nothing more may be written.
        written: gets the number of each record that is in the journal.
        told: called when all lines of the engine so far are in the journal.
        last_line: number of the last line of the history.
        dropped: receives each event that quarantine keeps out, also the one that broke the engine.
        progress: called after each batch and each step of a rebuild.
        tried: called after each try to append that failed.
        measures: counts what passes by, for the metrics page.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        holder: str,
        clock: Clock,
        journal: JournalPort,
        snapshots: SnapshotsPort,
        may_act: Callable[[], bool],
        let_out: Callable[[Command], None],
        fenced: Callable[[Fenced], None],
        progress: Callable[[], None],
        tried: Callable[[], None],
        measures: Measures,
        written: Callable[[int], None] = lambda _: None,
        told: Callable[[], None] = lambda: None,
        last_line: Callable[[], Awaitable[int]] = _no_line,
        dropped: Callable[[Event], None] = lambda _: None,
    ) -> None:
        self.engine = Engine(settings.engine)
        self.time = EngineTime(clock)
        self.passed_at_s = float("-inf")
        """When the last pass was in the journal, on the boot clock."""
        self._settings = settings
        self._holder = holder
        self._clock = clock
        self._journal = journal
        self._snapshots = snapshots
        self._may_act = may_act
        self._let_out = let_out
        self._fenced = fenced
        self._progress = progress
        self._tried = tried
        self._measures = measures
        self._written = written
        self._told = told
        self._last_line = last_line
        self._dropped = dropped
        self._numbers = Numbers()
        self._losses: tuple[RecordsLost, ...] = ()
        """Records that the rebuild found missing; reported with the first record."""
        self._inbox: list[_Waiting] = []
        self._wake = asyncio.Event()
        self._urgent = asyncio.Event()
        """A caller waits for the journal, or for the end."""
        self._gather_until_s: float | None = None
        """When passes may run over the new events; None while nothing came since the last
        passes."""
        self._wants_pass = self._wants_loan_pass = False
        self._readers: list[asyncio.Future[None]] = []
        self._first_written = asyncio.Event()  # or this coordinator stopped before
        self._is_ahead = self._is_stopping = self._has_ended = False
        """Ahead: the engine is ahead of the journal, or an event broke it."""
        self.quarantine = Quarantine()
        self._since = _Since()
        self._passes_took_s = 0.0
        self._slowest: tuple[float, str] = (0.0, "")
        """In the batch in hand: the longest time of one event, and which event."""
        self._pass_at_s = self._loan_pass_at_s = 0.0
        self._wake_at_s: float | None = None

    @property
    def foreign_count(self) -> int:
        """Messages in the journal that no coordinator wrote; counted and skipped."""
        return self._journal.foreign_count

    @property
    def loan_pass_at_s(self) -> float:
        """When the next loan pass is due without an event, in engine time."""
        return self.time.now_s() + max(0.0, self._loan_pass_at_s - self._clock.now_s())

    # --- intake -----------------------------------------------------------------------------

    def post(self, event: Event) -> bool:
        """Take an event in without waiting.

        False: its source is in quarantine, so it is dropped.
        """
        if self.quarantine.holds(event, now_s=self._clock.now_s()):
            self._dropped(event)
            return False
        self._inbox.append(_Waiting(event))
        self.wake()
        return True

    async def record(self, event: Event) -> Outcome:
        """Take an event in and return when it is in the journal.

        Raises:
            Unavailable: this coordinator stopped leading before that, or the event broke the
                engine.
        """
        self._check_runs()
        if self.quarantine.holds(event, now_s=self._clock.now_s()):
            raise Unavailable(_BROKE)
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._inbox.append(_Waiting(event, done))
        self._urgent.set()
        self.wake()
        return await done

    async def begun(self) -> None:
        """Return when the first record of this lead is in the journal.

        The state before that is the last leader's: of its epoch, its policy and its settings.

        Raises:
            Unavailable: this coordinator stopped leading before that.
        """
        await self._first_written.wait()
        self._check_runs()

    async def settled(self) -> None:
        """Return when the engine's present state is in the journal.

        State that is read from the engine while an append is under way is no promise before that.

        Raises:
            Unavailable: this coordinator stopped leading before that.
        """
        if self._is_ahead:
            self._check_runs()
            written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._readers.append(written)
            await written

    def _check_runs(self) -> None:
        if self._has_ended:
            raise Unavailable("the coordinator is stopping")

    def wake(self) -> None:
        """Check for due work after time has passed."""
        self._wake.set()

    def stop(self) -> None:
        """Return from `run` after the batch in hand."""
        self._is_stopping = True
        self._urgent.set()
        self.wake()

    # --- start ------------------------------------------------------------------------------

    def begin(self, started: LeaderStarted) -> None:
        """Begin to lead: the first events of its first record."""
        self.post(started)
        for lost in self._losses:
            self.post(lost)

    async def rebuild(self, *, last_number: int = 0) -> None:
        """Rebuild from the newest snapshot and the journal's tail.

        Agents' reports follow as events.

        last_number: of a record known to be written; 0: of none.

        Raises:
            ConfigError: a record was decided by a policy that no longer exists here; names both.
            ProtocolError: a record of a coordinator cannot be read; names its sequence.
            Unavailable: the journal does not answer.
        """
        await self._journal.open()
        await self._read_back(last_number)
        self.time.begin(self.engine.state.now_s, self.engine.state.clock)
        for service, by in unknown_services(self.engine.state, self._settings.engine):
            log.warning(
                "service %s is not in the settings, so it is not lent; named by %s", service, by
            )
        if not self._losses and self._since.decide_s >= self._settings.snapshot_decide_s:
            # If this leader dies before its first record, the next one has less to repeat.
            await self.save_snapshot()

    async def _read_back(self, last_number: int) -> None:
        """The engine after the last record, from the newest snapshot and the journal.

        last_number: of a record known to be written; 0: of none.
        """
        began_s = self._clock.now_s()
        rebuilt = await rebuild(
            self._journal, self._snapshots, progress=self._progress, last_number=last_number
        )
        self.engine = rebuilt.engine
        self._numbers = Numbers(rebuilt.last_number, rebuilt.number)
        # The numbers of lines in lost records must not be used again.
        lines = await self._last_line() if rebuilt.losses else 0
        self._losses = tuple(replace(lost, lines=lines) for lost in rebuilt.losses)
        self._measures.journaled(self.engine.state)
        self._told()
        self._since.server = self._journal.server
        self._since.decide_s = self._clock.now_s() - began_s if rebuilt.records else 0.0
        # The count includes the rebuild: a coordinator that dies often would otherwise never write
        # a snapshot, and each start would take longer than the one before.
        self._since.records = rebuilt.records
        if rebuilt.losses:
            # Later starts need not work around them again.
            self._since.records = self._settings.snapshot_records
        self._since.sequence = rebuilt.snapshot_sequence

    # --- the loop ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Decide until a stop; callers that still wait then get an error."""
        try:
            while True:
                is_pass_time = await self._gather()
                self.time.look()
                if self._may_act():
                    await self._batch(is_pass_time=is_pass_time)
                if self._is_stopping:
                    return
                self._progress()
        finally:
            self._give_up()

    async def _gather(self) -> bool:
        """Wait until there is work; returns whether passes may run over it.

        `coalesce_s` counts from the first event, whatever follows. Slow passes wait for as long as
        the last ones took: they leave half of the loop to everything else.
        """
        if self._gather_until_s is None:
            await self._wake.wait()
            self._wake.clear()
            if not self._inbox and not self._wants_pass and not self._wants_loan_pass:
                return True
            wait_s = max(self._settings.coalesce_s, self._passes_took_s)
            self._gather_until_s = self._clock.now_s() + wait_s
        left_s = self._gather_until_s - self._clock.now_s()
        is_over = left_s <= 0 or self._is_stopping
        if not is_over:
            try:
                async with self._clock.timeout(left_s):
                    await self._urgent.wait()
                is_over = self._is_stopping
            except TimeoutError:
                is_over = True
        self._urgent.clear()
        if is_over:
            self._gather_until_s = None
        return is_over

    def _give_up(self) -> None:
        self._has_ended = True
        self._first_written.set()
        inbox, self._inbox = self._inbox, []
        waiting: list[asyncio.Future[Outcome] | asyncio.Future[None]] = [*self._readers]
        waiting += [one.done for one in inbox if one.done is not None]
        _refuse(waiting, "the coordinator is stopping")

    async def _batch(self, *, is_pass_time: bool) -> None:
        inbox = self._take()
        entries: list[Entry] = []
        began_s = self._clock.now_s()
        self._slowest = (0.0, "")
        try:
            outcomes = [self._handle(waiting.event, entries) for waiting in inbox]
            self._wants_pass |= any(outcome.needs_pass for outcome in outcomes)
            self._wants_loan_pass |= any(outcome.needs_loan_pass for outcome in outcomes)
            is_passed = is_pass_time and self._timed_passes(entries, outcomes)
            if not entries:
                return
            decisions = tuple(d for outcome in outcomes for d in outcome.decisions)
            self._is_ahead = True
            self._note_time(self._clock.now_s() - began_s, len(entries))
            await self._append(entries, decisions)
        except _Broke as broke:
            await self._recover(broke, inbox)
            return
        except BaseException as error:
            # The engine is ahead of the journal now: nothing of this batch may leave.
            self._inbox = inbox + self._inbox
            if not isinstance(error, Fenced | Unavailable | ConfigError):
                raise
            self._is_stopping = True
            self._fenced(error if isinstance(error, Fenced) else Fenced(f"journal: {error}"))
            return
        if is_passed:
            self.passed_at_s = self._clock.now_s()
        self._measures.decided(decisions)
        self._tell_written()
        _answer(inbox, outcomes)
        # The engine has taken nothing since: the journal has the nodes' desired states.
        for command in dict.fromkeys(c for outcome in outcomes for c in outcome.commands):
            self._let_out(command)
        _log(inbox, decisions)
        if self._is_snapshot_due():
            await self.save_snapshot()

    def _is_snapshot_due(self) -> bool:
        """True if a snapshot is due.

        By the count of records, or by the work that a restart would repeat.
        """
        if self._since.records >= self._settings.snapshot_records:
            return True
        at_least_s = self._since.took_s * (1 - SNAPSHOT_SHARE) / SNAPSHOT_SHARE
        limit_s = max(self._settings.snapshot_decide_s, at_least_s)
        return self._since.decide_s >= limit_s

    def _note_time(self, took_s: float, entries: int) -> None:
        """Count the work that a restart would repeat, and log a record that was slow."""
        self._since.decide_s += took_s
        if took_s >= SLOW_SHARE * self._settings.leader_ttl_s:
            longest_s, what = self._slowest
            log.warning(
                "record of %d events took %.1f s to decide; %.1f s of that: %s",
                entries,
                took_s,
                longest_s,
                what,
            )

    async def _recover(self, broke: _Broke, inbox: list[_Waiting]) -> None:
        """Go on without an event that broke the engine, from the state in the journal.

        Raises:
            Exception: the event's error, where no leader can go on without it.
            Unavailable: the journal does not answer.
        """
        event = broke.event
        # The engine is half changed: none of its answers may leave.
        self._is_ahead = True
        if isinstance(event, PassDue | LoanPassDue | LeaderStarted | RecordsLost):
            self._inbox = inbox + self._inbox
            assert broke.__cause__ is not None
            raise broke.__cause__
        for_s = self.quarantine.note(event, now_s=self._clock.now_s())
        log.error(
            "%s made the engine fail; events of this source are ignored for %.0f s: %.2000s",
            source_of(event),
            for_s,
            event,
            exc_info=broke.__cause__,
        )
        self._inbox = inbox + self._inbox
        self._keep_out(event)
        await self._read_back(self._numbers.known)
        # A read of the half-changed engine in this turn of the loop waits by the next one.
        await asyncio.sleep(0)
        if self._losses and not self._take_losses():
            self._is_stopping = True
            lost = "; ".join(span(one) for one in self._losses)
            self._fenced(Fenced(f"journal {lost} lost: the next leader hears every node again"))
            return
        self._is_ahead = False
        readers, self._readers = self._readers, []
        _refuse(readers, _READ_BACK)
        self._urgent.set()
        self.wake()

    def _keep_out(self, broke: Event) -> None:
        """Drop the event that broke the engine from the inbox, with others of its source."""
        inbox, self._inbox = self._inbox, []
        now_s = self._clock.now_s()
        for one in inbox:
            if one.event is not broke and not self.quarantine.holds(one.event, now_s=now_s):
                self._inbox.append(one)
                continue
            _refuse([] if one.done is None else [one.done], _BROKE)
            self._dropped(one.event)

    def _take_losses(self) -> bool:
        """Take in the losses that were found, if this lead has not begun in the journal.

        False: it has begun. The nodes count as heard since then, so none of them would be asked for
        its workers.
        """
        count = next(
            (n for n, one in enumerate(self._inbox, 1) if isinstance(one.event, LeaderStarted)), 0
        )
        if not count:
            return False
        later = [
            one
            for one in self._inbox[count:]
            if not isinstance(one.event, RecordsLost) or one.event.is_state_whole
        ]
        found = [_Waiting(lost) for lost in self._losses]
        self._inbox = [*self._inbox[:count], *found, *later]
        return True

    def _take(self) -> list[_Waiting]:
        """Take as many events of the inbox, in order, as one record holds.

        The rest follows at once.
        """
        count = size_bytes = 0
        while count < len(self._inbox) and size_bytes < BATCH_BYTES:
            size_bytes += len(msgspec.msgpack.encode(self._inbox[count].event))
            count += 1
        taken, self._inbox = self._inbox[:count], self._inbox[count:]
        if self._inbox:
            self._urgent.set()
            self.wake()
        return taken

    def _tell_written(self) -> None:
        self._is_ahead = False
        self._first_written.set()
        self._measures.journaled(self.engine.state)
        self._told()
        readers, self._readers = self._readers, []
        for reader in readers:
            if not reader.done():
                reader.set_result(None)

    def _handle(self, event: Event, entries: list[Entry]) -> Outcome:
        now_s = self.time.now_s()
        entries.append(Entry(now_s, event))
        began_s = self._clock.now_s()
        try:
            outcome = self.engine.handle(event, now_s=now_s)
        except Exception as error:
            raise _Broke(event) from error
        took_s = self._clock.now_s() - began_s
        if took_s > self._slowest[0]:
            self._slowest = (took_s, source_of(event))
        self._measures.handled(event, outcome, took_s)
        self._wake_at_s = outcome.wake_at_s
        for refused in outcome.refused:
            log.info("refused %s: %s", _described(refused.decision), refused.why)
        return outcome

    def _timed_passes(self, entries: list[Entry], outcomes: list[Outcome]) -> bool:
        began_s, count = self._clock.now_s(), len(entries)
        is_passed = self._passes(entries, outcomes)
        if len(entries) > count:
            self._passes_took_s = min(self._clock.now_s() - began_s, self._settings.pass_period_s)
        return is_passed

    def _passes(self, entries: list[Entry], outcomes: list[Outcome]) -> bool:
        """Run the passes that are due or requested; a loan pass first, since it frees nodes."""
        now_s = self._clock.now_s()
        if now_s >= self._loan_pass_at_s or self._wants_loan_pass:
            self._loan_pass_at_s = now_s + self.engine.settings.loan_period_s
            self._wants_loan_pass = False
            outcomes.append(self._handle(LoanPassDue(), entries))
            self._wants_pass |= outcomes[-1].needs_pass
        # Checked for each batch: the outcome that requested it may be long gone.
        is_woken = self._wake_at_s is not None and self._wake_at_s <= self.time.now_s()
        if now_s < self._pass_at_s and not is_woken and not self._wants_pass:
            return False
        self._pass_at_s = now_s + self._settings.pass_period_s
        self._wants_pass = False
        outcomes.append(self._handle(PassDue(), entries))
        return True

    async def _append(self, entries: list[Entry], decisions: tuple[Decision, ...]) -> None:
        """Append, again and again while the leader lease lasts; the same bytes count once.

        Raises:
            Fenced: another coordinator wrote.
            Unavailable: not known to be written, and no time is left to find out.
        """
        record = Record(
            number=self._numbers.known + 1,
            after=self._numbers.taken,
            epoch=self.engine.state.epoch,
            writer=self._holder,
            entries=tuple(entries),
            decisions=decisions,
        )
        data = encode_record(record)
        began_s = self._clock.now_s()
        wounded_at_s: float | None = None
        lost: RecordsLost | None = None
        while True:
            try:
                if wounded_at_s is not None:
                    lost = lost or await self._mend(record)
                sequence = await self._journal.append(data)
                if wounded_at_s is not None:
                    await self._check_holds(sequence, data)
                break
            except Wounded as wound:
                log.error("journal: %s; repairing it from this leader's state", wound)
                now_s = self._clock.now_s()
                wounded_at_s = now_s if wounded_at_s is None else wounded_at_s
                lost, error = None, Unavailable(f"{wound}")
            except Unavailable as unavailable:
                error = unavailable
            if not self._may_act() or self._is_stopping:
                raise error
            if wounded_at_s is not None and (
                self._clock.now_s() - wounded_at_s >= self._settings.leader_ttl_s
            ):
                raise Unavailable(f"it could not be mended in a leader's TTL: {error}")
            log.warning("journal: %s; retrying", error)
            self._tried()  # the lease may last longer than the patience of a watchdog
            await self._clock.sleep(JOURNAL_RETRY_S)
        self._numbers = Numbers(record.number, record.number)
        self._written(record.number)
        self._measures.appended(len(data), self._clock.now_s() - began_s)
        self._since.records += 1
        if lost is not None:
            log.error("%s", lost_in_words(lost))
            self.post(lost)
        if lost is not None or self._since.server != self._journal.server:
            # A restarted server may have lost records, the last ones or others: a snapshot has
            # their effect. It also follows one that `_mend` saved.
            self._since.records = self._settings.snapshot_records
        self._since.server = self._journal.server

    async def _mend(self, record: Record) -> RecordsLost:
        """Save the state in place of a record and all before it, and find the journal's end.

        Nothing is removed that the journal still has.

        Raises:
            Fenced: a later leader wrote.
            Unavailable: not known to be saved, or the lease has run out.
        """
        await self._journal.mend()
        found = await self._journal.last_record()
        first, from_s = 1, 0.0
        if found is not None:
            last = decode_record(found[1], sequence=found[0])
            if last.epoch > record.epoch or (
                last.epoch == record.epoch and last.writer != record.writer
            ):
                raise Fenced(f"journal record {found[0]} is of {last.writer}, epoch {last.epoch}")
            first = 1 + last.number
            from_s = last.entries[-1].now_s if last.entries else 0.0
        if not self._may_act():
            raise Unavailable("journal: the lease ran out before the state was saved")
        await self._snapshots.save(self._journal.last_sequence, self._saved(record.number))
        until_s = record.entries[0].now_s
        last_number = max(first, record.number - 1)
        return RecordsLost(
            first=first, last=last_number, from_s=from_s, until_s=until_s, is_state_whole=True
        )

    async def _check_holds(self, sequence: int, data: bytes) -> None:
        """Check that a record can be read.

        A server with a damaged block may acknowledge unreadable ones.

        Raises:
            Wounded: it did.
        """
        if not await self._journal.holds(sequence, data):
            raise Wounded(f"record {sequence} was acknowledged and cannot be read")

    def _saved(self, number: int) -> bytes:
        """Save the state after the record of this number as a snapshot."""
        saved = Saved(
            settings=self.engine.settings,
            state=msgspec.Raw(self.engine.encode_state()),
            journal=self._journal.identity,
            number=number,
        )
        return msgspec.msgpack.encode(saved)

    async def save_snapshot(self) -> None:
        """Save the state after the last record.

        A snapshot only shortens the next start, so a failed one is no reason to stop; the next is
        tried after as many records again.
        """
        self._since.records = 0
        self._since.decide_s = 0.0
        sequence = self._journal.last_sequence
        began_s = self._clock.now_s()
        try:
            await self._snapshots.save(sequence, self._saved(self._numbers.taken))
            self._since.took_s = self._clock.now_s() - began_s
            self._measures.saved()
        except (Unavailable, ConfigError) as error:
            log.warning("snapshot not written: %s", error)
            return
        before, self._since.sequence = self._since.sequence, sequence
        if self._settings.journal_kept_days > 0:
            await self._shorten(before)

    async def _shorten(self, up_to: int) -> None:
        """Drop old records that two snapshots cover.

        If the newest is damaged, the other still serves. The next snapshot tries again, so a
        failure is no reason to stop.
        """
        try:
            await self._journal.shorten(up_to, kept_s=self._settings.journal_kept_days * DAY_S)
        except Unavailable as error:
            log.warning("journal not shortened: %s", error)


def _refuse(waiting: Sequence[asyncio.Future[Outcome] | asyncio.Future[None]], why: str) -> None:
    """End the callers that wait for the journal as unavailable."""
    for future in waiting:
        if not future.done():
            future.set_exception(Unavailable(why))


def _answer(inbox: list[_Waiting], outcomes: list[Outcome]) -> None:
    """Give the callers that wait for their events the results."""
    for waiting, outcome in zip(inbox, outcomes, strict=False):
        if waiting.done is not None and not waiting.done.done():
            waiting.done.set_result(outcome)


def _described(decision: Decision) -> str:
    """One line for the log: the decision and its reason."""
    fields = {
        name: getattr(decision, name)
        for name in ("job_id", "node", "service", "added", "removed_workers")
        if getattr(decision, name, None)
    }
    what = " ".join(f"{name}={value}" for name, value in fields.items())
    return f"{type(decision).__name__} {what}: {decision.reason}"
