"""What an operator is told of faults that were no job's own: how often its nodes failed it."""

from __future__ import annotations

import pytest

from common.model import JobState, NodeName
from coordinator.service.api.explain import job as explain_job
from coordinator.sim.run.outages import Crash
from tests.engine.house import House, state

DOWN_S = 30.0


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (0, []),
        (1, ["its nodes failed it 1 time, which costs it no try"]),
        (2, ["its nodes failed it 2 times, which costs it no try"]),
    ],
)
def test_a_waiting_job_says_how_often_its_nodes_failed_it(times: int, said: list[str]) -> None:
    """Each loss of a node counts once, and a job that lost none says nothing of it."""
    house = House()
    job = house.submit("j", workers=(1, 1), work_s=1e6)
    for _ in range(times):
        house.start(job, "t0")
        house.wait(5.0)
        house.sim.crash(
            [Crash(node=NodeName("t0"), at_s=house.sim.loop.now_s + 1.0, down_s=DOWN_S)]
        )
        house.wait(DOWN_S + 60.0)
    assert state(job) == JobState.PENDING
    assert [why for why in explain_job(house.engine, job) if "failed it" in why] == said
