"""Figures of a cell whose journal was lost: what is adopted from nodes counts as begun."""

from __future__ import annotations

from common.model import NodeName
from coordinator.engine.invariants import figure_faults
from coordinator.policies.contract.decisions import Loan, Reclaim
from tests.engine.house import CHAT, House


def test_what_is_adopted_is_counted_before_its_end_is() -> None:
    """Of no more jobs than were submitted can be said that they finished, and no more nodes come
    home than were lent."""
    house = House()
    house.decide(Loan(node=NodeName("i0"), service=CHAT, reason="r"), lend=True)
    house.start(house.submit(workers=(1, 1), work_s=60.0), "t0")
    house.wait(10.0)
    house.lose_journal()
    house.wait(5.0)
    counters = house.engine.state.counters
    assert (counters.jobs_submitted, counters.loans) == (1, 1)
    home = Reclaim(node=NodeName("i0"), service=CHAT, deadline_s=100.0, reason="r")
    house.decide(home, lend=True)
    house.wait(120.0)
    counters = house.engine.state.counters
    assert (counters.jobs_submitted, counters.jobs_finished) == (1, 1)
    assert (counters.loans, counters.reclaims) == (1, 1)


def test_a_job_of_two_ledgers_is_one_job() -> None:
    """Each worker's node tells of it, and it was submitted once."""
    house = House()
    house.start(house.submit(workers=(2, 2), work_s=60.0), "t0", "t1")
    house.wait(10.0)
    house.lose_journal()
    house.wait(5.0)
    assert house.engine.state.counters.jobs_submitted == 1


def test_ends_of_what_never_began_are_a_fault() -> None:
    """The engine's own check tells of a counter that was left out."""
    house = House()
    house.submit()
    state = house.engine.state
    assert figure_faults(state) == []
    state.counters.jobs_submitted = 0
    assert "0 submitted" in figure_faults(state)[0]
    state.counters.jobs_submitted, state.counters.reclaims = 1, 1
    assert "of 0" in figure_faults(state)[0]
    assert house.engine.check() == figure_faults(state)
