"""What a job said before an order came is heard before it, however late its shim gets to either."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.proc.process_tree import thread_states
from agent.shim import files as shim_files
from agent.shim.checkpoint_probe import Probe
from agent.shim.sockets import MAX_CLIENTS, JobSocket
from agent.workers.runner import WorkerStatus
from common.messages import WorkerPhase
from common.model import Checkpoint, StopReason, WorkerKey
from tests.agent.worker_house import (
    PATIENCE_S,
    WorkerHouse,
    make_order,
    make_workers,
    talker,
)

pytestmark = pytest.mark.slow

WAITS = 'import os, time\nwhile not os.path.exists("{go}"):\n    time.sleep(0.02)\n'
"""The opening of a worker that says nothing until a file is there."""
SAVES = """
log("ready")
for line in hear:
    message = json.loads(line)
    log("heard", line.strip())
    if message["type"] == "checkpoint_request":
        say(type="checkpoint", stage="saved", step=42, path="/save")
    if message["type"] == "suspend":
        say(type="suspended")
    if message["type"] == "stop":
        sys.exit(0)
"""


house = pytest.fixture(make_workers)


@contextmanager
def held(house: WorkerHouse, key: WorkerKey) -> Generator[int]:
    """While the block runs its shim stands still, and everything waits for it; its number."""
    shim_pid = int(str(house.raw(key)["shim_pid"]))
    os.kill(shim_pid, signal.SIGSTOP)
    try:
        yield shim_pid
    finally:
        os.kill(shim_pid, signal.SIGCONT)


def waiting(go: Path, body: str) -> tuple[str, ...]:
    """The command of a worker that says hello when a file is there."""
    *python, script = talker(body)
    return (*python, WAITS.format(go=go) + script)


async def test_a_job_that_said_hello_before_its_stop_is_asked_to_save(
    house: WorkerHouse, tmp_path: Path
) -> None:
    """Both wait for the shim: the stop is no reason to signal a job that has a connection."""
    go = tmp_path / "go"
    key = await house.start(make_order(*waiting(go, SAVES)))
    with held(house, key):
        go.touch()
        await house.until_said(key, "ready")
        await house.runner.stop(key, StopReason.PREEMPT, PATIENCE_S)
    status = await house.until_exited(key)
    assert '"checkpoint_request"' in house.log(key)
    assert "signalled" not in status.stop_stages_s
    assert status.exit_code == 0


async def test_a_worker_that_ended_before_its_stop_was_not_stopped(house: WorkerHouse) -> None:
    """The order waits for the shim while the worker ends: the end is the worker's own success."""
    key = await house.start(make_order("sleep", "0.2"))
    pid = int(str(house.raw(key)["pid"]))
    with held(house, key):
        await house.until(lambda: is_zombie(pid), "the worker has ended")
        await house.runner.stop(key, StopReason.PREEMPT, PATIENCE_S)
    status = await house.until_exited(key)
    assert (status.exit_code, status.stop_reason) == (0, None)


async def signalled_together(house: WorkerHouse, key: WorkerKey) -> WorkerStatus:
    """SIGTERM to a shim and its worker at one instant; how the worker ended."""
    pid = int(str(house.raw(key)["pid"]))
    with held(house, key) as shim_pid:
        os.kill(shim_pid, signal.SIGTERM)
        os.kill(pid, signal.SIGTERM)
        await house.until(lambda: is_zombie(pid), "the worker has ended")
    return await house.until_exited(key)


async def test_a_signal_to_worker_and_shim_together_is_a_stop(house: WorkerHouse) -> None:
    """A shutdown, or the end of a person's session, costs no try of the job."""
    key = await house.start(make_order("sleep", "600"))
    status = await signalled_together(house, key)
    assert (status.exit_code, status.stop_reason) == (-15, StopReason.PREEMPT)


async def test_a_connected_worker_that_a_shutdown_killed_was_stopped(
    house: WorkerHouse, tmp_path: Path
) -> None:
    """No look at its checkpoints holds the stop back: there is nobody left to ask."""
    key = await house.start(make_order(*talker(SAVES), checkpoint=tmp_path))
    await house.until_said(key, "ready")
    status = await signalled_together(house, key)
    assert (status.exit_code, status.stop_reason) == (-15, StopReason.PREEMPT)


@pytest.mark.parametrize("exit_code", [0, 3])
async def test_a_worker_that_left_by_itself_before_a_shutdown_was_not_stopped(
    house: WorkerHouse, tmp_path: Path, exit_code: int
) -> None:
    """The shutdown did not reach it: its end is its own."""
    script = f"while [ ! -e go ]; do sleep 0.02; done; exit {exit_code}"
    key = await house.start(make_order("sh", "-c", script, workdir=tmp_path))
    pid = int(str(house.raw(key)["pid"]))
    with held(house, key) as shim_pid:
        (tmp_path / "go").touch()
        await house.until(lambda: is_zombie(pid), "the worker has ended")
        os.kill(shim_pid, signal.SIGTERM)
    status = await house.until_exited(key)
    assert (status.exit_code, status.stop_reason) == (exit_code, None)


def is_zombie(pid: int) -> bool:
    """Whether a process has ended and its parent has not looked."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"


async def test_a_job_that_said_hello_before_a_shutdown_is_asked_to_save(
    house: WorkerHouse, tmp_path: Path
) -> None:
    """A stop that no agent ordered is no ruder."""
    go = tmp_path / "go"
    key = await house.start(make_order(*waiting(go, SAVES)))
    with held(house, key) as shim_pid:
        go.touch()
        await house.until_said(key, "ready")
        os.kill(shim_pid, signal.SIGTERM)
    status = await house.until_exited(key)
    assert '"checkpoint_request"' in house.log(key)
    assert "signalled" not in status.stop_stages_s


async def test_a_job_that_said_hello_before_its_pause_suspends_by_itself(
    house: WorkerHouse, tmp_path: Path
) -> None:
    """Frozen it would keep its device memory, which it said that it gives up."""
    go = tmp_path / "go"
    body = SAVES.replace('log("ready")', 'say(type="hello", suspends=True)\nlog("ready")', 1)
    key = await house.start(make_order(*waiting(go, body)))
    with held(house, key):
        go.touch()
        await house.until_said(key, "ready")
        await house.runner.pause(key, is_suspended=True)
    await house.until_status(key, lambda s: s.phase == WorkerPhase.SUSPENDED, "suspended")
    assert '"suspend"' in house.log(key)


async def test_a_save_from_before_the_stop_is_no_answer_to_it(house: WorkerHouse) -> None:
    """It would be told to leave for a save that nobody asked for yet."""
    body = 'say(type="checkpoint", stage="saved", step=7, path="/old")\n' + SAVES
    go = house.run_dir / "go"
    key = await house.start(make_order(*waiting(go, body)))
    with held(house, key):
        go.touch()
        await house.until_said(key, "ready")
        await house.runner.stop(key, StopReason.PREEMPT, PATIENCE_S)
    status = await house.until_exited(key)
    assert status.checkpoint == Checkpoint(step=42, path="/save", is_verified=False)


async def test_a_save_that_comes_with_the_look_at_the_one_before_is_looked_at(
    house: WorkerHouse, tmp_path: Path
) -> None:
    """The answer of the older look is not taken for the newer one's."""
    saves = tmp_path / "saves"
    saves.mkdir()
    body = """
def save(step):
    path = os.environ["ARYL_CHECKPOINT_PATH"] + f"/step-{step}.pt"
    open(path, "w").write("weights")
    say(type="checkpoint", stage="saved", step=step, path=path)
    log("saved", step)
step = 1
while True:
    while not os.path.exists(f"save-{step}"):
        time.sleep(0.02)
    save(step)
    step += 1
"""
    key = await house.start(make_order(*talker(body), workdir=tmp_path, checkpoint=saves))
    shim_pid = int(str(house.raw(key)["shim_pid"]))
    await house.until(lambda: not lookers(shim_pid, house, key), "it has looked what is there")
    step, is_looking = 1, False

    def has_looked() -> bool:
        return verified_step(house, key) == step

    def looks_or_has_looked() -> bool:
        return bool(lookers(shim_pid, house, key)) or has_looked()

    # A look is short: one may be over before its shim stands still, and shows nothing then.
    while not is_looking:
        (tmp_path / f"save-{step}").touch()
        await house.until(looks_or_has_looked, "it looks, or has looked")
        with held(house, key):
            await house.until(lambda: thread_states(shim_pid) == {"T"}, "the shim is stopped")
            is_looking = bool(lookers(shim_pid, house, key))
            await house.until(lambda: not lookers(shim_pid, house, key), "the look is over")
            (tmp_path / f"save-{step + 1}").touch()
            await house.until_said(key, f"saved {step + 1}")
        step += 1
        await house.until(has_looked, "the newer one is there")
        step += 1


def verified_step(house: WorkerHouse, key: WorkerKey) -> int:
    """Of the last save, if a shim says that it is there and complete; else 0."""
    said = shim_files.as_object(house.raw(key).get("checkpoint")) or {}
    return int(str(said["step"])) if said.get("is_verified") is True else 0


def lookers(shim_pid: int, house: WorkerHouse, key: WorkerKey) -> list[int]:
    """Children of a shim that still run, its worker aside."""
    below = shim_files.descendants(shim_pid)
    return [pid for pid in below if pid != house.raw(key)["pid"] and shim_files.start_ticks(pid)]


def test_a_job_that_connects_without_end_is_let_in_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shim has orders to hear, and a deadline to keep."""
    monkeypatch.chdir(tmp_path)  # a shim is in its directory
    job = JobSocket("/too-long-for-a-socket" * 6)  # which gets one that it removes itself
    connections: list[socket.socket] = []

    def connect() -> None:
        connections.append(socket.socket(socket.AF_UNIX))
        connections[-1].connect(job.path)

    try:
        connect()
        for fd in job.accept_all():
            job.drop(fd)
            connect()
            assert len(connections) <= 2 * MAX_CLIENTS, "it never ends"
    finally:
        job.close()
        for connection in connections:
            connection.close()


def test_a_look_that_is_not_over_has_no_answer() -> None:
    """Nothing seen yet is not the same as nothing there."""
    looking = Probe.__new__(Probe)  # whose child never gets on
    looking.fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        with pytest.raises(BlockingIOError):
            looking.answer()
    finally:
        os.close(looking.fd)
        os.close(write_fd)


@pytest.mark.slow
async def test_a_worker_that_is_to_stop_is_suspended_no_more(house: WorkerHouse) -> None:
    """It saves for good; one that was frozen then could not."""
    body = """
for line in hear:
    message = json.loads(line)
    log("heard", message["type"], message.get("worker_count"))
    if message["type"] == "checkpoint_request":
        say(type="checkpoint", stage="working")
"""
    given = await house.start(make_order(*talker(body)))
    await house.runner.resize(given, 5)
    await house.until_said(given, "heard resize 5")
    await house.runner.stop(given, StopReason.PREEMPT, 10 * PATIENCE_S)
    await house.until_said(given, "heard checkpoint_request")
    await house.runner.pause(given, is_suspended=True)
    await house.runner.resize(given, 6)
    await house.until_said(given, "heard resize 6")
    assert (await house.status(given)).phase == WorkerPhase.STOPPING
    await house.runner.stop(given, StopReason.PREEMPT, 0.0)
    await house.until_exited(given)
