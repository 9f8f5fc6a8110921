"""Why a job failed, from a real worker's log to what its user reads, in a real cell."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from common.api import Describe, Description
from common.model import JobState, PrerunSpec, RetrySpec
from tests.live.cell.house import running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]


async def test_a_hopeless_failure_is_told_and_not_tried_again(tmp_path: Path) -> None:
    """The log names it, the node reports it, the job ends after one attempt of the four it has."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=0) as house:
        script = "echo 'SyntaxError: invalid syntax' >&2; exit 1"
        retry = RetrySpec(max_restarts=3)
        spec = msgspec.structs.replace(house.shell("typo", script), retry=retry)
        job_id = await house.submit(spec)
        await house.until_state(job_id, JobState.FAILED)
        found = await house.client.ask(Describe(kind="job", name=job_id), Description)
        assert found.job is not None
        assert found.job.attempt == 1
        assert found.job.failure is not None
        assert found.job.failure.reason == "syntax_error"
        assert found.job.failure.line == "SyntaxError: invalid syntax"
        assert any("Syntax error" in line.reason for line in found.story)


async def test_a_plain_gang_has_its_ranks_and_a_crash_says_what_ended_it(tmp_path: Path) -> None:
    """Both attempts run, each worker with a rank of its own; then the budget is named."""
    async with running_cell(tmp_path, training_nodes=2, inference_nodes=0) as house:
        script = (
            'echo "$RANK $NODE_RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE" >> '
            f"{tmp_path}/$ARYL_ATTEMPT.$RANK; until [ -s {tmp_path}/$ARYL_ATTEMPT.0 ] && "
            f"[ -s {tmp_path}/$ARYL_ATTEMPT.1 ]; do sleep 0.05; done; exit 3"
        )
        gang = house.shell("gang", script, worker_count=2, gpus=4)
        job_id = await house.submit(msgspec.structs.replace(gang, retry=RetrySpec(max_restarts=1)))
        await house.until_state(job_id, JobState.FAILED)
        found = await house.client.ask(Describe(kind="job", name=job_id), Description)
        assert found.job is not None
        assert (found.job.attempt, found.job.exit_code) == (2, 3)
        assert any("1 restart of retry.max_restarts used" in why for why in found.why)
        told = {f"{at}.{rank}" for at in (1, 2) for rank in (0, 1)}
        ranks = {name: (tmp_path / name).read_text().strip() for name in told}
        assert ranks == {name: f"{name[2]} {name[2]} of 2, 0 of 1" for name in told}


async def test_a_fault_of_a_node_is_tried_again_on_the_other_one(tmp_path: Path) -> None:
    """The next attempt avoids the node on which the first one failed."""
    async with running_cell(tmp_path, training_nodes=2, inference_nodes=0) as house:
        script = '[ "$ARYL_ATTEMPT" = 2 ] || { echo "CUDA error: unknown"; exit 1; }; sleep 600'
        retry = RetrySpec(max_restarts=1)
        spec = msgspec.structs.replace(house.shell("gpu", script), retry=retry)
        job_id = await house.submit(spec)

        async def runs_again() -> bool:
            found = await house.client.ask(Describe(kind="job", name=job_id), Description)
            return found.job is not None and (found.job.attempt, found.job.state) == (
                2,
                JobState.RUNNING,
            )

        await house.until("the second attempt runs", runs_again)
        found = await house.client.ask(Describe(kind="job", name=job_id), Description)
        first = [line.reason for line in found.story if "CUDA failure" in line.reason]
        assert first
        assert found.job is not None
        assert found.job.failure is not None
        assert found.job.failure.reason == "cuda_failure"


async def test_a_pre_run_comes_before_the_gang(tmp_path: Path) -> None:
    """First one worker of one GPU for a moment, then both nodes with the gang."""
    async with running_cell(tmp_path, training_nodes=2, inference_nodes=0) as house:
        script = 'echo "of $ARYL_WORKERS_MAX"; [ $ARYL_ATTEMPT = 2 ] || sleep 600'
        spec = msgspec.structs.replace(
            house.shell("gang", script, worker_count=2, gpus=4), prerun=PrerunSpec(time_s=1.0)
        )
        job_id = await house.submit(spec)
        await house.until_state(job_id, JobState.SUCCEEDED)
        found = await house.client.ask(Describe(kind="job", name=job_id), Description)
        assert found.job is not None
        assert (found.job.attempt, found.job.preemption_count) == (2, 0)
        assert (found.job.min_workers, found.job.gpus_per_worker) == (2, 4)
        assert any("its pre-run ended" in line.reason for line in found.story)
