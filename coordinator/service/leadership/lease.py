"""The leader's lease: which coordinator may act, and until when, on one key with compare-and-set.

`coordinator.service.leadership.jetstream_key` keeps the key on JetStream.

The rules: clocks of two machines are never compared. A holder counts its TTL from the moment that
it *sent* the write that succeeded. All others count the same TTL from the moment that they first
*saw* that revision, which is later. So the holder always stops before another one starts, as long
as their clocks run at the same speed to within the margin. A coordinator does not wait for a holder
that it knows to have ended: on its own machine it looks for the holder's process.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta, Struct

from common.clock import Clock
from common.decoding import UNREADABLE
from common.errors import ConfigError, Fenced, Unavailable
from common.model import Ordinal
from coordinator.service.leadership.process import ProcessId

log = logging.getLogger(__name__)

MAX_TTL_S = 3600.0
"""No coordinator asks for more; a key with more was not written by one, and the cell would have no
leader until it is over."""
MAX_POLL_S = 0.25
"""A standby looks at least this often: a planned takeover is done within a second, and one after a
kill within `leader_ttl_s`, two looks and a rebuild."""


class KeyEntry(NamedTuple):
    """A value and the revision that a compare-and-set needs."""

    value: bytes
    revision: int


class KeyPort(Protocol):
    """One key with compare-and-set."""

    async def get(self) -> KeyEntry | None:
        """The newest value, or None if there never was one.

        Raises:
            Unavailable: no answer.
        """
        ...

    async def put(self, value: bytes, *, last_revision: int) -> int | None:
        """Write if the revision is still this one (0: there is none); the new revision.

        None means that another write came first.

        Raises:
            Unavailable: not known to be written.
        """
        ...


class LeaseValue(Struct, frozen=True, kw_only=True):
    """The content of the key."""

    holder: str
    """For people."""
    nonce: str
    """Its true identity: two processes may have one name, and a name may come back."""
    epoch: Ordinal
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_TTL_S)]
    is_released: bool = False
    process: ProcessId | None = None
    record: int = 0
    """Number of a journal record that the holder has written; 0: not known."""


class _Seen(NamedTuple):
    revision: int
    at_s: float


class LeaderLease:
    """`LeasePort` on a `KeyPort`.

    Args:
        ttl_s: a holder that does not renew for this long is replaced.
        margin_s: it stops acting this long before.
        nonce: the holder's true identity; no other holder, past or present, has the same.
        process: the holder's process, so that others on the machine see when it has ended.
        has_ended: whether a process is known to have ended; the lease of any other is waited out.

    Raises:
        ConfigError: the margin eats the TTL.
    """

    def __init__(
        self,
        key: KeyPort,
        *,
        clock: Clock,
        ttl_s: float,
        margin_s: float,
        nonce: str,
        process: ProcessId | None = None,
        has_ended: Callable[[ProcessId], bool] = lambda _: False,
    ) -> None:
        if not 0 <= margin_s < ttl_s:
            raise ConfigError(f"leader_margin_s: {margin_s:g} is not less than the TTL, {ttl_s:g}")
        self._key = key
        self._clock = clock
        self._ttl_s = ttl_s
        self._margin_s = margin_s
        self._nonce = nonce
        self._process = process
        self._has_ended = has_ended
        self._held: LeaseValue | None = None
        self._seen = _Seen(-1, -math.inf)
        self._revision = 0
        self._valid_until_s = -math.inf
        self._record = self._record_before = 0
        self._lost_at_s: float | None = None
        """Since when the key, which existed, is gone or older than before."""

    @property
    def valid_until_s(self) -> float:
        """On this machine's boot clock; after it the holder must not act."""
        return self._valid_until_s

    @property
    def record_before(self) -> int:
        """Number of a journal record that the previous holder is known to have written; 0: none."""
        return self._record_before

    def note_record(self, number: int) -> None:
        """Report from the next renewal on that the journal has this record."""
        self._record = number

    async def look(self) -> None:
        """Look up the present holder.

        Another's TTL counts from here on, not only from `acquire` on.

        Raises:
            Unavailable: no answer.
        """
        self._see(await self._key.get())

    def _see(self, entry: KeyEntry | None) -> None:
        revision = entry.revision if entry is not None else 0
        if revision < self._seen.revision:
            self._lost_at_s = self._clock.now_s()
        elif revision > self._seen.revision:
            self._lost_at_s = None
        if revision != self._seen.revision:
            self._seen = _Seen(revision, self._clock.now_s())

    async def acquire(self, holder: str, highest_reported_epoch: Callable[[], int]) -> int:
        """Wait until this holder leads; returns its epoch.

        The epoch is one more than every epoch that the key or any agent has seen by then: agents
        continue to report while a standby waits.
        """
        while True:
            asked_s = self._clock.now_s()
            try:
                entry = await self._key.get()
                self._see(entry)
                if self._may_take(entry, self._seen, asked_s):
                    epoch = await self._take(entry, holder, highest_reported_epoch())
                    if epoch is not None:
                        return epoch
            except Unavailable as error:
                # A standby outlives an outage; its observations stay valid.
                log.info("leader lease cannot be read or taken: %s", error)
            await self._clock.sleep(min(MAX_POLL_S, self._ttl_s / 8))

    async def renew(self) -> None:
        """Renew the lease, counted from now.

        An expired lease is not renewed, even if no other holder has taken it: a holder that slept
        through its end has missed reports, and starts afresh instead of acting on old knowledge.

        Raises:
            Fenced: another coordinator holds it, or none does, or it ran out.
            Unavailable: not known to be renewed; `valid_until_s` is unchanged.
        """
        if self._held is None:
            raise Fenced("the leader lease is not held here")
        over_s = self._clock.now_s() - self._valid_until_s
        if over_s >= 0:
            raise Fenced(f"the leader lease ran out {over_s:.1f} s ago")
        if await self._write(self._held):
            return
        # An earlier renewal may have been applied although its answer was lost; or a damaged disk
        # lost the key, or gave back an older value. In that case no other coordinator took the
        # lease: others wait for a TTL where a key that they saw is gone.
        entry = await self._key.get()
        if self._is_ours_still(entry):
            self._revision = entry.revision if entry is not None else 0
            if await self._write(self._held):
                return
        self._held = None
        self._valid_until_s = -math.inf
        raise Fenced(f"the leader lease is held by {_name(entry)}")

    async def keep(self, progressed_at_s: Callable[[], float], *, stall_s: float) -> None:
        """Renew it each quarter of its TTL, from now on and until it is lost.

        A holder whose work stalls does not block others: its lease runs out. If its work resumes
        before that, renewals resume too.

        Raises:
            Fenced: another holder has it, or it ran out.
        """
        is_stalled = False
        while True:
            await self._clock.sleep(self._ttl_s / 4)
            idle_s = self._clock.now_s() - progressed_at_s()
            if idle_s < stall_s:
                is_stalled = False
                try:
                    await self.renew()
                except Unavailable as error:
                    log.warning("lease not renewed: %s", error)
            elif not is_stalled:
                is_stalled = True
                log.error("leader lease not renewed: decisions made no progress for %.1f s", idle_s)
            if self._clock.now_s() >= self._valid_until_s:
                why = f": decisions made no progress for {idle_s:.1f} s" if is_stalled else ""
                raise Fenced(f"the leader lease ran out{why}")

    async def release(self) -> None:
        """Give the lease up at once, so that the next holder need not wait.

        Nothing when it is not held.

        A renewal that was under way when the holder stopped may come first: then the lease is
        released at the revision of that renewal.

        Raises:
            Unavailable: not known to be released; it then runs out by itself.
        """
        held, self._held = self._held, None
        self._valid_until_s = -math.inf
        if held is None:
            return
        value = msgspec.structs.replace(held, is_released=True, record=self._record)
        released = msgspec.msgpack.encode(value)
        if await self._key.put(released, last_revision=self._revision) is not None:
            return
        entry = await self._key.get()
        found = decode_value(entry.value) if entry is not None else None
        if entry is not None and found is not None and found.nonce == self._nonce:
            await self._key.put(released, last_revision=entry.revision)

    def _may_take(self, entry: KeyEntry | None, seen: _Seen, asked_s: float) -> bool:
        value = decode_value(entry.value) if entry is not None else None
        if self._lost_at_s is not None and asked_s - self._lost_at_s < self._ttl_s:
            return False  # its holder may be alive, and writes the key again
        if value is None:
            return entry is None or asked_s - seen.at_s >= self._ttl_s
        if value.is_released or value.nonce == self._nonce:
            # Our own: a take whose answer was lost. No other coordinator acts on it, and we do not
            # yet.
            return True
        if value.process is not None and self._has_ended(value.process):
            return True
        return asked_s - seen.at_s >= value.ttl_s

    async def _take(self, entry: KeyEntry | None, holder: str, reported: int) -> int | None:
        previous = decode_value(entry.value) if entry is not None else None
        value = LeaseValue(
            holder=holder,
            nonce=self._nonce,
            epoch=1 + max(previous.epoch if previous is not None else 0, reported),
            ttl_s=self._ttl_s,
            process=self._process,
            record=previous.record if previous is not None else 0,
        )
        self._record = self._record_before = value.record
        self._revision = entry.revision if entry is not None else 0
        if not await self._write(value):
            return None
        self._held = value
        return value.epoch

    def _is_ours_still(self, entry: KeyEntry | None) -> bool:
        """True if the key shows no other holder than this one, or one before it."""
        value = decode_value(entry.value) if entry is not None else None
        if entry is None or self._held is None or not entry.value:
            return self._held is not None
        if value is None:
            return False
        return value.nonce == self._nonce or value.epoch < self._held.epoch

    async def _write(self, value: LeaseValue) -> bool:
        value = msgspec.structs.replace(value, record=self._record)
        sent_s = self._clock.now_s()
        revision = await self._key.put(msgspec.msgpack.encode(value), last_revision=self._revision)
        if revision is None:
            return False
        self._revision = revision
        self._valid_until_s = sent_s + self._ttl_s - self._margin_s
        return True


def decode_value(value: bytes) -> LeaseValue | None:
    """A value of this version; None for any other: it is waited out like any other lease."""
    try:
        return msgspec.msgpack.decode(value, type=LeaseValue)
    except UNREADABLE:
        return None


def _name(entry: KeyEntry | None) -> str:
    value = decode_value(entry.value) if entry is not None else None
    return f"{value.holder} (epoch {value.epoch})" if value is not None else "no coordinator"
