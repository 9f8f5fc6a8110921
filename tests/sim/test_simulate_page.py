"""The page of `aryl simulate`, held to its options and headings. Must not know what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from coordinator.cli.app import whole
from coordinator.sim.report.measures import MEASURES, Measure
from tests.tables import each_row

PAGE = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text()
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
