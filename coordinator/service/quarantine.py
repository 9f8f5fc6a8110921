"""Keeps out events that broke the engine for a while, so that one report cannot end each leader.

An agent reports the same facts again to each new leader. If each leader handled them, each would
crash before it wrote a record. Pure; `now_s` is an argument.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec
from msgspec import Struct

from coordinator.engine.state.events import (
    Event,
    LoadMeasured,
    LoadUnknown,
    NodeReported,
    NodeSilent,
    OrdersRecovered,
    ProgressReported,
    ProgressStopped,
)

FIRST_S = 60.0
"""How long the events of one source are kept out after the first of them broke the engine."""
LONGEST_S = 3600.0
"""The time doubles with each further event of the source that breaks the engine, up to this."""
SOURCES = 1000
"""Sources remembered; the oldest is forgotten first."""


class _Kept(Struct):
    """One source: the length of its quarantine, and its end."""

    for_s: float
    until_s: float


class Quarantine:
    """Sources of events that broke the engine."""

    def __init__(self) -> None:
        self.count = 0
        """Events that broke the engine."""
        self._kept: dict[str, _Kept] = {}

    def note(self, event: Event, *, now_s: float) -> float:
        """Note that an event broke the engine; returns how long its source is kept out."""
        self.count += 1
        source = source_of(event)
        last = self._kept.pop(source, None)
        for_s = FIRST_S if last is None else min(LONGEST_S, 2 * last.for_s)
        self._kept[source] = _Kept(for_s, now_s + for_s)
        if len(self._kept) > SOURCES:
            del self._kept[next(iter(self._kept))]
        return for_s

    def holds(self, event: Event, *, now_s: float) -> bool:
        """True if an event is kept out now."""
        if not self._kept:
            return False
        kept = self._kept.get(source_of(event))
        return kept is not None and now_s < kept.until_s


def source_of(event: Event) -> str:
    """The source of an event: a node, a job or a service; a request is its own source.

    Ages in a report differ each time, so a report's content does not identify it.
    """
    match event:
        case NodeReported() | OrdersRecovered() | NodeSilent() | LoadUnknown():
            return f"{type(event).__name__} of node {event.node}"
        case ProgressReported() | ProgressStopped():
            return f"{type(event).__name__} of job {event.job_id}"
        case LoadMeasured():
            return f"LoadMeasured of service {event.service}"
        case _:
            digest = blake2b(msgspec.msgpack.encode(event), digest_size=8).hexdigest()
            return f"{type(event).__name__} {digest}"
