"""Engine time: seconds since 1970 that advance with the boot clock, even if the wall clock is set.

A wall clock that is set back must not extend the time limits, waits and loans of a cell. One that
is set ahead must not end them. So intervals are measured on the boot clock, and each leader leaves
a mark in the journal: how far engine time is ahead of the boot clock of its machine. The next
leader on the same boot continues from there, and reads no wall clock. On another boot or machine
only the wall clock shows how long the cell had no leader. A long gap is reported, as the clock may
be wrong.
"""

from __future__ import annotations

import logging
from typing import TypeVar, cast

from msgspec import Struct, structs

from common.clock import Clock
from common.log import Throttle
from common.messages import Message
from coordinator.engine.state.tables import ClockMark

log = logging.getLogger(__name__)

P = TypeVar("P", bound=Struct)

TOLERANCE_S = 5.0
"""A wall clock within this range is good enough: clocks of two coordinators that are kept in sync
differ by less."""

GAP_S = 600.0
"""No cell is without a leader for this long by design: a standby leads within seconds."""

GAP_SHOWN_S = 86_400.0
"""How long `aryl status` shows a gap of this kind, so that the next person on duty sees it."""

REPEAT_PERIOD_S = 600.0
"""How often the warning is repeated: the clock may be off for as long as the cell lives."""


class EngineTime:
    """The engine's clock while one coordinator leads.

    Args:
        clock: this machine's clocks; the wall clock is read when leading begins, and after that
            only for instants that people see.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._throttle = Throttle(clock, REPEAT_PERIOD_S)
        self._shown_ahead_s = 0.0
        self._base_s = self._began_s = self._gap_s = 0.0
        self.begin(0.0)

    def begin(self, known_s: float, mark: ClockMark | None = None) -> None:
        """Begin to lead.

        mark: that of the leader before; None: there was none.
        """
        self._began_s = self._clock.now_s()
        self._gap_s = 0.0
        if mark is not None and mark.boot_id == self._clock.boot_id():
            self._base_s = max(mark.ahead_s + self._began_s, known_s)
            return
        self._base_s = max(self._clock.wall_s(), known_s)
        if known_s > 0 and self._base_s - known_s > GAP_S:
            self._gap_s = self._base_s - known_s
            log.warning("%s", self._told_gap())

    def mark(self) -> ClockMark:
        """The mark for the next leader, if that is one of the same boot."""
        return ClockMark(self._clock.boot_id(), self._base_s - self._began_s)

    def _told_gap(self) -> str:
        return (
            f"the journal ended {self._gap_s:.0f} s before this coordinator began to lead, by the "
            "wall clock of its machine: time limits, drains and waits count them. If no "
            "coordinator led for that time, this is right; else that clock is, or was, ahead"
        )

    def warning(self) -> str:
        """A warning about the time, for people who look at the cell; empty without one."""
        said: list[str] = []
        if self._gap_s and self._clock.now_s() - self._began_s < GAP_SHOWN_S:
            said.append(self._told_gap())
        if ahead_s := self.ahead_s():
            which = "behind" if ahead_s > 0 else "ahead of"
            said.append(f"the wall clock is {abs(ahead_s):.0f} s {which} the clock of decisions")
        return "; ".join(said)

    def now_s(self) -> float:
        """Seconds since 1970 in engine time."""
        return self._base_s + self._clock.now_s() - self._began_s

    def ahead_s(self) -> float:
        """Seconds by which engine time is ahead of the wall clock; 0 within `TOLERANCE_S`.

        The value stays until it is off by more than that: an instant that is shown twice is the
        same both times.
        """
        ahead_s = self.now_s() - self._clock.wall_s()
        if abs(ahead_s - self._shown_ahead_s) > TOLERANCE_S:
            self._shown_ahead_s = ahead_s if abs(ahead_s) > TOLERANCE_S else 0.0
        return self._shown_ahead_s

    def look(self) -> None:
        """Log, from time to time, that the wall clock is off, and by how much."""
        ahead_s = self.ahead_s()
        which = "behind" if ahead_s > 0 else "ahead of"
        if ahead_s and self._throttle.is_due(which):
            log.warning(
                "the wall clock is %.0f s %s the clock of decisions, which continues "
                "unchanged: no limit gets shorter or longer; times are shown by the wall "
                "clock",
                abs(ahead_s),
                which,
            )

    def shown(self, answer: Message) -> Message:
        """An answer of the API with its instants converted to the present wall clock."""
        ahead_s = self.ahead_s()
        return _earlier(answer, ahead_s) if ahead_s else answer


def _earlier(part: P, by_s: float) -> P:
    """A message or a part of one, with all its instants earlier by a number of seconds."""
    changes: dict[str, object] = {}
    for name in part.__struct_fields__:
        value: object = getattr(part, name)
        is_instant = name == "at_s" or name.endswith("_at_s")  # docs/protocol.md, Encoding
        if is_instant and isinstance(value, float):
            changes[name] = value - by_s
        elif isinstance(value, Struct):
            changes[name] = _earlier(value, by_s)
        elif isinstance(value, tuple):
            parts = cast("tuple[object, ...]", value)
            changes[name] = tuple(
                _earlier(each, by_s) if isinstance(each, Struct) else each for each in parts
            )
    return structs.replace(part, **changes)
