"""The plots of Themis' knobs are what their script makes of the runs that are kept."""

from __future__ import annotations

import msgspec

from coordinator.sim.report.style import STYLE
from tools.play_themis import KEPT, PAGE, Sweep, page


def test_the_page_is_what_the_script_makes_of_the_runs() -> None:
    """Nobody edited it, no run came without it, and it looks as every page with plots does."""
    by_f, by_lease, delayed = (
        msgspec.json.decode((KEPT / f"{name}.json").read_bytes(), type=Sweep)
        for name in ("f", "lease", "delays")
    )
    kept = PAGE.read_text("utf-8")
    assert kept == page(by_f, by_lease, delayed)
    assert STYLE in kept
