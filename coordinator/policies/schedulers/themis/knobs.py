"""The knobs of Themis."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from common.model import NonNegativeInt
from coordinator.policies.schedulers.themis.finish_time_fairness import Aim, Alone
from coordinator.policies.schedulers.themis.lease_terms import Part, Terms


class ThemisKnobs(Terms, frozen=True, kw_only=True):
    """f: share of the apps that an auction leaves out.

    patience: leases that a gang waits before it goes first and leases end together for it.
    aim: when an app of several trials is done.
    alone: the share that an app would have by itself.
    seed: seed of the random choices.
    """

    f: Part = 0.8
    patience: Annotated[float, Meta(ge=0, le=1e6)] = 8.0
    aim: Aim = Aim.ALL
    alone: Alone = Alone.SHARE
    seed: NonNegativeInt = 1
