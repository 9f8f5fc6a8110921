"""Events as they come out of a journal.

Must not know what is asserted.
"""

from __future__ import annotations

from typing import TypeVar

from coordinator.engine.record import Entry, Record, decode_record, encode_record
from coordinator.engine.state.events import Event

E = TypeVar("E", bound=Event)


def journalled(event: E) -> E:
    """An event that was written and is read again; it is of the kind that it was."""
    record = Record(
        number=1, after=0, epoch=1, writer="w", entries=(Entry(0.0, event),), decisions=()
    )
    [entry] = decode_record(encode_record(record), sequence=1).entries
    assert isinstance(entry.event, type(event))
    return entry.event
