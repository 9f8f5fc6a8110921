"""Fakes of the edges, for tests: a bus, a journal, snapshots and a key with CAS.

Each one is run through the same contract tests as the real thing (tests/common/test_bus.py,
tests/service/journal/test_jetstream.py), so a test that passes on a fake says something about the
product.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from common.bus import BusMessage, Handler
from common.clock import Clock, SystemClock
from common.errors import Fenced, Unavailable
from common.history import HistoryLine
from common.subjects import reply_inbox
from coordinator.service.journal.history import Tail
from coordinator.service.leadership.lease import KeyEntry, KeyPort, LeaderLease
from coordinator.service.leadership.process import ProcessId
from coordinator.service.ports import Lost, Wounded
from tests.harness.fake_clock import FakeClock as FakeClock  # so that a test needs one import

log = logging.getLogger(__name__)


# --- the bus --------------------------------------------------------------------------------


@dataclass(eq=False)
class FakeMessage:
    """A message on a `FakeNetwork`."""

    subject: str
    data: bytes
    reply: Callable[[bytes], None] | None = None

    async def respond(self, data: bytes) -> None:
        """Answer a request; without one this does nothing."""
        if self.reply is not None:
            self.reply(data)


class FakeSubscription:
    """One subject, its own queue and its own task, as on the real bus."""

    def __init__(self, network: FakeNetwork, bus: FakeBus, subject: str, handler: Handler) -> None:
        self.bus = bus
        self.subject = subject
        self.queue: asyncio.Queue[FakeMessage] = asyncio.Queue()
        self._network = network
        self._handler = handler
        self._task = asyncio.create_task(self._run(), name=f"fake-bus {subject}")

    async def unsubscribe(self) -> None:
        """Stop delivery."""
        self._network.subscriptions = [s for s in self._network.subscriptions if s is not self]
        if self._task is not asyncio.current_task():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _only_if_up(self, message: FakeMessage) -> Callable[[bytes], None]:
        """An answer that leaves only a bus that is still there, as any other message."""

        def reply(data: bytes) -> None:
            if message.reply is not None and self.bus.is_connected:
                message.reply(data)

        return reply

    async def _run(self) -> None:
        while True:
            message = await self.queue.get()
            try:
                received: BusMessage = FakeMessage(
                    message.subject, message.data, self._only_if_up(message)
                )
                await self._handler(received)
            except Exception:
                self.bus.handler_error_count += 1
                log.exception("handler of %s failed", message.subject)
            finally:
                self.queue.task_done()


@dataclass
class FakeNetwork:
    """What FakeBuses share; tests read what was sent and lose what they like."""

    subscriptions: list[FakeSubscription] = field(default_factory=list[FakeSubscription])
    sent: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])
    """Everything that was published or requested, lost or not."""
    is_lost: Callable[[str, bytes], bool] = lambda _subject, _data: False
    """Called with subject and payload of each message; True loses it."""

    async def settle(self) -> None:
        """Return when every queue is empty and every handler has returned."""
        while any(s.queue.qsize() or not _is_idle(s.queue) for s in self.subscriptions):
            for subscription in list(self.subscriptions):
                await subscription.queue.join()

    def deliver(self, message: FakeMessage) -> int:
        """Queue a message at each matching subscription; how many there are."""
        self.sent.append((message.subject, message.data))
        found = [
            s
            for s in self.subscriptions
            if s.bus.is_connected and matches(s.subject, message.subject)
        ]
        if not self.is_lost(message.subject, message.data):
            for subscription in found:
                subscription.queue.put_nowait(message)
        return len(found)


class FakeBus:
    """`Bus` in memory. Buses on one network hear each other.

    Args:
        network: shared by the buses that should hear each other; its own by default.
        clock: what request timeouts run on.
    """

    def __init__(self, network: FakeNetwork | None = None, *, clock: Clock | None = None) -> None:
        self.network = network or FakeNetwork()
        self.handler_error_count = 0
        self._clock: Clock = clock or SystemClock()
        self._is_connected = True
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        """Whether messages sent now have somewhere to go."""
        return self._is_connected and not self._is_closed

    def cut(self) -> None:
        """Lose everything to and from this bus until `heal`."""
        self._is_connected = False

    def heal(self) -> None:
        """The connection is back; nobody needs to subscribe again."""
        self._is_connected = True

    async def publish(self, subject: str, data: bytes) -> None:
        """Send and forget; while cut it is lost."""
        if self._is_closed:
            raise Unavailable(f"{subject}: not connected")
        if self._is_connected:
            self.network.deliver(FakeMessage(subject, data))

    async def subscribe(self, subject: str, handler: Handler) -> FakeSubscription:
        """Call `handler` for each message, one at a time."""
        subscription = FakeSubscription(self.network, self, subject, handler)
        self.network.subscriptions.append(subscription)
        return subscription

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Send and wait for the first answer."""
        if reply_inbox(subject) is None:
            raise ValueError(f"{subject}: no permission to answer on this subject")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def reply(data: bytes) -> None:
            if self.is_connected and not answer.done():
                answer.set_result(data)

        if self._is_closed:
            raise Unavailable(f"{subject}: not connected")
        if self._is_connected and not self.network.deliver(FakeMessage(subject, data, reply)):
            raise Unavailable(f"{subject}: no listener")
        try:
            async with self._clock.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise Unavailable(f"{subject}: no answer in time") from None

    async def close(self) -> None:
        """Leave; its subscriptions end."""
        self._is_closed = True
        for subscription in [s for s in self.network.subscriptions if s.bus is self]:
            await subscription.unsubscribe()


def matches(pattern: str, subject: str) -> bool:
    """NATS subject matching: `*` is one token, `>` one or more at the end."""
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted = wanted[:-1]
        if len(given) <= len(wanted):
            return False
        given = given[: len(wanted)]
    return len(wanted) == len(given) and all(
        w in ("*", g) for w, g in zip(wanted, given, strict=True)
    )


def _is_idle(queue: asyncio.Queue[FakeMessage]) -> bool:
    return bool(getattr(queue, "_unfinished_tasks", 0) == 0)


# --- the coordinator's ports ----------------------------------------------------------------


@dataclass
class FakeFaults:
    """How the next writes fail; each entry is used once, in order."""

    writes: list[str] = field(default_factory=list[str])
    """`lost`: not applied, no answer. `unanswered`: applied, no answer. Anything else: fine."""

    def next(self) -> str:
        """The fault of this write."""
        return self.writes.pop(0) if self.writes else ""


class Foreign(bytes):
    """A message on the journal's subject that no coordinator wrote."""


class Dropped(bytes):
    """What stands at the place of a record that was dropped."""


class Gone(bytes):
    """What stands at the place of a record that a damaged disk lost."""


class MemoryJournal:
    """`JournalPort` on a list; journals on one list fence each other.

    Each record counts as written a second after the one before.
    """

    def __init__(self, records: list[bytes] | None = None) -> None:
        self.records = records if records is not None else []
        self.is_down = False
        """While set, every call is `Unavailable`."""
        self.cannot_shorten = False
        """While set, that call is `Unavailable`."""
        self.server_run = "server-1"
        self.faults = FakeFaults()
        self._last_sequence = 0
        self._foreign: set[int] = set()

    @property
    def server(self) -> str:
        """Which run of the server keeps it."""
        return self.server_run

    @property
    def identity(self) -> str:
        """Which list it is."""
        return f"list-{id(self.records)}"

    @property
    def first_sequence(self) -> int:
        """Sequence of the first record that is still there."""
        return 1 + sum(isinstance(record, Dropped) for record in self.records)

    @property
    def last_sequence(self) -> int:
        """Sequence of the last record known here."""
        return self._last_sequence

    @property
    def foreign_count(self) -> int:
        """Messages met here that no coordinator wrote."""
        return len(self._foreign)

    async def open(self) -> None:
        """Find the end."""
        self._check()
        self._last_sequence = len(self.records)

    async def append(self, record: bytes) -> int:
        """Write after the last record known here; the same bytes at the same place count once."""
        await asyncio.sleep(0)
        self._check()
        fault = self.faults.next()
        if fault == "lost":
            raise Unavailable("journal: no answer")
        while self._last_sequence < len(self.records) and isinstance(
            self.records[self._last_sequence], Foreign
        ):
            self._last_sequence += 1
            self._foreign.add(self._last_sequence)
        if len(self.records) < self._last_sequence:
            raise Wounded(f"it ends at {len(self.records)}")
        if len(self.records) == self._last_sequence:
            self.records.append(record)
        elif self.records[self._last_sequence] != record:
            raise Fenced(f"journal: record {self._last_sequence + 1} is somebody else's")
        if fault == "unanswered":
            raise Unavailable("journal: no answer")
        self._last_sequence += 1
        return self._last_sequence

    async def mend(self) -> None:
        """Find the end."""
        await self.open()

    async def holds(self, sequence: int, record: bytes) -> bool:
        """Whether a record can be read back."""
        self._check()
        return self.records[sequence - 1 : sequence] == [record]

    async def last_record(self) -> tuple[int, bytes] | None:
        """The last record and its sequence."""
        self._check()
        for sequence in range(self._last_sequence, self.first_sequence - 1, -1):
            if not isinstance(self.records[sequence - 1], Foreign | Gone):
                return sequence, self.records[sequence - 1]
        return None

    async def read(self, from_sequence: int) -> AsyncIterator[tuple[int, bytes] | Lost]:
        """Records from a sequence on, to the end as it is now."""
        self._check()
        for sequence in range(max(self.first_sequence, from_sequence), len(self.records) + 1):
            if isinstance(self.records[sequence - 1], Foreign):
                self._foreign.add(sequence)
            elif isinstance(self.records[sequence - 1], Gone):
                yield Lost(sequence, sequence)
            else:
                yield sequence, self.records[sequence - 1]

    async def shorten(self, up_to: int, *, kept_s: float) -> None:
        """Drop records up to a sequence that are more than `kept_s` older than the last."""
        self._check()
        if self.cannot_shorten:
            raise Unavailable("journal: no answer")
        for sequence in range(1, min(up_to + 1, self._last_sequence)):
            if self._last_sequence - sequence > kept_s:
                self.records[sequence - 1] = Dropped()

    def _check(self) -> None:
        if self.is_down:
            raise Unavailable("journal: down")


class MemoryHistory:
    """`HistoryPort` on a list; two on one list refuse each other what they have not seen."""

    def __init__(self, rows: list[HistoryLine] | None = None) -> None:
        self.rows = rows if rows is not None else []
        self.is_down = False
        """While set, every call is `Unavailable`."""
        self.server_run = "server-1"
        self.identity = "stream-1"
        self._known = 0

    def another(self) -> MemoryHistory:
        """As another coordinator sees the same history."""
        return MemoryHistory(self.rows)

    @property
    def server(self) -> str:
        """Which run of the server keeps it."""
        return self.server_run

    async def open(self) -> int:
        """The number of the last line."""
        self._check()
        self._known = len(self.rows)
        return self.rows[-1].number if self.rows else 0

    async def write(self, lines: Sequence[HistoryLine]) -> None:
        """Append lines."""
        await asyncio.sleep(0)
        self._check()
        if self._known != len(self.rows):
            raise Unavailable("history: another line is the last")
        self.rows += lines
        self._known = len(self.rows)

    async def read(
        self, words: Collection[str], *, after: int, before: int, most_bytes: int, newest: bool
    ) -> tuple[list[HistoryLine], bool]:
        """Lines between two numbers, and whether more of them are there."""
        self._check()
        found = [
            row
            for row in self.rows
            if after < row.number < before and (not words or row.subject in words)
        ]
        count = size_bytes = 0
        for line in reversed(found) if newest else found:
            size_bytes += len(msgspec.msgpack.encode(line))
            if count and size_bytes > most_bytes:
                break
            count += 1
        if newest:
            return found[len(found) - count :], False
        return found[:count], count < len(found)

    async def tail(self, sequence: int, *, most: int) -> Tail:
        """Messages from a sequence on; a line's sequence is its place."""
        self._check()
        found = self.rows[sequence - 1 : sequence - 1 + most]
        messages = [msgspec.msgpack.encode(line) for line in found]
        until = sequence - 1 + len(found)
        return Tail(self.identity, 1, len(self.rows), messages, until)

    def _check(self) -> None:
        if self.is_down:
            raise Unavailable("history: down")


class MemorySnapshots:
    """`SnapshotsPort` that keeps the newest."""

    def __init__(self) -> None:
        self.saved: tuple[int, bytes] | None = None
        self.is_down = False
        """While set, every call is `Unavailable`."""

    async def save(self, sequence: int, data: bytes) -> None:
        """Keep it."""
        self._check()
        self.saved = (sequence, data)

    async def load(self) -> tuple[int, bytes] | None:
        """The newest one."""
        self._check()
        return self.saved

    def _check(self) -> None:
        if self.is_down:
            raise Unavailable("snapshot: down")


class MemoryKey:
    """`KeyPort`: one key with compare-and-set, and faults on order."""

    def __init__(self) -> None:
        self.entry: KeyEntry | None = None
        self.faults = FakeFaults()
        self.is_down = False

    async def get(self) -> KeyEntry | None:
        """The value and its revision."""
        await asyncio.sleep(0)
        if self.is_down:
            raise Unavailable("key: down")
        return self.entry

    async def put(self, value: bytes, *, last_revision: int) -> int | None:
        """Write if the revision is still this one; None if it is not."""
        await asyncio.sleep(0)
        fault = self.faults.next()
        if self.is_down or fault == "lost":
            raise Unavailable("key: no answer")
        revision = self.entry.revision if self.entry is not None else 0
        if revision != last_revision:
            return None
        self.entry = KeyEntry(value, revision + 1)
        if fault == "unanswered":
            raise Unavailable("key: no answer")
        return self.entry.revision


_NONCES = itertools.count()


def memory_lease(
    key: KeyPort,
    *,
    clock: Clock,
    ttl_s: float = 8.0,
    margin_s: float = 1.0,
    process: ProcessId | None = None,
    ended: Collection[ProcessId] = (),
) -> LeaderLease:
    """The real lease rules on a key in memory; leases on one key compete.

    ended: processes that this one knows to have ended.
    """
    return LeaderLease(
        key,
        clock=clock,
        ttl_s=ttl_s,
        margin_s=margin_s,
        nonce=f"nonce-{next(_NONCES)}",
        process=process,
        has_ended=ended.__contains__,
    )
