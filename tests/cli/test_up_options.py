"""Options of `aryl up` that no cell can be made from: refused by name, before anything starts."""

from __future__ import annotations

from math import inf

import pytest

from common.errors import ConfigError
from coordinator.cli.up import make_plan


@pytest.mark.parametrize(
    ("nodes", "speed", "named"),
    [("six", 120.0, "--nodes"), ("0+6", 120.0, "--nodes"), ("100+101", 120.0, "--nodes"),
     ("6+6", inf, "--speed")],
)  # fmt: skip
def test_an_option_that_fits_no_cell_is_named(nodes: str, speed: float, named: str) -> None:
    """An endless speed would submit a whole trace at once."""
    with pytest.raises(ConfigError, match=named):
        make_plan(nodes, 8, 1, "aryl", speed=speed)
