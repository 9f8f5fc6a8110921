"""What a person asks for, as tasks: which seed draws what, under which scenario and policy."""

from __future__ import annotations

import os

import pytest
from msgspec import structs

from common.errors import ConfigError
from coordinator.cli.simulate.command import usable_cores
from coordinator.sim.inputs.inputs import Shares, read_workload
from coordinator.sim.inputs.sweep import sweep
from coordinator.sim.inputs.tasks import plays, refuse_idle, seeds_of, tasks
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.compare import Task
from coordinator.workloads.named import seed_of
from coordinator.workloads.shaping import RuntimeModel
from tests.cli.fake_cell import FakeCell, aryl
from tests.sim.small import SLICE
from tests.tables import each_row

BASE = Task(workload="paper", options=RunOptions(policy=""), shares=Shares(elastic=0.3))


def asked(
    workload: str, seed: int | None, *, scenario: str | None = None, seeds: str | None = None
) -> list[Task]:
    """The tasks of a workload under one policy."""
    base = structs.replace(BASE, workload=workload)
    return tasks(base, plays(scenario, "aryl"), seeds_of(seed, seeds), delays=None, speedup=None)


@each_row(
    ("name", "given", "expected"),
    [
        ("paper-7", None, 7),
        ("paper-overload-4", None, 4),
        ("paper-overload", None, 1),
        ("paper", None, 1),
        ("paper", 3, 3),
        ("paper", 0, 0),
        ("trace-9.csv", None, 1),
        ("trace.csv", 0, 0),
    ],
)
def test_a_seed_is_given_or_in_the_name_or_one(name: str, given: int | None, expected: int) -> None:
    """Names of files tell none."""
    assert seed_of(name, given) == expected


@pytest.mark.parametrize("scenario", [None, "advanced", "wrong-20"])
def test_all_that_a_run_of_paper_n_draws_is_drawn_by_n(scenario: str | None) -> None:
    """As of `paper --seed N`: lost messages and chances go by the seed that results tell."""
    [named] = asked("paper-2", None, scenario=scenario)
    [given] = asked("paper", 2, scenario=scenario)
    assert named.options == given.options
    assert named.options.seed == 2
    [swept, other] = sweep(asked("paper", None, scenario=scenario), ["workload=paper-2,paper-3"])
    assert (swept.options, other.options.seed) == (named.options, 3)


@pytest.mark.slow
def test_paper_n_is_paper_with_that_seed_in_every_share_and_scenario() -> None:
    """Job by job: who is elastic, and who spans two GPU types."""
    [named] = asked("paper-2", None, scenario="advanced")
    [given] = asked("paper", 2, scenario="advanced")
    found = named.read()
    assert found == given.read()
    [first] = asked("paper", 1, scenario="advanced")
    assert [job.is_elastic for job in found.jobs] != [job.is_elastic for job in first.read().jobs]


def test_a_seed_beside_a_name_that_has_one_is_refused() -> None:
    """Two words on one thing."""
    with pytest.raises(ConfigError, match=r"paper-2 has its seed in its name; seed 2 was given"):
        read_workload("paper-2", seed=2)


def test_each_scenario_and_policy_is_asked_for_with_each_seed() -> None:
    """In the order of the options; a scenario brings what it needs unless told otherwise."""
    found = asked("paper", None, scenario="basic,wrong-20", seeds="3..4")
    assert [(task.scenario, task.seed, task.options.seed) for task in found] == [
        ("basic", 3, 3),
        ("basic", 4, 4),
        ("wrong-20", 3, 3),
        ("wrong-20", 4, 4),
    ]
    assert [task.options.tells_progress for task in found] == [True, True, False, False]
    assert not any(task.options.has_delays for task in found)
    [alone] = asked("paper", None)
    assert alone.options.has_delays
    [tuned] = tasks(BASE, plays("elastic-pollux", None), (None,), delays=None, speedup=None)
    assert tuned.options.speedup == RuntimeModel.TUNED
    [told] = tasks(
        BASE, plays("elastic-pollux", None), (None,), delays=True, speedup=RuntimeModel.LOSSY
    )
    assert (told.options.speedup, told.options.has_delays) == (RuntimeModel.LOSSY, True)


def test_runs_at_a_time_are_as_many_as_cores_that_may_be_used() -> None:
    """Not as many as the machine has: a batch job that was given one core plays one run."""
    before = os.sched_getaffinity(0)
    assert usable_cores() == len(before)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


@each_row(
    ("sweeps", "is_idle"),
    [
        (["prerun=60,600"], True),
        (["prerun=60,600", "failures=none"], True),
        (["prerun=60,600", "failures=none,philly"], False),
        (["failures=none,philly"], False),
        ([], False),
    ],
)
def test_a_pre_run_that_nobody_asks_for_is_refused(sweeps: list[str], *, is_idle: bool) -> None:
    """Only jobs that may fail ask for one; one run in which some do is enough."""
    found = sweep(asked("paper", None), sweeps)
    if not is_idle:
        refuse_idle(found)
        return
    with pytest.raises(ConfigError, match=r"^prerun: 60 decides nothing without --failures: "):
        refuse_idle(found)


def test_a_command_with_an_idle_pre_run_plays_nothing() -> None:
    """It says what is missing, in one line."""
    done = aryl(
        FakeCell({}), "simulate", "--workload", str(SLICE), "--policy", "fifo", "--prerun", "300"
    )
    assert (done.code, done.out) == (2, "")
    assert "prerun: 300 decides nothing without --failures" in done.err
