"""Swept knobs: whose they are, what they stand in place of, and which are left out or refused."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec import structs

from common.errors import ConfigError
from coordinator.policies.registry import policy
from coordinator.sim.inputs.sweep import sweep
from coordinator.sim.inputs.tasks import plays, tasks
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.compare import Means, Task, label
from tests.sim.small import SLICE
from tests.tables import each_row

BASE = Task(workload=str(SLICE), cluster="1x64", options=RunOptions(policy="aryl-elastic"))


def of(*policies: str) -> list[Task]:
    """The same under several policies."""
    return [
        structs.replace(BASE, options=structs.replace(BASE.options, policy=policy))
        for policy in policies
    ]


def test_a_knob_that_needs_another_one_may_be_swept_beside_it() -> None:
    """In whichever order; alone it is refused before anything runs, and at a value of the other one
    at which it decides nothing it is left out."""
    near, base = "policy.near_quantile=0.5,0.9", "policy.lifetime_quantile=0,0.25"
    for texts in ([near, base], [base, near]):
        assert len(sweep(of("aryl"), texts)) == 4
    assert len(sweep(of("aryl"), [near, "policy.lifetime_quantile=0.25,null"])) == 3
    for texts in ([near], [near, "policy.lifetime_quantile=null"]):
        for name in ("aryl", "aryl:lifetime_quantile=null"):
            with pytest.raises(
                ConfigError,
                match=r"^policy aryl: near_quantile=0\.5 decides nothing: it needs life",
            ):
                sweep(of(name), texts)
    with pytest.raises(ConfigError, match=r"^policy foresight: near_quantile=0\.5 decides nothing"):
        sweep(of("foresight"), [near, "policy.lifetime_quantile=null"])


def test_a_knob_is_swept_of_those_that_have_it() -> None:
    """A policy without it stands beside them once, and not once for each value."""
    made = sweep(of("srtf", "themis", "sjf"), ["policy.f=0.2,0.8"])
    shown = [(task.options.policy, task.options.knobs, task.swept) for task in made]
    assert shown == [
        ("srtf", (), {}),
        ("themis", ("f=0.2",), {"policy.f": "0.2"}),
        ("sjf", (), {}),
        ("themis", ("f=0.8",), {"policy.f": "0.8"}),
    ]


def test_a_knob_is_swept_of_those_that_can_use_it() -> None:
    """A bundle without the part that it belongs to is what it is at every value, and runs once."""
    made = sweep(of("sjf", "aryl", "aryl-loan"), ["policy.resize_cost_s=5,60"])
    shown = [(task.options.policy_text, task.swept) for task in made]
    assert shown == [
        ("sjf", {}),
        ("aryl:resize_cost_s=5", {"policy.resize_cost_s": "5"}),
        ("aryl-loan", {}),
        ("aryl:resize_cost_s=60", {"policy.resize_cost_s": "60"}),
    ]
    by_rule = sweep(of("aryl-random", "aryl"), ["policy.reclaim_cost=jobs,lost-gpu-s"])
    assert [task.options.policy for task in by_rule] == ["aryl-random", "aryl", "aryl"]


def test_a_part_that_is_swept_itself_takes_its_knobs() -> None:
    """`sjf` with scaling has a use for them; a value that has none is run once."""
    both = ["policy.is_scaling=true", "policy.resize_cost_s=0,60"]
    for keys_in_order in (both, both[::-1]):
        assert len(sweep(of("sjf"), keys_in_order)) == 2
    made = sweep(of("sjf"), ["policy.is_scaling=true,false", both[1]])
    assert [task.options.knobs for task in made][2:] == [("is_scaling=false",)]


def test_a_knob_that_nobody_here_can_use_is_an_error() -> None:
    """It says of the first that has it what it needs, at a value, too, that is its default."""
    with pytest.raises(
        ConfigError,
        match=r"^policy sjf: reclaim=cost decides nothing: it needs is_loaning, which is false$",
    ):
        sweep(of("srtf", "sjf", "aryl-elastic"), ["policy.reclaim=cost,random"])


def test_two_keys_are_told_apart_by_who_has_them() -> None:
    """The one that is everybody's is swept of those, too, that do not have the other."""
    made = sweep(of("srtf", "themis"), ["policy.f=0.2,0.8", "loss=0,0.1"])
    counts = Counter(task.options.policy for task in made)
    assert counts == {"themis": 4, "srtf": 2}
    assert len({tuple(task.swept.items()) for task in made if task.options.policy == "srtf"}) == 2


def test_a_knob_that_no_policy_has_is_an_error() -> None:
    """Nothing would be swept; it says of whom it was asked."""
    with pytest.raises(ConfigError, match=r"^sweep: none of srtf, sjf has a knob f$"):
        sweep(of("srtf", "sjf"), ["policy.f=0.2"])


def test_a_value_that_one_of_the_policies_refuses_is_an_error() -> None:
    """Its row would be missing without a word."""
    with pytest.raises(ConfigError, match="policy qos: resize_cost_s=2e9"):
        sweep(of("aryl", "qos"), ["policy.resize_cost_s=2e9"])


PAPER_LOANS = "elastic_base_prefers_loan=true:lend_only_on_demand=false"
PAPER_REST = "trusts_profiles=false:reclaim"


@each_row(
    ("scenario", "policies", "texts", "names"),
    [
        (None, "aryl:resize_cost_s=1", ["resize_cost_s=2"], ["aryl:resize_cost_s=2"]),
        (None, "aryl:reclaim=random", ["is_loaning=true,false"],
         ["aryl:reclaim=random:is_loaning=true", "aryl:is_loaning=false"]),
        ("basic", None, ["is_scaling=true,false"],
         [f"aryl:resize_cost_s=0:{PAPER_LOANS}:{PAPER_REST}=cost:is_scaling=true",
          f"aryl:{PAPER_LOANS}:{PAPER_REST}=cost:is_scaling=false"]),
        ("basic-random", None, ["is_loaning=true,false"],
         [f"aryl:resize_cost_s=0:{PAPER_LOANS}:{PAPER_REST}=random:is_loaning=true",
          "aryl:resize_cost_s=0:trusts_profiles=false:is_loaning=false"]),
        ("basic", None, ["reclaim=random,cost"],
         [f"aryl:resize_cost_s=0:{PAPER_LOANS}:{PAPER_REST}={rule}"
          for rule in ("random", "cost")]),
        (None, "sjf,aryl", ["is_scaling=true,false", "resize_cost_s=0,5"],
         [*(f"{name}:is_scaling=true:resize_cost_s={cost}" for cost in "05"
            for name in ("sjf", "aryl")), "sjf:is_scaling=false", "aryl:is_scaling=false"]),
        (None, "foresight", ["claim_ratio=0,0.5", "claim_stretch=0,30"],
         ["foresight:claim_ratio=0", "foresight:claim_ratio=0.5:claim_stretch=0",
          "foresight:claim_ratio=0.5:claim_stretch=30"]),
        (None, "foresight", ["lifetime_quantile=null,0.25", "lifetime_odds=true,false"],
         ["foresight:lifetime_quantile=null",
          "foresight:lifetime_quantile=0.25:lifetime_odds=true",
          "foresight:lifetime_quantile=0.25:lifetime_odds=false"]),
        (None, "foresight", ["claims_most=0,1", "claim_ratio=0,1"],
         ["foresight:claim_ratio=0", "foresight:claims_most=0",
          "foresight:claims_most=1:claim_ratio=1"]),
    ],
)  # fmt: skip
def test_what_is_swept_replaces_what_is_said_and_idle_knobs_are_left_out(
    scenario: str | None, policies: str | None, texts: list[str], names: list[str]
) -> None:
    """Of the name, of the scenario and of the sweep itself; every run is one that can be played,
    and its row says what was swept and decides something, and nothing else."""
    asked = tasks(BASE, plays(scenario, policies), (1,), delays=None, speedup=None)
    made = sweep(asked, [f"policy.{text}" for text in texts])
    assert [task.options.policy_text for task in made] == names
    for task in made:
        assert policy(task.options.policy_text).name == task.options.policy_text
        assert task.options.knobs == tuple(
            f"{key.removeprefix('policy.')}={value}" for key, value in task.swept.items()
        )


@each_row(
    ("scenario", "policies", "text", "told"),
    [
        ("basic", None, "is_scaling=false", "basic policy.is_scaling=false"),
        ("basic-random", None, "is_loaning=false", "basic-random policy.is_loaning=false"),
        ("basic", None, "reclaim=random", "basic policy.reclaim=random"),
        ("basic", "aryl", "reclaim=random", "basic aryl policy.reclaim=random"),
        ("basic", "aryl:resize_cost_s=0", "is_scaling=false", "basic aryl policy.is_scaling=false"),
        ("basic", "sjf", "is_scaling=true", "basic sjf policy.is_scaling=true"),
    ],
)
def test_a_scenario_s_own_policy_is_told_by_the_scenario_s_name(
    scenario: str, policies: str | None, text: str, told: str
) -> None:
    """Also less the knobs that the sweep replaced or left idle; another one is told by its own."""
    asked = tasks(BASE, plays(scenario, policies), (1,), delays=None, speedup=None)
    [task] = sweep(asked, [f"policy.{text}"])
    row = Means(
        policy=task.options.policy, scenario=scenario, swept=task.swept, seeds=1, figures={}
    )
    assert label(row) == told


@pytest.mark.parametrize(("policies", "first"), [("sjf,aryl", "sjf"), (None, "aryl")])
def test_a_knob_that_no_combination_can_use_is_refused(policies: str | None, first: str) -> None:
    """By the policy's own name, however many knobs its scenario turns."""
    asked = tasks(BASE, plays("basic", policies), (1,), delays=None, speedup=None)
    said = f"^policy {first}: claims_most=0 decides nothing: it needs claim_ratio, which is 0$"
    with pytest.raises(ConfigError, match=said):
        sweep(asked, ["policy.claims_most=0,1"])
