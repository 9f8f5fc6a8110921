"""The launcher alone, without a cell: what one does about the ends of its ranks and of others."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from agent.workers.spec import RENDEZVOUS, TORCH_LAUNCHER, TORCH_STORE
from tests.training.live import HANG_S

RANK = """
import os, signal, sys, time
import torch, torch.distributed as dist
if os.environ["MODE"] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.init_process_group("gloo")
sys.stderr.write(f"met as {dist.get_rank()} of {dist.get_world_size()}\\n")
while True:
    if os.path.exists(os.environ["FAILS_AT"]):
        sys.exit(3)
    dist.all_reduce(torch.zeros(1))
    time.sleep(0.1)
"""


class Gang:
    """Launchers that meet at one store; each has the files that a shim would give it."""

    def __init__(self, directory: Path, python: Path) -> None:
        self.directory = directory
        self.python = python
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
        (directory / "rank.py").write_text(RANK)
        store = [str(python), str(TORCH_STORE), self.endpoint]
        self.processes = [subprocess.Popen(store, stderr=subprocess.DEVNULL)]

    def start(
        self, index: int, *, count: int, nodes: str = "1:3", grace_s: int = 30, mode: str = ""
    ) -> subprocess.Popen[bytes]:
        """One more launcher, whose ranks fail once the file `fails-INDEX` is there."""
        own = self.directory / str(index)
        own.mkdir()
        self.tell(index, None)
        env = os.environ | {
            "ARYL_WORKER_INDEX": str(index),
            "ARYL_WORKER_COUNT": str(count),
            "ARYL_GRACE_SECONDS": str(grace_s),
            "ARYL_WORKER_DIRECTORY": str(own),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
            "MODE": mode,
            "FAILS_AT": str(self.directory / f"fails-{index}"),
        }
        argv = [
            str(self.python), str(TORCH_LAUNCHER), f"--nnodes={nodes}", "--nproc-per-node=1",
            "--max-restarts=1000000", "--rdzv-backend=c10d", f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-conf={','.join(RENDEZVOUS)}", "--rdzv-id=gang", "rank.py",
        ]  # fmt: skip
        with (own / "log").open("wb") as log:
            launcher = subprocess.Popen(argv, cwd=self.directory, env=env, stdout=log, stderr=log)
        self.processes.append(launcher)
        return launcher

    def tell(self, index: int, reason: str | None) -> None:
        """What the shim writes of an order to stop."""
        (self.directory / str(index) / "status.json").write_text(
            json.dumps({"stop_reason": reason})
        )

    def fail(self, index: int) -> None:
        """Let the ranks of a launcher exit with 3."""
        (self.directory / f"fails-{index}").touch()

    def kill(self, index: int) -> None:
        """Lose a launcher with all of its ranks, each of which has a session of its own."""
        launcher = psutil.Process(self.processes[index + 1].pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            process.kill()

    def log(self, index: int) -> str:
        """What a launcher and its ranks wrote."""
        return (self.directory / str(index) / "log").read_text(errors="replace")

    def await_words(self, index: int, words: str) -> None:
        """Until its log has them."""
        self._wait(lambda: words in self.log(index), f"{words!r} of {index}")

    def _wait(self, is_so: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + HANG_S
        while not is_so():
            assert time.monotonic() < deadline_s, f"hangs: {what}"
            time.sleep(0.1)

    def close(self) -> None:
        """End all that is left."""
        for process in self.processes:
            if process.poll() is None:
                launcher = psutil.Process(process.pid)
                for each in [*launcher.children(recursive=True), launcher]:
                    each.kill()
                process.wait()


@pytest.fixture
def gang(tmp_path: Path, python: Path) -> Iterator[Gang]:
    """A store, and nobody there yet."""
    gang = Gang(tmp_path, python)
    yield gang
    gang.close()


def test_who_fails_first_ends_with_the_exit_code_of_its_rank(gang: Gang) -> None:
    """One more joined before; then nobody leaves: the first failure is told, the others wait for
    their order to stop and end by it."""
    first = gang.start(0, count=1)
    gang.await_words(0, "met as 0 of 1")
    second = gang.start(1, count=2)
    gang.await_words(1, "of 2")
    gang.await_words(0, "of 2")
    assert "the job failed" not in gang.log(0)
    gang.fail(0)
    assert first.wait(HANG_S) == 3
    assert "rank 0 exited with 3 and no worker left or joined: the job failed" in (
        gang.log(0) + gang.log(1)
    ).replace("rank 1", "rank 0")
    assert second.poll() is None
    gang.tell(1, "preempt")
    assert second.wait(HANG_S) == 1
    assert "meeting again" not in gang.log(0)


def test_the_others_meet_again_when_a_member_leaves_or_dies(gang: Gang) -> None:
    """One is asked to leave and gets its signal; another is lost with its machine."""
    for index in range(3):
        gang.start(index, count=3)
    for index in range(3):
        gang.await_words(index, "of 3")
    gang.tell(2, "release")
    gang.processes[3].terminate()
    assert gang.processes[3].wait(HANG_S) == 128 + signal.SIGTERM
    for index in range(2):
        gang.await_words(index, "of 2")
    gang.kill(1)
    gang.await_words(0, "of 1")
    assert gang.processes[1].poll() is None


def test_ranks_have_the_job_s_grace_and_no_more(gang: Gang) -> None:
    """Ranks that do not end are killed after two seconds, not after torchrun's thirty."""
    launcher = gang.start(0, count=1, grace_s=2, mode="stubborn")
    gang.await_words(0, "of 1")
    launcher.terminate()
    assert launcher.wait(20.0) == 128 + signal.SIGTERM
    assert "was ordered to stop by SIGTERM" in gang.log(0)
