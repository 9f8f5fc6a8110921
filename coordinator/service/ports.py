"""The live driver's dependencies, as protocols: taken as arguments, replaced in tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from msgspec import Struct

from common.errors import ArylError


class Wounded(ArylError):  # noqa: N818 - a state of the world, not a mistake
    """The journal lost records that it had acknowledged; `mend` finds its end, or creates it."""


class Lost(Struct, frozen=True):
    """Missing sequences of a journal, both ends included; none of them was dropped."""

    first: int
    last: int


class JournalPort(Protocol):
    """An append-only log with fencing."""

    @property
    def server(self) -> str:
        """The run of the server that keeps it.

        Another run may have lost records of the one before.
        """
        ...

    @property
    def identity(self) -> str:
        """The identity of the log, once opened.

        It changes if the log was lost and created again.
        """
        ...

    @property
    def first_sequence(self) -> int:
        """Sequence of the first record that is still there, once opened; 1 if none was dropped."""
        ...

    @property
    def last_sequence(self) -> int:
        """Sequence of the last record known here; 0 for an empty journal."""
        ...

    @property
    def foreign_count(self) -> int:
        """Messages met here that no coordinator wrote; they hold a sequence and mean nothing."""
        ...

    async def open(self) -> None:
        """Create missing parts and find the end."""
        ...

    async def append(self, record: bytes) -> int:
        """Write one record after the last one known here; returns its sequence.

        Raises:
            ConfigError: it is larger than the store takes, now and later.
            Fenced: another coordinator wrote in between.
            Unavailable: not known to be written.
            Wounded: earlier records are gone, the last ones or all.
        """
        ...

    async def mend(self) -> None:
        """After `Wounded`: find the present end, in a journal that is created if it is gone."""
        ...

    async def holds(self, sequence: int, record: bytes) -> bool:
        """True if a record can be read back."""
        ...

    async def last_record(self) -> tuple[int, bytes] | None:
        """The last record that can be read, and its sequence."""
        ...

    def read(self, from_sequence: int) -> AsyncIterator[tuple[int, bytes] | Lost]:
        """Records from a sequence on, to the present end; foreign messages are left out.

        Dropped records are left out as well; missing ones are reported as `Lost`.
        """
        ...

    async def shorten(self, up_to: int, *, kept_s: float) -> None:
        """Drop records up to a sequence, as far as they are more than `kept_s` older than the last.

        Raises:
            Unavailable: not known to be dropped.
        """
        ...


class SnapshotsPort(Protocol):
    """Engine states, newest wins."""

    async def save(self, sequence: int, data: bytes) -> None:
        """Keep the state after the record with this sequence."""
        ...

    async def load(self) -> tuple[int, bytes] | None:
        """The newest whole snapshot and its sequence."""
        ...


class LeasePort(Protocol):
    """The leader's lease."""

    @property
    def valid_until_s(self) -> float:
        """On this machine's boot clock; after it the holder must not act."""
        ...

    @property
    def record_before(self) -> int:
        """Number of a journal record that the previous holder is known to have written; 0: none."""
        ...

    def note_record(self, number: int) -> None:
        """Report from the next renewal on that the journal has this record."""
        ...

    async def look(self) -> None:
        """Look up the present holder: another's TTL counts from the first look at it.

        Raises:
            Unavailable: no answer.
        """
        ...

    async def acquire(self, holder: str, highest_reported_epoch: Callable[[], int]) -> int:
        """Wait until this holder leads; returns its epoch.

        highest_reported_epoch: called when the lease is taken, which may be days from now.
        """
        ...

    async def renew(self) -> None:
        """Renew it.

        Raises:
            Fenced: another coordinator holds it, or it ran out.
            Unavailable: not known to be renewed; `valid_until_s` is unchanged.
        """
        ...

    async def keep(self, progressed_at_s: Callable[[], float], *, stall_s: float) -> None:
        """Renew it until it is lost; not while the work that it is held for stalls.

        progressed_at_s: when that work made progress last, on the boot clock. It may be called from
            another thread.
        stall_s: work without progress for this long stalls.

        Raises:
            Fenced: another coordinator holds it, or it ran out.
        """
        ...

    async def release(self) -> None:
        """Give it up at once, so that the next holder need not wait."""
        ...
