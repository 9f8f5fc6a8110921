"""Many runs: wherever they run they are the same, and their means say how sure they are."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from msgspec import structs

from common.clock import SystemClock
from common.errors import ConfigError
from coordinator.engine.state.accounting import Quantiles
from coordinator.sim.report.statistics import estimate, student_t
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.compare import (
    LOCAL_BACKENDS,
    Task,
    compare,
    flat,
    means,
    with_gaps,
)
from coordinator.sim.run.play import Run, RunResult, play
from coordinator.sim.run.runtime import Saves
from coordinator.sim.run.stall_detection import UnfinishedError
from tests.sim.small import FEW, small
from tests.tables import each_row


def tasks(*policies: str, seeds: tuple[int, ...] = (1,)) -> list[Task]:
    """A few jobs on one pool, without delays."""
    return [
        Task(
            workload=str(FEW),
            seed=seed,
            cluster="1x64",
            options=RunOptions(policy=policy, seed=seed, has_delays=False),
        )
        for policy in policies
        for seed in seeds
    ]


def is_installed(module: str) -> bool:
    """Whether a backend that is not of joblib's own can be played here."""
    return find_spec(module) is not None


INSTALLED = [
    *LOCAL_BACKENDS,
    pytest.param(
        "ray", marks=pytest.mark.skipif(not is_installed("ray"), reason="ray is not installed")
    ),
]
"""Each that is listed; dask needs a scheduler's address besides."""


def figures(runs: list[Run]) -> list[RunResult]:
    """What does not depend on the machine."""
    return [structs.replace(run.result, wall_s=0.0, peak_rss_bytes=0) for run in runs]


@pytest.mark.slow
@pytest.mark.parametrize("backend", INSTALLED)
def test_where_it_runs_changes_no_figure(backend: str) -> None:
    """Other processes or threads give what this one gives, in the order of the tasks."""
    here = figures(list(compare(tasks("fifo", "sjf"), backend="sequential")))
    there = figures(list(compare(tasks("fifo", "sjf"), cores=2, backend=backend)))
    assert [result.policy for result in there] == ["fifo", "sjf"]
    assert there == here


def test_jobs_come_back_only_when_they_are_wanted() -> None:
    """Figures are small; jobs of a large trace are not."""
    [task] = tasks("fifo")
    [bare] = compare([task])
    [full] = compare([structs.replace(task, keeps_jobs=True)])
    assert (bare.rows, bare.samples) == ((), ())
    assert len(full.rows) == full.result.jobs


def endless(tmp_path: Path) -> list[Task]:
    """Two jobs of the whole node, and a policy whose turns are too short for a start."""
    trace = tmp_path / "two.csv"
    trace.write_text("submit_s,duration_s,gpus\n0,7200,8\n10,7200,8\n")
    return [
        Task(
            workload=str(trace),
            cluster="1x8",
            options=RunOptions(policy=policy, saves=Saves.ON_REQUEST, idle_events=100),
        )
        for policy in ("fifo", "gandiva:slice_s=1", "sjf")
    ]


def test_a_run_that_never_ends_does_not_cost_the_others(tmp_path: Path) -> None:
    """It is left out and told; where nobody is told it is an error."""
    told: list[str] = []
    runs = list(compare(endless(tmp_path), unfinished=told.append))
    assert [run.result.policy for run in runs] == ["fifo", "sjf"]
    [why] = told
    assert "gandiva:slice_s=1 makes no headway" in why
    with pytest.raises(UnfinishedError, match="no headway"):
        list(compare(endless(tmp_path)))


def test_a_mistake_in_another_process_is_the_same_error() -> None:
    """A ConfigError stays one on its way back."""
    broken = [structs.replace(task, cluster="1x8") for task in tasks("fifo", "sjf")]
    with pytest.raises(ConfigError, match="never fit this cluster"):
        list(compare(broken, cores=2))


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    """The error lists what there is."""
    with pytest.raises(ConfigError, match=r"backend: 'spark' is not one of .*dask, ray"):
        list(compare(tasks("fifo", "sjf"), backend="spark"))


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("dask=tcp://127.0.0.1:1", r"dask: distributed is not installed.*'dask\[distributed\]'"),
        ("ray", r"ray: ray is not installed here; pip install 'ray\[default\]'"),
    ],
)
def test_an_engine_that_is_not_here_is_named(backend: str, said: str) -> None:
    """Whoever asks for a cluster's engine learns which package is missing, and what brings it."""
    with pytest.raises(ConfigError, match=f"backend {said}"):
        list(compare(tasks("fifo", "sjf"), backend=backend))


def test_dask_needs_its_scheduler_s_address() -> None:
    """There is no cluster to guess."""
    with pytest.raises(ConfigError, match=r"name its scheduler, as in dask=tcp://"):
        list(compare(tasks("fifo", "sjf"), backend="dask"))


# --- means --------------------------------------------------------------------------------------


@each_row(
    ("degrees", "t"), [(1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (10, 2.228), (30, 2.042)]
)
def test_student_s_t_is_that_of_the_tables(degrees: int, t: float) -> None:
    """Two-sided, 95 %."""
    assert student_t(degrees) == pytest.approx(t, abs=0.0005)


def test_an_interval_is_t_times_the_standard_error() -> None:
    """1, 2, 3: mean 2, deviation 1, t of two degrees 4.303."""
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.303 / 3**0.5, abs=0.001)


def test_one_value_says_nothing_about_its_spread() -> None:
    """No interval rather than a narrow one; no value is an error."""
    assert estimate([5.0]).half_width is None
    with pytest.raises(ValueError, match="no value"):
        estimate([])


def test_each_policy_is_averaged_over_its_own_seeds() -> None:
    """Every figure has its dotted name; policies keep their order."""
    results = [run.result for run in compare(tasks("sjf", "fifo", seeds=(1, 2)))]
    rows = means(results)
    assert [(row.policy, row.seeds) for row in rows] == [("sjf", 2), ("fifo", 2)]
    mean_s = (results[0].jct_s.mean + results[1].jct_s.mean) / 2
    assert rows[0].figures["jct_s.mean"].mean == pytest.approx(mean_s)
    assert set(rows[0].figures) == set(flat(results[0]))


# --- the way to the bound -----------------------------------------------------------------------


@cache
def one_run() -> RunResult:
    """Figures of some run, to be changed."""
    options = RunOptions(policy="fifo", has_delays=False)
    return play(small(12), options, clock=SystemClock()).result


def beside(policy: str, jct_s: float, *, seed: int = 1, scenario: str = "", **swept: str) -> Run:
    """A run with this mean JCT, whose bound is 100 s."""
    keys = {key.replace("__", "."): value for key, value in swept.items()}
    result = structs.replace(
        one_run(),
        policy=policy,
        seed=seed,
        scenario=scenario,
        jct_s=Quantiles(mean=jct_s),
        jct_bound_s=100.0,
        swept=keys,
    )
    return Run(result=result, rows=(), samples=())


def closed(*runs: Run) -> list[float | None]:
    """Of each run, the part of the way from sjf to the bound."""
    return [run.result.gap_closed_ratio for run in with_gaps(runs)]


def test_the_way_from_sjf_to_the_bound_is_told_where_sjf_was_played() -> None:
    """sjf itself is at 0, the bound at 1, what is worse than sjf below 0; without sjf none is."""
    runs = [beside("aryl", 125.0), beside("sjf", 200.0), beside("fifo", 300.0), beside("x", 100.0)]
    assert closed(*runs) == [0.75, 0.0, -1.0, 1.0]
    assert closed(runs[0], runs[2]) == [None, None]


def test_only_sjf_on_the_same_jobs_is_a_yardstick() -> None:
    """Another seed, scenario or swept option has other jobs; a knob has not."""
    sjf = beside("sjf", 200.0, elastic="0.2")
    assert closed(sjf, beside("aryl", 150.0, elastic="0.2")) == [0.0, 0.5]
    assert closed(sjf, beside("aryl", 150.0, elastic="0.2", policy__margin="2")) == [0.0, 0.5]
    others = (
        beside("aryl", 150.0, elastic="0.4"),
        beside("aryl", 150.0, elastic="0.2", seed=2),
        beside("aryl", 150.0, elastic="0.2", scenario="basic"),
    )
    assert closed(sjf, *others) == [0.0, None, None, None]


def test_sjf_with_a_knob_at_its_own_value_is_a_yardstick() -> None:
    """With another one turned it is another policy, and stands where that one would."""
    own = beside("sjf", 200.0, policy__claim_ratio="0", policy__is_strict="false")
    aryl = beside("aryl", 150.0, policy__claim_ratio="2")
    assert closed(own, aryl) == [0.0, 0.5]
    assert closed(beside("sjf", 200.0, policy__claim_ratio="2"), aryl) == [None, None]


@pytest.mark.parametrize("lacking", ["jobs_rejected", "jobs_failed"])
def test_a_run_that_did_not_finish_all_jobs_is_on_no_way(lacking: str) -> None:
    """Its mean and its bound are of other jobs than those of sjf, whichever run lacks one."""
    runs = [beside("sjf", 200.0), beside("aryl", 150.0)]
    for number, other in ((0, [None, None]), (1, [0.0, None])):
        changed = list(runs)
        result = structs.replace(runs[number].result, **{lacking: 1})
        changed[number] = Run(result=result, rows=(), samples=())
        assert closed(*changed) == other


def test_where_sjf_is_at_the_bound_there_is_no_way_to_go() -> None:
    """Nothing is a share of nothing."""
    assert closed(beside("sjf", 100.0), beside("aryl", 100.0)) == [None, None]
