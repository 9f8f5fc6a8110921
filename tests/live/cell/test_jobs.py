"""Jobs on a real cell: from submit to success, gangs, and an agent that is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from common.messages import WorkerPhase
from common.model import JobState
from tests.live.cell.house import is_alive, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]


async def test_a_job_goes_from_submit_to_success(tmp_path: Path) -> None:
    """A real process runs once on the GPUs that it was given, and its exit code is the job's."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=0) as house:
        script = 'echo "$ARYL_WORKER_INDEX $CUDA_VISIBLE_DEVICES" >> $OUT/ran'
        good = await house.submit(house.shell("good", script, gpus=2))
        bad = await house.submit(house.shell("bad", "exit 7"))
        row = await house.until_state(good, JobState.SUCCEEDED)
        assert (row.attempt, row.exit_code) == (1, 0)
        [line] = house.said("ran")
        index, uuids = line.split()
        assert index == "0"
        assert len(set(uuids.split(","))) == 2
        row = await house.until_state(bad, JobState.FAILED)
        assert row.exit_code == 7
        figures = await house.figures()
        assert (figures["jobs_finished"], figures["jobs_failed"]) == (1, 1)


async def test_a_gang_never_runs_before_all_its_nodes_are_ready(tmp_path: Path) -> None:
    """While one agent is frozen, no worker of the gang has begun; then all of them do."""
    async with running_cell(tmp_path, training_nodes=2, inference_nodes=0) as house:
        slow = house.cell.agent_unit("train-2")
        house.cell.units.signal(slow, signal.SIGSTOP)
        gang = await house.submit(
            house.shell("gang", "touch $OUT/began-$ARYL_WORKER_INDEX", worker_count=2, gpus=4)
        )

        async def is_half_ready() -> bool:
            return (await house.phases(gang)).get("train-1") == WorkerPhase.READY

        await house.until("the other half is ready", is_half_ready)
        assert list(house.directory.glob("began-*")) == []
        house.cell.units.signal(slow, signal.SIGCONT)
        await house.until_state(gang, JobState.SUCCEEDED)
        assert sorted(path.name for path in house.directory.glob("began-*")) == [
            "began-0",
            "began-1",
        ]


async def test_kill_9_of_an_agent_during_a_job_loses_nothing(tmp_path: Path) -> None:
    """The worker never notices; the next agent adopts it and reports its end."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=0) as house:
        script = "echo $$ >> $OUT/pids; while [ ! -e $OUT/go ]; do sleep 0.1; done; exit 5"
        job_id = await house.submit(house.shell("survivor", script))
        await house.until_state(job_id, JobState.RUNNING)

        before = await house.until_worker_runs()
        starts = house.cell.units.starts(house.cell.agent_unit("train-1"))
        house.kill_agent("train-1")

        async def is_heard_again() -> bool:
            unit = house.cell.agent_unit("train-1")
            ago_s = (await house.node("train-1")).heard_ago_s
            return house.cell.units.starts(unit) > starts and ago_s is not None and ago_s < 1.0

        await house.until("another agent reports", is_heard_again)
        assert is_alive(before)
        assert (await house.job(job_id)).state == JobState.RUNNING
        (house.directory / "go").touch()
        row = await house.until_state(job_id, JobState.FAILED)
        assert (row.attempt, row.exit_code) == (1, 5)
        assert len(house.said("pids")) == 1
