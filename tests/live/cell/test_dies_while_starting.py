"""Real nodes that fall silent before a gang on them is ready."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest

from common.api import Cancel, Done, Operate
from common.model import JobState
from tests.harness.live.cell import PERIODS, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]

SLOW_TO_LOSE = msgspec.structs.replace(PERIODS, lost_after_s=20.0, gang_ready_s=8.0)
"""The gang times out first, and a machine that is busy has time for what comes before that."""


async def test_a_job_leaves_a_node_that_falls_silent_before_it_was_ready(tmp_path: Path) -> None:
    """A cancel ends at once, another job runs elsewhere after its gang timeout, and the node that
    goes on lets go of both: neither ever ran there."""
    async with running_cell(
        tmp_path, training_nodes=2, inference_nodes=0, periods=SLOW_TO_LOSE
    ) as harness:
        stopped, other = (node.name for node in harness.cell.nodes)
        unit = harness.cell.agent_unit(stopped)
        await harness.client.ask(Operate(action="cordon", target=other), Done)
        harness.cell.units.signal(unit, signal.SIGSTOP)
        try:
            script = 'echo "$ARYL_JOB_ID $ARYL_ATTEMPT" >> $OUT/ran; sleep 600'
            doomed = await harness.submit(harness.shell("doomed", script, gpus=2))
            moved = await harness.submit(harness.shell("moved", script, gpus=2))
            for job_id in (doomed, moved):
                await harness.until_state(job_id, JobState.STARTING)
            await harness.client.ask(Operate(action="uncordon", target=other), Done)
            await harness.client.ask(Cancel(job_id=doomed), Done)
            assert (await harness.job(doomed)).state == JobState.CANCELLED
            assert (await harness.node(stopped)).gpus_held == 4
            row = await harness.until_state(moved, JobState.RUNNING)
            assert row.attempt == 2
        finally:
            harness.cell.units.signal(unit, signal.SIGCONT)

        async def lets_go() -> bool:
            return (await harness.node(stopped)).gpus_held == 0 and bool(harness.said("ran"))

        await harness.until(f"{stopped} holds nothing, and {moved} has begun", lets_go)
        row = await harness.job(moved)
        assert (row.state, row.attempt) == (JobState.RUNNING, 2)
        assert harness.said("ran") == [f"{moved} 2"]
