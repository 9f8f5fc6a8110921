"""The whole way on a live cell, in one test: a loan, a reclaim in time, a job that ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.model import JobState, NodeRole
from tests.harness.live.cell import running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.smoke]


async def test_an_inelastic_job_on_a_lent_node_is_preempted_and_finishes(tmp_path: Path) -> None:
    """It saves, queues again as its next attempt, and goes on where it was."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=2) as harness:
        long = await harness.submit(harness.training("long", work_s=12, gpus=4))
        lodger = await harness.submit(harness.training("lodger", work_s=16, workers=(2, 2), gpus=2))
        await harness.until_state(long, JobState.RUNNING)
        row = await harness.until_job(lodger, "has saved", lambda row: (row.step or 0) >= 25)
        [lent] = await harness.until_role(NodeRole.ON_LOAN)
        assert row.nodes == (lent,)

        async def second_attempts_step() -> int | None:
            path = harness.cell.checkpoint_root / "lodger" / "attempt-2.json"
            return json.loads(path.read_text())["step"] if path.exists() else None

        async with harness.load(req_per_s=5.0):
            row = await harness.until_job(lodger, "queues again", lambda row: row.attempt == 2)
            assert row.preemption_count == 1
            await harness.until_role(NodeRole.SERVING, 2)
            first_step = await harness.until("its next attempt trains", second_attempts_step)
            assert first_step >= 25
            row = await harness.until_state(lodger, JobState.SUCCEEDED)
        assert (row.attempt, row.preemption_count) == (2, 1)
        figures = await harness.figures()
        assert (figures["preemptions"], figures["reclaims_late"]) == (1, 0)
        (loan,) = await harness.loans()
        assert (loan.realised_preemptions, loan.realised_cost_gpu_s) == (1, 0.0)  # it had saved
        stages_s = loan.stage_durations_s
        way = {"notify", "checkpoint", "exit", "device_free", "server_ready", "heard"}
        assert set(stages_s) - {"unattended"} == {"decide"} | way
        assert sum(stages_s.values()) - stages_s["decide"] == pytest.approx(loan.reclaim_s)
        assert figures["lost_gpu_s"] == 0.0
        assert (await harness.cell.router_stats())["refused_total"] == 0
