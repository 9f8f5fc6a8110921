"""The states of a job: what the table allows, and that nothing else happens."""

from __future__ import annotations

from itertools import product

import pytest

from common.errors import TransitionError
from common.job_state_table import JOB_TRANSITIONS, JobEvent, next_state
from common.model import FINAL_JOB_STATES, JobState
from tests.common.reachable import reachable
from tests.tables import each_row

ILLEGAL_MOVES = [
    (state, event)
    for state, event in product(JobState, JobEvent)
    if event not in JOB_TRANSITIONS[state]
]


def test_every_job_state_can_be_reached() -> None:
    """Each job state is reached from PENDING."""
    assert reachable(JOB_TRANSITIONS, JobState.PENDING) == set(JobState)


@each_row("state", JobState)
def test_a_job_can_always_end_and_an_ended_job_stays(state: JobState) -> None:
    """Every live state leads to each final one that is left; a final state knows no event."""
    if state in FINAL_JOB_STATES:
        assert reachable(JOB_TRANSITIONS, state) == {state}
    else:
        assert reachable(JOB_TRANSITIONS, state) >= FINAL_JOB_STATES


@each_row(("state", "event"), ILLEGAL_MOVES)
def test_an_illegal_move_of_a_job_is_named(state: JobState, event: JobEvent) -> None:
    """What is not in the table raises, and says which job, from where, on what."""
    with pytest.raises(TransitionError) as error:
        next_state(state, event, who="j1")
    assert "j1" in str(error.value)
    assert state.value in str(error.value)
    assert event.value in str(error.value)
