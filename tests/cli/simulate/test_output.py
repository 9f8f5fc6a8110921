"""What `aryl simulate` says on standard error of options that change nothing or cannot be met."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli.app import whole
from coordinator.sim.report.measures import MEASURES, Measure
from coordinator.sim.report.statistics import estimate
from tests.cli.fake_cell import FakeCell, Run, aryl
from tests.sim.small import FEW
from tests.tables import each_row

POOL = ("--workload", str(FEW), "--no-delays", "--policy", "aryl", "--seeds", "1..3")
LOAD = Path(__file__).parents[3] / "coordinator" / "demo" / "data" / "servegen_m_small_day.csv"
SEEDLESS = "the seed changes nothing here"


def simulate(*args: str) -> Run:
    """`aryl simulate ARGS`, with no cell anywhere."""
    return aryl(FakeCell({}), "simulate", "--backend", "sequential", *args)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "is_seedless"), [((), True), (("--elastic", "0.5"), False), (("--seed", "1"), False)]
)
def test_seeds_that_draw_nothing_are_told(more: tuple[str, ...], *, is_seedless: bool) -> None:
    """Three times the same run is said to be that; where shares are drawn, and of one seed, not."""
    base = POOL[:-2] if "--seed" in more else POOL
    done = simulate(*base, "--cluster", "2x16", *more)
    assert done.code == 0
    assert (SEEDLESS in done.err) == is_seedless
    if is_seedless:
        assert "± 0" in done.out
        assert "<0.1" not in done.out


def test_equal_values_have_no_interval_and_their_own_mean() -> None:
    """Three times 0.1 sum up to a little more than 0.3."""
    found = estimate([0.1, 0.1, 0.1])
    assert (found.mean, found.half_width) == (0.1, 0.0)


def test_a_directory_is_no_page_and_is_refused_before_the_runs(tmp_path: Path) -> None:
    """As soon as it is read; nothing was played in vain."""
    done = simulate(*POOL, "--cluster", "2x16", "--html", str(tmp_path))
    assert done.code == 2
    assert f"html {tmp_path}: is a directory, expected the name of a file" in done.err
    assert done.out == ""
    assert "events" not in done.err


@pytest.mark.slow
@each_row(
    ("more", "said"),
    [
        (("--policy", "fifo,srsf"), ["aryl: srsf: preempted jobs start from the beginning"]),
        (("--policy", "fifo"), []),
        (("--policy", "srsf", "--checkpoints", "on-request"), []),
        (("--policy", "srsf", "--checkpoints", "trace"), []),
        (("--policy", "srsf", "--checkpoint-share", "0.5"), []),
    ],
)
def test_who_stops_jobs_that_do_not_save_is_told_once(
    more: tuple[str, ...], said: list[str]
) -> None:
    """Published figures of such policies take it that nothing is lost; who says what is kept, and
    who stops nobody, is told nothing."""
    pool = ("--workload", str(FEW), "--cluster", "1x16", "--no-delays")
    done = simulate(*pool, *more)
    assert done.code == 0, done.err
    lines = [line for line in done.err.splitlines() if "start from the beginning" in line]
    assert [line[: len(text)] for line, text in zip(lines, said, strict=True)] == said


def test_results_come_out_also_where_the_page_cannot_be_written() -> None:
    """Hours of runs are not thrown away for it: they are printed first, and the end is an error."""
    given = ("--cluster", "2x16", "--html", "/dev/full", "-o", "json")
    done = simulate(*POOL[:-1], "1", *given)
    assert done.code == 2
    assert [run["seed"] for run in json.loads(done.out)["runs"]] == [1]
    assert "html /dev/full: No space left on device" in done.err
    assert "Traceback" not in done.err


@pytest.mark.slow
def test_a_deadline_that_no_way_home_fits_into_is_told_and_nothing_is_lent() -> None:
    """One line for each such value, and none for those that do fit; the sweep is played."""
    done = simulate(
        *("--workload", str(FEW), "--cluster", "2x8+4x8", "--load", str(LOAD)),
        *("--policy", "fifo,aryl", "--fungible", "1", "-o", "csv"),
        *("--sweep", "service.reclaim_deadline_s=60,300"),
    )
    assert done.code == 0
    lines = [line for line in done.err.splitlines() if "lends nothing" in line]
    assert len(lines) == 1
    assert "service.reclaim_deadline_s=60 lends nothing: a lent node is home within" in lines[0]
    rows = [line.split(",") for line in done.out.splitlines()]
    head = rows[0]
    lent = {
        deadline: sum(
            row[head.index("was_on_loan")].lower() in ("true", "1")
            for row in rows[1:]
            if deadline in row and "aryl" in row
        )
        for deadline in ("60", "300")
    }
    assert lent["60"] == 0
    assert lent["300"] > 0


@pytest.mark.slow
def test_what_lends_nothing_anyway_is_told_of_no_deadline() -> None:
    """Neither a policy without loans nor a pool without inference nodes has a way home."""
    short = ("--sweep", "service.reclaim_deadline_s=60,300")
    of = ("--workload", str(FEW), "--cluster", "2x8+4x8", "--load", str(LOAD))
    assert "lends nothing" not in simulate(*of, "--policy", "fifo", *short).err


PAGE = (Path(__file__).parents[3] / "docs" / "simulate.md").read_text()
FIRST_CELLS = "\n".join(line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `"))
_ROOT: Any = whole()
OPTIONS = [
    (*option.opts, *option.secondary_opts)
    for option in _ROOT.commands["simulate"].params
    if option.param_type_name == "option"
]


@each_row("names", OPTIONS)
def test_every_option_is_on_the_page(names: tuple[str, ...]) -> None:
    """What can be asked for is explained where one looks for it, by one of its names at least."""
    assert any(re.search(rf"`{re.escape(name)}(?![-\w])", PAGE) for name in names)


@each_row("measure", MEASURES)
def test_every_heading_is_explained(measure: Measure) -> None:
    """A heading of the table is named in a row of its own or one that it shares.

    A quantile goes by the mean of the same thing.
    """
    name = re.sub(r" P(50|95)$", "", measure.heading)
    assert f"`{name}`" in FIRST_CELLS
