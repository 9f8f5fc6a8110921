"""What can be turned of Themis. Must not know what an arbiter or an agent makes of it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from common.model import NonNegativeInt
from coordinator.policies.apps import Aim, Alone
from coordinator.policies.knob_types import Period

LEASE_S = 1200.0
LEFT_OUT_RATIO = 0.8

Share = Annotated[float, Meta(ge=0, le=1)]


class Payment(StrEnum):
    """What becomes of the part 1 - c of a bundle that its bidder pays."""

    WHOLE = "whole"
    """Whole GPUs, rounded up; where no gang fits what is left, all of it with chance c."""
    FLOOR = "floor"
    """Whole GPUs, rounded up: gangs that no longer fit get nothing from the auction."""
    LOTTERY = "lottery"
    """All of the bundle with chance c, else nothing: c of its value on the average."""
    NONE = "none"
    """Nothing is paid: the proportionally fair choice, which is not proof against lies."""


class Horizon(StrEnum):
    """For how long a bid takes it that its bundle is held."""

    LEASE = "lease"
    """For one lease, and the app's share of the GPUs from then on: what is really given."""
    GOOD = "good"
    """For good, as in the paper's formula of rho; nothing at all is still had for a lease only."""


class ThemisKnobs(Struct, frozen=True, kw_only=True):
    """f: part of the apps that is left out of an auction. lease_s: how long GPUs are given for.

    spread: part of it by which leases differ, so that they do not end together.
    payment: what becomes of the hidden payment. horizon: for how long a bid counts its bundle.
    patience: leases that a gang waits before it goes first, and leases end together for it.
    aim: when an app of several trials is done. alone: what an app would have by itself.
    seed: of its chance.
    """

    f: Share = LEFT_OUT_RATIO
    lease_s: Period = LEASE_S
    spread: Share = 0.0
    payment: Payment = Payment.WHOLE
    horizon: Horizon = Horizon.LEASE
    patience: Annotated[float, Meta(ge=0, le=1e6)] = 8.0
    aim: Aim = Aim.ALL
    alone: Alone = Alone.SHARE
    seed: NonNegativeInt = 1
