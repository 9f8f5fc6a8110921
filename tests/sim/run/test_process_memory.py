"""How often garbage is looked for while a simulation runs, and what a run leaves of it."""

from __future__ import annotations

import gc

import pytest

from common.clock import SystemClock
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import play
from coordinator.sim.run.process_memory import COLLECT_AFTER, collecting_rarely
from tests.sim.small import small


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


@pytest.mark.parametrize("policy", ["fifo", "aryl"])
def test_a_run_leaves_no_garbage(policy: str) -> None:
    """What it made goes as it ends: of a long run the search for it would take a second."""
    workload, options = small(20), RunOptions(policy=policy)
    play(workload, options, clock=SystemClock())  # what is made once, as of a module, is made now
    gc.collect()
    gc.disable()
    try:
        run = play(workload, options, clock=SystemClock())
        assert gc.collect() == 0
    finally:
        gc.enable()
    assert run.result.jobs == len(run.rows) > 0
