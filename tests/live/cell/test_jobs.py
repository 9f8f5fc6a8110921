"""Jobs on a real cell: from submit to success, gangs, failures, and what their users read."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from common.api import Describe, Description, Done, GetLogs, Logs, Operate
from common.errors import ArylError
from common.messages import WorkerPhase
from common.model import JobState, PrerunSpec, RetrySpec
from tests.harness.live.cell import LiveHarness, is_alive, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveHarness]:
    """A cell of two nodes with four GPUs each: it takes longer to start than each test here."""
    directory = tmp_path_factory.mktemp("cell")
    async with running_cell(directory, training_nodes=2, inference_nodes=0) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def harness(shared: LiveHarness, tmp_path: Path) -> AsyncIterator[LiveHarness]:
    """The cell for one test, which leaves it idle."""
    harness = await shared.turn(tmp_path)
    yield harness
    await harness.tidy()


async def test_a_job_goes_from_submit_to_success(harness: LiveHarness) -> None:
    """A real process runs once on the GPUs that it was given, and its exit code is the job's."""
    script = 'echo "$ARYL_WORKER_INDEX $CUDA_VISIBLE_DEVICES" >> $OUT/ran'
    good = await harness.submit(harness.shell("good", script, gpus=2))
    bad = await harness.submit(harness.shell("bad", "exit 7"))
    row = await harness.until_state(good, JobState.SUCCEEDED)
    assert (row.attempt, row.exit_code) == (1, 0)
    [line] = harness.said("ran")
    index, uuids = line.split()
    assert index == "0"
    assert len(set(uuids.split(","))) == 2
    row = await harness.until_state(bad, JobState.FAILED)
    assert row.exit_code == 7
    counts = await harness.counted()
    assert (counts["jobs_finished"], counts["jobs_failed"]) == (1, 1)


async def test_a_gang_never_runs_before_all_its_nodes_are_ready(harness: LiveHarness) -> None:
    """While one agent is frozen, no worker of the gang has begun; then all of them do."""
    slow = harness.cell.agent_unit("train-2")
    harness.cell.units.signal(slow, signal.SIGSTOP)
    gang = await harness.submit(
        harness.shell("gang", "touch $OUT/began-$ARYL_WORKER_INDEX", worker_count=2, gpus=4)
    )

    async def is_half_ready() -> bool:
        return (await harness.phases(gang)).get("train-1") == WorkerPhase.READY

    await harness.until("the other half is ready", is_half_ready)
    assert list(harness.directory.glob("began-*")) == []
    harness.cell.units.signal(slow, signal.SIGCONT)
    await harness.until_state(gang, JobState.SUCCEEDED)
    assert sorted(path.name for path in harness.directory.glob("began-*")) == [
        "began-0",
        "began-1",
    ]


async def test_kill_9_of_an_agent_during_a_job_loses_nothing(harness: LiveHarness) -> None:
    """The worker never notices; the next agent adopts it and reports its end."""
    script = "echo $$ >> $OUT/pids; while [ ! -e $OUT/go ]; do sleep 0.1; done; exit 5"
    job_id = await harness.submit(harness.shell("survivor", script))
    [node] = (await harness.until_state(job_id, JobState.RUNNING)).nodes
    unit = harness.cell.agent_unit(node)

    before = await harness.until_worker_runs()
    starts = harness.cell.units.starts(unit)
    harness.kill_agent(node)

    async def is_heard_again() -> bool:
        ago_s = (await harness.node(node)).heard_ago_s
        return harness.cell.units.starts(unit) > starts and ago_s is not None and ago_s < 1.0

    await harness.until("another agent reports", is_heard_again)
    assert is_alive(before)
    assert (await harness.job(job_id)).state == JobState.RUNNING
    (harness.directory / "go").touch()
    row = await harness.until_state(job_id, JobState.FAILED)
    assert (row.attempt, row.exit_code) == (1, 5)
    assert len(harness.said("pids")) == 1


# --- why a job failed


async def test_a_hopeless_failure_is_told_and_not_tried_again(harness: LiveHarness) -> None:
    """The log names it, the node reports it, the job ends after one attempt of the four it has."""
    script = "echo 'SyntaxError: invalid syntax' >&2; exit 1"
    retry = RetrySpec(max_restarts=3)
    spec = msgspec.structs.replace(harness.shell("typo", script), retry=retry)
    job_id = await harness.submit(spec)
    await harness.until_state(job_id, JobState.FAILED)
    found = await harness.client.ask(Describe(kind="job", name=job_id), Description)
    assert found.job is not None
    assert found.job.attempt == 1
    assert found.job.failure is not None
    assert found.job.failure.reason == "syntax_error"
    assert found.job.failure.line == "SyntaxError: invalid syntax"
    assert any("Syntax error" in line.reason for line in found.story)


async def test_a_plain_gang_has_its_ranks_and_a_crash_says_what_ended_it(
    harness: LiveHarness, tmp_path: Path
) -> None:
    """Both attempts run, each worker with a rank of its own; then the budget is named."""
    script = (
        'echo "$RANK $NODE_RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE" >> '
        f"{tmp_path}/$ARYL_ATTEMPT.$RANK; until [ -s {tmp_path}/$ARYL_ATTEMPT.0 ] && "
        f"[ -s {tmp_path}/$ARYL_ATTEMPT.1 ]; do sleep 0.05; done; exit 3"
    )
    gang = harness.shell("gang", script, worker_count=2, gpus=4)
    job_id = await harness.submit(msgspec.structs.replace(gang, retry=RetrySpec(max_restarts=1)))
    await harness.until_state(job_id, JobState.FAILED)
    found = await harness.client.ask(Describe(kind="job", name=job_id), Description)
    assert found.job is not None
    assert (found.job.attempt, found.job.exit_code) == (2, 3)
    assert any("1 restart of retry.max_restarts used" in why for why in found.why)
    told = {f"{at}.{rank}" for at in (1, 2) for rank in (0, 1)}
    ranks = {name: (tmp_path / name).read_text().strip() for name in told}
    assert ranks == {name: f"{name[2]} {name[2]} of 2, 0 of 1" for name in told}


async def test_a_fault_of_a_node_is_tried_again_on_the_other_one(harness: LiveHarness) -> None:
    """The next attempt avoids the node on which the first one failed."""
    script = '[ "$ARYL_ATTEMPT" = 2 ] || { echo "CUDA error: unknown"; exit 1; }; sleep 600'
    retry = RetrySpec(max_restarts=1)
    spec = msgspec.structs.replace(harness.shell("gpu", script), retry=retry)
    job_id = await harness.submit(spec)

    async def runs_again() -> bool:
        found = await harness.client.ask(Describe(kind="job", name=job_id), Description)
        return found.job is not None and (found.job.attempt, found.job.state) == (
            2,
            JobState.RUNNING,
        )

    await harness.until("the second attempt runs", runs_again)
    found = await harness.client.ask(Describe(kind="job", name=job_id), Description)
    first = [line.reason for line in found.story if "CUDA failure" in line.reason]
    assert first
    assert found.job is not None
    assert found.job.failure is not None
    assert found.job.failure.reason == "cuda_failure"


async def test_a_pre_run_comes_before_the_gang(harness: LiveHarness) -> None:
    """First one worker of one GPU for a moment, then both nodes with the gang."""
    script = 'echo "of $ARYL_WORKERS_MAX"; [ $ARYL_ATTEMPT = 2 ] || sleep 600'
    spec = msgspec.structs.replace(
        harness.shell("gang", script, worker_count=2, gpus=4), prerun=PrerunSpec(time_s=1.0)
    )
    job_id = await harness.submit(spec)
    await harness.until_state(job_id, JobState.SUCCEEDED)
    found = await harness.client.ask(Describe(kind="job", name=job_id), Description)
    assert found.job is not None
    assert (found.job.attempt, found.job.preemption_count) == (2, 0)
    assert (found.job.min_workers, found.job.gpus_per_worker) == (2, 4)
    assert any("its pre-run ended" in line.reason for line in found.story)


# --- logs and flexible workers


async def test_the_log_of_an_ended_job_is_answered_by_a_real_cell(harness: LiveHarness) -> None:
    """After the end was acknowledged and the worker's directory is gone, by job, worker and
    attempt; what is not known and what is kept no longer are told apart."""
    script = 'echo "worker $ARYL_WORKER_INDEX said this"'
    job_id = await harness.submit(harness.shell("talker", script, worker_count=2, gpus=4))
    spec = harness.shell("again", 'echo "attempt $ARYL_ATTEMPT"; [ $ARYL_ATTEMPT = 2 ]')
    retry = RetrySpec(max_restarts=1)
    again = await harness.submit(msgspec.structs.replace(spec, retry=retry))
    await harness.until_state(job_id, JobState.SUCCEEDED)
    await harness.until_state(again, JobState.SUCCEEDED)

    async def is_forgotten() -> bool:
        return not list(harness.cell.run_dir.glob("**/workers/j*"))

    await harness.until("the nodes have forgotten the workers", is_forgotten)
    first = await harness.client.ask(GetLogs(job_id=job_id), Logs)
    assert (first.worker_index, first.text) == (0, "worker 0 said this\n")
    second = await harness.client.ask(GetLogs(job_id=job_id, worker_index=1), Logs)
    assert second.text == "worker 1 said this\n"
    assert first.node != second.node
    with pytest.raises(ArylError, match="no worker 7"):
        await harness.client.ask(GetLogs(job_id=job_id, worker_index=7), Logs)
    for attempt in (None, 2, 1):
        found = await harness.client.ask(GetLogs(job_id=again, attempt=attempt), Logs)
        assert (found.attempt, found.text) == (attempt or 2, f"attempt {attempt or 2}\n")
    with pytest.raises(ArylError, match=r"no record of attempt 3.*known attempts: 1, 2"):
        await harness.client.ask(GetLogs(job_id=again, attempt=3), Logs)
    [kept] = harness.cell.run_dir.glob(f"**/logs/{again}.1.0.log")
    kept.unlink()
    with pytest.raises(ArylError, match=r"worker 0 of attempt 1 on .* is kept no longer"):
        await harness.client.ask(GetLogs(job_id=again, attempt=1), Logs)


def statuses(harness: LiveHarness, node: str) -> list[dict[str, Any]]:
    """What the shims of a node's workers say of them on disk."""
    (found,) = (each for each in harness.cell.nodes if each.name == node)
    return [
        json.loads(path.read_text())
        for path in sorted((found.directory / "state" / "workers").glob("*/status.json"))
    ]


async def until_told(harness: LiveHarness, node: str, worker_count: int) -> None:
    """Wait until both workers of a node were told this worker count of their gang."""

    async def are_told() -> bool:
        told = [status["worker_count"] for status in statuses(harness, node)]
        return told == [worker_count] * 2

    await harness.until(f"workers on {node} know that they are {worker_count}", are_told)


async def test_a_node_that_loses_its_flexible_workers_only_shrinks_the_job(
    harness: LiveHarness,
) -> None:
    """Their supervisors are killed, which is their node's fault: the base goes on as the same
    attempt, nothing is preempted, and its workers learn how many are left."""
    spec = harness.training("elastic", work_s=600, workers=(2, 4), gpus=2, save_every_s=600)
    job_id = await harness.submit(msgspec.structs.replace(spec, expected_runtime_s=600.0))
    await harness.until_job(job_id, "has grown", lambda row: row.worker_count == 4)
    found = await harness.client.ask(Describe(kind="job", name=job_id), Description)
    (base,) = {worker.node for worker in found.workers if not worker.is_flexible}
    (other,) = {worker.node for worker in found.workers if worker.is_flexible}
    await until_told(harness, base, 4)
    await until_told(harness, other, 4)
    pids = {status["pid"] for status in statuses(harness, base)}
    await harness.client.ask(Operate(action="cordon", target=other), Done)
    for status in statuses(harness, other):
        os.kill(status["shim_pid"], signal.SIGKILL)
    row = await harness.until_job(job_id, "has shrunk", lambda row: row.worker_count == 2)
    assert (row.state, row.attempt, row.nodes) == (JobState.RUNNING, 1, (base,))
    await until_told(harness, base, 2)
    assert {status["pid"] for status in statuses(harness, base)} == pids
    assert (await harness.counted())["preemptions"] == 0
