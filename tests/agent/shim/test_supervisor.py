"""One shim and its worker, with real processes and sockets: the job's contract."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import signal
import socket
import sys
from pathlib import Path

import pytest

from agent.shim import files as shim_files
from agent.workers import starters
from agent.workers.runner import WorkerStatus
from common.errors import Unavailable
from common.messages import WorkerPhase
from common.model import Checkpoint, StopReason
from tests.harness.node.workers import (
    PATIENCE_S,
    WorkerHarness,
    is_alive,
    make_harness,
    make_order,
    make_workers,
    rss_bytes,
    talker,
)
from tests.harness.sockets import short_path

pytestmark = pytest.mark.slow

SAVE = """
log("ready")
for line in hear:
    message = json.loads(line)
    log("heard", line.strip())
    if message["type"] == "checkpoint_request":
        say(type="checkpoint", stage="working", eta_s=0.1)
        with open(os.environ["ARYL_CHECKPOINT_PATH"], "w") as file:
            file.write("step 42")
        say(type="checkpoint", stage="saved", step=42, path=os.environ["ARYL_CHECKPOINT_PATH"])
    if message["type"] == "stop":
        say(type="checkpoint", stage="released")
        sys.exit(0)
"""
LIE = SAVE.replace('"w") as file', '"a") as file').replace('file.write("step 42")', "pass")
SILENT = 'signal.signal(signal.SIGTERM, signal.SIG_IGN); print("ready", flush=True); '
DEAF = (sys.executable, "-c", f"import signal, time; {SILENT} time.sleep(600)")


harness = pytest.fixture(make_workers)


def descriptors(pid: int) -> dict[int, str]:
    """The open descriptors of a process, and what each is."""
    found: dict[int, str] = {}
    for place in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found[int(place.name)] = str(place.readlink())
    return found


def pipe_ends(pid: int) -> int:
    """Pipes that a process has open; a shim that looks at nothing has one, with both ends."""
    return sum(what.startswith("pipe:") for what in descriptors(pid).values())


async def test_a_job_saves_on_request_and_leaves(harness: WorkerHarness, tmp_path: Path) -> None:
    """Request, working, saved, released: exit 0, and the shim has seen the checkpoint itself."""
    path = tmp_path / "checkpoint"
    path.write_text("step 1")
    key = await harness.start(make_order(*talker(SAVE), checkpoint=path))
    await harness.until_said(key, "ready")
    await harness.runner.stop(key, StopReason.PREEMPT, PATIENCE_S)
    status = await harness.until_exited(key)
    assert status.exit_code == 0
    assert status.stop_reason == StopReason.PREEMPT
    assert status.checkpoint == Checkpoint(step=42, path=str(path), is_verified=True)
    assert {"requested", "working", "saved"} <= set(status.stop_stages_s)
    assert "signalled" not in status.stop_stages_s
    assert status.saved_at_s is not None
    assert status.ended_at_s is not None
    assert status.save_over_at_s is not None
    assert status.save_over_at_s == pytest.approx(status.saved_at_s, abs=0.5)
    assert status.save_over_at_s <= status.ended_at_s + 0.001  # as stages are rounded
    assert '"checkpoint_request"' in harness.log(key)


async def test_a_save_counts_where_its_shim_can_start_no_look_at_it(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """A job that fills the limits of its unit takes them from its shim, which must outlive that."""
    path = tmp_path / "checkpoint"
    path.write_text("step 1")
    key = await harness.start(make_order(*talker(SAVE), checkpoint=path))
    await harness.until_said(key, "ready")
    shim = (await harness.status(key)).shim_pid
    await harness.until(lambda: pipe_ends(shim) == 2, "the look at the earlier save is over")
    taken = descriptors(shim).keys()
    free = min(set(range(len(taken) + 1)) - taken)
    # One descriptor is left: for a file, and not for the pipe of a look.
    resource.prlimit(shim, resource.RLIMIT_NOFILE, (free + 1, free + 1))
    await harness.runner.stop(key, StopReason.PREEMPT, PATIENCE_S)
    status = await harness.until_exited(key)
    assert (status.exit_code, status.error) == (0, "")
    assert status.checkpoint == Checkpoint(step=42, path=str(path), is_verified=False)


async def test_a_checkpoint_that_is_not_newer_is_not_verified(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """A job that claims the save it had made before the request earns no credit."""
    path = tmp_path / "checkpoint"
    path.write_text("step 1")
    key = await harness.start(make_order(*talker(LIE), checkpoint=path))
    await harness.until_said(key, "ready")
    await harness.runner.stop(key, StopReason.PREEMPT, PATIENCE_S)
    status = await harness.until_exited(key)
    assert status.checkpoint == Checkpoint(step=42, path=str(path), is_verified=False)


@pytest.mark.parametrize(
    ("name", "content", "is_verified"),
    [("step-9.pt", "weights", True), ("step-9.pt.tmp", "weights", False), ("step-9.pt", "", False)],
)
async def test_a_periodic_save_is_verified_by_its_newest_file(
    harness: WorkerHarness, tmp_path: Path, name: str, content: str, is_verified: bool
) -> None:
    """In a checkpoint directory a save counts when it is whole, named as such and newer."""
    (tmp_path / "saves").mkdir()
    (tmp_path / "saves" / "step-1.pt").write_text("old")
    body = f"""
hear.readline()
open(os.environ["ARYL_CHECKPOINT_PATH"] + "/{name}", "w").write("{content}")
say(type="checkpoint", stage="saved", step=9, path="saves/{name}")
say(type="progress", step=9)
hear.readline()
"""
    order = make_order(*talker(body), workdir=tmp_path, checkpoint="saves")
    key = await harness.start(order)
    await harness.runner.resize(key, 7)  # answers the first readline
    if is_verified:
        status = await harness.until_status(
            key, lambda s: s.checkpoint is not None and s.checkpoint.is_verified, "verified"
        )
    else:
        await harness.until_status(key, lambda s: s.checkpoint is not None, "saved")
        await harness.runner.stop(key, StopReason.CANCEL, 0.0)
        status = await harness.until_exited(key)  # an exit waits for the look at the last save
    assert status.checkpoint == Checkpoint(step=9, path=f"saves/{name}", is_verified=is_verified)


async def test_a_save_outside_the_configured_path_is_not_verified(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """The next attempt looks at the configured path; a save elsewhere does not help it."""
    elsewhere = tmp_path / "elsewhere"
    body = f"""
open("{elsewhere}", "w").write("weights")
say(type="checkpoint", stage="saved", step=9, path="{elsewhere}")
"""
    (tmp_path / "saves").mkdir()
    key = await harness.start(make_order(*talker(body), checkpoint=tmp_path / "saves"))
    status = await harness.until_exited(key)
    assert status.checkpoint == Checkpoint(step=9, path=str(elsewhere), is_verified=False)


async def test_a_job_that_ignores_its_grace_is_killed(harness: WorkerHarness) -> None:
    """Signal first, SIGKILL at the end of the grace; both are on record."""
    key = await harness.start(make_order(*DEAF))
    await harness.until_said(key, "ready")
    await harness.runner.stop(key, StopReason.PREEMPT, 0.3)
    status = await harness.until_exited(key)
    assert status.exit_code == -9
    assert set(status.stop_stages_s) == {"signalled", "killed"}
    assert harness.raw(key)["exit_signal"] == "SIGKILL"


async def test_the_signal_reaches_the_main_process_only(harness: WorkerHarness) -> None:
    """Data loaders must not die before the process that saves (production note, pain 7)."""
    script = """
sh -c 'trap "echo child signalled" USR1; echo child; while :; do sleep 0.05; done' &
trap 'echo main signalled; exit 4' USR1
while :; do sleep 0.05; done
"""
    key = await harness.start(make_order("sh", "-c", script, signal_name="SIGUSR1"))
    await harness.until_said(key, "child")
    await harness.runner.stop(key, StopReason.PREEMPT, PATIENCE_S)
    assert (await harness.until_exited(key)).exit_code == 4
    assert "main signalled" in harness.log(key)
    assert "child signalled" not in harness.log(key)


async def test_what_a_worker_leaves_behind_is_killed(harness: WorkerHarness) -> None:
    """A worker has ended when its last descendant has, in whichever session that hid."""
    script = "sleep 600 & echo $!; setsid sleep 600 & echo $!; setsid sh -c 'sleep 600 & echo $!'"
    key = await harness.start(make_order("sh", "-c", script + "; sleep 0.2; exit 5"))
    status = await harness.until_exited(key)
    assert status.exit_code == 5
    left = [int(word) for word in harness.log(key).split()]
    assert len(left) == 3
    assert [pid for pid in left if is_alive(pid)] == []


async def test_a_resize_reaches_the_job_once(harness: WorkerHarness) -> None:
    """A repeated order is not a second resize, and a late connection misses nothing."""
    body = 'log("up"); [log(line.strip()) for line in hear]'
    key = await harness.start(make_order(*talker(body), workers=(2, 8)))
    await harness.runner.resize(key, 4)
    await harness.runner.resize(key, 4)
    await harness.until_said(key, '"worker_count":4')
    await harness.runner.resize(key, 3)
    await harness.until_said(key, '"worker_count":3')
    assert re.findall(r'"worker_count":(\d)', harness.log(key)) == ["4", "3"]


async def test_a_grace_can_be_shortened_and_the_first_reason_stays(harness: WorkerHarness) -> None:
    """A reclaim that becomes urgent does not wait for the grace it had granted."""
    key = await harness.start(make_order(*DEAF))
    await harness.until_said(key, "ready")
    await harness.runner.stop(key, StopReason.PREEMPT, 600.0)
    await harness.until_status(key, lambda s: s.stop_stage == "signalled", "signalled")
    await harness.runner.stop(key, StopReason.CANCEL, 0.0)
    status = await harness.until_exited(key)
    assert (status.exit_code, status.stop_reason) == (-9, StopReason.PREEMPT)


async def test_garbage_is_counted_and_changes_nothing(harness: WorkerHarness) -> None:
    """Neither the job nor anybody at the agent's socket can disturb a shim with nonsense."""
    body = r"""
for junk in [b"\xff\n", b"[1]\n", b'{"type":"no"}\n', b'{"type":"progress","step":-1}\n',
             b'{"type":"progress","step":1.5}\n', b'{"type":"checkpoint","stage":"saved"}\n',
             b'{"type":"checkpoint","stage":"saved","step":1,"path":"/tmp/\\ud800"}\n',
             b"x" * 200000 + b"\n", b"[" * 60000 + b"\n"]:
    link.sendall(junk)
say(type="progress", step=1)
hear.readline()
"""
    key = await harness.start(make_order(*talker(body)))
    await harness.until_status(key, lambda s: s.progress is not None, "progress after the junk")
    with (
        short_path(harness.directory(key)) as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as control,
    ):
        for junk in (b"", b"{", b'{"op":"stop"}', b'{"op":"stop","grace_s":"x"}', b'{"op":1}'):
            control.sendto(junk, str(directory / shim_files.CONTROL_SOCKET))
    status = await harness.until_status(key, lambda s: s.garbage_count >= 14, "14 counted")
    assert (status.garbage_count, status.phase) == (14, WorkerPhase.RUNNING)
    assert status.checkpoint is None


async def test_a_job_that_does_not_read_blocks_nothing(harness: WorkerHarness) -> None:
    """A shim goes on taking orders while its messages pile up unread, then hangs up."""
    key = await harness.start(make_order(*talker('log("up"); time.sleep(600)')))
    await harness.until_said(key, "up")
    for count in range(4000):  # more than the kernel and the shim keep for one who is behind
        while True:
            try:
                await harness.runner.resize(key, count % 7 + 2)
                break
            except Unavailable:
                await harness.clock.sleep(0.001)
    await harness.runner.stop(key, StopReason.PREEMPT, 600.0)
    status = await harness.until_exited(key)
    assert status.exit_code == -15
    assert "requested" not in status.stop_stages_s  # too far behind is the same as not connected


async def test_a_long_directory_is_no_obstacle(tmp_path: Path) -> None:
    """Unix sockets have short names; directories need not, and nothing stays in /tmp."""
    deep = tmp_path.joinpath(*["d" * 60] * 3)
    async for harness in make_harness(deep):
        key = await harness.start(make_order(*talker("log(link.getpeername()); hear.readline()")))
        await harness.until_said(key, "job.sock")
        used = Path(harness.log(key).split()[0])
        assert len(os.fsencode(used)) <= 107
        await harness.runner.stop(key, StopReason.CANCEL, PATIENCE_S)
        await harness.until_exited(key)
        assert not used.parent.exists()


async def test_a_shim_ends_with_its_worker(harness: WorkerHarness) -> None:
    """Nothing but files is left of a worker that ended."""
    key = await harness.start(make_order("true"))
    await harness.until_exited(key)
    shim_pid = harness.raw(key)["shim_pid"]
    assert isinstance(shim_pid, int)
    await harness.until(lambda: not is_alive(shim_pid), "the shim has ended")
    left = {path.name for path in harness.directory(key).iterdir()}
    assert left == {"lock", "shim.log", "spec.json", "status.json", "worker.log"}
    assert (harness.directory(key) / "shim.log").read_text() == ""


async def test_a_job_that_asked_for_it_is_stopped_when_no_agent_is_heard(
    harness: WorkerHarness,
) -> None:
    """stop_after_s is kept by the shim itself, because nobody else may be left."""
    alone = make_order("sleep", "600", stop_after_s=0.3)
    watched = make_order("sleep", "600", job_id="job-2", stop_after_s=600.0)
    await harness.runner.start(alone, endpoint="")
    await harness.runner.start(watched, endpoint="")
    path = harness.directory(alone.key)
    # Looked at past the runner: its own looks tell the shim that there is an agent.
    await harness.until(lambda: harness.raw(alone.key)["phase"] == "exited", f"{path} ended")
    status = await harness.status(alone.key)
    assert (status.exit_code, status.stop_reason) == (-15, StopReason.PREEMPT)
    assert "stop_after_s" in status.detail
    assert (await harness.status(watched.key)).phase == WorkerPhase.RUNNING


async def test_a_shutdown_of_the_machine_gives_the_worker_its_grace(harness: WorkerHarness) -> None:
    """SIGTERM to the shim, which is what PID 1 sends, is a stop with the job's own grace."""
    key = await harness.start(
        make_order("sh", "-c", "trap 'exit 6' TERM; echo up; sleep 600 & wait")
    )
    await harness.until_said(key, "up")
    shim_pid = harness.raw(key)["shim_pid"]
    assert isinstance(shim_pid, int)
    os.kill(shim_pid, signal.SIGTERM)
    status = await harness.until_exited(key)
    assert (status.exit_code, status.stop_reason) == (6, StopReason.PREEMPT)


def test_a_log_is_cut_with_a_note_and_its_end_is_kept(tmp_path: Path) -> None:
    """A worker that writes without end fills no disk."""
    path, old = str(tmp_path / "log"), str(tmp_path / "log.1")
    log_fd = shim_files.open_log(path)
    try:
        os.write(log_fd, b"a" * 1000 + b"b" * 1000)
        assert not shim_files.cap_log(log_fd, path, old, 2000)
        assert shim_files.cap_log(log_fd, path, old, 1000)
        os.write(log_fd, b"more")
    finally:
        os.close(log_fd)
    assert Path(old).read_bytes() == b"b" * 1000
    assert Path(path).read_text().startswith("[aryl: log cut at 1000 bytes")
    assert Path(path).read_text().endswith("more")


async def test_the_log_of_a_worker_that_ends_is_cut_too(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """It may write much and end before its shim looks at its log again; the last words are kept."""
    harness.log_max_bytes = 10_000
    harness.runner = harness.new_runner()
    script = "until [ -e go ]; do sleep 0.05; done; seq 100000; echo the end; exit 3"
    key = await harness.start(make_order("sh", "-c", script, workdir=tmp_path))
    (tmp_path / "go").touch()
    assert (await harness.until_exited(key)).exit_code == 3
    files = [
        harness.directory(key) / name for name in (shim_files.LOG_FILE, shim_files.OLD_LOG_FILE)
    ]
    assert sum(file.stat().st_size for file in files if file.exists()) <= 20_000
    assert harness.log(key).startswith("[aryl: log cut at 10000 bytes")
    assert b"99999\n100000\nthe end\n" in await harness.runner.log_tail(key, 200)


async def test_the_log_of_a_worker_whose_shim_was_lost_is_cut_too(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """Nobody looks at it until the agent finds the shim dead; the last words are kept, and are
    there for whoever asks once the worker is forgotten."""
    harness.log_max_bytes = 10_000
    harness.runner = harness.new_runner()
    script = "until [ -e go ]; do sleep 0.05; done; seq 100000; echo the end; exec sleep 600"
    key = await harness.start(make_order("sh", "-c", script, workdir=tmp_path))
    shim_pid = harness.raw(key)["shim_pid"]
    assert isinstance(shim_pid, int)
    os.kill(shim_pid, signal.SIGKILL)
    await harness.until(lambda: shim_files.start_ticks(shim_pid) == 0, "the shim is dead")
    (tmp_path / "go").touch()
    await harness.until_said(key, "the end")
    path = harness.directory(key) / shim_files.LOG_FILE
    assert path.stat().st_size > 500_000
    assert (await harness.until_exited(key)).error == "shim lost"
    assert path.stat().st_size <= 10_000
    assert harness.log(key).startswith("[aryl: log cut at 10000 bytes")
    assert harness.log(key).endswith("99999\n100000\nthe end\n")


async def test_a_shim_is_small(harness: WorkerHarness) -> None:
    """At most 12 MB resident, while its worker talks to it."""
    body = 'say(type="progress", step=1, loss=0.1); hear.readline()'
    key = await harness.start(make_order(*talker(body)))
    status: WorkerStatus = await harness.until_status(key, lambda s: s.progress is not None, "talk")
    assert status.phase == WorkerPhase.RUNNING
    assert rss_bytes(harness.raw(key)["shim_pid"]) <= 12 * 1024 * 1024


async def test_a_wrong_call_says_how_it_is_called(tmp_path: Path) -> None:
    """Usage goes to stderr with exit code 2; a directory without a spec is exit code 1."""
    for arguments, exit_code, words in (
        (["--detach"], 2, b"usage"),
        ([str(tmp_path)], 1, b"spec.json"),
    ):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(starters.SHIM), *arguments,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, said = await process.communicate()
        assert process.returncode == exit_code
        assert words in said
