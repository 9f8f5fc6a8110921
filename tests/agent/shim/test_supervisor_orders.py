"""What a job said before an order came is heard before it, however late its shim gets to either."""

from __future__ import annotations

import os
import signal
import socket
import sys
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
from tests.harness.node.workers import (
    PATIENCE_S,
    WorkerHarness,
    make_order,
    make_workers,
    talker,
)

pytestmark = pytest.mark.slow

REPORTS = """
link = socket.socket(socket.AF_UNIX)
link.connect(os.environ["ARYL_CONTROL_SOCKET"])
link.sendall(b'{"type": "hello"}\\n{"type": "progress", "step": 5}\\n')
link.close()
print("reported", flush=True)
time.sleep(600)
"""
"""A report by a process that says hello, one thing, and has left."""
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


harness = pytest.fixture(make_workers)


@contextmanager
def held(harness: WorkerHarness, key: WorkerKey) -> Generator[int]:
    """While the block runs its shim stands still, and everything waits for it; its number."""
    shim_pid = int(str(harness.raw(key)["shim_pid"]))
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
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """Both wait for the shim: the stop is no reason to signal a job that has a connection."""
    go = tmp_path / "go"
    key = await harness.start(make_order(*waiting(go, SAVES)))
    with held(harness, key):
        go.touch()
        await harness.until_said(key, "ready")
        await harness.runner.stop(key, StopReason.PREEMPT, PATIENCE_S)
    status = await harness.until_exited(key)
    assert '"checkpoint_request"' in harness.log(key)
    assert "signalled" not in status.stop_stages_s
    assert status.exit_code == 0


async def test_a_worker_that_ended_before_its_stop_was_not_stopped(harness: WorkerHarness) -> None:
    """The order waits for the shim while the worker ends: the end is the worker's own success."""
    key = await harness.start(make_order("sleep", "0.2"))
    pid = int(str(harness.raw(key)["pid"]))
    with held(harness, key):
        await harness.until(lambda: is_zombie(pid), "the worker has ended")
        await harness.runner.stop(key, StopReason.PREEMPT, PATIENCE_S)
    status = await harness.until_exited(key)
    assert (status.exit_code, status.stop_reason) == (0, None)


async def signalled_together(harness: WorkerHarness, key: WorkerKey) -> WorkerStatus:
    """SIGTERM to a shim and its worker at one instant; how the worker ended."""
    pid = int(str(harness.raw(key)["pid"]))
    with held(harness, key) as shim_pid:
        os.kill(shim_pid, signal.SIGTERM)
        os.kill(pid, signal.SIGTERM)
        await harness.until(lambda: is_zombie(pid), "the worker has ended")
    return await harness.until_exited(key)


async def test_a_signal_to_worker_and_shim_together_is_a_stop(harness: WorkerHarness) -> None:
    """A shutdown, or the end of a person's session, costs no try of the job."""
    key = await harness.start(make_order("sleep", "600"))
    status = await signalled_together(harness, key)
    assert (status.exit_code, status.stop_reason) == (-15, StopReason.PREEMPT)


async def test_a_connected_worker_that_a_shutdown_killed_was_stopped(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """No look at its checkpoints holds the stop back: there is nobody left to ask."""
    key = await harness.start(make_order(*talker(SAVES), checkpoint=tmp_path))
    await harness.until_said(key, "ready")
    status = await signalled_together(harness, key)
    assert (status.exit_code, status.stop_reason) == (-15, StopReason.PREEMPT)


@pytest.mark.parametrize("exit_code", [0, 3])
async def test_a_worker_that_left_by_itself_before_a_shutdown_was_not_stopped(
    harness: WorkerHarness, tmp_path: Path, exit_code: int
) -> None:
    """The shutdown did not reach it: its end is its own."""
    script = f"while [ ! -e go ]; do sleep 0.02; done; exit {exit_code}"
    key = await harness.start(make_order("sh", "-c", script, workdir=tmp_path))
    pid = int(str(harness.raw(key)["pid"]))
    with held(harness, key) as shim_pid:
        (tmp_path / "go").touch()
        await harness.until(lambda: is_zombie(pid), "the worker has ended")
        os.kill(shim_pid, signal.SIGTERM)
    status = await harness.until_exited(key)
    assert (status.exit_code, status.stop_reason) == (exit_code, None)


def is_zombie(pid: int) -> bool:
    """Whether a process has ended and its parent has not looked."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"


async def test_a_job_that_said_hello_before_a_shutdown_is_asked_to_save(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """A stop that no agent ordered is no ruder."""
    go = tmp_path / "go"
    key = await harness.start(make_order(*waiting(go, SAVES)))
    with held(harness, key) as shim_pid:
        go.touch()
        await harness.until_said(key, "ready")
        os.kill(shim_pid, signal.SIGTERM)
    status = await harness.until_exited(key)
    assert '"checkpoint_request"' in harness.log(key)
    assert "signalled" not in status.stop_stages_s


async def test_a_job_that_said_hello_before_its_pause_suspends_by_itself(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """Frozen it would keep its device memory, which it said that it gives up."""
    go = tmp_path / "go"
    body = SAVES.replace('log("ready")', 'say(type="hello", suspends=True)\nlog("ready")', 1)
    key = await harness.start(make_order(*waiting(go, body)))
    with held(harness, key):
        go.touch()
        await harness.until_said(key, "ready")
        await harness.runner.pause(key, is_suspended=True)
    await harness.until_status(key, lambda s: s.phase == WorkerPhase.SUSPENDED, "suspended")
    assert '"suspend"' in harness.log(key)


async def test_a_save_from_before_the_stop_is_no_answer_to_it(harness: WorkerHarness) -> None:
    """It would be told to leave for a save that nobody asked for yet."""
    body = 'say(type="checkpoint", stage="saved", step=7, path="/old")\n' + SAVES
    go = harness.run_dir / "go"
    key = await harness.start(make_order(*waiting(go, body)))
    with held(harness, key):
        go.touch()
        await harness.until_said(key, "ready")
        await harness.runner.stop(key, StopReason.PREEMPT, PATIENCE_S)
    status = await harness.until_exited(key)
    assert status.checkpoint == Checkpoint(step=42, path="/save", is_verified=False)


async def test_a_save_that_comes_with_the_look_at_the_one_before_is_looked_at(
    harness: WorkerHarness, tmp_path: Path
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
    key = await harness.start(make_order(*talker(body), workdir=tmp_path, checkpoint=saves))
    shim_pid = int(str(harness.raw(key)["shim_pid"]))
    await harness.until(lambda: not lookers(shim_pid, harness, key), "it has looked what is there")
    step, is_looking = 1, False

    def has_looked() -> bool:
        return verified_step(harness, key) == step

    def looks_or_has_looked() -> bool:
        return bool(lookers(shim_pid, harness, key)) or has_looked()

    # A look is short: one may be over before its shim stands still, and shows nothing then.
    while not is_looking:
        (tmp_path / f"save-{step}").touch()
        await harness.until(looks_or_has_looked, "it looks, or has looked")
        with held(harness, key):
            await harness.until(lambda: thread_states(shim_pid) == {"T"}, "the shim is stopped")
            is_looking = bool(lookers(shim_pid, harness, key))
            await harness.until(lambda: not lookers(shim_pid, harness, key), "the look is over")
            (tmp_path / f"save-{step + 1}").touch()
            await harness.until_said(key, f"saved {step + 1}")
        step += 1
        await harness.until(has_looked, "the newer one is there")
        step += 1


def verified_step(harness: WorkerHarness, key: WorkerKey) -> int:
    """Of the last save, if a shim says that it is there and complete; else 0."""
    said = shim_files.as_object(harness.raw(key).get("checkpoint")) or {}
    return int(str(said["step"])) if said.get("is_verified") is True else 0


def lookers(shim_pid: int, harness: WorkerHarness, key: WorkerKey) -> list[int]:
    """Children of a shim that still run, its worker aside."""
    below = shim_files.descendants(shim_pid)
    return [pid for pid in below if pid != harness.raw(key)["pid"] and shim_files.start_ticks(pid)]


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
async def test_a_worker_that_is_to_stop_is_suspended_no_more(harness: WorkerHarness) -> None:
    """It saves for good; one that was frozen then could not."""
    body = """
for line in hear:
    message = json.loads(line)
    log("heard", message["type"], message.get("worker_count"))
    if message["type"] == "checkpoint_request":
        say(type="checkpoint", stage="working")
"""
    given = await harness.start(make_order(*talker(body)))
    await harness.runner.resize(given, 5)
    await harness.until_said(given, "heard resize 5")
    await harness.runner.stop(given, StopReason.PREEMPT, 10 * PATIENCE_S)
    await harness.until_said(given, "heard checkpoint_request")
    await harness.runner.pause(given, is_suspended=True)
    await harness.runner.resize(given, 6)
    await harness.until_said(given, "heard resize 6")
    assert (await harness.status(given)).phase == WorkerPhase.STOPPING
    await harness.runner.stop(given, StopReason.PREEMPT, 0.0)
    await harness.until_exited(given)


async def test_a_reporter_that_left_before_it_is_told_the_size_of_its_gang_is_heard(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """The first hello after a resize is answered with the new size; its sender may be gone."""
    go = tmp_path / "go"
    body = WAITS.format(go=go) + "import socket\n" + REPORTS
    key = await harness.start(make_order(sys.executable, "-I", "-S", "-c", body))
    await harness.runner.resize(key, 7)
    await harness.until(lambda: harness.raw(key).get("worker_count") == 7, "resized")
    with held(harness, key):
        go.touch()
        await harness.until_said(key, "reported")
    status = await harness.until_status(key, lambda s: s.progress is not None, "its report")
    assert (status.phase, status.error) == (WorkerPhase.RUNNING, "")
