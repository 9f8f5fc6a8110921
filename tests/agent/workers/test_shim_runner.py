"""Workers under shims, with real processes: what outlives what, and what is known of it."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import msgspec
import psutil
import pytest

from agent.core.state import Refusal
from agent.settings import AgentSettings, Starter
from agent.shim import files as shim_files
from agent.workers.shim_runner import ShimRunner, make_runner
from agent.workers.spec import Account
from agent.workers.starters import DetachedStarter
from common.clock import Clock, SystemClock
from common.errors import ConfigError, Unavailable
from common.faults import Fault
from common.messages import WorkerOrder, WorkerPhase
from common.model import JobId, Pool, Progress, StopReason, WorkerKey
from tests.harness.node.workers import (
    WorkerHarness,
    is_alive,
    kill,
    make_harness,
    make_order,
    make_workers,
    talker,
)

pytestmark = pytest.mark.slow

WAIT = ("sh", "-c", "echo up; exec sleep 600")


harness = pytest.fixture(make_workers)


async def test_a_worker_that_succeeds_has_exit_code_0(harness: WorkerHarness) -> None:
    """Exit status and log of a worker are known after its end."""
    key = await harness.start(make_order("sh", "-c", "echo done; echo oops >&2"))
    status = await harness.until_exited(key)
    assert (status.exit_code, status.error, status.stop_reason) == (0, "", None)
    assert await harness.runner.log_tail(key, 1000) == b"done\noops\n"
    assert await harness.runner.log_tail(key, 5) == b"oops\n"


async def test_a_worker_that_fails_keeps_its_exit_code(harness: WorkerHarness) -> None:
    """The job's own exit code is reported as it is."""
    key = await harness.start(make_order("sh", "-c", "exit 3"))
    assert (await harness.until_exited(key)).exit_code == 3


async def test_a_worker_killed_by_a_signal_has_its_negative_number(harness: WorkerHarness) -> None:
    """What the kernel or the job itself did to the process is not hidden."""
    key = await harness.start(make_order("sh", "-c", "kill -SEGV $$"))
    assert (await harness.until_exited(key)).exit_code == -11
    assert harness.raw(key)["exit_signal"] == "SIGSEGV"


async def test_a_command_that_is_not_there_exits_127_and_says_why(harness: WorkerHarness) -> None:
    """A worker that never became its command is told from one that failed."""
    key = await harness.start(make_order("no-such-command"))
    status = await harness.until_exited(key)
    assert status.exit_code == 127
    assert "no-such-command" in status.error
    assert "ENOENT" in status.error


async def test_two_starts_of_a_key_give_one_process(harness: WorkerHarness) -> None:
    """A repeated order, even of another agent and even after the end, starts nothing."""
    order = make_order("sh", "-c", "echo up; sleep 600")
    key = await harness.start(order)
    other = harness.new_runner()
    await other.start(order, endpoint="node-1:29400")
    starter = DetachedStarter(harness.clock)
    await starter.start(harness.directory(key), order)  # a shim that raced for the directory
    await harness.until_said(key, "up")
    pid = (await harness.status(key)).pid
    await harness.runner.stop(key, StopReason.CANCEL, 0.0)
    await harness.until_exited(key)
    await other.start(order, endpoint="node-1:29400")
    assert (await harness.status(key)).pid == pid
    assert harness.log(key) == "up\n"


async def test_a_start_cut_short_is_taken_up_again(harness: WorkerHarness) -> None:
    """An agent that died between directory and shim has started nothing, and its next one does."""
    order = make_order("true")
    harness.directory(order.key).mkdir(parents=True)
    assert await harness.runner.statuses() == ()
    await harness.start(order)
    assert (await harness.until_exited(order.key)).exit_code == 0


async def test_a_shim_outlives_kill_9_of_its_starter(harness: WorkerHarness) -> None:
    """Neither the death of the agent nor that of its process group reaches a worker."""
    order = make_order(*WAIT)
    program = """
import asyncio, os, pathlib, signal, sys
import msgspec
from agent.workers.starters import DetachedStarter
from agent.workers.spec import Account
from agent.workers.shim_runner import ShimRunner
from common.clock import SystemClock
from common.messages import WorkerOrder
order = msgspec.json.decode(sys.argv[2], type=WorkerOrder)
clock = SystemClock()
runner = ShimRunner(pathlib.Path(sys.argv[1]), clock=clock, starter=DetachedStarter(clock),
                    is_root_allowed=True)
asyncio.run(runner.start(order, endpoint="node-1:29400"))
os.killpg(os.getpid(), signal.SIGKILL)
"""
    text = msgspec.json.encode(order).decode()
    root = Path(__file__).parents[3]
    starter = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        str(harness.run_dir),
        text,
        env={"PYTHONPATH": str(root), "PATH": os.environ["PATH"]},
        start_new_session=True,
    )
    assert await starter.wait() == -9
    assert await harness.new_runner().adopt() == (order.key,)
    status = await harness.status(order.key)
    assert status.phase == WorkerPhase.RUNNING
    assert is_alive(status.pid)


async def test_a_second_runner_adopts_and_rules_what_the_first_left(harness: WorkerHarness) -> None:
    """All that is known of a worker is in its directory."""
    key = await harness.start(make_order(*WAIT))
    ended = await harness.start(make_order("true", job_id="job-2"))
    await harness.until_exited(ended)
    before_s = (await harness.status(key)).running_s
    second = harness.new_runner()
    assert await second.adopt() == (key,)
    found = {status.key: status.running_s for status in await second.statuses()}
    assert set(found) == {key, ended}
    assert found[key] >= before_s > 0
    await second.stop(key, StopReason.PREEMPT, 5.0)
    status = await harness.until_exited(key)
    assert (status.exit_code, status.stop_reason) == (-15, StopReason.PREEMPT)


async def test_a_lost_shim_ends_its_worker_and_says_so(harness: WorkerHarness) -> None:
    """Without a shim nobody keeps the contract, so what it left is killed to the last rank."""
    order = make_order("sh", "-c", "setsid sleep 600 & echo rank $!; exec sleep 600")
    key = await harness.start(order)
    await harness.until_said(key, "rank")
    rank = int(harness.log(key).split()[1])
    status = await harness.status(key)
    shim_pid = harness.raw(key)["shim_pid"]
    assert isinstance(shim_pid, int)
    kill(shim_pid)
    await harness.until(lambda: not is_alive(shim_pid), "the shim is dead")
    after = await harness.until_exited(key)
    assert after.error == "shim lost"
    assert after.exit_code is None
    assert not is_alive(status.pid)
    assert not is_alive(rank)


async def test_a_number_used_again_is_not_the_worker(harness: WorkerHarness) -> None:
    """A process that has a recorded number but another start is left alone."""
    order = make_order("true")
    key = await harness.start(order)
    await harness.until_exited(key)
    ended = harness.raw(key)
    bystander = await asyncio.create_subprocess_exec("sleep", "600")
    while shim_files.start_ticks(bystander.pid) in ended.values():  # started in the same tick
        bystander.kill()
        await bystander.wait()
        bystander = await asyncio.create_subprocess_exec("sleep", "600")
    try:
        record = ended | {
            "phase": "running",
            "pid": bystander.pid,
            "shim_pid": bystander.pid,
        }
        path = harness.directory(key) / shim_files.STATUS_FILE
        shim_files.write_json(str(path), record, is_durable=False)
        assert (await harness.until_exited(key)).error == "shim lost"
        assert is_alive(bystander.pid)
    finally:
        bystander.kill()
        await bystander.wait()


async def test_an_ended_worker_can_be_forgotten_and_a_live_one_cannot(
    harness: WorkerHarness,
) -> None:
    """Forgetting removes the directory, and never hides a process."""
    key = await harness.start(make_order(*WAIT))
    with pytest.raises(Unavailable, match="running"):
        await harness.runner.forget(key)
    await harness.runner.stop(key, StopReason.CANCEL, 0.0)
    await harness.until_exited(key)
    await harness.runner.forget(key)
    assert await harness.runner.statuses() == ()
    assert not harness.directory(key).exists()
    await harness.runner.forget(key)
    await harness.runner.stop(key, StopReason.CANCEL, 0.0)
    with pytest.raises(Unavailable, match="kept no longer"):
        await harness.runner.log_tail(key, 100)


async def test_progress_and_running_time_are_known(harness: WorkerHarness) -> None:
    """What a job says of itself is in its status."""
    body = 'say(type="progress", step=7, total_steps=10, loss=0.5); hear.readline()'
    key = await harness.start(make_order(*talker(body)))
    status = await harness.until_status(key, lambda s: s.progress is not None, "progress")
    assert status.progress == Progress(step=7, total_steps=10, loss=0.5)
    assert status.running_s > 0


async def test_a_directory_of_somebody_else_is_no_worker(harness: WorkerHarness) -> None:
    """What is not named as a key is not reported and not touched."""
    (harness.run_dir / "lost+found").mkdir(parents=True)
    (harness.run_dir / "a.b.c").mkdir()
    assert await harness.runner.statuses() == ()


async def test_a_damaged_status_is_an_ended_worker_with_an_error(harness: WorkerHarness) -> None:
    """One bad file is data; it does not hide the other workers."""
    key = await harness.start(make_order("true"))
    await harness.until_exited(key)
    (harness.directory(key) / shim_files.STATUS_FILE).write_text('{"phase": "exited"}')
    status = await harness.status(key)
    assert status.phase == WorkerPhase.EXITED
    assert "pid" in status.error


async def test_a_job_id_cannot_name_another_place(harness: WorkerHarness) -> None:
    """A key that is no token is refused before anything is written."""
    order = msgspec.structs.replace(make_order("true"), key=WorkerKey(JobId("../x"), 1, 0))
    with pytest.raises(ConfigError, match="key"):
        await harness.start(order)
    refused = await harness.runner.check_reserve(order)
    assert refused is not None
    assert (refused.fault, refused.refused_for) == (Fault.JOB, "key")


async def test_jobs_never_run_as_root(tmp_path: Path) -> None:
    """Without an account an agent of root starts nothing and says so at reserve already."""
    clock = SystemClock()
    runner = ShimRunner(tmp_path, clock=clock, starter=DetachedStarter(clock))
    if os.geteuid() != 0:
        assert await runner.check_reserve(make_order("true")) is None
        return
    refused = await runner.check_reserve(make_order("true"))
    assert refused is not None
    assert "root" in refused.error
    with pytest.raises(ConfigError, match="root"):
        await runner.start(make_order("true"), endpoint="")


@pytest.fixture
def open_dir() -> Generator[Path, None, None]:
    """A directory that every user may enter, as an agent's state directory is."""
    with tempfile.TemporaryDirectory(prefix="aryl-test-") as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start workers of another user")
async def test_a_worker_runs_as_its_account(open_dir: Path) -> None:
    """Shim and worker give up root, the agent still rules them, and a save is seen as the user."""
    nobody = Account(name="nobody", uid=65534, gid=65534, home="/nonexistent")
    clock = SystemClock()
    async for harness in make_harness(open_dir / "workers"):
        harness.runner = ShimRunner(
            harness.run_dir, clock=clock, starter=DetachedStarter(clock), account=nobody
        )
        order = make_order("sh", "-c", "id -u; id -g; echo $HOME; exec sleep 600")
        refusal = await harness.runner.check_reserve(order)
        if refusal is not None and "cannot look as the job's user" in refusal.error:
            pytest.skip(f"this interpreter is not everybody's: {refusal}")
        assert refusal is None
        closed = await harness.runner.check_reserve(make_order("true", workdir="/root"))
        assert closed is not None
        assert closed.refused_for == "workdir"
        key = await harness.start(order)
        await harness.until_said(key, "/nonexistent")
        assert harness.log(key).split() == ["65534", "65534", "/nonexistent"]
        shim_pid = harness.raw(key)["shim_pid"]
        assert isinstance(shim_pid, int)
        assert psutil.Process(shim_pid).uids().real == 65534
        await harness.runner.stop(key, StopReason.PREEMPT, 5.0)
        assert (await harness.until_exited(key)).exit_code == -15


async def test_who_looks_at_paths_can_be_somebody_else(tmp_path: Path) -> None:
    """A model of the machine answers in place of a process; the question is the same."""
    asked: list[dict[str, str]] = []

    async def refuse(question: dict[str, str], *, account: Account | None, clock: Clock) -> Refusal:
        asked.append(question)
        return Refusal("no storage")

    clock = SystemClock()
    runner = ShimRunner(
        tmp_path, clock=clock, starter=DetachedStarter(clock), refuse=refuse, is_root_allowed=True
    )
    answer = await runner.check_reserve(make_order("train", workdir="/data"))
    assert answer == Refusal("no storage")
    [question] = asked
    assert (question["workdir"], question["command"]) == ("/data", "train")


async def test_reserve_names_what_is_missing(harness: WorkerHarness, tmp_path: Path) -> None:
    """Workdir, checkpoint path and command are looked for before a gang counts on the node."""

    async def check(order: WorkerOrder) -> tuple[str, str]:
        refused = await harness.runner.check_reserve(order)
        if refused is None:
            return "", ""
        assert refused.fault == Fault.JOB
        return refused.refused_for, refused.error

    nothing = ("", "")
    assert await check(make_order("true", workdir=tmp_path, checkpoint=tmp_path / "new")) == nothing
    what, why = await check(make_order("true", workdir=tmp_path / "gone"))
    assert (what, why.split()[0]) == ("workdir", "workdir")
    missing = make_order("true", workdir=tmp_path, checkpoint=tmp_path / "gone" / "new")
    what, why = await check(missing)
    assert (what, why.split()[0]) == ("checkpoint.path", "checkpoint.path")
    what, why = await check(make_order("no-such-command"))
    assert what == "command"
    assert "no-such-command" in why
    on_path = make_order("tool", workdir=tmp_path, env={"PATH": str(tmp_path)})
    assert "tool" in (await check(on_path))[1]
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "tool").chmod(0o755)
    assert await check(on_path) == nothing


def test_the_settings_choose_the_starter(tmp_path: Path) -> None:
    """A runner is made for either kind of machine."""
    for starter in Starter:
        settings = AgentSettings(
            cell="c",
            node="n",
            home_pool=Pool.TRAINING,
            nats_url="nats://127.0.0.1:4222",
            state_dir=str(tmp_path),
            worker_starter=starter,
        )
        assert isinstance(make_runner(settings, clock=SystemClock()), ShimRunner)
