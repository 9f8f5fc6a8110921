"""`aryl simulate` as a person and a script meet it: outputs, the page, and clear mistakes."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.cli.fake_cell import FakeCell, Run, aryl
from tests.sim.small import FEW, FEW_JOBS
from tests.tables import each_row

POOL = ("--workload", str(FEW), "--cluster", "1x16", "--no-delays", "--backend", "sequential")


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
    assert (said["workload"], said["cluster"]) == ("itp_few", "1 x 16 V100")
    runs = [(run["policy"], run["seed"]) for run in said["runs"]]
    assert runs == [("fifo", 1), ("fifo", 2), ("sjf", 1), ("sjf", 2)]
    assert said["runs"][0]["jct_s"]["mean"] == pytest.approx(90364.667, abs=0.001)
    assert said["means"][0]["figures"]["jct_s.mean"]["half_width"] == pytest.approx(0.0)


def test_the_table_has_a_row_per_policy_and_intervals_over_seeds() -> None:
    """One seed has no interval, several have one; what is zero throughout is said below."""
    one = simulate(*POOL, "--policy", "fifo,sjf")
    lines = one.out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["POLICY", "fifo", "sjf"]
    assert "JCT h" in lines[0]
    assert "25.10" in lines[1]
    assert lines[3] == ""
    assert lines[4].startswith("zero throughout: Preemptions; ")
    assert "±" not in one.out
    assert "±" in simulate(*POOL, "--policy", "fifo", "--seeds", "1..3", "--elastic", "0.5").out


SHORT = ("JCT", "QUEUEING", "MAKESPAN", "HELD", "RHO", "RHO MAX", "RHO >1")


@each_row("width", [40, 80, 160])
@each_row("seeds", ["1..1", "1..2"])
def test_at_any_width_all_that_was_asked_for_is_there_and_no_line_wraps(
    width: int, seeds: str
) -> None:
    """Tables below each other where one is too wide, each with its policies, and a word of more."""
    args = ("--policy", "fifo,aryl-elastic:is_strict=true", "--seeds", seeds, "--elastic", "0.5")
    done = aryl(FakeCell({}), "simulate", *POOL, *args, environ={"COLUMNS": str(width)})
    lines = done.out.splitlines()
    assert done.code == 0, done.err
    assert max(len(line) for line in lines) <= width
    tables = done.out.split("\n\n")[:-1]
    headings = [table.splitlines()[0] for table in tables]
    assert all(heading.startswith("POLICY") for heading in headings)
    assert all(len(table.splitlines()) == 3 for table in tables)
    together = "  ".join(headings)
    for name in SHORT:
        assert re.search(rf"  {name}( [h%]| min)?(  |$)", together), name
    assert "zero throughout: Preemptions; " in done.out
    assert "more measures: a wider terminal" in " ".join(lines)


def test_csv_has_a_row_per_job_of_each_run() -> None:
    """Jobs under their own names, with what happened to them."""
    rows = list(csv.DictReader(io.StringIO(simulate(*POOL, "--policy", "sjf", "-o", "csv").out)))
    assert len(rows) == FEW_JOBS
    assert rows[0]["policy"] == "sjf"
    assert all(
        float(row["jct_s"]) == float(row["finished_at_s"]) - float(row["submitted_at_s"])
        for row in rows
    )
    assert all(row["app"] == row["job_id"] for row in rows)  # the trace names no app
    assert all(float(row["rho"]) > 0 for row in rows)
    assert all((row["suspensions"], row["suspended_s"]) == ("0", "0") for row in rows)


def test_csv_names_the_tenant_and_the_app_of_each_job(tmp_path: Path) -> None:
    """So that figures can be taken by tenant; an app is its tenant's own, and has its name."""
    trace = tmp_path / "t.csv"
    trace.write_text(
        "submit_s,duration_s,gpus,job_id,tenant,app\n"
        "0,100,1,x,vision,tuning\n0,100,1,y,vision,\n0,100,1,z,speech,tuning\n"
    )
    given = ("--workload", str(trace), *POOL[4:], "--cluster", "1x8", "--policy", "fifo,drf")
    rows = csv.DictReader(io.StringIO(simulate(*given, "-o", "csv").out))
    assert [(row["job_id"], row["tenant"], row["app"]) for row in rows] == 2 * [
        ("x", "vision", "vision/tuning"),
        ("y", "vision", "y"),
        ("z", "speech", "speech/tuning"),
    ]


def test_what_did_not_happen_is_null_and_not_zero() -> None:
    """Nobody ran on loan, nothing was reclaimed: no time, no ratio."""
    done = simulate(*POOL, "--policy", "fifo", "-o", "json")
    [run] = json.loads(done.out)["runs"]
    nothing = {"mean": None, "p50": None, "p95": None}
    assert run["on_loan_jobs"] == {"jobs": 0, "queueing_s": nothing, "jct_s": nothing}
    assert run["reclaim"] == {"gentle_ratio": None, "collateral_ratio": None}
    assert (run["suspensions"], run["migrations"], run["apps"]) == (0, 0, [])


def test_apps_of_several_jobs_are_in_json(tmp_path: Path) -> None:
    """Each with its jobs and its rho."""
    file = tmp_path / "trace.csv"
    file.write_text("job_id,submit_s,duration_s,gpus,app\na,0,100,8,x\nb,0,100,8,x\nc,5,9,1,\n")
    done = simulate(
        *("--workload", str(file), "--cluster", "1x8", "--no-delays", "--policy", "fifo"),
        *("-o", "json", "--backend", "sequential"),
    )
    [run] = json.loads(done.out)["runs"]
    [app] = run["apps"]
    assert (app["app"], app["jobs"]) == ("trace/x", 2)
    # Both trials are done after 200 s; c is there for 195 of them, so 1.975 apps in the mean.
    assert app["rho"] == pytest.approx(200.0 / (1600.0 / (8 / 1.975)))
    assert run["finish_time_fairness"]["apps"] == 2


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
    saving = ("--checkpoints", "trace")
    done = simulate(*POOL, *saving, "--policy", "fifo,srsf", "--html", str(file))
    assert (done.code, done.err) == (0, f"wrote {file}\n")
    text = file.read_text()
    page = Page(text)
    assert page.tags.count("figure") == 11 + 6
    assert page.outside == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "@import" not in text
    assert "url(" not in text
    assert "NaN" not in text


def test_the_page_shows_what_was_lent(tmp_path: Path) -> None:
    """With inference nodes there are three plots more: their whole use, what is held of those on
    loan, and lent against lendable.

    One policy has no bars: three distributions and three plots over time are the others.
    """
    file = tmp_path / "report.html"
    load = tmp_path / "load.csv"
    load.write_text("t_s,busy_ratio\n0,0.2\n300,0.3\n600,0.2\n")
    lending = ("--cluster", "4x8+4x8", "--load", str(load), "--policy", "aryl-loan")
    done = simulate("--workload", str(FEW), *lending, "--html", str(file))
    assert done.code == 0, done.err
    assert Page(file.read_text()).tags.count("figure") == 9
    assert "Inference GPUs that serve or are held on loan" in file.read_text()


def test_the_page_does_not_say_of_all_what_was_swept(tmp_path: Path) -> None:
    """Runs with 10 and with 30 % of elastic jobs are no runs with 10 %."""
    file = tmp_path / "report.html"
    swept = simulate(*POOL, "--policy", "fifo", "--sweep", "elastic=0.1,0.3", "--html", str(file))
    assert swept.code == 0, swept.err
    assert "are elastic" not in file.read_text()
    assert "fifo elastic=0.3" in file.read_text()
    simulate(*POOL, "--policy", "fifo", "--elastic", "0.1", "--html", str(file))
    assert "10 % of the jobs, drawn by seed, are elastic." in file.read_text()


# --- mistakes -----------------------------------------------------------------------------------


@each_row(
    ("args", "said"),
    [
        (("--policy", "magic"), "policy: 'magic' is not one of"),
        (("--policy", "fifo,fifo"), "policy: fifo is given twice"),
        (("--policy", ","), "policy: none named"),
        (("--policy", ""), "policy: none named"),
        (("--policy", "fifo,,sjf"), "policy: 'fifo,,sjf' has an empty name"),
        (("--policy", "fifo,"), "policy: 'fifo,' has an empty name"),
        (("--policy", "magic"), "is not one of all, afs"),
        (
            ("--policy", "all,fifo"),
            "policy: 'all' stands for one of each system; it is named alone",
        ),
        (("--policy", "all:f=1"), "policy: 'all' stands for one of each system; it is named alone"),
        (("--policy", "aryl:reclaim=cost,is_strict=true"), "with a colon"),
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
        (("--load", "nowhere.csv"), "load nowhere.csv: no such file"),
        (("--tenants", "nowhere.toml"), "aryl: tenants nowhere.toml: no such file"),
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


@each_row("weight", ["0", "-1", "inf", "nan", "1e308", "1e-308"])
def test_a_weight_that_nothing_can_be_parted_by_is_refused(tmp_path: Path, weight: str) -> None:
    """Sums of weights are divided by: what is too large or too small for that is a mistake."""
    file = tmp_path / "tenants.toml"
    file.write_text(f'[[tenants]]\nname = "a"\nweight = {weight}\n')
    done = simulate(*POOL, "--policy", "fifo", "--tenants", str(file))
    assert done.code == 2
    assert "tenants[0].weight: expected `float`" in done.err
    assert "Traceback" not in done.err


@each_row(
    ("text", "said"),
    [
        ("", "line 1: column 1: empty file"),
        (
            "job_id,submit_s,duration_s,gpus\n",
            "line 2: column job_id: no rows, expected at least one",
        ),
        ("job_id,submit_s,duration_s\na,0,1\n", "line 1: column gpus: missing"),
        ("job_id,submit_s,duration_s,gpus\na,0,nan,1\n", "line 2: column duration_s: 'nan'"),
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


def test_rows_without_a_gpu_are_an_error_unless_they_are_skipped_and_then_counted(
    tmp_path: Path,
) -> None:
    """A trace that says zero GPUs is a bad one; who asks for it learns how many rows are gone."""
    file = tmp_path / "trace.csv"
    file.write_text("submit_s,duration_s,gpus\n0,5,0\n1,5,1\n2,5,0\n")
    html = tmp_path / "report.html"
    args = ("--workload", str(file), "--cluster", "1x8", "--policy", "fifo", "--no-delays")
    refused = simulate(*args)
    assert refused.code == 2
    assert f"{file}: line 2: column gpus: 0, expected at least 1; --skip-zero-gpus" in refused.err
    done = simulate(*args, "--skip-zero-gpus", "-o", "json", "--html", str(html))
    [run] = json.loads(done.out)["runs"]
    assert (run["jobs"], run["skipped_zero_gpus"], run["skipped_not_run"]) == (1, 2, 0)
    told = "rows of the trace that have no GPU and are left out: 2"
    assert f"aryl: {told}" in done.err.splitlines()
    assert told in html.read_text().replace("Rows", "rows")
    assert told not in simulate(*POOL, "--policy", "fifo").err


def test_a_trace_without_any_gpu_is_one_error_also_when_such_rows_are_skipped(
    tmp_path: Path,
) -> None:
    """Then no job is left to play."""
    file = tmp_path / "trace.csv"
    file.write_text("submit_s,duration_s,gpus\n0,5,0\n")
    done = simulate(
        "--workload", str(file), "--cluster", "1x8", "--policy", "fifo", "--skip-zero-gpus"
    )
    assert done.code == 2
    assert f"{file}: line 1: column gpus: no job is left" in done.err


def test_a_job_that_never_fits_is_named_with_its_place_in_the_trace(tmp_path: Path) -> None:
    """Its name alone may be one that the reader of the file made up."""
    file = tmp_path / "trace.csv"
    file.write_text("submit_s,duration_s,gpus\n0,5,1\n\n1,5,64\n")
    done = simulate("--workload", str(file), "--cluster", "1x8", "--policy", "fifo")
    assert done.code == 2
    assert f"{file}: line 4: column gpus: job 3: 8 workers of 8 GPUs" in done.err


@each_row(
    ("cluster", "has_load", "said"),
    [
        ("8x8", True, "not played: the cluster has no inference nodes"),
        ("8x8+2x8", False, "without --load its inference nodes lend nothing"),
        ("8x8+2x8", True, ""),
        ("8x8", False, ""),
    ],
)
def test_what_does_nothing_is_said_in_one_line(
    tmp_path: Path, cluster: str, has_load: bool, said: str
) -> None:
    """A load needs nodes that serve, and nodes that serve need a load; else nothing is lent."""
    file = tmp_path / "load.csv"
    file.write_text("t_s,busy_ratio\n0,0.2\n300,0.3\n")
    load = ("--load", str(file)) if has_load else ()
    given = ("--workload", str(FEW), "--cluster", cluster, "--backend", "sequential", "--seed")
    done = simulate(*given, "1", *load, "--policy", "fifo,sjf", "--no-delays")
    assert done.code == 0, done.err
    assert [line for line in done.err.splitlines() if line.startswith("aryl: ")] == [
        line for line in done.err.splitlines() if said and said in line
    ]
    assert done.err.count(said) == 1 or not said


@pytest.mark.slow
def test_the_part_of_the_way_to_the_bound_stands_beside_every_policy() -> None:
    """Where sjf is among them: 0 for it, and for the others what they add; else null."""
    done = simulate(*POOL, "--policy", "fifo,sjf,srtf", "--checkpoints", "on-request", "-o", "json")
    fifo, sjf, srtf = json.loads(done.out)["runs"]
    assert sjf["gap_closed_ratio"] == 0.0
    assert fifo["gap_closed_ratio"] < 0.0
    way_s = sjf["jct_s"]["mean"] - sjf["jct_bound_s"]
    gained_s = sjf["jct_s"]["mean"] - srtf["jct_s"]["mean"]
    assert srtf["gap_closed_ratio"] == pytest.approx(gained_s / way_s)
    given = ("--policy", "fifo,sjf", "--checkpoints", "on-request")
    table = aryl(FakeCell({}), "simulate", *POOL, *given, environ={"COLUMNS": "400"})
    heading, first, *_ = table.out.splitlines()
    end = heading.index("GAP CLOSED %") + len("GAP CLOSED %")
    assert first[:end].split()[-1] == f"{100 * fifo['gap_closed_ratio']:.1f}"
    [alone] = json.loads(simulate(*POOL, "--policy", "fifo", "-o", "json").out)["runs"]
    assert alone["gap_closed_ratio"] is None


@pytest.mark.parametrize(("cluster", "is_said"), [("4x8", True), ("4x8+9x8", True), ("5x8", False)])
def test_guarantees_beyond_the_cluster_are_said_in_one_line(
    tmp_path: Path, cluster: str, *, is_said: bool
) -> None:
    """Those of all roots together against the training nodes; the run is played all the same."""
    file = tmp_path / "tenants.toml"
    file.write_text("".join(f'[[tenants]]\nname = "{n}"\nguarantee_gpus = 20\n' for n in "ab"))
    given = ("--workload", str(FEW), "--cluster", cluster, "--backend", "sequential")
    done = simulate(*given, "--policy", "fifo", "--no-delays", "--tenants", str(file))
    assert done.code == 0, done.err
    line = (
        "aryl: tenants: 40 GPUs are guaranteed, and the training nodes have 32: "
        "not all guarantees can be kept at a time"
    )
    assert (line in done.err.splitlines()) == is_said
