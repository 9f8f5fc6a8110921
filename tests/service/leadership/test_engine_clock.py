"""Engine time: what is counted in it goes on at the right speed, whatever the wall clock says."""

from __future__ import annotations

import logging

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.api import (
    Describe,
    Description,
    Events,
    GetEvents,
    GetStatus,
    JobRow,
    Jobs,
    ListJobs,
    ListLoans,
    Loans,
    Status,
    Submit,
    Submitted,
)
from common.model import JobId, JobState
from coordinator.service.coordinator import Coordinator
from coordinator.service.leadership.engine_clock import (
    GAP_S,
    GAP_SHOWN_S,
    REPEAT_PERIOD_S,
    TOLERANCE_S,
    EngineTime,
)
from tests.harness.cluster.coordinator import (
    LEASE_TTL_S,
    Cell,
    job,
    make_settings,
    make_spec,
    on_loan,
    running,
    submit,
)
from tests.harness.fakes import FakeClock
from tests.tables import each_row

HOUR_S = 3600.0
YEAR_S = 365 * 24 * HOUR_S
LIMIT_S = 100.0
STEPS_S = [-YEAR_S, -HOUR_S, HOUR_S, YEAR_S]


# --- the clock --------------------------------------------------------------------------------


@given(
    known_s=st.floats(0.0, 4e9),
    moves=st.lists(st.tuples(st.floats(0.0, 1e5), st.floats(-1e9, 1e9)), max_size=8),
)
async def test_time_runs_on_as_the_boot_clock_does(
    known_s: float, moves: list[tuple[float, float]]
) -> None:
    """However the wall clock is set: from its start on it passes at the right speed, and it is
    never before the last instant of the journal."""
    clock = FakeClock()
    time = EngineTime(clock)
    time.begin(known_s)
    began_s, boot_s = time.now_s(), clock.now_s()
    assert began_s == max(known_s, clock.wall_s())
    for passed_s, stepped_s in moves:
        clock.step_wall(stepped_s)
        await clock.advance(passed_s)
        assert time.now_s() - began_s == pytest.approx(clock.now_s() - boot_s, abs=1e-5)


@given(wall_s=st.floats(-1e9, 1e9), passed_s=st.floats(0.0, 1e6))
async def test_a_leader_of_the_same_boot_asks_no_wall_clock(wall_s: float, passed_s: float) -> None:
    """What passed while nobody led is said by the boot clock, to the last part of a second."""
    clock = FakeClock()
    before = EngineTime(clock)
    before.begin(clock.wall_s() + HOUR_S)
    began_s, known_s = before.now_s(), before.now_s() + passed_s / 2
    clock.step_wall(wall_s)
    await clock.advance(passed_s)
    time = EngineTime(clock)
    time.begin(known_s, before.mark())
    assert time.now_s() == pytest.approx(began_s + passed_s, abs=1e-5)
    assert time.mark().ahead_s == pytest.approx(before.mark().ahead_s, abs=1e-5)


@pytest.mark.parametrize("is_same_boot", [True, False])
@given(ahead_s=st.floats(-1e6, 1e6))
async def test_time_never_begins_before_the_last_instant_of_the_journal(
    *, is_same_boot: bool, ahead_s: float
) -> None:
    """What was decided is in the past, whatever mark or wall clock a leader begins with."""
    clock = FakeClock()
    before = EngineTime(clock)
    mark, known_s = before.mark(), before.now_s() + ahead_s
    if not is_same_boot:
        clock.boot = "another"
    time = EngineTime(clock)
    time.begin(known_s, mark)
    assert time.now_s() == max(before.now_s(), known_s)


async def test_a_cell_that_begins_has_missed_nothing() -> None:
    """An empty journal has no last instant since which nobody led."""
    time = EngineTime(FakeClock())
    time.begin(0.0)
    assert time.warning() == ""
    time.begin(time.now_s() - GAP_S - 1.0)
    assert "the journal ended 601 s before" in time.warning()


async def test_of_another_machine_the_wall_clock_says_how_long_nobody_led(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And where that is longer than a cell is ever without a leader, it is told for a day."""
    clock = FakeClock()
    before = EngineTime(clock)
    mark, known_s = before.mark(), before.now_s()
    clock.boot = "another"
    for passed_s in (GAP_S - 1.0, GAP_S + 1.0):
        caplog.clear()
        clock.step_wall(known_s + passed_s - clock.wall_s())
        time = EngineTime(clock)
        with caplog.at_level(logging.WARNING):
            time.begin(known_s, mark)
        assert time.now_s() == pytest.approx(known_s + passed_s)
        told = "the journal ended 601 s before this coordinator began to lead"
        assert (told in caplog.text, told in time.warning()) == ((passed_s > GAP_S,) * 2)
    clock.step_wall(-HOUR_S)
    assert "; the wall clock is 3600 s behind the clock of decisions" in time.warning()
    clock.step_wall(HOUR_S)
    await clock.advance(GAP_SHOWN_S)
    assert time.warning() == ""


async def test_a_wall_clock_that_is_a_little_off_is_off_by_nothing() -> None:
    """Slow drift and another coordinator's clock move no instant that was shown."""
    clock = FakeClock()
    time = EngineTime(clock)
    for _ in range(4):
        clock.step_wall(TOLERANCE_S / 5)
        assert time.ahead_s() == 0.0
    clock.step_wall(TOLERANCE_S)
    first = time.ahead_s()
    assert first == pytest.approx(-TOLERANCE_S * 9 / 5)
    clock.step_wall(TOLERANCE_S / 2)
    assert time.ahead_s() == first


async def test_a_wall_clock_that_is_off_is_said_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, by how much and in which direction, and again only after a while."""
    clock = FakeClock()
    time = EngineTime(clock)
    with caplog.at_level(logging.WARNING):
        time.look()
        assert not caplog.messages
        clock.step_wall(-HOUR_S)
        for _ in range(10):
            await clock.advance(1.0)
            time.look()
        assert len(caplog.messages) == 1
        assert "3600 s behind" in caplog.text
        await clock.advance(REPEAT_PERIOD_S)
        time.look()
        assert len(caplog.messages) == 2
        clock.step_wall(2 * HOUR_S)
        time.look()
        assert "3600 s ahead of" in caplog.messages[-1]


# --- a cell -----------------------------------------------------------------------------------


async def limited(cell: Cell, coordinator: Coordinator) -> JobId:
    """A job that runs and may do so for `LIMIT_S`."""
    spec = msgspec.structs.replace(make_spec("limited"), time_limit_s=LIMIT_S)
    reply = await cell.ask(Submit(spec=spec, request_id="limited"))
    assert isinstance(reply, Submitted)
    job_id = JobId(reply.job_id)
    await cell.until(lambda: job(coordinator, job_id).attempt.ran_at_s is not None)
    return job_id


@each_row("step_s", STEPS_S)
async def test_a_time_limit_is_of_time_that_passed(step_s: float) -> None:
    """A step of the wall clock ends no job before its limit, and lets none run beyond it."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        job_id = await limited(cell, coordinator)
        cell.clock.step_wall(step_s)
        await cell.clock.advance(LIMIT_S / 2)
        assert job(coordinator, job_id).state == JobState.RUNNING
        await cell.clock.advance(LIMIT_S)
        assert job(coordinator, job_id).state == JobState.FAILED


async def test_time_goes_on_after_a_leader_whose_clock_was_ahead() -> None:
    """The next one begins where the journal ends, and does not wait for its wall clock to come
    there; what it decides is in the journal at the instants that replay it."""
    settings = make_settings(snapshot_records=2)
    async with Cell() as cell:
        cell.clock.step_wall(YEAR_S)
        coordinator = await cell.lead(settings=settings)
        job_id = await limited(cell, coordinator)
        await cell.leaders[0].crash()
        cell.clock.step_wall(-YEAR_S)
        second = await cell.lead("two", settings)
        before_s = second.engine.state.now_s
        await cell.clock.advance(LIMIT_S + 60.0)
        assert second.engine.state.now_s - before_s > LIMIT_S
        assert job(second, job_id).state == JobState.FAILED
        await cell.leaders[1].crash()
        after = second.engine.encode_state()
        third = cell.launch("three", settings).coordinator
        await third.decider.rebuild()
        assert third.engine.encode_state() == after


@each_row("step_s", STEPS_S)
async def test_a_restart_while_the_wall_clock_is_off_ends_nothing(step_s: float) -> None:
    """Nobody has waited, computed or been lent for the time by which it was set: neither now, nor
    when it is set right again, nor at the restart after that."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        job_id = await limited(cell, coordinator)
        await running(cell, coordinator, "lent")
        began_s, boot_s = coordinator.decider.time.now_s(), cell.clock.now_s()
        for number, by_s in enumerate((step_s, -step_s)):
            await cell.leaders[-1].crash()
            cell.clock.step_wall(by_s)
            coordinator = await cell.lead(f"again{number}")
            assert coordinator.decider.time.now_s() - began_s == pytest.approx(
                cell.clock.now_s() - boot_s, abs=1e-3
            )
            assert coordinator.engine.state.now_s - began_s <= cell.clock.now_s() - boot_s + 1e-3
            assert job(coordinator, job_id).state == JobState.RUNNING
            [loan] = coordinator.engine.state.loans.values()
            assert loan.returned_at_s is None
            status = await cell.ask(GetStatus())
            assert isinstance(status, Status)
            assert bool(status.clock_warning) == (number == 0)
        await cell.clock.advance(LIMIT_S)
        assert job(coordinator, job_id).state == JobState.FAILED


async def test_a_standby_whose_wall_clock_is_ahead_ends_no_loan_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Leases are of the agents' boot clocks; who looks at the cell is told what was counted."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        await on_loan(cell, coordinator)
        await cell.leaders[-1].crash()
        cell.clock.boot = "another machine"
        cell.clock.step_wall(YEAR_S)
        with caplog.at_level(logging.WARNING):
            second = await cell.lead("two")
        [loan] = second.engine.state.loans.values()
        assert loan.returned_at_s is None
        await cell.clock.advance(2 * LEASE_TTL_S)
        assert loan.returned_at_s is None
        status = await cell.ask(GetStatus())
        assert isinstance(status, Status)
        assert "by the wall clock of its machine: time limits" in status.clock_warning
        assert status.clock_warning in caplog.text


# --- what people are shown --------------------------------------------------------------------


async def the_job(cell: Cell) -> JobRow:
    """The only job, as a caller sees it."""
    reply = await cell.ask(ListJobs())
    assert isinstance(reply, Jobs)
    [row] = reply.rows
    return row


@each_row("step_s", STEPS_S)
async def test_instants_are_shown_as_the_wall_clock_has_them(step_s: float) -> None:
    """What just happened has just happened by the clock of whoever looks, in every answer, and
    durations are what they were."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        cell.clock.step_wall(step_s)
        before_s = cell.clock.wall_s()
        await running(cell, coordinator)
        row = await the_job(cell)
        now_s = cell.clock.wall_s()
        assert before_s - 1e-3 <= row.submitted_at_s <= (row.started_at_s or 0.0) <= now_s + 1e-3
        assert 0.0 <= row.queueing_s <= now_s - before_s
        again = await the_job(cell)
        assert again.submitted_at_s == row.submitted_at_s
        said = await cell.ask(Describe(kind="job", name="j"))
        assert isinstance(said, Description)
        assert said.job is not None
        assert said.job.submitted_at_s == row.submitted_at_s
        assert all(before_s - 1e-3 <= line.at_s <= now_s + 1e-3 for line in said.story)
        events = await cell.ask(GetEvents(subject="job/j"))
        assert isinstance(events, Events)
        assert [line.at_s for line in events.rows] == [line.at_s for line in said.story]


@pytest.mark.parametrize("step_s", STEPS_S)
async def test_who_waits_has_waited_for_the_time_that_passed(
    step_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Not for what the wall clock was set by; and the log of the coordinator says that it was."""
    async with Cell(training=0) as cell:
        await cell.lead()
        before_s = cell.clock.now_s()
        await submit(cell)
        assert "the wall clock is" not in caplog.text
        cell.clock.step_wall(step_s)
        await cell.clock.advance(30.0)
        row = await the_job(cell)
        assert 30.0 <= row.queueing_s <= cell.clock.now_s() - before_s
        assert f"the wall clock is {abs(step_s):.0f} s" in caplog.text


async def test_loans_are_shown_as_the_wall_clock_has_them() -> None:
    """When a node was lent, when a loan began: before now, and of a cell as old as it is."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        cell.clock.step_wall(-HOUR_S)
        began_s = cell.clock.wall_s()
        await on_loan(cell, coordinator)
        reply = await cell.ask(ListLoans())
        assert isinstance(reply, Loans)
        [row] = reply.rows
        assert row.begun_at_s is not None
        assert began_s - 1e-3 <= row.decided_at_s <= row.begun_at_s <= cell.clock.wall_s() + 1e-3


async def test_instants_are_left_as_they_are_while_the_wall_clock_is_right() -> None:
    """What is shown is then what the journal says, to the last bit."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        job_id = await submit(cell)
        cell.clock.step_wall(TOLERANCE_S / 2)
        row = await the_job(cell)
        assert row.submitted_at_s == job(coordinator, job_id).submitted_at_s
