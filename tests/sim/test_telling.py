"""What `aryl simulate` tells of itself: how results were made, and how far its runs are."""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path

from rich.console import Console

from coordinator import demo
from coordinator.cli.simulate.progress import tally, watching
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.compare import Task, teller
from tests.cli.fake_cell import FakeCell, Run, aryl
from tests.sim.small import SLICE

POOL = ("--workload", str(SLICE), "--cluster", "1x64", "--no-delays", "--backend", "sequential")


def simulate(*args: str) -> Run:
    """`aryl simulate ARGS`, with no cell anywhere."""
    return aryl(FakeCell({}), "simulate", *args)


# --- how it was made ----------------------------------------------------------------------------


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
        "workload": str(SLICE),
        "policy": "fifo",
        "skip-zero-gpus": False,
        "cluster": "1x64",
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
    cluster = tuple("8x8+2x8" if word == "1x64" else word for word in POOL)
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


# --- progress -----------------------------------------------------------------------------------


def test_progress_adds_up_what_the_runs_say(tmp_path: Path) -> None:
    """A run that said nothing yet, or is just writing, counts as not begun."""
    files = [tmp_path / "0", tmp_path / "1", tmp_path / "2"]
    files[0].write_text("10 200")
    files[1].write_text("")
    assert tally(files) == (10, 200)
    files[2].write_text("5 100")
    assert tally(files) == (15, 300)


def test_a_bar_never_goes_backwards(tmp_path: Path) -> None:
    """Whoever looks while a run says how far it is sees what it said before, or what it says now:
    a file that was opened before stays as it was."""
    file = tmp_path / "0"
    tell = teller(file)
    tell(1, 10)
    with file.open() as before:
        tell(2, 20)
        assert before.read() == "1 10"
    assert tally([file]) == (2, 20)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


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
