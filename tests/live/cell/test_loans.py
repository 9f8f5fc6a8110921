"""Loans on a real cell: out when the load is low, back in time when it rises."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from common.model import JobState, NodeRole
from tests.live.cell.house import PERIODS, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]


async def test_an_elastic_job_grows_into_a_lent_node_and_shrinks_back(tmp_path: Path) -> None:
    """Its base stays where it is, so that the load's return costs no preemption."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=2) as house:
        spec = house.training("elastic", work_s=600, workers=(4, 8), save_every_s=600)
        job_id = await house.submit(msgspec.structs.replace(spec, expected_runtime_s=600.0))
        row = await house.until_job(job_id, "has grown", lambda row: row.worker_count == 8)
        [lent] = await house.until_role(NodeRole.ON_LOAN)
        assert set(row.nodes) == {"train-1", lent}
        async with house.load(req_per_s=5.0):
            await house.until_role(NodeRole.SERVING, 2)
            row = await house.until_state(job_id, JobState.RUNNING)
        assert (row.worker_count, row.attempt, row.nodes) == (4, 1, ("train-1",))
        figures = await house.figures()
        assert figures["preemptions"] == 0
        assert figures["flexible_workers_released"] == 4
        assert figures["resizes"] == 2
        assert (figures["reclaims"], figures["reclaims_late"]) == (1, 0)
        assert (await house.cell.router_stats())["refused_total"] == 0


async def test_services_come_home_when_everybody_who_could_order_it_is_dead(
    tmp_path: Path,
) -> None:
    """Without coordinator, NATS and the lent node's agent every node serves within the deadline."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=2) as house:
        await house.submit(house.training("filler", work_s=600, gpus=4))
        lodger = await house.submit(house.training("lodger", work_s=600, gpus=4))
        [lent] = await house.until_role(NodeRole.ON_LOAN)
        await house.until_job(lodger, "runs there", lambda row: row.nodes == (lent,))
        assert len(await house.serving()) == 1
        await house.end_for_good(lent)

        async def is_home() -> bool:
            return await house.serving() == {"infer-1", "infer-2"}

        await house.until("both serve", is_home, within_s=PERIODS.reclaim_deadline_s)
