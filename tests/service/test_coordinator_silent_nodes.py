"""A node silent under a job with `stop_after_s`: who answers, who counts, and from when."""

from __future__ import annotations

import msgspec
import pytest

from common import subjects
from common.api import Describe, Description, Submit, Submitted
from common.errors import Unavailable
from common.messages import encode
from common.model import JobId, JobState
from coordinator.engine.nodes.lost import certain_end_s
from coordinator.engine.state.tables import JobEntry
from coordinator.service.coordinator import Coordinator
from tests.harness.cluster.agents import CELL, Agent, meanwhile
from tests.harness.cluster.coordinator import Cell, make_settings, make_spec

SETTINGS = make_settings()
SPEC = msgspec.structs.replace(make_spec(), stop_after_s=20.0)
_BOUND_S = certain_end_s(SETTINGS.engine, SPEC)
assert _BOUND_S is not None
BOUND_S = _BOUND_S
SLACK_S = 3.0
"""A second until the next look, and as much for a push and a report."""


async def is_answered(cell: Cell, agent: Agent) -> bool:
    """Whether anybody answers a report of a node."""
    subject = subjects.node_report(CELL, agent.name)
    asking = agent.bus.request(subject, encode(agent.make_report()), timeout_s=2.0)
    try:
        await meanwhile(cell.clock, asking)
    except Unavailable:
        return False
    return True


async def running(cell: Cell, leader: Coordinator) -> JobEntry:
    """A job that runs on one of two nodes."""
    answer = await cell.ask(Submit(spec=SPEC, request_id="r"))
    assert isinstance(answer, Submitted)
    job = leader.engine.state.jobs[JobId(answer.job_id)]
    await cell.until(lambda: job.state == JobState.RUNNING)
    return job


def silence(cell: Cell, job: JobEntry) -> Agent:
    """The node of a job is cut off; its worker runs on."""
    agent = cell.agents[job.workers[0].node]
    agent.is_silent = True
    agent.bus.cut()
    return agent


async def test_a_report_is_answered_by_who_leads_and_by_nobody_else() -> None:
    """A standby hears it too, and so does a leader whose lease is over: they say nothing."""
    async with Cell() as cell:
        leader = await cell.lead()
        cell.launch("standby")
        agent = cell.agents["t0"]
        assert await is_answered(cell, agent)
        leader.is_leading = False
        assert not await is_answered(cell, agent)


async def test_a_job_restarts_elsewhere_when_its_node_was_silent_long_enough() -> None:
    """Never before, however often passes come; `explain` counts down to it."""
    async with Cell(training=2) as cell:
        leader = await cell.lead()
        job = await running(cell, leader)
        first = silence(cell, job)
        await cell.clock.advance(BOUND_S - SLACK_S)
        assert (job.state, job.attempt.number) == (JobState.RUNNING, 1)
        answer = await cell.ask(Describe(kind="job", name=job.job_id))
        assert isinstance(answer, Description)
        assert any("count as ended in" in said for said in answer.why)
        await cell.until(lambda: job.attempt.number == 2 and job.state == JobState.RUNNING)
        assert job.workers[0].node != first.name
        assert job.counts.node_faults == 1


async def test_a_leader_that_is_new_counts_from_when_it_began_to_lead() -> None:
    """The one before may have answered until then what the new one never heard."""
    async with Cell(training=2) as cell:
        leader = await cell.lead()
        job = await running(cell, leader)
        agent = silence(cell, job)
        standby = cell.launch("two").coordinator
        standby.folder.expect(agent.name, now_s=cell.clock.now_s())
        await cell.clock.advance(BOUND_S - 2 * SLACK_S)
        await cell.leaders[0].crash()
        await cell.until(lambda: standby.is_leading)
        began_s = cell.clock.now_s()
        again = standby.engine.state.jobs[job.job_id]
        await cell.clock.advance(BOUND_S - SLACK_S)
        assert (again.state, again.attempt.number) == (JobState.RUNNING, 1)
        await cell.until(lambda: standby.engine.state.jobs[job.job_id].attempt.number == 2)
        assert cell.clock.now_s() - began_s >= BOUND_S


@pytest.mark.parametrize("silent_s", [10.0, BOUND_S - SLACK_S])
async def test_a_node_that_comes_back_in_time_goes_on(silent_s: float) -> None:
    """Silence that ended counts for nothing, also for the next one."""
    async with Cell(training=2) as cell:
        leader = await cell.lead()
        job = await running(cell, leader)
        for _ in range(2):
            agent = silence(cell, job)
            await cell.clock.advance(silent_s)
            agent.is_silent = False
            agent.bus.heal()
            await cell.clock.advance(5.0)
        assert (job.state, job.attempt.number, job.counts.node_faults) == (JobState.RUNNING, 1, 0)
