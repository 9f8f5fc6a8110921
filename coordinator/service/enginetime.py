"""Engine time: seconds since 1970 that run on with the boot clock, whatever somebody sets.

A wall clock that is set back must not hold up the time limits, waits and loans of a cell, and one
that is set ahead must not end them (design 6: intervals are of the boot clock). Must not know
events, the engine or the journal.
"""

from __future__ import annotations

import logging
from typing import TypeVar, cast

from msgspec import Struct, structs

from common.clock import Clock
from common.log import Throttle
from common.messages import Message

log = logging.getLogger(__name__)

P = TypeVar("P", bound=Struct)

TOLERANCE_S = 5.0
"""A wall clock that is no further off shows the time as well as any: clocks of two coordinators
differ by less where somebody keeps them."""

REPEAT_PERIOD_S = 600.0
"""How often it is said that it is off: it may be for as long as the cell lives."""


class EngineTime:
    """The engine's clock while one coordinator leads.

    Args:
        clock: this machine's clocks; the wall clock is read when leading begins, and after that
            only for what people are shown.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._throttle = Throttle(clock, REPEAT_PERIOD_S)
        self._shown_ahead_s = 0.0
        self._base_s = self._began_s = 0.0
        self.begin(0.0)

    def begin(self, known_s: float) -> None:
        """Leading begins; `known_s` is the last instant of the journal, and none is before it."""
        self._base_s = max(self._clock.wall_s(), known_s)
        self._began_s = self._clock.now_s()

    def now_s(self) -> float:
        """Seconds since 1970, as this cell counts them."""
        return self._base_s + self._clock.now_s() - self._began_s

    def ahead_s(self) -> float:
        """Seconds by which engine time is ahead of the wall clock; 0 within `TOLERANCE_S`.

        It stays what it was until it is off by more than that: an instant that is shown twice is
        the same both times.
        """
        ahead_s = self.now_s() - self._clock.wall_s()
        if abs(ahead_s - self._shown_ahead_s) > TOLERANCE_S:
            self._shown_ahead_s = ahead_s if abs(ahead_s) > TOLERANCE_S else 0.0
        return self._shown_ahead_s

    def look(self) -> None:
        """Say, from time to time, that the wall clock is off, and by how much."""
        ahead_s = self.ahead_s()
        which = "behind" if ahead_s > 0 else "ahead of"
        if ahead_s and self._throttle.is_due(which):
            log.warning(
                "the wall clock is %.0f s %s the time that decisions count in, which runs on as "
                "it did: no limit is shorter or longer for it, and instants are shown by the wall "
                "clock",
                abs(ahead_s),
                which,
            )

    def shown(self, answer: Message) -> Message:
        """An answer of the API with its instants as the wall clock has them now."""
        ahead_s = self.ahead_s()
        return _earlier(answer, ahead_s) if ahead_s else answer


def _earlier(part: P, by_s: float) -> P:
    """A message or a part of one, with all its instants earlier by that many seconds."""
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
