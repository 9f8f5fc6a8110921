"""Knobs of bundles: a bundle has none of parts that it is without, which are refused by name. What
it has decides something, or is refused beside the knobs that leave it nothing to decide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from re import escape

import pytest
from msgspec import inspect

from common.clock import SystemClock
from common.errors import ConfigError
from coordinator.engine.state.settings import EngineSettings
from coordinator.policies.knobs import idle, known, replaced, values
from coordinator.policies.policy import knobs_of, turned
from coordinator.policies.registry import POLICIES, Added, add, policy
from coordinator.service.settings import CoordinatorSettings, check
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import play
from coordinator.workloads.records import Workload
from coordinator.workloads.shaping import with_fungible_share
from tests.sim.small import small
from tests.tables import each_row

SCALES = "is_scaling, which is false"


LENDS = "is_loaning, which is false"


PREFERS = "elastic_base_prefers_loan, which is false"


@each_row(
    ("name", "needs"),
    [
        ("fifo:resize_cost_s=60", SCALES),
        ("fifo:reclaim=random", LENDS),
        ("aryl-loan:grows_when_idle=true", SCALES),
        ("aryl-loan:queue_weight=1", SCALES),
        ("aryl-elastic:lend_quantile=0.9", LENDS),
        ("aryl-elastic:lifetime_quantile=0.9", LENDS),
        ("aryl-elastic:lend_only_on_demand=false", LENDS),
        ("foresight:is_loaning=false:near_quantile=0.5", LENDS),
        ("aryl-loan:separates_groups=false", f"{SCALES}, or {PREFERS}"),
        ("aryl-elastic:separates_groups=false", LENDS),
        ("aryl:separates_groups=false:separates_at_home=true", "separates_groups, which is false"),
        ("aryl:reclaim=random:reclaim_cost=lost-gpu-s", "another reclaim than random"),
        ("aryl-scf:waits_for_finish=true", "another reclaim than fewest-jobs"),
        ("aryl:claims_most=0:claim_ratio=0.5", "claims_most, which is 0"),
        ("yarn-fair:timeout_s=5", "preempts, which is false"),
        ("gandiva:migrates=false:rest_s=5", "migrates, which is false"),
        ("gandiva:grows=false:grow_after_s=5", "grows, which is false"),
        ("tiresias:limits=:promote=8", "limits, which is empty"),
        ("tiresias:limits=:line=entry:mixes_units=true", "limits, which is empty"),
        ("tiresias-gittins:delta_gpu_s=5", "subtracts_age, which is true"),
        ("tiresias-gittins:services=1/2:history=3", "an empty services, which is 1/2"),
        ("tiresias-gittins:limits=:services=5", "limits, which is empty"),
    ],
)
def test_a_knob_of_a_part_that_is_off_is_refused(name: str, needs: str) -> None:
    """Whoever turns it, in a comparison or in a cell's settings, is told what it needs."""
    base, _, _ = name.partition(":")
    _, _, last = name.rpartition(":")
    said = escape(f"policy {base}: {last} decides nothing: it needs {needs}")
    with pytest.raises(ConfigError, match=f"^{said}$"):
        policy(name)


def test_a_cell_s_settings_are_refused_by_the_same_words() -> None:
    """The key that is wrong first, then the knob and what it needs; no coordinator starts so."""
    engine = EngineSettings(policy="fifo:reclaim=random")
    settings = CoordinatorSettings(cell="a", nats_url="nats://127.0.0.1:4222", engine=engine)
    said = f"engine.policy fifo: reclaim=random decides nothing: it needs {LENDS}"
    with pytest.raises(ConfigError, match=f"^{escape(said)}$"):
        check(settings)


@each_row(
    "name",
    [
        "fifo:reclaim=cost:resize_cost_s=5",
        "fifo:is_scaling=true:resize_cost_s=60",
        "fifo:reclaim=random:is_loaning=true",
        "aryl-random:is_scaling=true:is_loaning=false",
        "aryl-loan:elastic_base_prefers_loan=true:separates_groups=false",
        "foresight:is_loaning=false",
        "foresight:claims_most=0",
        "foresight:lifetime_quantile=null:lifetime_odds=true",
        "foresight:claims_most=0:claim_ratio=0.5",
        "foresight:is_loaning=false:lend_quantile=0.9:near_quantile=0.9",
        "aryl-random:is_loaning=false:reclaim=random",
        "yarn-fair:preempts=true:timeout_s=5",
        "tiresias:limits=5/9:promote=8",
        "tiresias-dlas:limits=",
        "tiresias-gittins:subtracts_age=false:delta_gpu_s=5",
        "tiresias-gittins:history=3",
    ],
)
def test_a_knob_of_a_part_that_is_on_is_taken(name: str) -> None:
    """In whichever order they are written; so is a default or a policy's own value that is said,
    and what is switched off of a policy that has the rest of it by itself."""
    assert policy(name).name == name


# --- they really decide nothing -----------------------------------------------------------------

BUNDLES = ("fifo", "sjf", "aryl-loan", "aryl-elastic", "aryl-random", "gandiva-lyra", "foresight")


MADE = "made-for-a-test"


def _other_value(name: str, kind: object, default: object) -> str:
    """A value that a knob has not by default, as far from it as goes."""
    match inspect.type_info(kind):
        case inspect.BoolType():
            return str(not default).lower()
        case inspect.EnumType():
            return {"reclaim": "random", "reclaim_cost": "lost-gpu-s"}[name]
        case _:
            return {"resize_cost_s": "3600", "claim_ratio": "2"}.get(name, "1")


@pytest.mark.parametrize("name", BUNDLES)
def test_what_a_bundle_is_without_leaves_no_trace(name: str) -> None:
    """A knob of a part that it has not is no knob of its own, and turning it makes the same policy,
    so that it decides nothing."""
    made = POLICIES[name]
    lacking = knobs_of(made).keys() - values(made.knobs).keys()
    assert lacking <= idle(made.knobs).keys()
    for knob in lacking:
        of = known(type(made.knobs))[knob]
        other = f"{knob}={_other_value(knob, of.kind, of.default)}"
        assert turned(made, MADE, [other], is_whole=False).knobs == made.knobs


IDLE = (
    ("aryl-random", "reclaim_cost=lost-gpu-s"),
    ("aryl-scf", "waits_for_finish=true"),
    ("aryl-loan", "separates_groups=false"),
    ("aryl:separates_groups=false", "separates_at_home=true"),
    ("foresight:claims_most=0", "claim_ratio=2"),
    ("foresight:claims_most=0", "claim_stretch=1"),
)
"""Knobs of parts that a bundle has, which decide nothing beside others."""


@pytest.fixture
def _nothing_added() -> Iterator[None]:
    yield
    add(())


@cache
def _workload() -> Workload:
    """Elastic jobs, jobs for both pools, saves and loans: something for every part to decide."""
    found = small(60)
    training, inference = (
        next(group.gpu_type for group in found.nodes if group.home_pool == pool)
        for pool in ("training", "inference")
    )
    jobs = with_fungible_share(found.jobs, 0.5, 1, training_gpu=training, inference_gpu=inference)
    return Workload(
        name="both", jobs=jobs, loads=found.loads, nodes=found.nodes, length_s=found.length_s
    )


@cache
def _lives(name: str) -> str:
    return _lives_of(name)


def _lives_of(name: str) -> str:
    return play(_workload(), RunOptions(policy=name), clock=SystemClock()).fingerprint


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text"), IDLE)
@pytest.mark.usefixtures("_nothing_added")
def test_what_is_refused_would_have_changed_no_job_s_life(name: str, text: str) -> None:
    """Rules that refuse too much would take a knob away that decides something."""
    with pytest.raises(ConfigError, match="decides nothing: it needs "):
        policy(f"{name}:{text}")
    base, *texts = name.split(":")
    made = turned(POLICIES[base], MADE, [*texts, text], is_whole=False)
    add([Added(name=MADE, origin="tests", made=made)])
    assert _lives_of(MADE) == _lives(name)


SEEN = {
    **dict.fromkeys(("is_strict", "is_scaling", "is_loaning", "grows_when_idle"), "aryl"),
    **dict.fromkeys(("lend_only_on_demand", "resize_cost_s", "separates_at_home"), "aryl"),
    "queue_weight": "aryl",
    **dict.fromkeys(("separates_groups", "claim_stretch"), "foresight"),
}
"""In which bundle each knob is turned; all of them have the same ones."""


UNSEEN = {
    **dict.fromkeys(
        ("reclaim", "reclaim_cost", "waits_for_finish", "elastic_base_prefers_loan"),
        "no lent node is called home here with a choice of whom to stop; tests of reclaiming",
    ),
    **dict.fromkeys(
        ("lifetime_quantile", "lifetime_odds", "lifetime_saves", "near_quantile", "lend_quantile"),
        "one day of load is no history of many; tests of lifetimes and of the season",
    ),
    "claim_ratio": "who waits here for so long has a reservation first; test_aged_claims",
    "claims_most": "never two wide jobs have aged here at once; test_aged_claims",
    "reservation_after_s": "no gang waits here for hours; test_reservations",
    "waits_for_loan": "its guests wait for ever, for more than is ever lent; reclaim/test_rules",
    "trusts_profiles": "these jobs tell no curve; test_scaling_profiles",
}
"""Knobs that change no life here, why, and which tests show that they decide something."""


@pytest.mark.slow
@pytest.mark.parametrize("knob", SEEN)
def test_a_knob_of_a_part_that_is_there_changes_some_job_s_life(knob: str) -> None:
    """Turned alone; else it should be refused."""
    made = POLICIES[SEEN[knob]]
    other = {"queue_weight": "10", "claim_stretch": "1"}.get(knob)
    value = other or _other_value(knob, knobs_of(made)[knob], values(made.knobs)[knob])
    assert _lives(f"{made.name}:{knob}={value}") != _lives(made.name)


def test_no_knob_of_bundles_is_forgotten() -> None:
    """A new one is shown to decide something, or says why not here."""
    assert knobs_of(POLICIES["aryl"]).keys() == SEEN.keys() | UNSEEN.keys()
    assert not SEEN.keys() & UNSEEN.keys()


@pytest.mark.slow
def test_the_lives_tell_rules_apart() -> None:
    """Else equal ones would say nothing: scaling, loans and who goes home each change some."""
    names = ("sjf", "aryl-loan", "aryl-elastic", "aryl", "foresight", "aryl:resize_cost_s=3600")
    assert len({_lives(name) for name in names}) == len(names)


def test_knobs_need_knobs_of_the_same_policy() -> None:
    """What is idle and what it needs, of each policy as it is and with each switch turned over."""
    for made in POLICIES.values():
        own, known_here = values(made.knobs), knobs_of(made).keys()
        switches = [{name: not value} for name, value in own.items() if isinstance(value, bool)]
        for changes in ({}, *switches):
            with suppress(ConfigError):  # values that do not fit each other
                knobs = replaced(made.knobs, changes)
                needs = idle(knobs)
                assert needs.keys() <= known_here, made.name
                assert {each for names in needs.values() for each in names} <= values(knobs).keys()
