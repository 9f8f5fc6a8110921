"""The paper's runs by name: workload, policy and rules of each, and what they have in common."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from common.clock import SystemClock
from common.errors import ConfigError
from coordinator.policies.aryl.reclaim.rules import ReclaimRule
from coordinator.policies.aryl.rules import Rules
from coordinator.policies.registry import policy
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import play
from coordinator.workloads.paper_runs import FAMILIES, SCENES, find_scene
from coordinator.workloads.records import Workload
from tests.cli.fake_cell import FakeCell, Run, aryl
from tests.sim.small import SLICE, small
from tests.tables import each_row

PAPER_NAMES = {
    *("baseline", "basic", "advanced", "heterogeneous", "ideal"),
    *("loan-opportunistic", "loan-random", "loan-scf", "loan-aryl", "elastic-aryl"),
    *("elastic-gandiva", "elastic-afs", "elastic-pollux", "elastic-tuned"),
}
"""Table 5."""

OTHERS = {"elastic-gandiva", "elastic-afs", "elastic-pollux", "elasticflow-8a"}
"""Rows of other systems, which have rules of their own."""


def rules(name: str) -> Rules:
    """The rules of a scenario's policy."""
    found = policy(find_scene(name).policy).knobs
    assert isinstance(found, Rules)
    return found


def simulate(*args: str) -> Run:
    """`aryl simulate ARGS`, with no cell anywhere."""
    given = ("--workload", str(SLICE), "--cluster", "4x8+4x8", "--backend", "sequential")
    return aryl(FakeCell({}), "simulate", *given, *args)


# --- what they are ------------------------------------------------------------------------------


def test_every_row_of_table_5_that_we_have_is_there() -> None:
    """Under its own name, with a policy that exists and a sentence."""
    assert set(SCENES) >= PAPER_NAMES
    for name, scene in SCENES.items():
        assert scene.name == name
        assert scene.description
        assert policy(scene.policy).name == scene.policy


@each_row("name", sorted(SCENES.keys() - {"baseline", *OTHERS}))
def test_the_paper_s_rules_hold_in_all_its_rows(name: str) -> None:
    """Growing is free where they scale, and whatever is spare is lent where they lend; naive rows
    alone favor no lent node; and none believes what jobs say of how they scale."""
    found, is_naive = rules(name), name.startswith("naive")
    assert found.scaling or found.lending
    if found.scaling:
        assert found.scaling.resize_cost_s == 0
    if found.lending:
        assert not found.lending.only_on_demand
        assert found.lending.elastic_base_prefers_loan != is_naive
    assert found.loans.separates_groups != is_naive
    assert not found.trusts_profiles


@each_row(
    ("name", "loans", "scales", "reclaim"),
    [
        ("basic", True, True, ReclaimRule.COST),
        ("loan-aryl", True, False, ReclaimRule.COST),
        ("loan-random", True, False, ReclaimRule.RANDOM),
        ("loan-scf", True, False, ReclaimRule.FEWEST_JOBS),
        ("basic-random", True, True, ReclaimRule.RANDOM),
        ("basic-scf", True, True, ReclaimRule.FEWEST_JOBS),
        ("elastic-aryl", False, True, ReclaimRule.COST),
        ("elastic-40", False, True, ReclaimRule.COST),
        ("wrong-20", True, True, ReclaimRule.COST),
    ],
)
def test_a_row_lends_scales_and_reclaims_as_it_says(
    name: str, loans: bool, scales: bool, reclaim: ReclaimRule
) -> None:
    """Section 7.1."""
    found = rules(name)
    assert (found.lending is not None, found.scaling is not None) == (loans, scales)
    assert found.loans.reclaim == reclaim


def shares(workload: Workload) -> tuple[float, float]:
    """Shares of elastic and of heterogeneous jobs."""
    jobs = workload.jobs
    elastic = sum(job.is_elastic for job in jobs) / len(jobs)
    return elastic, sum(job.heterogeneous_speed_ratio > 0 for job in jobs) / len(jobs)


def test_a_number_in_a_name_is_a_share_of_the_jobs() -> None:
    """Elastic, heterogeneous, wrong and checkpointing jobs; a larger number is a larger share."""
    base = small(100)
    for percent in (0, 20, 60, 100):
        share = percent / 100
        elastic = find_scene(f"elastic-{percent}").shape(base, 1)
        assert shares(elastic)[0] == pytest.approx(share, abs=0.01)
        spanning = find_scene(f"heterogeneous-{percent}").shape(base, 1)
        assert shares(spanning)[1] == pytest.approx(share, abs=0.01)
        saving = find_scene(f"checkpoint-{percent}").shape(base, 1).jobs
        assert sum(j.has_checkpoints for j in saving) / len(saving) == pytest.approx(
            share, abs=0.01
        )
        wrong = find_scene(f"wrong-{percent}").shape(base, 1).jobs
        off = [j for j in wrong if j.estimate_s != j.duration_s]
        assert len(off) / len(wrong) == pytest.approx(share, abs=0.02)
        assert all(abs((j.estimate_s or 0) / j.duration_s - 1) <= 0.25 for j in off)


def test_checkpoints_are_a_share_of_ideal_s_jobs() -> None:
    """Figure 13 varies Ideal: jobs grow and span as in Ideal, and differ by checkpoints alone."""
    base = small(100)
    ideal = find_scene("ideal").shape(base, 1).jobs
    for percent in (0, 40, 100):
        saving = find_scene(f"checkpoint-{percent}").shape(base, 1).jobs
        assert [structs.replace(job, has_checkpoints=False) for job in saving] == [
            structs.replace(job, has_checkpoints=False) for job in ideal
        ]
    assert ideal != find_scene("basic").shape(base, 1).jobs


def test_ten_days_are_drawn_by_the_number_and_alike_for_all_three() -> None:
    """Baseline and Basic have the same jobs, Ideal the same submissions; numbers differ."""
    base = small(100, is_dense=False)
    made = {
        name: find_scene(f"bootstrap-{name}-3").shape(base, 1)
        for name in ("baseline", "basic", "ideal")
    }
    assert made["baseline"].jobs == made["basic"].jobs
    when = [[job.submit_s for job in workload.jobs] for workload in made.values()]
    assert when[0] == when[1] == when[2]
    other = find_scene("bootstrap-baseline-4").shape(base, 1)
    assert [job.submit_s for job in other.jobs] != when[0]
    assert made["basic"].length_s == 10 * 86_400


def test_wrong_estimates_stay_wrong() -> None:
    """Jobs that said how far they are would set them right."""
    assert not find_scene("wrong-40").tells_progress
    assert find_scene("basic").tells_progress


@each_row("name", ["best", "wrong", "wrong-101", "wrong-x", "elastic-", ""])
def test_an_unknown_scenario_lists_those_that_are(name: str) -> None:
    """And numbers end where shares do."""
    with pytest.raises(ConfigError, match=r"is not one of baseline.*wrong-N|expected 0 to 100"):
        find_scene(name)


# --- played -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*SCENES, *(f"{family}-20" for family in FAMILIES)}))
def test_every_scenario_runs_to_its_last_job(name: str) -> None:
    """On four training and four inference nodes, with the engine's invariants checked."""
    scene = find_scene(name)
    options = RunOptions(policy=scene.policy, has_delays=False, check=True)
    if name.startswith("bootstrap"):  # ten days of draws of a whole day; others need a queue
        day = small(60, is_dense=False)
        workload = scene.shape(structs.replace(day, jobs=day.jobs[::12]), 1)
    else:
        workload = scene.shape(small(16), 1)
    found = play(workload, options, clock=SystemClock())
    assert found.result.jobs == len(workload.jobs) > 0


@pytest.mark.slow
def test_a_scenario_brings_its_own_policy_unless_one_is_named() -> None:
    """And takes no time by itself; results tell it."""
    own = json.loads(simulate("--scenario", "baseline,elastic-aryl", "-o", "json").out)["runs"]
    assert [(run["scenario"], run["policy"].partition(":")[0]) for run in own] == [
        ("baseline", "fifo"),
        ("elastic-aryl", "aryl-elastic"),
    ]
    args = ("--scenario", "baseline", "--policy", "fifo,sjf", "-o", "json")
    named = json.loads(simulate(*args).out)["runs"]
    assert [run["policy"] for run in named] == ["fifo", "sjf"]
    assert named[0]["queueing_s"] == own[0]["queueing_s"]
    slow = json.loads(simulate("--scenario", "baseline", "--delays", "-o", "json").out)["runs"]
    assert slow[0]["jct_s"]["mean"] > own[0]["jct_s"]["mean"]


def test_the_table_names_scenarios_without_their_knobs() -> None:
    """A row is found by its name, not by twenty words of rules."""
    table, _ = simulate("--scenario", "baseline,elastic-aryl").out.split("\n\n")
    heading, *lines = table.splitlines()
    assert heading.split()[:2] == ["SCENARIO", "POLICY"]
    assert [line.split()[:2] for line in lines] == [
        ["baseline", "fifo"],
        ["elastic-aryl", "aryl-elastic"],
    ]


@each_row(
    ("args", "said"),
    [
        (("--scenario", "best"), "scenario: 'best' is not one of baseline"),
        (("--scenario", "basic,basic"), "scenario: basic is given twice"),
        (("--scenario", ","), "scenario: none named"),
        (("--scenario", "basic", "--policy", "magic"), "policy: 'magic' is not one of"),
        (("--policy", "aryl:speed=1"), "'speed=1' sets no knob"),
    ],
)
def test_a_mistake_is_one_clear_line(args: tuple[str, ...], said: str) -> None:
    """Exit code 2, and no traceback."""
    done = simulate(*args)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err
