"""The plots of Themis' knobs are what their script makes of the runs that are kept."""

from __future__ import annotations

from coordinator.sim.report.style import STYLE
from docs.research.kept import read
from docs.research.play_themis import KEPT, PAGE, Sweep, page


def test_the_page_is_what_the_script_makes_of_the_runs() -> None:
    """Nobody edited it, no run came without it, and it looks as every page with plots does."""
    found = read(KEPT, Sweep)
    kept = PAGE.read_text("utf-8")
    assert kept == page(found["f"], found["lease"], found["delays"])
    assert STYLE in kept
