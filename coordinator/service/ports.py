"""The live driver's dependencies, as protocols: taken as arguments, replaced in tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from msgspec import Struct

from common.errors import ArylError


class Wounded(ArylError):  # noqa: N818 - a state of the world, not a mistake
    """The journal lost records that it had acknowledged; `mend` finds its end, or makes it."""


class Lost(Struct, frozen=True):
    """Sequences at which a journal has nothing any more, both ends included; none was dropped."""

    first: int
    last: int


class JournalPort(Protocol):
    """An append-only log with fencing."""

    @property
    def server(self) -> str:
        """Which run of the server keeps it; another one may have lost what the one before had."""
        ...

    @property
    def identity(self) -> str:
        """Which log it is, once opened: another one than before if it was lost and made anew."""
        ...

    @property
    def first_sequence(self) -> int:
        """Sequence of the first record that is still there, once opened; 1 if none was dropped."""
        ...

    @property
    def last_sequence(self) -> int:
        """Sequence of the last record known here; 0 of an empty journal."""
        ...

    @property
    def foreign_count(self) -> int:
        """Messages met here that no coordinator wrote; they hold a sequence and say nothing."""
        ...

    async def open(self) -> None:
        """Create what is missing and find the end."""
        ...

    async def append(self, record: bytes) -> int:
        """Write one record after the last one known here; returns its sequence.

        Raises:
            ConfigError: it is larger than whoever keeps it takes, now and later.
            Fenced: somebody else wrote in between.
            Unavailable: not known to be written.
            Wounded: records that were there are gone, the last ones or all.
        """
        ...

    async def mend(self) -> None:
        """After `Wounded`: find the end as it is now, in a journal that is made if it is gone."""
        ...

    async def holds(self, sequence: int, record: bytes) -> bool:
        """Whether a record can be read back."""
        ...

    async def last_record(self) -> tuple[int, bytes] | None:
        """The last record that can be read, and its sequence."""
        ...

    def read(self, from_sequence: int) -> AsyncIterator[tuple[int, bytes] | Lost]:
        """Records from a sequence on, to the end as it is now; foreign messages are left out.

        Those that were dropped are left out as well; those that are gone are reported as `Lost`.
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
        """Number of a journal record that the holder before is known to have written; 0: none."""
        ...

    def note_record(self, number: int) -> None:
        """Renewals tell from here on that the journal has this record."""
        ...

    async def look(self) -> None:
        """See who holds it now: another's TTL counts from the first look at it.

        Raises:
            Unavailable: no answer.
        """
        ...

    async def acquire(self, holder: str, highest_reported_epoch: Callable[[], int]) -> int:
        """Wait until this holder leads; returns its epoch.

        highest_reported_epoch: asked when the lease is taken, which may be days from now.
        """
        ...

    async def renew(self) -> None:
        """Prolong it.

        Raises:
            Fenced: somebody else holds it, or it ran out.
            Unavailable: not known to be prolonged; `valid_until_s` is as before.
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
        """Give it up at once, so that the next one need not wait."""
        ...
