"""Whose rows are equal: said below the table, on the page and in JSON, and only where it is so."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from msgspec import structs

from coordinator.engine.state.accounting import Quantiles
from coordinator.sim.inputs.alike import alike, alike_text, lacks
from coordinator.sim.run.play import JobRow, Run, RunResult, fingerprint_of
from coordinator.workloads.records import TraceJob, Workload
from tests.cli.fake_cell import FakeCell, aryl
from tests.sim.small import FEW, small
from tests.tables import each_row

POOL = ("--workload", str(FEW), "--cluster", "1x16", "--no-delays", "--backend", "sequential")
NAMES = "fifo,drf,sjf,fifo-skip"


def simulate(*args: str) -> str:
    """What `aryl simulate ARGS` prints, in one long line for each of its own."""
    return aryl(FakeCell({}), "simulate", *POOL, *args, environ={"COLUMNS": "400"}).out


@pytest.mark.slow
def test_who_is_named_alike_has_the_same_jobs_and_nobody_else_has() -> None:
    """One tenant: fifo and drf are one, and the groups are those that the jobs' records make."""
    rows = csv.DictReader(io.StringIO(simulate("--policy", NAMES, "-o", "csv")))
    lives: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        lives.setdefault(row.pop("policy"), []).append(tuple(row.values()))
    expected = [
        [name for name in lives if lives[name] == lives[first]]
        for place, first in enumerate(lives)
        if all(lives[name] != lives[first] for name in list(lives)[:place])
    ]
    said = json.loads(simulate("--policy", NAMES, "-o", "json"))
    assert said["alike"] == [names for names in expected if len(names) > 1]
    assert ["fifo", "drf"] in said["alike"]
    assert not any("sjf" in names for names in said["alike"])


def test_the_table_says_it_in_one_line_below_with_what_the_trace_lacks() -> None:
    """The reader of equal rows is told that they are, and what could have made them differ."""
    lines = simulate("--policy", "fifo,drf,sjf").splitlines()
    [line] = [each for each in lines if "same for every job" in each]
    assert line.startswith("the same for every job: fifo = drf (the workload has one tenant, ")
    assert lines.index(line) > 3
    assert "same for every job" not in simulate("--policy", "fifo,sjf")


def test_the_page_says_it_below_the_measures_in_short(tmp_path: Path) -> None:
    """As the table does."""
    file = tmp_path / "page.html"
    simulate("--policy", "fifo,drf,sjf", "--html", str(file))
    text = file.read_text()
    at = text.index("<p>The same for every job: fifo = drf (the workload has one tenant, ")
    assert text.index("<h2>In short</h2>") < at < text.index("<h2>Measure by measure</h2>")


# --- who is alike -------------------------------------------------------------------------------


def row(name: str, finished_at_s: float, **changes: object) -> JobRow:
    """One job that began at 10 s."""
    made = JobRow(
        job_id=name,
        submitted_at_s=0.0,
        started_at_s=10.0,
        finished_at_s=finished_at_s,
        queueing_s=10.0,
        jct_s=finished_at_s,
        gpus=8,
        min_workers=1,
        max_workers=1,
        preemptions=0,
        resizes=0,
        was_on_loan=False,
        suspensions=0,
        suspended_s=0.0,
        migrations=0,
        app=name,
        rho=None,
    )
    return structs.replace(made, **changes)


def run(policy: str, *rows: JobRow, seed: int = 1, scenario: str = "", **swept: str) -> Run:
    """A run with these jobs, of which only the fingerprint is left."""
    result = RunResult(
        policy=policy,
        seed=seed,
        scenario=scenario,
        swept={key.replace("__", "."): value for key, value in swept.items()},
        jobs=len(rows),
        queueing_s=Quantiles(),
        jct_s=Quantiles(),
        training_gpu_ratio=0.0,
        overall_gpu_ratio=0.0,
        on_loan_gpu_ratio=0.0,
        preemptions=0,
        preempted_jobs_ratio=0.0,
        lost_gpu_s=0.0,
        reclaims=0,
        reclaims_late=0,
        jct_bound_s=0.0,
        events=0,
        wall_s=0.0,
        peak_rss_bytes=0,
    )
    return Run(result=result, rows=(), samples=(), fingerprint=fingerprint_of(rows))


SAME = row("a", 20.0)


@each_row(
    "other",
    [
        row("a", 20.01),
        row("b", 20.0),
        row("a", 20.0, preemptions=1),
        row("a", 20.0, was_on_loan=True),
        row("a", 20.0, rho=1.0),
    ],
    ids=["another end", "another job", "a preemption", "a loan", "another rho"],
)
def test_one_difference_of_one_job_is_enough(other: JobRow) -> None:
    """Equal means are not equal runs."""
    assert alike([run("x", SAME), run("y", other)]) == ()
    assert alike([run("x", SAME), run("y", SAME), run("z", other)]) == (("x", "y"),)


def test_whose_a_job_was_is_no_difference() -> None:
    """What was asked for or said of it is no part of what became of it."""
    same = row("a", 20.0, tenant="vision", deadline_s=9.0, is_promised=True)
    assert alike([run("x", SAME), run("y", same)]) == (("x", "y"),)


def test_rounding_and_the_order_of_rows_are_no_difference() -> None:
    """Sums of other parts differ in their last digits."""
    one, other = row("a", 20.0), row("b", 30.0)
    again = run("y", other, row("a", 20.0 + 1e-9))
    assert alike([run("x", one, other), again]) == (("x", "y"),)


def test_alike_means_under_every_seed() -> None:
    """Under one of two is not enough."""
    both = [run("x", SAME), run("y", SAME), run("x", SAME, seed=2)]
    assert alike([*both, run("y", SAME, seed=2)]) == (("x", "y"),)
    assert alike([*both, run("y", row("a", 21.0), seed=2)]) == ()


def test_runs_without_a_success_are_like_nobody() -> None:
    """There is nothing of which they could be equal."""
    assert alike([run("x"), run("y")]) == ()


def test_groups_are_told_in_the_order_of_the_runs() -> None:
    """Several stand in one line."""
    other = row("a", 99.0)
    groups = alike([run("b", SAME), run("c", other), run("a", SAME), run("d", other)])
    assert groups == (("b", "a"), ("c", "d"))
    assert alike_text(groups, ()) == "the same for every job: b = a; c = d"
    assert alike_text((), ("one tenant",)) == ""


# --- what a workload lacks ----------------------------------------------------------------------


def of_jobs(*jobs: TraceJob) -> Workload:
    """A workload of these without a load."""
    return structs.replace(small(1), jobs=jobs, loads=())


PLAIN = TraceJob(job_id="a", submit_s=0.0, duration_s=10.0, gpus=1)
ALL = ("one tenant", "one priority", "no deadlines", "no elastic jobs", "nothing to lend")


@each_row(
    ("change", "gone"),
    [
        ({}, None),
        ({"tenant": "other"}, "one tenant"),
        ({"priority": 1}, "one priority"),
        ({"deadline_s": 5.0}, "no deadlines"),
        ({"min_workers": 1, "max_workers": 2}, "no elastic jobs"),
        ({"min_workers": 2, "max_workers": 2}, None),
    ],
)
def test_what_a_workload_lacks_is_what_none_of_its_jobs_has(
    change: dict[str, object], gone: str | None
) -> None:
    """One job that has it is enough for it not to be said."""
    workload = of_jobs(PLAIN, structs.replace(PLAIN, job_id="b", **change))
    found = lacks(workload, [run("x").result])
    assert found == tuple(name for name in ALL if name != gone)


def test_a_load_is_something_to_lend() -> None:
    """Then loans can make policies differ."""
    assert "nothing to lend" not in lacks(small(1), [run("x").result])


def test_of_several_workloads_nothing_is_said() -> None:
    """A swept option changes what the jobs are; a swept knob does not."""
    workload, plain = of_jobs(PLAIN), run("x").result
    assert lacks(workload, [plain, run("x", elastic="0.5").result]) == ()
    assert lacks(workload, [plain, run("x", scenario="basic").result]) == ()
    assert lacks(workload, [plain, run("x", policy__margin="2").result]) == ALL
