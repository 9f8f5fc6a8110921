"""A coordinator that slept itself: what it missed is nobody's silence, and its lead is over."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from common.api import Submit, Submitted
from common.errors import Fenced
from common.messages import NodeReport
from common.model import JobId, JobState, NodeName, NodeRole
from coordinator.engine.state.events import Event, NodeSilent
from coordinator.engine.state.tables import JobEntry
from coordinator.service.coordinator import Coordinator
from coordinator.service.nodes.report_folding import Folder
from tests.harness.cluster.coordinator import Cell, make_settings, make_spec
from tests.service.wire import example

SETTINGS = make_settings()
LONG_TTL = msgspec.structs.replace(SETTINGS, leader_ttl_s=60.0)
PERIOD_S = 1.0
AWAY_S = 26.0
NODE = NodeName("i0")


def heard(folder: Folder, sequence: int, *, now_s: float) -> None:
    """One node reports."""
    plain = {**example(NodeReport), "node": NODE, "sequence": sequence, "workers": []}
    folder.fold(msgspec.convert(plain, NodeReport), now_s=now_s)


def silences(folder: Folder, now_s: float) -> list[Event]:
    """What the folder says of silence."""
    return [event for event in folder.due(now_s=now_s) if isinstance(event, NodeSilent)]


def make_folder() -> Folder:
    """That of the settings."""
    return Folder(
        lost_after_s=SETTINGS.lost_after_s,
        load_period_s=SETTINGS.load_period_s,
        progress_period_s=SETTINGS.progress_period_s,
    )


def test_silence_counts_only_while_somebody_listens() -> None:
    """After a pause a node has the rest of its time to report, and is lost when that is over."""
    folder = make_folder()
    now_s = 0.0
    for sequence in range(3):
        now_s = float(sequence)
        heard(folder, sequence, now_s=now_s)
        assert folder.listened(now_s=now_s, period_s=PERIOD_S) == 0.0
    now_s += AWAY_S
    assert folder.listened(now_s=now_s, period_s=PERIOD_S) == AWAY_S - PERIOD_S
    assert silences(folder, now_s) == []
    assert folder.silent_s(NODE, now_s=now_s) == PERIOD_S
    for _ in range(int(SETTINGS.lost_after_s)):
        assert silences(folder, now_s) == []
        now_s += PERIOD_S
        assert folder.listened(now_s=now_s, period_s=PERIOD_S) == 0.0
    assert len(silences(folder, now_s)) == 1


def test_a_report_that_came_before_the_look_is_not_of_the_future() -> None:
    """What was waiting in the socket is read first: its node is silent for no time at all."""
    folder = make_folder()
    heard(folder, 1, now_s=0.0)
    folder.listened(now_s=0.0, period_s=PERIOD_S)
    heard(folder, 2, now_s=AWAY_S)
    folder.listened(now_s=AWAY_S, period_s=PERIOD_S)
    assert folder.silent_s(NODE, now_s=AWAY_S) == 0.0


def test_a_look_that_is_a_little_late_takes_nothing_back() -> None:
    """Else a busy loop, which is late each time, would never lose a node."""
    folder = make_folder()
    heard(folder, 1, now_s=0.0)
    folder.listened(now_s=0.0, period_s=PERIOD_S)
    folder.listened(now_s=2 * PERIOD_S, period_s=PERIOD_S)
    assert folder.silent_s(NODE, now_s=2 * PERIOD_S) == 2 * PERIOD_S


async def running(cell: Cell, leader: Coordinator) -> JobEntry:
    """A job that runs."""
    answer = await cell.ask(Submit(spec=make_spec(), request_id="r"))
    assert isinstance(answer, Submitted)
    job = leader.engine.state.jobs[JobId(answer.job_id)]
    await cell.until(lambda: job.state == JobState.RUNNING)
    return job


def said_silent(cell: Cell) -> list[str]:
    """Nodes that the journal calls silent."""
    entries = [entry for _, record in cell.journal() for entry in record.entries]
    return [entry.event.node for entry in entries if isinstance(entry.event, NodeSilent)]


async def test_a_rebuild_lets_the_lease_be_renewed_between_two_records() -> None:
    """However many there are: whoever comes back to a lease that ran out has lost it."""
    async with Cell() as cell:
        await cell.lead()
        await cell.clock.advance(10 * SETTINGS.pass_period_s)
        again = cell.launch("again").coordinator
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        turning = asyncio.create_task(turn())
        await again.decider.rebuild()
        turning.cancel()
        assert turns >= len(cell.records) > 10


async def test_a_leader_whose_lease_outlives_its_pause_calls_nobody_lost() -> None:
    """It goes on with the nodes that it had; one that died meanwhile is lost a little later."""
    async with Cell(training=2) as cell:
        leader = await cell.lead(settings=LONG_TTL)
        job = await running(cell, leader)
        dead = next(agent for name, agent in cell.agents.items() if name != job.workers[0].node)
        dead.bus.cut()
        await cell.clock.sleep_through(AWAY_S)
        await cell.clock.advance(SETTINGS.lost_after_s / 2)
        assert (said_silent(cell), leader.may_act()) == ([], True)
        await cell.clock.advance(SETTINGS.lost_after_s)
        assert said_silent(cell) == [dead.name]
        assert leader.engine.state.nodes[dead.name].role == NodeRole.LOST
        assert (job.state, job.attempt.number) == (JobState.RUNNING, 1)


async def test_a_leader_that_slept_through_its_lease_steps_down_before_it_commands() -> None:
    """Nobody took its lead and it could; but it says, writes and orders nothing any more."""
    async with Cell(training=2) as cell:
        leader = await cell.lead()
        job = await running(cell, leader)
        records, pushes = len(cell.records), leader.dispatcher.pushes
        await cell.clock.sleep_through(AWAY_S)
        await cell.until(cell.leaders[0].task.done)
        with pytest.raises(Fenced, match="the leader lease ran out"):
            cell.leaders[0].task.result()
        assert (len(cell.records), leader.dispatcher.pushes) == (records, pushes)
        again = await cell.lead("again")
        await cell.until(lambda: cell.is_obeyed(again) and again.engine.state.epoch == 2)
        found = again.engine.state.jobs[job.job_id]
        assert (found.state, found.attempt.number) == (JobState.RUNNING, 1)
        assert said_silent(cell) == []
