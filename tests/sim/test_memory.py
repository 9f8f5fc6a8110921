"""How often garbage is looked for while a simulation runs."""

from __future__ import annotations

import gc

import pytest

from coordinator.sim.memory import COLLECT_AFTER, collecting_rarely


def test_garbage_is_looked_for_rarely_only_while_a_run_lasts() -> None:
    """What was set before is set again afterwards."""
    before = gc.get_threshold()
    with collecting_rarely():
        assert gc.get_threshold() == COLLECT_AFTER
    assert gc.get_threshold() == before


def test_a_run_that_fails_leaves_the_collector_as_it_was() -> None:
    """An error rises, and what was set before is set again all the same."""
    before = gc.get_threshold()
    with pytest.raises(RuntimeError, match="no headway"), collecting_rarely():
        raise RuntimeError("no headway")
    assert gc.get_threshold() == before
