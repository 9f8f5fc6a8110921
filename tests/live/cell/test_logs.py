"""Logs of ended jobs on a real cell."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from common.api import GetLogs, Logs
from common.errors import ArylError
from common.model import JobState, RetrySpec
from tests.live.cell.house import running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]


async def test_the_log_of_an_ended_job_is_answered_by_a_real_cell(tmp_path: Path) -> None:
    """After the end was acknowledged and the worker's directory is gone, by job, worker and
    attempt; what is not known and what is kept no longer are told apart."""
    async with running_cell(tmp_path, training_nodes=2, inference_nodes=0) as house:
        script = 'echo "worker $ARYL_WORKER_INDEX said this"'
        job_id = await house.submit(house.shell("talker", script, worker_count=2, gpus=4))
        spec = house.shell("again", 'echo "attempt $ARYL_ATTEMPT"; [ $ARYL_ATTEMPT = 2 ]')
        retry = RetrySpec(max_restarts=1)
        again = await house.submit(msgspec.structs.replace(spec, retry=retry))
        await house.until_state(job_id, JobState.SUCCEEDED)
        await house.until_state(again, JobState.SUCCEEDED)

        async def is_forgotten() -> bool:
            return not list(house.cell.run_dir.glob("**/workers/j*"))

        await house.until("the nodes have forgotten the workers", is_forgotten)
        first = await house.client.ask(GetLogs(job_id=job_id), Logs)
        assert (first.worker_index, first.text) == (0, "worker 0 said this\n")
        second = await house.client.ask(GetLogs(job_id=job_id, worker_index=1), Logs)
        assert second.text == "worker 1 said this\n"
        assert first.node != second.node
        with pytest.raises(ArylError, match="no worker 7"):
            await house.client.ask(GetLogs(job_id=job_id, worker_index=7), Logs)
        for attempt in (None, 2, 1):
            found = await house.client.ask(GetLogs(job_id=again, attempt=attempt), Logs)
            assert (found.attempt, found.text) == (attempt or 2, f"attempt {attempt or 2}\n")
        with pytest.raises(ArylError, match=r"no record of attempt 3.*known attempts: 1, 2"):
            await house.client.ask(GetLogs(job_id=again, attempt=3), Logs)
        [kept] = house.cell.run_dir.glob(f"**/logs/{again}.1.0.log")
        kept.unlink()
        with pytest.raises(ArylError, match=r"worker 0 of attempt 1 on .* is kept no longer"):
            await house.client.ask(GetLogs(job_id=again, attempt=1), Logs)
