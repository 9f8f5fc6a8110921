"""What a real preemption costs, against what the job itself wrote down of its computing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from common.model import CheckpointSpec, JobState, NodeRole
from tests.harness.live.cell import PERIODS, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]

GPUS = 4
LONG_GRACE = msgspec.structs.replace(PERIODS, grace_s=6.0, reclaim_deadline_s=25.0)
STUBBORN = "trap '' TERM; while :; do date +%s.%N >> $OUT/ticks; sleep 0.1; done"
SOME_TICKS = 20
"""Two seconds and more of computing, so that the last ticks before the kill, which a busy machine
delays, do not decide whether the whole grace was used."""


async def test_a_job_that_ignores_the_request_to_save_loses_its_grace_as_well(
    tmp_path: Path,
) -> None:
    """Job, loan and cell book no less than from its first sign of life to its last one."""
    async with running_cell(
        tmp_path, training_nodes=1, inference_nodes=2, periods=LONG_GRACE
    ) as harness:
        filler = await harness.submit(harness.training("filler", work_s=600, gpus=GPUS))
        await harness.until_state(filler, JobState.RUNNING)
        spec = msgspec.structs.replace(
            harness.shell("stubborn", STUBBORN, gpus=GPUS),
            checkpoint=CheckpointSpec(grace_s=LONG_GRACE.grace_s),
        )
        stubborn = await harness.submit(spec)
        row = await harness.until_state(stubborn, JobState.RUNNING)
        [lent] = await harness.until_role(NodeRole.ON_LOAN)
        assert row.nodes == (lent,)

        async def computes() -> bool:
            return len(harness.said("ticks")) >= SOME_TICKS

        await harness.until("it has computed for a while", computes)
        async with harness.load(req_per_s=5.0):
            row = await harness.until_state(stubborn, JobState.PENDING)
            ticks = [float(line) for line in harness.said("ticks")]
            computed_gpu_s = GPUS * (ticks[-1] - ticks[0])
            assert computed_gpu_s > GPUS * LONG_GRACE.grace_s
            assert (await harness.figures())["lost_gpu_s"] >= computed_gpu_s
            (loan,) = await harness.loans()
            assert loan.realised_cost_gpu_s >= computed_gpu_s
