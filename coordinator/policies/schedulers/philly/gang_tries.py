"""Tries of a gang: how long it holds GPUs, releases them, and then asks for looser locality.

Gang scheduling by the Philly study (ATC'19, section 2.3): a gang holds GPUs for a while. If it is
not complete by then, it releases all of them, backs off and tries again. After a number of timeouts
it takes looser locality. All of it follows from when the gang first did not fit.
"""

from __future__ import annotations

from math import floor as round_down
from typing import Annotated

from msgspec import Meta, Struct

from coordinator.policies.knobs import Period
from coordinator.policies.schedulers.philly.locality import ANYWHERE

EARLY_S = 5e-4
"""A pass that is woken at an instant must not miss it by rounding."""


class Patience(Struct, frozen=True, kw_only=True):
    """hold_s: time for which a gang holds the GPUs it has found (the study: 2 to 3 minutes).

    back_off_s: time for which it then holds none (the study: 2 minutes).
    tries: timeouts until the next level of locality (the study: "a fixed number"; this one is
        ours).
    """

    hold_s: Period = 150.0
    back_off_s: Period = 120.0
    tries: Annotated[int, Meta(ge=1)] = 3


class Try(Struct, frozen=True, kw_only=True):
    """Where a gang is in its tries.

    level: of locality. may_hold: whether it holds now what it finds. timeouts: so far.
    until_s: when that changes; at the loosest level only whether it may hold does.
    """

    level: int
    may_hold: bool
    timeouts: int
    until_s: float


def try_at(patience: Patience, since_s: float, now_s: float) -> Try:
    """The try at an instant of a gang that first did not fit at another one."""
    cycle_s = patience.hold_s + patience.back_off_s
    passed_s = now_s - since_s + EARLY_S
    cycles = round_down(passed_s / cycle_s)
    may_hold = passed_s - cycles * cycle_s < patience.hold_s
    timeouts = cycles if may_hold else cycles + 1
    return Try(
        level=min(ANYWHERE, timeouts // patience.tries),
        may_hold=may_hold,
        timeouts=timeouts,
        until_s=since_s + cycles * cycle_s + (patience.hold_s if may_hold else cycle_s),
    )
