"""Knobs in words: what is shown can be written, and turns nothing."""

from __future__ import annotations

import pytest
from msgspec import Struct

from common.errors import ConfigError
from coordinator.policies.contract.decisions import Allocation
from coordinator.policies.knob_text import knobs
from coordinator.policies.policy import Parts, joint
from coordinator.policies.registry import POLICIES, policy
from tests.tables import each_row


class ToyKnobs(Struct, frozen=True, kw_only=True):
    """Of nothing.

    packs, moves: whether it does. slice_s: how long.
    """

    packs: bool = True
    moves: bool = True
    slice_s: float = 1.0


@each_row("name", sorted(POLICIES))
def test_every_default_can_be_written_as_it_is_shown(name: str) -> None:
    """`NAME:KNOB=DEFAULT` for all knobs at once is the policy as it was."""
    made = POLICIES[name]
    texts = [f"{knob.name}={knob.default}" for knob in knobs(made)]
    assert policy(":".join([name, *texts])).knobs == made.knobs


def test_values_say_kind_and_limits() -> None:
    """Of numbers, choices, switches, lists, and what may be nothing."""
    found = {(name, knob.name): knob.values for name in POLICIES for knob in knobs(POLICIES[name])}
    assert found["las", "round_s"] == "number >= 0.001 and <= 1e+09"
    assert found["pollux", "population"] == "whole number >= 1 and <= 10000"
    assert found["aryl", "lend_quantile"] == "number >= 0 and <= 1, null"
    assert found["aryl", "is_strict"] == "true, false"
    assert found["tiresias", "limits"].endswith("; several with / between")
    assert found["las", "spare"] == "fair, even"
    assert all(found.values())


NUMBERS = [
    (name, knob.name) for name in sorted(POLICIES) for knob in knobs(POLICIES[name])
    if "number" in knob.values
]  # fmt: skip


@each_row(("name", "knob"), NUMBERS)
def test_no_number_is_endless_or_none_at_all(name: str, knob: str) -> None:
    """Whatever its type says: a pass that compares with NaN or waits for ever decides nothing."""
    for value in ("inf", "-inf", "nan", "1e999"):
        with pytest.raises(ConfigError, match=f"^policy {name}: {knob}={value}: "):
            policy(f"{name}:{knob}={value}")


def test_every_number_says_from_where_on_it_makes_sense() -> None:
    """A knob without a lower limit would take a negative time, weight or count."""
    found = [(name, knob) for name in POLICIES for knob in knobs(POLICIES[name])]
    open_ended = {
        (name, knob.name)
        for name, knob in found
        if "number" in knob.values and ">" not in knob.values
    }
    assert not open_ended


@each_row(
    ("text", "said"),
    [
        ("tetris:srtf_weight=-1", "srtf_weight=-1: Expected `float` >= 0"),
        ("tetris:remote_ratio=1.1", "remote_ratio=1.1: Expected `float` <= 1"),
        ("gandiva:slice_s=1e-9", "slice_s=1e-9: Expected `float` >= 0.001"),
        ("pollux:power=-51", "power=-51: Expected `float` >= -50"),
        ("pollux:population=10001", "population=10001: Expected `int` <= 10000"),
        ("tiresias:pack_limit=2", "pack_limit=2: Expected `float` <= 1"),
        ("tiresias-gittins:history=0", "history=0: Expected `int` >= 1"),
        ("tiresias:limits=5/-3", "limits=5/-3: Expected `float` > 0"),
        ("tiresias:limits=5/inf", "limits=5/inf: expected a finite number"),
        ("themis:seed=-1", "seed=-1: Expected `int` >= 0"),
        ("philly:tries=1.5", "tries=1.5: expected a whole number$"),
        ("tiresias:limits=5/few", "limits=5/few: expected a number"),
        ("tiresias:limits=5,9", "limits=5,9: expected a number.*; write several values with"),
        ("foresight:lend_quantile=most", "lend_quantile=most: expected a number or null$"),
        ("fifo:is_strict=maybe", "is_strict=maybe: .*; expected true or false"),
        ("aryl:reclaim=cost:reclaim=random", "reclaim is set twice"),
        ("aryl:reclaim=cost:reclaim=cost", "reclaim is set twice"),
    ],
)
def test_a_value_outside_its_limits_is_refused_by_name(text: str, said: str) -> None:
    """Policy, knob, value and limit; the same knob twice is a mistake and no order of two."""
    with pytest.raises(ConfigError, match=f"^policy {text.partition(':')[0]}: {said}"):
        policy(text)


def test_a_knob_behind_a_comma_is_told_where_knobs_stand() -> None:
    """A comma parts policies, so `aryl:a=1,b=2` reads `b=2` as a policy."""
    with pytest.raises(ConfigError, match=r"'resize_cost_s=0' is not a policy; .* with a colon"):
        policy("resize_cost_s=0")


@pytest.mark.parametrize("name", ["9000", "1e5", "9.5:promote=8"])
def test_a_value_behind_a_comma_is_told_how_lists_are_written(name: str) -> None:
    """A comma parts policies, so `tiresias:limits=5000,9000` reads `9000` as a policy."""
    with pytest.raises(
        ConfigError, match=r"is not a policy; .* with slashes: tiresias:limits=3600/1"
    ):
        policy(name)


def test_every_knob_says_what_it_is() -> None:
    """Also one that a policy's knobs have from the type that they build on."""
    found = [(name, knob) for name in POLICIES for knob in knobs(POLICIES[name])]
    assert not {(name, knob.name) for name, knob in found if not knob.says}


def test_notes_are_those_of_the_source_alone_or_of_several_knobs() -> None:
    """`a, b: text` says it of both, and ends where the next note begins."""
    made = joint(
        "toy",
        "does nothing",
        knobs=ToyKnobs(),
        allocate=lambda _, __, memory: Allocation(decisions=(), memory=memory),
        pending_reasons=lambda _, __, ___: (),
        parts=Parts(),
    )
    says = {knob.name: knob.says for knob in knobs(made)}
    assert says == {"packs": "whether it does", "moves": "whether it does", "slice_s": "how long"}


IDLE = [
    ("aryl", "lifetime_odds=true", "lifetime_quantile, which is null"),
    ("aryl", "near_quantile=0", "lifetime_quantile, which is null"),
    ("aryl-loan", "lifetime_saves=true", "lifetime_quantile, which is null"),
    ("foresight:lifetime_quantile=null", "near_quantile=0.5", "lifetime_quantile, which is null"),
    ("sjf", "claim_stretch=0", "claim_ratio, which is 0"),
    ("foresight:claim_ratio=0", "claims_most=2", "claim_ratio, which is 0"),
]


@each_row(("name", "turned", "needs"), IDLE)
def test_a_knob_that_decides_nothing_is_refused(name: str, turned: str, needs: str) -> None:
    """Whoever turns it expects a difference, and is told which other knob it needs; once that one
    is on, in whichever order they are written, it is taken."""
    base, _, _ = name.partition(":")
    with pytest.raises(ConfigError) as refused:
        policy(f"{name}:{turned}")
    assert str(refused.value) == f"policy {base}: {turned} decides nothing: it needs {needs}"
    other, _, _ = needs.partition(",")
    knob, _, value = turned.partition("=")
    for both in (f"{turned}:{other}=0.5", f"{other}=0.5:{turned}"):
        (found,) = (each for each in knobs(policy(f"{base}:{both}")) if each.name == knob)
        assert found.default == value


@each_row(
    "name",
    [
        "aryl:lifetime_odds=false:near_quantile=null:claim_stretch=30:claims_most=1",
        "foresight:lifetime_quantile=null",
        "foresight:claim_ratio=0",
        "aryl:lifetime_quantile=0:near_quantile=0.9",
    ],
)
def test_a_knob_that_nobody_turned_on_is_no_mistake(name: str) -> None:
    """Nor is one that is said to be off, one that a policy is shipped with, nor a quantile of 0,
    which is one."""
    assert policy(name).name == name
