"""What is said of a job whose workers were told to stop: the end that follows, and their grace."""

from __future__ import annotations

import pytest

from common.api import Cancel, Describe, Description, Jobs, ListJobs
from common.messages import DesiredState
from common.model import JobState, NodeName
from coordinator import plain_text
from coordinator.engine.state.events import JobCancelRequested
from coordinator.engine.state.tables import AfterVacating
from coordinator.policies.contract.decisions import Preempt
from coordinator.service.api import explain, explain_job
from tests.engine.house import House, state
from tests.service.cell import Cell, job, running


async def described(cell: Cell, job_id: str) -> Description:
    """The job in full."""
    answer = await cell.ask(Describe(kind="job", name=job_id))
    assert isinstance(answer, Description), answer
    return answer


async def test_a_job_that_is_being_cancelled_says_so_until_it_has_ended() -> None:
    """By whom, and how long its worker may take; in the list as well."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        job_id = await running(cell, coordinator)
        pretend = cell.agents["t0"].node
        obey = pretend.obey
        orders: list[DesiredState] = []

        def keep(desired: DesiredState) -> None:
            orders.append(desired)

        pretend.obey = keep  # type: ignore[method-assign]  # a worker that takes its time
        await cell.ask(Cancel(job_id=job_id))
        await cell.clock.advance(2.0)
        found = await described(cell, job_id)
        assert found.why[0] == "cancelled by team/ann: it ends when its workers have left t0"
        assert found.why[1].startswith("worker 0 on t0 was ordered to stop ")
        assert found.why[1].endswith(" of its grace of 5 s left")
        left_s = int(found.why[1].split(" and has ")[1].split()[0])
        assert 0 < left_s <= 3
        answer = await cell.ask(ListJobs())
        assert isinstance(answer, Jobs)
        assert plain_text.why(answer.rows[0]).startswith("cancelled by team/ann")
        await cell.clock.advance(10.0)
        assert "is past its grace of 5 s" in (await described(cell, job_id)).why[1]
        pretend.obey = obey  # type: ignore[method-assign]
        obey(orders[-1])
        await cell.until(lambda: job(coordinator, job_id).state == JobState.CANCELLED)
        assert (await described(cell, job_id)).why == ("cancelled by team/ann",)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (AfterVacating.REQUEUE, "it waits again when its workers have left t0"),
        (AfterVacating.SUCCEED, "its work is done: it ends when its workers have left t0"),
        (
            AfterVacating.FAIL,
            "it failed (exit code 3) and is not tried again: it ends when its workers have left t0",
        ),
    ],
)
def test_what_becomes_of_a_job_is_said_by_what_will(after: AfterVacating, said: str) -> None:
    """All of them stop their workers, and only some wait again."""
    house = House()
    entry = house.submit()
    house.start(entry, "t0")
    house.wait(10.0)
    assert explain_job.stopping_reasons(entry, now_s=house.sim.loop.now_s) == ()
    entry.after_vacating, entry.exit_code = after, 3
    assert explain_job.stopping_reasons(entry, now_s=house.sim.loop.now_s) == (said,)


def test_a_job_that_was_cancelled_while_it_was_preempted_does_not_wait_again() -> None:
    """Its state is still that of a preemption."""
    house = House()
    entry = house.submit()
    house.start(entry, "t0")
    house.wait(10.0)
    house.toggle_deaf(NodeName("t0"))
    house.decide(Preempt(job_id=entry.job_id, reason="the test says so"))
    house.sim.handle(JobCancelRequested(job_id=entry.job_id, by="ops/ada"))
    assert state(entry) == JobState.PREEMPTING
    [what, _] = explain.job(house.engine, entry)
    assert what == "cancelled by ops/ada: it ends when its workers have left t0"
    house.sim.handle(JobCancelRequested(job_id=entry.job_id, by="ops/bob"))
    assert explain.job(house.engine, entry)[0] == what
