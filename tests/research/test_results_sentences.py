"""What docs/results.md says below its tables: each figure is one that was measured or published."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec import structs

from common.clock import SystemClock
from common.model import NodeName, Pool, ServiceName
from coordinator.policies.contract.decisions import Reclaim
from coordinator.sim.run.build import RunOptions, Stage
from coordinator.sim.run.play import play
from coordinator.workloads.paper import RARE_GPU
from coordinator.workloads.records import LoadSeries, LoadUnit, NodeGroup, TraceJob, Workload
from docs.research.play_results import ROWS, read_kept
from docs.research.results import page
from docs.research.results_figures import PLACE, OppositeError, filled, sentence_figures, text_of
from docs.research.results_ours import all_values, by_row, plain_figures
from docs.research.results_sentences import (
    PAGE_FILE,
    RUNS,
    TRACE,
    Measured,
    ReclaimKeeper,
    keep_measured,
    look,
    read_measured,
    task_of,
    trace_figures,
    trying_loans_first,
)
from docs.research.results_text import WHY, WHY_OF_ROW

KEPT_RUNS = read_kept()
SEEN = read_measured()
SENTENCES = sorted({*WHY.values(), *WHY_OF_ROW.values()})
FIGURES = sentence_figures(all_values(by_row(KEPT_RUNS)), SEEN)

NO_FIGURES = re.compile(r"`[^`]*`|\[[^\]]*\]\([^)]*\)|\bp\d\d\b|\bTables? \d+")
"""Names, places in the documentation, quantiles and the numbers of tables."""


# --- the page -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sentence", SENTENCES)
def test_no_figure_is_typed_into_a_sentence(sentence: str) -> None:
    """Where its names stood and what merely names something is gone, no digit is left."""
    assert not re.search(r"\d", NO_FIGURES.sub("", PLACE.sub("", sentence)))


@pytest.mark.parametrize("sentence", SENTENCES)
def test_every_name_in_a_sentence_has_a_figure(sentence: str) -> None:
    """Also in those that no star asks for today; no brace is left over."""
    assert not re.search(r"[{}]", filled(sentence, FIGURES))


def test_a_sentence_tells_what_was_measured() -> None:
    """Another measurement makes another page, and so does another run."""
    before = page(KEPT_RUNS, SEEN)
    basic = SEEN["basic"]
    changed = structs.replace(basic, figures=basic.figures | {"idle_ratio": 0.123})
    assert "12.3 % are idle" in page(KEPT_RUNS, SEEN | {"basic": changed})
    assert "12.3 % are idle" not in before
    run = KEPT_RUNS["basic-1"]
    other = structs.replace(run, result=structs.replace(run.result, reclaims=4321))
    assert "of 4,321 in Basic" in page(KEPT_RUNS | {"basic-1": other}, SEEN)


def test_a_name_without_a_figure_stops_the_page() -> None:
    """A run that was not measured is missed, not left out."""
    with pytest.raises(KeyError, match=r"seen\.none\.guests"):
        filled("Of {seen.none.guests} guests.", FIGURES)
    with pytest.raises(KeyError, match="fifo-skip"):
        sentence = next(each for each in SENTENCES if "seen.fifo-skip." in each)
        without = {run: each for run, each in SEEN.items() if run != "fifo-skip"}
        filled(sentence, sentence_figures(all_values(by_row(KEPT_RUNS)), without))


def test_a_sentence_that_says_the_opposite_stops_the_page() -> None:
    """`so much earlier` with less than nothing is later."""
    with pytest.raises(OppositeError, match="sooner_s is -3"):
        filled("It ends {x.sooner_s} s earlier.", {"x.sooner_s": -3.0})


def test_figures_are_told_in_the_unit_that_is_asked_for() -> None:
    """Parts as percent, seconds as hours, factors with two digits, others whole."""
    assert [text_of(0.1234, "%"), text_of(0.01234, "%")] == ["12.3 %", "1.23 %"]
    assert text_of(5400.0, "h") == "1.5 h"
    assert text_of(1.527, "x") == "1.53"
    assert filled("{a.b} s, {c %}", {"a.b": 12345.6, "c": 0.5}) == "12,346 s, 50.0 %"


def test_what_follows_from_the_paper_is_computed_from_its_tables() -> None:
    """Running times, gains and shares that it does not print, by hand."""
    found = {name: round(value, 3) for name, value in FIGURES.items() if "theirs" in name}
    assert found["theirs.baseline.running_s"] == 16_610 - 3_072
    assert found["theirs.basic.running_s"] == 11_236 - 2_010
    assert found["theirs.least_running_s"] == 13_538 - 0.05 * 14.2 * 3600 / 2
    assert found["theirs.basic.queueing_gain"] == 1.528
    assert found["theirs.wrong-20.queueing_gain"] == 2.21
    assert found["theirs.overall_use_by_parts"] == 0.682
    assert found["theirs.loan-opportunistic.preemptions_each"] == 0.921
    assert found["theirs.elastic-tuned.sooner_s"] == 6_381
    assert found["theirs.elastic-tuned.queueing_less_s"] == 1_018
    assert found["least.theirs_queueing_p95_s"] == 2_749


# --- what was measured --------------------------------------------------------------------------


def test_every_run_that_sentences_need_was_measured_on_its_trace() -> None:
    """And under the policy by which it is played today: what is stale is measured again."""
    assert list(SEEN) == [TRACE, *RUNS]
    for run, asked in RUNS.items():
        assert SEEN[run].workload == asked.trace
        assert SEEN[run].policy == task_of(asked).options.policy, run
    others = {run for run, each in SEEN.items() if each.workload != "paper-1"}
    assert others == {"overload"}


@pytest.mark.parametrize("run", [run for run in RUNS if run in ROWS])
def test_a_measured_run_is_the_run_of_the_tables(run: str) -> None:
    """As many facts, the same times, preemptions, guests and nodes taken back."""
    kept, seen = KEPT_RUNS[f"{run}-1"], SEEN[run]
    figures = plain_figures(kept)
    assert seen.policy == kept.result.policy
    assert seen.events == kept.result.events
    for ours, theirs in (
        ("queueing_s", "queueing_s.mean"),
        ("jct_s", "jct_s.mean"),
        ("preemptions", "preemptions"),
        ("guests", "on_loan_jobs.jobs"),
        ("reclaims", "reclaims"),
    ):
        assert seen.figures[ours] == pytest.approx(figures[theirs], rel=1e-9), ours
    if "idle_ratio" in seen.figures:
        gentle = seen.figures["idle_ratio"] + seen.figures["flexible_alone_ratio"]
        assert gentle == pytest.approx(kept.result.reclaim.gentle_ratio)


def test_what_was_measured_is_kept_and_read_again(tmp_path: Path) -> None:
    """In the order in which runs are played, whichever was measured first; nothing is there yet."""
    path = tmp_path / PAGE_FILE.name
    assert read_measured(path) == {}
    basic = Measured(run="basic", workload="paper-1", policy="x", figures={"a": 1 / 3})
    trace = Measured(run=TRACE, workload="paper-1", figures={})
    keep_measured({"basic": basic, TRACE: trace}, path)
    found = read_measured(path)
    assert list(found) == [TRACE, "basic"]
    assert found["basic"].figures == {"a": 0.3333333333}


# --- how it is measured -------------------------------------------------------------------------


def job(name: str, duration_s: float, *types: str, elastic: bool = False) -> TraceJob:
    """A job of four GPUs, from the start on."""
    return TraceJob(
        job_id=name,
        submit_s=400.0,
        duration_s=duration_s,
        gpus=4,
        gpus_per_worker=4,
        min_workers=1,
        max_workers=2 if elastic else 1,
        gpu_types=types,
    )


def workload_of(*jobs: TraceJob, busy: tuple[float, ...] = (0.0,)) -> Workload:
    """One training node, one of the rare type, four inference nodes of 8 GPUs."""
    return Workload(
        name="small",
        jobs=jobs,
        loads=(LoadSeries(name="chat", step_s=300.0, values=busy, unit=LoadUnit.BUSY),),
        nodes=(
            NodeGroup(count=1, gpus=8, gpu_type="V100"),
            NodeGroup(count=1, gpus=4, gpu_type=RARE_GPU),
            NodeGroup(count=4, gpus=8, gpu_type="T4", home_pool=Pool.INFERENCE),
        ),
        length_s=3600.0,
    )


OPTIONS = RunOptions(
    policy="aryl:elastic_base_prefers_loan=true:lend_only_on_demand=false:resize_cost_s=0",
    has_delays=False,
    check=True,
    service={"headroom_ratio": 0.0, "min_serving": 0},
)


def test_the_trace_is_counted_job_by_job() -> None:
    """Kinds, lengths and what elastic jobs make up, on ten jobs by hand."""
    jobs = (
        *(job(f"short-{n}", 100.0, "V100") for n in range(5)),
        job("fungible", 200.0, "V100", "T4"),
        job("rare", 800.0, RARE_GPU),
        job("elastic", 20_000.0, "V100", elastic=True),
        job("long", 30_000.0, "V100", "T4"),
        job("longest", 40_000.0, "V100", elastic=True),
    )
    found = trace_figures(workload_of(*jobs))
    assert (found["jobs"], found["rare_jobs"], found["fungible_jobs"]) == (10.0, 1.0, 2.0)
    assert (found["rare_ratio"], found["elastic_ratio"]) == (0.1, 0.2)
    assert (found["short_ratio"], found["long_ratio"]) == (0.6, 0.3)
    assert (found["elastic_s"], found["elastic_part_s"]) == (30_000.0, 6_000.0)
    assert found["fungible_short_ratio"] == 0.5
    assert found["longest_s"] == pytest.approx(35_500.0)
    assert found["longest_elastic_ratio"] == 1.0


def test_nodes_that_go_home_are_idle_or_hold_flexible_workers_or_a_base_gang() -> None:
    """One of each kind, and a node that two decisions name counts once."""
    elastic = job("elastic", 5000.0, "T4", elastic=True)
    stage = Stage(workload_of(elastic), OPTIONS)
    stage.sim.begin()
    stage.sim.loop.run(2000.0)  # some loan passes later
    state = stage.sim.engine.state
    [entry] = state.jobs.values()
    of = {worker.is_flexible: worker.node for worker in entry.workers.values()}
    assert set(of) == {True, False}
    assert of[True] != of[False]
    idle = next(name for name in sorted(state.nodes) if name.startswith("i") and name not in
                of.values())  # fmt: skip
    keeper = ReclaimKeeper(stage.sim.engine)

    def reclaim(node: NodeName) -> Reclaim:
        return Reclaim(node=node, service=ServiceName("chat"), deadline_s=300.0, reason="")

    keeper.hear([reclaim(of[False])])
    assert (keeper.nodes, keeper.idle, keeper.flexible_alone) == (1, 0, 0)
    keeper.hear([reclaim(of[True]), reclaim(of[True])])
    assert (keeper.nodes, keeper.idle, keeper.flexible_alone) == (2, 0, 1)
    keeper.hear([reclaim(idle)])
    assert (keeper.nodes, keeper.idle, keeper.flexible_alone) == (3, 1, 1)


def test_a_run_is_looked_at_as_the_tables_look_at_it() -> None:
    """The same means, guests and nodes; those that want the rare type apart from the others."""
    jobs = (
        job("rare-1", 5000.0, RARE_GPU),
        job("rare-2", 5000.0, RARE_GPU),
        job("elastic", 5000.0, "T4", elastic=True),
        job("fungible", 5000.0, "V100", "T4"),
        job("home", 5000.0, "V100"),
    )
    workload = workload_of(*jobs, busy=(*(0.0,) * 5, *(1.0,) * 5, *(0.0,) * 20))
    run = play(workload, OPTIONS, clock=SystemClock())
    found, events = look(workload, OPTIONS)
    result, rows = run.result, {row.job_id: row for row in run.rows}
    assert events == result.events
    assert found["queueing_s"] == pytest.approx(result.queueing_s.mean)
    assert found["jct_s"] == pytest.approx(result.jct_s.mean)
    assert (found["preemptions"], found["reclaims"]) == (result.preemptions, result.reclaims)
    assert result.reclaims > 0
    assert result.reclaim.gentle_ratio == pytest.approx(
        found["idle_ratio"] + found["flexible_alone_ratio"]
    )
    guests = {name for name, row in rows.items() if row.was_on_loan}
    assert (found["guests"], found["guests_elastic"]) == (len(guests), 1.0)
    rare_s = sum(rows[name].queueing_s for name in ("rare-1", "rare-2"))
    assert rare_s >= 5000.0  # one waits for the other
    assert found["rare_queueing_s"] == pytest.approx(rare_s / 2)
    assert found["rare_part_s"] == pytest.approx(rare_s / 5)
    others_s = sum(rows[name].queueing_s for name in ("elastic", "fungible", "home"))
    assert found["others_queueing_s"] == pytest.approx(others_s / 3)


def test_jobs_that_prefer_loans_try_lent_nodes_first() -> None:
    """Fungible ones turn their order around and then are guests; no other job changes."""
    jobs = (job("fungible", 5000.0, "V100", "T4"), job("home", 5000.0, "V100"))
    turned = trying_loans_first(jobs)
    assert [each.gpu_types for each in turned] == [("T4", "V100"), ("V100",)]
    before, _ = look(workload_of(*jobs), OPTIONS)
    after, _ = look(workload_of(*turned), OPTIONS)
    assert (before["guests"], after["guests"]) == (0.0, 1.0)
