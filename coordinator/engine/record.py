"""The journal record: its contents, and how records rebuild a state.

A record is a batch of events with their instants and the decisions that came of them. Must not
know where records are kept.
"""

from __future__ import annotations

import contextlib

import msgspec
from msgspec import Struct

from common.decoding import UNREADABLE
from common.errors import ProtocolError, TransitionError
from coordinator.engine.engine import Engine
from coordinator.engine.state.events import (
    Event,
    LoanPassDue,
    OperatorAction,
    OperatorAsked,
    PassDue,
)
from coordinator.policies.contract.decisions import Decision, Loan

RECORD_VERSION = 1


class Entry(Struct, frozen=True):
    """One event as the engine took it."""

    now_s: float
    event: Event


class Record(Struct, frozen=True, kw_only=True):
    """One append: events and decisions."""

    version: int = RECORD_VERSION
    number: int
    """Grows with each record, from 1; a sequence may come again where a stream lost its end."""
    after: int
    """Number of the record that its writer had before it; 0: none."""
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
        ProtocolError: not a record, or one of another version; names the sequence. A skipped record
            could be a lost job, so the reader must stop.
    """
    try:
        version = _version_decoder.decode(data).version
        if version != RECORD_VERSION:
            raise ProtocolError(
                f"journal record {sequence}: version {version}, expected {RECORD_VERSION}"
            )
        return _decoder.decode(data)
    except UNREADABLE as error:
        raise ProtocolError(f"journal record {sequence}: {error}") from error


def decision_bytes(decisions: tuple[Decision, ...]) -> bytes:
    """Decisions as the bytes that two runs are compared by."""
    return _encoder.encode(decisions)


def redecide(engine: Engine, record: Record) -> tuple[Decision, ...]:
    """Run a record's events through an engine and return its decisions now."""
    decisions: list[Decision] = []
    for entry in record.entries:
        decisions += engine.handle(entry.event, now_s=entry.now_s).decisions
    return tuple(decisions)


def follow(engine: Engine, record: Record) -> None:
    """Run a record through an engine that lacks earlier records.

    Decisions are taken as they were made. Decided again from incomplete knowledge, a job would be
    placed where it does not run. Loans are decided again: a lease's id counts the loans before it,
    and a node names the lease that it holds.
    """
    for entry in record.entries:
        if not _decides(entry.event):
            with contextlib.suppress(TransitionError):  # a step whose earlier steps are lost
                engine.handle(entry.event, now_s=entry.now_s)
    if record.entries:
        decisions = [one for one in record.decisions if not isinstance(one, Loan)]
        engine.carry_out(decisions, now_s=record.entries[-1].now_s)


def _decides(event: Event) -> bool:
    """Whether the engine would decide something by an event, and not only take it."""
    if isinstance(event, OperatorAsked):
        return event.action == OperatorAction.APPROVE_LOAN
    return isinstance(event, PassDue | LoanPassDue)


def replay(engine: Engine, record: Record) -> bool:
    """Run a record's events through an engine; whether its decisions came out the same."""
    return decision_bytes(redecide(engine, record)) == decision_bytes(record.decisions)
