"""Jobs whose trace names no type accept lent GPUs one for one; that is said with their results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.fake_cell import FakeCell, Run, aryl
from tests.sim.small import FEW_JOBS, write_few

SAID = (
    f"{FEW_JOBS} jobs name no GPU type: they accept any, one T4 for one V100; --fungible P draws "
    "which may use lent nodes and counts two for one"
)
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
    given = ("--workload", write_few(directory), "--cluster", cluster, "--backend", "sequential")
    return aryl(FakeCell({}), "simulate", *given, *load, "--no-delays", *args)


def test_it_is_said_on_standard_error_in_json_and_on_the_page(tmp_path: Path) -> None:
    """Once each, however many policies are compared."""
    page = tmp_path / "page.html"
    done = simulate(tmp_path, *LENDING, "-o", "json", "--html", str(page))
    assert done.code == 0, done.err
    assert [line for line in done.err.splitlines() if "GPU type" in line] == [f"aryl: {SAID}"]
    assert json.loads(done.out)["notes"] == [SAID]
    assert re.findall(r"<p>([^<]*GPU type[^<]*)</p>", page.read_text()) == [f"{SAID}."]


@pytest.mark.parametrize(
    "more",
    [
        (*LENDING, "--fungible", "0"),
        (*LENDING, "--sweep", "fungible=0,1"),
        ("--policy", "fifo,sjf"),
        ("--scenario", "baseline,basic"),
    ],
)
def test_where_jobs_have_types_or_nothing_is_lent_it_is_not_said(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    """Shares and scenarios draw types; a policy that does not lend makes no use of them."""
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
    few = write_few(tmp_path)
    done = simulate(tmp_path, *LENDING, "--sweep", f"workload={few},{other}", "-o", "json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["notes"] == [
        f"{few}: {SAID}",
        f"{other}: {SAID}".replace(f"{FEW_JOBS} jobs name", "1 job names").replace(
            "they accept", "it accepts"
        ),
    ]
    given = ("--scenario", "basic,elasticflow-8a", "--policy", "aryl", "-o", "json")
    done = simulate(tmp_path, *given)
    assert done.code == 0, done.err
    assert json.loads(done.out)["notes"] == [f"scenario elasticflow-8a: {SAID}"]
