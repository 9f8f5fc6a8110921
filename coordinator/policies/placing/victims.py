"""Who makes room for a gang: take victims until it fits, then give back those not needed. Pure.

Least disruptive first is the caller's order; the set found has nobody in it without whom the gang
would fit as well. Must not know what a victim is, nor why it comes before another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

V = TypeVar("V")


def fewest_victims(
    line: Iterable[V],
    *,
    may_go: Callable[[V], bool],
    move: Callable[[V, int], None],
    fits: Callable[[], bool],
) -> list[V] | None:
    """Victims of a line, none of them in vain; None where the gang does not fit even without all.

    may_go: asked as things stand with those before it gone. move: a victim goes (1), or stays after
    all (-1). Afterwards those found are gone, and everybody else is where it was.
    """
    gone: list[V] = []
    does_fit = False
    for victim in line:
        if not may_go(victim):
            continue
        move(victim, 1)
        gone.append(victim)
        if does_fit := fits():
            break
    needed: list[V] = []
    for victim in reversed(gone):
        move(victim, -1)
        if does_fit and not fits():
            move(victim, 1)
            needed.append(victim)
    return needed if does_fit else None
