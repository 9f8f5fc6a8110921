"""What a real cell loses when its parts are killed: nothing that it acknowledged."""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path

import pytest

from common.model import JobState
from coordinator.demo.cell import COORDINATOR
from tests.harness.live.cell import is_alive, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]

SUBMITS_PER_KILL = 6
DELAYS_S = (0.0, 0.03, 0.06, 0.09, 0.12, 0.15)
"""From the first submit of a round to the kill.

A submit is written at once and its pass comes `coalesce_s`, which is 0.1 s, later, so these fall
before, between and after the two. Exact points: tests/service/test_decision_loop_submit_crash.py.
"""


async def test_kill_9_of_the_coordinator_around_a_submit(tmp_path: Path) -> None:
    """No acknowledged job is lost and none runs twice, whenever the coordinator dies."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=0) as harness:
        accepted: list[str] = []
        for number, delay_s in enumerate(DELAYS_S):
            submits = [
                asyncio.create_task(
                    harness.submit(
                        harness.shell(f"job-{number}-{i}", f"echo ran >> $OUT/{number}-{i}"),
                        request_id=f"request-{number}-{i}",
                    )
                )
                for i in range(SUBMITS_PER_KILL)
            ]
            await asyncio.sleep(delay_s)  # it chooses when the kill comes and waits for nothing
            await harness.kill_coordinator()
            accepted += await asyncio.gather(*submits)
        assert len(set(accepted)) == len(DELAYS_S) * SUBMITS_PER_KILL
        for job_id in accepted:
            row = await harness.until_state(job_id, JobState.SUCCEEDED)
            assert row.attempt == 1
        assert {row.job_id for row in await harness.jobs()} == set(accepted)
        assert harness.said("*-*") == ["ran"] * len(accepted)


async def test_a_second_coordinator_leads_only_when_the_first_does_not(tmp_path: Path) -> None:
    """A leader that was frozen and wakes up as another leads neither appends nor commands."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=0) as harness:
        first = await harness.submit(harness.shell("first", _wait_for_go()))
        await harness.until_state(first, JobState.RUNNING)
        epoch = (await harness.status()).epoch
        frozen_pid = harness.cell.units.pid(COORDINATOR)
        assert frozen_pid is not None
        harness.cell.start_coordinator("standby")
        await harness.until_logged("standby", "standing by")
        assert (await harness.status()).epoch == epoch
        harness.cell.units.signal(COORDINATOR, signal.SIGSTOP)

        async def has_another_epoch() -> bool:
            return (await harness.status()).epoch > epoch

        await harness.until("the standby leads", has_another_epoch)
        second = await harness.submit(harness.shell("second", _wait_for_go()))
        await harness.until_state(second, JobState.RUNNING)
        epoch = (await harness.status()).epoch
        harness.cell.units.signal(COORDINATOR, signal.SIGCONT)

        async def has_stepped_down() -> bool:
            return harness.cell.units.pid(COORDINATOR) not in (None, frozen_pid)

        await harness.until("the first has ended and stands by", has_stepped_down)
        (harness.directory / "go").touch()
        for job_id in (first, second):
            row = await harness.until_state(job_id, JobState.SUCCEEDED)
            assert row.attempt == 1
        assert (await harness.status()).epoch == epoch


async def test_a_nats_server_that_is_killed_is_started_again(tmp_path: Path) -> None:
    """By the cell itself, on the same port with the same store: workers never notice, the queue is
    as it was, and work goes on."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=0) as harness:
        running = await harness.submit(harness.shell("running", _wait_for_go(), gpus=4))
        waiting = await harness.submit(harness.shell("waiting", "true"))
        await harness.until_state(running, JobState.RUNNING)
        pid = await harness.until_worker_runs()
        url = harness.cell.nats.url
        await harness.kill_nats()
        assert harness.cell.nats.url == url
        later = await harness.submit(harness.shell("later", "true"))
        assert is_alive(pid)
        (harness.directory / "go").touch()
        for job_id in (running, waiting, later):
            row = await harness.until_state(job_id, JobState.SUCCEEDED)
            assert row.attempt == 1
        assert len(harness.said("pids")) == 1


async def test_a_coordinator_with_an_empty_journal_stops_nothing(tmp_path: Path) -> None:
    """It does not know the jobs that it finds, so it leaves them alone until they end."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=0) as harness:
        lost = await harness.submit(harness.shell("lost", _wait_for_go(), gpus=3))
        await harness.until_state(lost, JobState.RUNNING)
        pid = await harness.until_worker_runs()
        harness.kill(COORDINATOR)
        await harness.cell.kill_nats()
        shutil.rmtree(harness.cell.nats.directory / "jetstream")
        await harness.cell.start_nats()
        await harness.kill_coordinator()
        fits = await harness.submit(harness.shell("fits", "true"))
        await harness.until_state(fits, JobState.SUCCEEDED)
        large = await harness.submit(harness.shell("large", "true", gpus=4))
        await harness.until_job(large, "waits for the GPUs", lambda row: bool(row.blockers))
        assert is_alive(pid)
        (harness.directory / "go").touch()
        await harness.until_state(large, JobState.SUCCEEDED)
        assert harness.said("ended") == ["0"]


def _wait_for_go() -> str:
    return "echo $$ >> $OUT/pids; until [ -e $OUT/go ]; do sleep 0.1; done; echo 0 >> $OUT/ended"
