"""Knobs in words: what is shown can be written, and turns nothing."""

from __future__ import annotations

import pytest
from msgspec import Struct

from coordinator.policies.bundles import POLICIES, policy
from coordinator.policies.decisions import Allocation
from coordinator.policies.knob_text import knobs
from coordinator.policies.policy import Parts, joint


class ToyKnobs(Struct, frozen=True, kw_only=True):
    """Of nothing.

    packs, moves: whether it does. slice_s: how long.
    """

    packs: bool = True
    moves: bool = True
    slice_s: float = 1.0


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_default_can_be_written_as_it_is_shown(name: str) -> None:
    """`NAME:KNOB=DEFAULT` for all knobs at once is the policy as it was."""
    made = POLICIES[name]
    texts = [f"{knob.name}={knob.default}" for knob in knobs(made)]
    assert policy(":".join([name, *texts])).knobs == made.knobs


def test_values_say_kind_and_limits() -> None:
    """Of numbers, choices, switches, lists, and what may be nothing."""
    found = {(name, knob.name): knob.values for name in POLICIES for knob in knobs(POLICIES[name])}
    assert found["las", "round_s"] == "number > 0 and <= 1e+09"
    assert found["pollux", "population"] == "whole number >= 1"
    assert found["aryl", "lend_quantile"] == "number >= 0 and <= 1, null"
    assert found["aryl", "is_strict"] == "true, false"
    assert found["tiresias", "limits"].endswith("; several with / between")
    assert found["las", "spare"] == "fair, even"
    assert all(found.values())


def test_notes_are_those_of_the_source_alone_or_of_several_knobs() -> None:
    """`a, b: text` says it of both, and ends where the next note begins."""
    made = joint(
        "toy",
        "does nothing",
        knobs=ToyKnobs(),
        allocate=lambda _, __, memory: Allocation(decisions=(), memory=memory),
        hold=lambda _, __, ___: (),
        parts=Parts(),
    )
    says = {knob.name: knob.says for knob in knobs(made)}
    assert says == {"packs": "whether it does", "moves": "whether it does", "slice_s": "how long"}
