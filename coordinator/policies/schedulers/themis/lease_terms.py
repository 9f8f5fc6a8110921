"""The terms of an auction: lease length, what a bid counts, and the payment. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from coordinator.policies.knobs import Period
from coordinator.policies.schedulers.themis.bundles import Bundle, reduced
from coordinator.policies.schedulers.themis.partial_allocation import Award
from coordinator.policies.schedulers.themis.seeded_chance import Chance

Part = Annotated[float, Meta(ge=0, le=1)]


class Payment(StrEnum):
    """The form of payment: how a bundle is reduced to the part c that its bidder keeps."""

    WHOLE = "whole"
    """Whole GPUs, rounded up; where no gang fits the rest, all of it with chance c. A lie may win a
    certainty in place of a chance.
    """
    FLOOR = "floor"
    """Whole GPUs, rounded up: gangs that no longer fit get nothing from the auction. A lie may save
    a GPU that is all the difference."""
    LOTTERY = "lottery"
    """All of the bundle with chance c, else nothing: c of its value on average, which no lie
    increases. A losing bidder still has the worth of nothing; a lie gains at most a part of
    that.
    """
    NONE = "none"
    """Nothing is paid: the proportionally fair choice, which is not proof against lies."""


class Horizon(StrEnum):
    """For how long a bid takes it that its bundle is held."""

    LEASE = "lease"
    """For one lease, and the app's share of the GPUs from then on: the real gift. Worth is the
    saved part of rho.
    """
    GOOD = "good"
    """For good, and worth is 1 / rho, as in the paper's formulas; nothing at all is still had for a
    lease only, and no GPUs are worth less than a lease of them."""


def saved(rho_ratio: float) -> float:
    """The worth of holding nothing, 1, plus the saved part of rho: never twice as much.

    It is linear in rho, so that GPUs which bring as much work as those before them add as much. 1 /
    rho adds ever more where nothing is worth nearly as much as a lease of GPUs: the greatest
    product of worths then leaves all but one of several like apps without any.
    """
    return 2.0 - rho_ratio


def inverse(rho_ratio: float) -> float:
    """1 / rho, in that of holding nothing (Themis, NSDI'20, section 3)."""
    return 1.0 / rho_ratio


WORTHS: Mapping[Horizon, Callable[[float], float]] = {
    Horizon.LEASE: saved,
    Horizon.GOOD: inverse,
}
"""The worth of GPUs, by rho with them over rho with none."""


class Terms(Struct, frozen=True, kw_only=True):
    """lease_s: length of a lease.

    spread: share of the lease by which leases differ, so that they do not end together.
    payment: use of the hidden payment.
    horizon: time for which a bid counts its bundle.
    """

    lease_s: Period = 1200.0
    spread: Part = 0.0
    payment: Payment = Payment.LOTTERY
    horizon: Horizon = Horizon.LEASE


def paid(won: Bundle, award: Award, payment: Payment, chance: Chance, bidder: str) -> Bundle:
    """The rest of a bundle after its payment (Themis, NSDI'20, section 4: hidden payments)."""
    if award.kept_ratio >= 1.0 or payment == Payment.NONE:
        return won
    kept = reduced(won, 0 if payment == Payment.LOTTERY else award.kept_gpus(won.bid))
    if kept.shares or payment == Payment.FLOOR:
        return kept
    return won if chance.ratio(bidder) < award.kept_ratio else kept
