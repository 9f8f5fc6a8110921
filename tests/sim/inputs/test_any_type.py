"""How jobs count whose trace names no type or range is said with their results, and is true."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.fake_cell import FakeCell, Run, aryl
from tests.sim.small import FEW, FEW_JOBS
from tests.tables import each_row

SAID = (
    f"{FEW_JOBS} jobs name no GPU type: they accept any, one T4 for one V100; --fungible P draws "
    "which may use T4, two for one"
)
DRAWN = f"drawn by seed: 21 % of {FEW_JOBS} jobs that name no GPU type may use T4, too"
RANGES = "5 % of the jobs are elastic, as none has a range"
SERVES = 'home_pool = "inference"\n'
OTHERS = """[[nodes]]
count = 4
gpus = 8
gpu_type = "H100"
[[nodes]]
count = 1
gpus = 8
gpu_type = "A100"
[[nodes]]
count = 4
gpus = 8
gpu_type = "A100"
home_pool = "inference"
"""
LENDING = ("--policy", "fifo,aryl")


def simulate(directory: Path, *args: str, cluster: str = "8x8+2x8", has_load: bool = True) -> Run:
    """`aryl simulate ARGS` on a few jobs that name no type, with no cell anywhere."""
    file = directory / "load.csv"
    file.write_text("t_s,busy_ratio\n0,0.2\n300,0.3\n")
    load = ("--load", str(file)) if has_load else ()
    given = ("--workload", str(FEW), "--cluster", cluster, "--backend", "sequential")
    return aryl(FakeCell({}), "simulate", *given, *load, "--no-delays", *args)


def test_it_is_said_on_standard_error_in_json_and_on_the_page(tmp_path: Path) -> None:
    """Once each, however many policies are compared."""
    page = tmp_path / "page.html"
    done = simulate(tmp_path, *LENDING, "-o", "json", "--html", str(page))
    assert done.code == 0, done.err
    assert [line for line in done.err.splitlines() if "GPU type" in line] == [f"aryl: {SAID}"]
    assert json.loads(done.out)["notes"] == [SAID]
    assert re.findall(r"<p>([^<]*GPU type[^<]*)</p>", page.read_text()) == [f"{SAID}."]


@each_row(
    "more",
    [
        (*LENDING, "--fungible", "0"),
        (*LENDING, "--sweep", "fungible=0,1"),
        ("--policy", "fifo,sjf"),
        (*LENDING, "--sweep", "service.reclaim_deadline_s=0.5"),
    ],
)
def test_where_jobs_have_types_or_nothing_is_lent_it_is_not_said(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    """Shares draw types; a policy that does not lend makes no use of them, nor does one whose
    lent nodes would come home too late."""
    done = simulate(tmp_path, *more, "-o", "json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["notes"] == []
    assert "GPU type" not in done.err


@pytest.mark.parametrize(("cluster", "has_load"), [("8x8+2x8", False), ("8x8", False), ("", True)])
def test_where_no_other_type_is_lent_it_is_not_said(
    tmp_path: Path, cluster: str, *, has_load: bool
) -> None:
    """Without a load, without inference nodes, and where training has their type as well."""
    file = tmp_path / "cluster.toml"
    file.write_text(OTHERS)
    done = simulate(tmp_path, *LENDING, cluster=cluster or str(file), has_load=has_load)
    assert done.code == 0, done.err
    assert "GPU type" not in done.err


def test_what_it_is_said_of_is_named_where_runs_differ(tmp_path: Path) -> None:
    """A line for each swept trace; of two scenarios that which draws nothing."""
    other = tmp_path / "other.csv"
    other.write_text("submit_s,duration_s,gpus,gpu_types\n0,9,8,\n0,9,8,V100\n")
    done = simulate(tmp_path, *LENDING, "--sweep", f"workload={FEW},{other}", "-o", "json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["notes"] == [
        f"{FEW}: {SAID}",
        f"{other}: {SAID}".replace(f"{FEW_JOBS} jobs name", "1 job names").replace(
            "they accept", "it accepts"
        ),
    ]
    given = ("--scenario", "basic,elasticflow-8a", "--policy", "aryl", "-o", "json")
    done = simulate(tmp_path, *given)
    assert done.code == 0, done.err
    assert json.loads(done.out)["notes"] == [
        f"scenario basic: {DRAWN}; {RANGES}",
        f"scenario elasticflow-8a: {SAID}",
    ]


@pytest.mark.parametrize("swept", ["8x8,8x8+2x8", "8x8+2x8,8x8"])
def test_of_swept_clusters_those_with_another_type_are_named(tmp_path: Path, swept: str) -> None:
    """Each is looked at, in whatever order they come."""
    done = simulate(tmp_path, *LENDING, "--sweep", f"cluster={swept}", "-o", "json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["notes"] == [f"cluster 8x8+2x8: {SAID}"]


@each_row(
    ("scenario", "more", "expected"),
    [
        ("baseline,basic", (), [f"scenario baseline, basic: {DRAWN}; {RANGES}"]),
        ("basic", ("--fungible", "0.5"), [f"scenario basic: drawn by seed: {RANGES}"]),
        ("basic", ("--elastic", "0.5"), [f"scenario basic: {DRAWN}"]),
        ("basic", ("--elastic", "0"), [f"scenario basic: {DRAWN}"]),
        ("heterogeneous", (), [f"scenario heterogeneous: drawn by seed: {RANGES}"]),
        ("elastic-20", (), [f"scenario elastic-20: {DRAWN}"]),
        ("ideal", (), []),
    ],
)
def test_what_a_scenario_draws_is_said(
    tmp_path: Path, scenario: str, more: tuple[str, ...], expected: list[str]
) -> None:
    """In JSON and on the page; what an option or the scenario itself decides is not drawn."""
    page = tmp_path / "page.html"
    given = ("--scenario", scenario, *more, "-o", "json", "--html", str(page))
    done = simulate(tmp_path, *given)
    assert done.code == 0, done.err
    assert json.loads(done.out)["notes"] == expected
    found = re.findall(r"<p>(Scenario [^<]*)</p>", page.read_text())
    assert found == [f"S{line[1:]}." for line in expected]


@pytest.mark.parametrize("scenario", ["ideal", "checkpoint-20"])
def test_where_no_job_can_span_types_nothing_is_drawn_unsaid(tmp_path: Path, scenario: str) -> None:
    """On inference nodes of one GPU nobody is on loan there, as none of the notes tells of one."""
    done = simulate(tmp_path, "--scenario", scenario, "-o", "json", cluster="8x8+64x1")
    assert done.code == 0, done.err
    made = json.loads(done.out)
    assert made["notes"] == []
    assert made["runs"][0]["on_loan_jobs"]["jobs"] == 0


def test_what_a_trace_tells_is_not_drawn(tmp_path: Path) -> None:
    """A line says nothing of types where all jobs name some, or of ranges where one has one."""
    trace = tmp_path / "told.csv"
    head = "submit_s,duration_s,gpus,gpu_types,gpus_per_worker,min_workers,max_workers"
    trace.write_text(f"{head}\n0,9,8,V100,4,1,2\n0,9,8,V100,,,\n")
    done = simulate(tmp_path, "--scenario", "basic", "--sweep", f"workload={trace}", "-o", "json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["notes"] == []


def test_the_drawn_type_is_offered_only_where_training_lacks_it(tmp_path: Path) -> None:
    """Where most lent GPUs are of a type of training, `--fungible` draws nobody for the others."""
    file = tmp_path / "cluster.toml"
    file.write_text(f'{OTHERS}[[nodes]]\ncount = 1\ngpus = 8\ngpu_type = "P4"\n{SERVES}')
    done = simulate(tmp_path, *LENDING, "-o", "json", cluster=str(file))
    assert done.code == 0, done.err
    [line] = json.loads(done.out)["notes"]
    assert line.endswith("they accept any, one P4 for one H100")


@each_row(
    ("scenario", "option"),
    [
        ("ideal", "elastic"),
        ("ideal", "fungible"),
        ("naive-ideal", "elastic"),
        ("bootstrap-ideal-1", "elastic"),
        ("checkpoint-20", "checkpoint-share"),
        ("checkpoint-20", "fungible"),
        ("elastic-20", "elastic"),
        ("heterogeneous", "fungible"),
        ("heterogeneous-20", "fungible"),
        ("elasticflow-8a", "elastic"),
    ],
)
@each_row("is_swept", [False, True])
def test_a_share_that_a_scenario_sets_cannot_be_asked_for(
    tmp_path: Path, scenario: str, option: str, *, is_swept: bool
) -> None:
    """It is refused before anything runs, whichever of the scenarios it is."""
    share = ("--sweep", f"{option}=0.5") if is_swept else (f"--{option}", "0.5")
    done = simulate(tmp_path, "--scenario", f"basic,{scenario}", *share)
    assert (done.code, done.out) == (2, "")
    refusal = (
        f"{option}: 0.5 cannot be given, as scenario {scenario} sets this share itself; "
        f"leave --{option} or the scenario out"
    )
    assert refusal in done.err


@pytest.mark.parametrize(
    ("scenario", "said"),
    [("basic", "for both GPU types."), ("advanced", "for both GPU types, beside the heterogene")],
)
def test_the_page_tells_the_shares_of_the_jobs_as_played(
    tmp_path: Path, scenario: str, said: str
) -> None:
    """Those that span types accept both, however few are drawn as fungible."""
    page = tmp_path / "page.html"
    done = simulate(tmp_path, "--scenario", scenario, "--fungible", "0", "--html", str(page))
    assert done.code == 0, done.err
    assert f"0 % of the jobs, drawn by seed, are {said}" in page.read_text()
