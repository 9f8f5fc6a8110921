"""Real nodes that fall silent before a gang on them is ready."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest

from common.api import Cancel, Done, Operate
from common.model import JobState
from tests.live.cell.house import PERIODS, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]

SLOW_TO_LOSE = msgspec.structs.replace(PERIODS, lost_after_s=20.0, gang_ready_s=8.0)
"""The gang times out first, and a machine that is busy has time for what comes before that."""


async def test_a_job_leaves_a_node_that_falls_silent_before_it_was_ready(tmp_path: Path) -> None:
    """A cancel ends at once, another job runs elsewhere after its gang timeout, and the node that
    goes on lets go of both: neither ever ran there."""
    async with running_cell(
        tmp_path, training_nodes=2, inference_nodes=0, periods=SLOW_TO_LOSE
    ) as house:
        stopped, other = (node.name for node in house.cell.nodes)
        unit = house.cell.agent_unit(stopped)
        await house.client.ask(Operate(action="cordon", target=other), Done)
        house.cell.units.signal(unit, signal.SIGSTOP)
        try:
            script = 'echo "$ARYL_JOB_ID $ARYL_ATTEMPT" >> $OUT/ran; sleep 600'
            doomed = await house.submit(house.shell("doomed", script, gpus=2))
            moved = await house.submit(house.shell("moved", script, gpus=2))
            for job_id in (doomed, moved):
                await house.until_state(job_id, JobState.STARTING)
            await house.client.ask(Operate(action="uncordon", target=other), Done)
            await house.client.ask(Cancel(job_id=doomed), Done)
            assert (await house.job(doomed)).state == JobState.CANCELLED
            assert (await house.node(stopped)).gpus_held == 4
            row = await house.until_state(moved, JobState.RUNNING)
            assert row.attempt == 2
        finally:
            house.cell.units.signal(unit, signal.SIGCONT)

        async def lets_go() -> bool:
            return (await house.node(stopped)).gpus_held == 0 and bool(house.said("ran"))

        await house.until(f"{stopped} holds nothing, and {moved} has begun", lets_go)
        row = await house.job(moved)
        assert (row.state, row.attempt) == (JobState.RUNNING, 2)
        assert house.said("ran") == [f"{moved} 2"]
