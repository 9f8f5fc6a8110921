"""Shares of time of one pool of GPUs: max-min fairness, and the least worst finish. Pure numbers.

A gang that runs the part x of the time uses x times its GPUs of the pool. Both problems of Gavel
(OSDI'20, section 4) are linear or quasi-convex programs over the matrix of these parts; with one
type of GPU a program has one resource, and raising all jobs together until it is used up solves it
exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from math import inf

from msgspec import Struct


class Spare(StrEnum):
    """The use of room that the worst off cannot use, because they have all of the time.

    The programs leave it open: each of these is one of their optima.
    """

    FAIR = "fair"
    """The others are raised further in the same way: the second worst off counts then."""
    EVEN = "even"
    """Each gets the same part of what it lacks: in the middle of the optima, where solvers by
    interior points end up."""


STEPS = 60
"""Halvings of a search: 2^-60 of where it begins."""

LEAST_S = 1e-9
"""No job is shorter."""


class Gang(Struct, frozen=True, kw_only=True):
    """One job.

    gpus: of its gang. left_s: remaining running time. passed_s: since its submission.
    alone_s: the time alone of its work so far plus the remaining work, in seconds.
    """

    gpus: int
    left_s: float = 0.0
    passed_s: float = 0.0
    alone_s: float = 1.0


def max_min(gangs: Sequence[Gang], gpus: float, spare: Spare = Spare.FAIR) -> list[float]:
    """Shares with the greatest least GPU time (least attained service, Gavel, section 4.1).

    A gang of twice the GPUs gets half the time, until it has all of it.
    """
    tops = [float(gang.gpus) for gang in gangs]
    return _raised(gangs, gpus, lambda gang, level: level / gang.gpus, tops, spare)


def least_worst_finish(
    gangs: Sequence[Gang], gpus: float, spare: Spare = Spare.FAIR
) -> list[float]:
    """Shares with the least greatest rho (finish-time fairness, Gavel, section 4.2).

    rho = (passed + left / x) / alone.
    """

    def needed(gang: Gang, level: float) -> float:
        """For rho = 1 / level; more than all of the time where that cannot be."""
        spare_s = gang.alone_s / level - gang.passed_s if level > 0 else inf
        return gang.left_s / spare_s if spare_s > 0 else inf

    tops = [gang.alone_s / max(LEAST_S, gang.passed_s + gang.left_s) for gang in gangs]
    return _raised(gangs, gpus, needed, tops, spare)


def _raised(
    gangs: Sequence[Gang],
    gpus: float,
    needed: Callable[[Gang, float], float],
    tops: Sequence[float],
    spare: Spare,
) -> list[float]:
    """Raise all to the highest common level that the pool has room for.

    needed: the share that a gang needs for a level; it grows with the level.
    tops: the level of each gang with all of the time; beyond, it is left behind.
    """

    def shares(level: float) -> list[float]:
        return [min(1.0, needed(gang, level)) for gang in gangs]

    def fits(level: float) -> bool:
        used = (share * gang.gpus for share, gang in zip(shares(level), gangs, strict=True))
        return sum(used) <= gpus

    low, high = 0.0, (max if spare == Spare.FAIR else min)(tops, default=0.0)
    if fits(high):
        low = high
    for _ in range(STEPS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if fits(middle) else (low, middle)
    found = shares(low)
    return found if spare == Spare.FAIR else _filled(found, gangs, gpus)


def _filled(shares: Sequence[float], gangs: Sequence[Gang], gpus: float) -> list[float]:
    """The same part of what each lacks, until the pool is used up."""
    pairs = list(zip(shares, gangs, strict=True))
    left = gpus - sum(share * gang.gpus for share, gang in pairs)
    lacking = sum((1.0 - share) * gang.gpus for share, gang in pairs)
    part = min(1.0, left / lacking) if lacking > 0 else 0.0
    return [share + (1.0 - share) * part for share in shares]
