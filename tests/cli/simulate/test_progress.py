"""How far the runs of `aryl simulate` are, as the bar shows it."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from coordinator.cli.simulate.progress import tally, watching
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.compare import Task, teller


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
