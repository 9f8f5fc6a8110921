"""A real cell's node loses flexible workers: their job goes on without them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.api import Describe, Description, Done, Operate
from common.model import JobState
from tests.live.cell.house import House, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]


def statuses(house: House, node: str) -> list[dict[str, Any]]:
    """What the shims of a node's workers say of them on disk."""
    (found,) = (each for each in house.cell.nodes if each.name == node)
    return [
        json.loads(path.read_text())
        for path in sorted((found.directory / "state" / "workers").glob("*/status.json"))
    ]


async def until_told(house: House, node: str, worker_count: int) -> None:
    """Wait until both workers of a node were told this worker count of their gang."""

    async def are_told() -> bool:
        told = [status["worker_count"] for status in statuses(house, node)]
        return told == [worker_count] * 2

    await house.until(f"workers on {node} know that they are {worker_count}", are_told)


async def test_a_node_that_loses_its_flexible_workers_only_shrinks_the_job(tmp_path: Path) -> None:
    """Their supervisors are killed, which is their node's fault: the base goes on as the same
    attempt, nothing is preempted, and its workers learn how many are left."""
    async with running_cell(tmp_path, training_nodes=2, inference_nodes=0) as house:
        spec = house.training("elastic", work_s=600, workers=(2, 4), gpus=2, save_every_s=600)
        job_id = await house.submit(msgspec.structs.replace(spec, expected_runtime_s=600.0))
        await house.until_job(job_id, "has grown", lambda row: row.worker_count == 4)
        found = await house.client.ask(Describe(kind="job", name=job_id), Description)
        (base,) = {worker.node for worker in found.workers if not worker.is_flexible}
        (other,) = {worker.node for worker in found.workers if worker.is_flexible}
        await until_told(house, base, 4)
        await until_told(house, other, 4)
        pids = {status["pid"] for status in statuses(house, base)}
        await house.client.ask(Operate(action="cordon", target=other), Done)
        for status in statuses(house, other):
            os.kill(status["shim_pid"], signal.SIGKILL)
        row = await house.until_job(job_id, "has shrunk", lambda row: row.worker_count == 2)
        assert (row.state, row.attempt, row.nodes) == (JobState.RUNNING, 1, (base,))
        await until_told(house, base, 2)
        assert {status["pid"] for status in statuses(house, base)} == pids
        assert (await house.figures())["preemptions"] == 0
