"""What one journal record holds, and how a state is rebuilt from records.

A record is a batch of events with their instants and the decisions that came of them. Must not
know where records are kept.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from common.errors import ProtocolError
from coordinator.engine.engine import Engine
from coordinator.engine.events import Event
from coordinator.policies.decisions import Decision

RECORD_VERSION = 1


class Entry(Struct, frozen=True):
    """One event as the engine took it."""

    now_s: float
    event: Event


class Record(Struct, frozen=True, kw_only=True):
    """One append: what entered, what was decided."""

    version: int = RECORD_VERSION
    epoch: int
    writer: str
    entries: tuple[Entry, ...]
    decisions: tuple[Decision, ...]


class _VersionOnly(Struct):
    version: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)
_version_decoder = msgspec.msgpack.Decoder(_VersionOnly)


def encode_record(record: Record) -> bytes:
    """A record as MessagePack."""
    return _encoder.encode(record)


def decode_record(data: bytes, *, sequence: int) -> Record:
    """A record from its bytes.

    Raises:
        ProtocolError: not a record, or one of another version; names the sequence. A record that
            was skipped would be a job that is lost, so whoever reads must stop.
    """
    try:
        version = _version_decoder.decode(data).version
        if version != RECORD_VERSION:
            raise ProtocolError(
                f"journal record {sequence}: version {version}, expected {RECORD_VERSION}"
            )
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"journal record {sequence}: {error}") from error


def decision_bytes(decisions: tuple[Decision, ...]) -> bytes:
    """Decisions as the bytes that two runs are compared by."""
    return _encoder.encode(decisions)


def redecide(engine: Engine, record: Record) -> tuple[Decision, ...]:
    """Run a record's events through an engine; what it decides of them now."""
    decisions: list[Decision] = []
    for entry in record.entries:
        decisions += engine.handle(entry.event, now_s=entry.now_s).decisions
    return tuple(decisions)


def replay(engine: Engine, record: Record) -> bool:
    """Run a record's events through an engine; whether its decisions came out the same."""
    return decision_bytes(redecide(engine, record)) == decision_bytes(record.decisions)
