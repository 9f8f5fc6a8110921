"""`aryl simulate` as a person and a script meet it: outputs, the page, and clear mistakes."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from coordinator.cli.simulate_progress import tally, watching
from coordinator.sim.compare import Task
from coordinator.sim.stage import RunOptions
from tests.cli.fake_cell import FakeCell, Run, aryl
from tests.sim.small import SLICE

POOL = ("--workload", str(SLICE), "--cluster", "1x64", "--no-delays", "--backend", "sequential")


def simulate(*args: str) -> Run:
    """`aryl simulate ARGS`, with no cell anywhere."""
    return aryl(FakeCell({}), "simulate", *args)


# --- outputs ------------------------------------------------------------------------------------


def test_json_has_one_run_per_policy_and_seed() -> None:
    """Scripts rely on `runs[]`, in the order of the options."""
    done = simulate(*POOL, "--policy", "fifo,sjf", "--seeds", "1..2", "-o", "json")
    said = json.loads(done.out)
    assert done.code == 0
    assert said["schema_version"] == 1
    assert (said["workload"], said["cluster"]) == ("itp_slice", "1 x 64 V100")
    runs = [(run["policy"], run["seed"]) for run in said["runs"]]
    assert runs == [("fifo", 1), ("fifo", 2), ("sjf", 1), ("sjf", 2)]
    assert said["runs"][0]["jct_s"]["mean"] == pytest.approx(56317.908, abs=0.001)
    assert said["means"][0]["figures"]["jct_s.mean"]["half_width"] == pytest.approx(0.0)


def test_the_table_has_a_row_per_policy_and_intervals_over_seeds() -> None:
    """One seed has no interval, several have one."""
    one = simulate(*POOL, "--policy", "fifo,sjf")
    lines = one.out.splitlines()
    assert [line.split()[0] for line in lines] == ["POLICY", "fifo", "sjf"]
    assert "56,318 s" in one.out
    assert "±" not in one.out
    assert "±" in simulate(*POOL, "--policy", "fifo", "--seeds", "1..3", "--elastic", "0.5").out


def test_a_narrow_terminal_keeps_what_matters_most() -> None:
    """Mean queueing and JCT are there when nothing else fits."""
    args = ("simulate", *POOL, "--policy", "fifo", "--seeds", "1..2")
    narrow = aryl(FakeCell({}), *args, environ={"COLUMNS": "60"})
    heading = narrow.out.splitlines()[0]
    assert "QUEUEING MEAN" in heading
    assert "JCT MEAN" in heading
    assert "RECLAIMS" not in heading


def test_csv_has_a_row_per_job_of_each_run() -> None:
    """Jobs under their own names, with what happened to them."""
    rows = list(csv.DictReader(io.StringIO(simulate(*POOL, "--policy", "sjf", "-o", "csv").out)))
    assert len(rows) == 240
    assert rows[0]["policy"] == "sjf"
    assert all(
        float(row["jct_s"]) == float(row["finished_at_s"]) - float(row["submitted_at_s"])
        for row in rows
    )


def test_the_same_seed_prints_the_same_bytes() -> None:
    """All but the two figures of the machine."""

    def printed() -> str:
        out = simulate(*POOL, "--policy", "srsf", "--checkpoints", "on-request", "-o", "json").out
        return re.sub(r'"(wall_s|peak_rss_bytes)([^,}]*),?', "", out)

    assert printed() == printed()


class Page(HTMLParser):
    """What a page holds and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note it, and what it refers to."""
        self.tags.append(tag)
        self.outside += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_is_whole_and_needs_nothing_from_outside(tmp_path: Path) -> None:
    """Plots are inline; no script, no link, no image is loaded from anywhere."""
    file = tmp_path / "report.html"
    done = simulate(*POOL, "--policy", "fifo,srsf", "--html", str(file))
    assert (done.code, done.err) == (0, f"wrote {file}\n")
    text = file.read_text()
    page = Page(text)
    assert page.tags.count("svg") == 15
    assert page.outside == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "@import" not in text
    assert "url(" not in text
    assert "NaN" not in text


def test_the_page_shows_what_was_lent(tmp_path: Path) -> None:
    """With inference nodes there are two plots more: their use, and lent against lendable."""
    file = tmp_path / "report.html"
    load = tmp_path / "load.csv"
    load.write_text("t_s,busy_ratio\n0,0.2\n300,0.3\n600,0.2\n")
    lending = ("--cluster", "4x8+4x8", "--load", str(load), "--policy", "aryl-loan")
    done = simulate("--workload", str(SLICE), *lending, "--html", str(file))
    assert done.code == 0, done.err
    assert Page(file.read_text()).tags.count("svg") == 17


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--policy", "magic"), "policy: 'magic' is not one of"),
        (("--policy", "fifo,fifo"), "policy: fifo stands twice"),
        (("--policy", ","), "policy: none named"),
        (("--cluster", "8"), "cluster 8: no such file and no shape"),
        (("--cluster", "1x2"), "never fit this cluster"),
        (("--seeds", "5..1"), "seeds 5..1"),
        (("--seed", "1", "--seeds", "1..2"), "--seed or --seeds, not both"),
        (("--checkpoints", "often"), "checkpoints: 'often', expected"),
        (("--checkpoints", "0"), "checkpoints: '0', expected"),
        (("--speedup", "magic"), "speedup: 'magic', expected"),
        (("--crash", "t1"), "crash t1: expected NODE@SECONDS+SECONDS"),
        (("--crash", "t9@5+5"), "no node t9; there are t00000 to t00000"),
        (("--elastic", "2"), "elastic: 2, expected 0 to 1"),
        (("--load", "nowhere.csv"), "trace nowhere.csv: no such file"),
        (("--html", "/proc/x.html"), "html /proc/x.html: No such file"),
        (("--html", "/nonexistent/x.html"), "html /nonexistent/x.html: No such directory"),
    ],
)
def test_a_mistake_is_one_clear_line(args: tuple[str, ...], said: str) -> None:
    """Usage errors have exit code 2, name what was wrong, and no traceback."""
    done = simulate(*POOL, *(() if "--policy" in args else ("--policy", "fifo")), *args)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: column 1: empty file"),
        ("job_id,submit_s,duration_s,gpus\n", "line 2: no rows"),
        ("job_id,submit_s,duration_s\na,0,1\n", "line 1: column gpus: missing"),
        ("job_id,submit_s,duration_s,gpus\na,0,nan,1\n", "line 2: column duration_s: 'nan'"),
        ("job_id,submit_s,duration_s,gpus\na,5,1,1\nb,4,1,1\n", "line 3: column submit_s: 4"),
    ],
)
def test_a_bad_trace_is_named_with_file_line_and_column(
    tmp_path: Path, text: str, said: str
) -> None:
    """Whatever a trace lacks, the error leads to the place."""
    file = tmp_path / "trace.csv"
    file.write_text(text)
    done = simulate("--workload", str(file), "--cluster", "1x8", "--policy", "fifo")
    assert done.code == 2
    assert f"{file}: {said}" in done.err


# --- progress -----------------------------------------------------------------------------------


def test_progress_adds_up_what_the_runs_say(tmp_path: Path) -> None:
    """A run that said nothing yet, or is just writing, counts as not begun."""
    files = [tmp_path / "0", tmp_path / "1", tmp_path / "2"]
    files[0].write_text("10 200")
    files[1].write_text("")
    assert tally(files) == (10, 200)
    files[2].write_text("5 100")
    assert tally(files) == (15, 300)


def test_a_terminal_sees_a_bar_and_a_pipe_sees_nothing() -> None:
    """Tasks are told to say how far they are only where somebody looks."""
    task = Task(workload="w", options=RunOptions(policy="fifo"))
    pipe = Console(file=io.StringIO(), force_terminal=False)
    with watching([task], jobs=5, out=pipe) as told:
        assert told == [task]
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=120)
    with watching([task], jobs=5, out=terminal) as told:
        assert told[0].progress is not None
        assert Path(told[0].progress).parent.is_dir()
    assert not Path(told[0].progress or "").parent.exists()
    assert "events" in screen.getvalue()
    assert "ETA" in screen.getvalue()
