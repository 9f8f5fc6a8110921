"""What `aryl simulate` says of how its results were made."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from coordinator import demo
from tests.cli.fake_cell import FakeCell, Run, aryl
from tests.sim.small import FEW

POOL = ("--workload", str(FEW), "--cluster", "1x16", "--no-delays", "--backend", "sequential")


def simulate(*args: str) -> Run:
    """`aryl simulate ARGS`, with no cell anywhere."""
    return aryl(FakeCell({}), "simulate", *args)


def test_results_and_page_tell_how_they_were_made(tmp_path: Path) -> None:
    """Every option that shapes the runs by its name, and on the page the call that makes it again;
    where things are printed and how many run at a time is no part of that."""
    page = tmp_path / "a page.html"
    given = (
        *("--elastic", "0.2", "--loss", "0.01", "--checkpoints", "600", "--speedup", "lossy"),
        *("--crash", "t00000@5000+60", "--crash", "t00000@9000+60", "--failures", "philly"),
        *("--coalesce", "2", "--learned", "--policy", "fifo"),
    )
    done = simulate(*POOL, *given, "-o", "json", "--html", str(page))
    assert done.code == 0, done.err
    told = json.loads(done.out)["options"]
    assert told == {
        "workload": str(FEW),
        "policy": "fifo",
        "skip-zero-gpus": False,
        "cluster": "1x16",
        "delays": False,
        "speedup": "lossy",
        "checkpoints": "600",
        "elastic": 0.2,
        "loss": 0.01,
        "crash": ["t00000@5000+60", "t00000@9000+60"],
        "oracle": False,
        "coalesce": 2.0,
        "check": False,
        "failures": "philly",
        "restarts": 2,
    }
    [call] = re.findall(r"Made by: aryl simulate ([^<]*)<", page.read_text())
    assert "html" not in call
    again = simulate(*shlex.split(call), "--backend", "sequential", "-o", "json")
    runs = [json.loads(each.out)["runs"][0] for each in (done, again)]
    for run in runs:
        del run["wall_s"], run["peak_rss_bytes"]
    assert runs[0] == runs[1]


def test_a_load_may_be_given_for_each_of_several_services() -> None:
    """By repeating the option; the result tells them all."""
    day = str(Path(demo.__file__).parent / "data" / "servegen_m_small_day.csv")
    loads = ("--load", f"chat={day}", "--load", f"code={day}")
    cluster = tuple("2x8+2x8" if word == "1x16" else word for word in POOL)
    done = simulate(*cluster, *loads, "--policy", "fifo", "-o", "json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["options"]["load"] == [f"chat={day}", f"code={day}"]


def test_what_nobody_said_is_told_as_it_was_played() -> None:
    """Delays are off in a scenario, and with all policies every job saves."""
    asked = ("--scenario", "baseline", "-o", "json")
    scene = simulate(*(word for word in POOL if word != "--no-delays"), *asked)
    told = json.loads(scene.out)["options"]
    assert (told["delays"], told["checkpoints"]) == (False, "trace")


def test_what_is_swept_is_told_with_each_row_alone() -> None:
    """No single value would be true of all rows, neither a default nor the first one's."""
    swept = ("--sweep", "delays=true,false", "--sweep", "loss=0,0.1", "--policy", "fifo")
    pool = tuple(word for word in POOL if word != "--no-delays")
    found = json.loads(simulate(*pool, *swept, "-o", "json").out)
    assert not {"delays", "loss"} & found["options"].keys()
    assert found["options"]["sweep"] == ["delays=true,false", "loss=0,0.1"]
    assert found["options"]["oracle"] is True
    values = [(run["swept"]["delays"], run["swept"]["loss"]) for run in found["runs"]]
    assert values == [("true", "0"), ("true", "0.1"), ("false", "0"), ("false", "0.1")]
