"""A cell as `aryl up` makes it, and jobs on it, driven by the commands that people type.

Most commands are given again and again until they answer as expected, so they run in this process.
Must not know what a job trains.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.harness.live.commands import Said, given

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs/examples"
ARYL = Path(sys.executable).with_name("aryl")
HANG_S = 240.0
"""After which something hangs, on however slow a machine."""


class Step(NamedTuple):
    """One line of a training's curve."""

    at_s: float
    step: int
    ranks: int
    loss: float
    pid: int


class Change(NamedTuple):
    """What one change of its workers cost a job.

    pause_s: last step before to first step after; of a start, from when its gang was ready.
    start_up_s: of these what the job's own processes took from their start to that step.
    repeated: steps that were trained a second time.
    """

    what: str
    ranks: int
    pause_s: float
    start_up_s: float
    repeated: int

    @property
    def beyond_s(self) -> float:
        """What the change took beyond the job's own start-up."""
        return self.pause_s - self.start_up_s


class LiveCell:
    """A running cell; `directory` is shared storage for its jobs."""

    def __init__(self, directory: Path, python: Path) -> None:
        self.directory = directory
        self._path = f"{python.parent}:/usr/local/bin:/usr/bin:/bin"
        self._env = os.environ | {"ARYL_HOME": str(directory / "home"), "TMPDIR": str(directory)}
        for file in EXAMPLES.glob("*.py"):
            shutil.copy(file, directory)

    @contextmanager
    def up(self, nodes: str) -> Iterator[LiveCell]:
        """Run the cell for the time of this block."""
        argv = [str(ARYL), "up", "--no-workload", "--nodes", nodes, "--gpus-per-node", "1"]
        with (self.directory / "up.log").open("wb") as log:
            process = subprocess.Popen(argv, env=self._env, stdout=log, stderr=log)
        try:
            self.wait("every node is heard", lambda: self._has_heard_all(nodes))
            yield self
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(HANG_S)

    def _has_heard_all(self, nodes: str) -> bool:
        with_all = sum(int(part) for part in nodes.split("+"))
        done = self._run("node", "list", "-o", "json")
        if done.code:
            return False
        listed = json.loads(done.out)["nodes"]
        return len(listed) == with_all and all(node["is_heard"] for node in listed)

    def _run(self, *words: str) -> Said:
        return given(self._env, *words)

    def aryl(self, *words: str) -> str:
        """What a command prints; it must succeed."""
        done = self._run(*words)
        assert done.code == 0, f"aryl {' '.join(words)}: {done.out}{done.err}"
        return done.out

    def printed(self, *words: str) -> str:
        """What a command prints, if it succeeds."""
        done = self._run(*words)
        return "" if done.code else done.out

    def wait(self, what: str, is_so: Callable[[], bool]) -> None:
        """Until something is so; a hang tells what was waited for, and of the jobs their logs."""
        deadline_s = time.monotonic() + HANG_S
        while not is_so():
            assert time.monotonic() < deadline_s, f"hangs: {what}\n{self._run('job', 'list').out}"
            time.sleep(0.2)

    def submit(self, example: str, *flags: str, more: str = "") -> Job:
        """Submit an example's job file, as its first line says, with more TOML at its end."""
        text = (EXAMPLES / f"{example}.toml").read_text()
        file = self.directory / f"{example}.toml"
        file.write_text(f"{text}\n{more}")
        job = self.aryl(
            "job", "submit", "-q", str(file), "--workdir", str(self.directory),
            "--env", f"PATH={self._path}", "--env", "OMP_NUM_THREADS=1", *flags,
        ).strip()  # fmt: skip
        return Job(self, job)


class Job:
    """A job of the cell."""

    def __init__(self, cell: LiveCell, job_id: str) -> None:
        self.cell = cell
        self.job_id = job_id

    def described(self) -> dict[str, Any]:
        """What `aryl job describe` knows."""
        text = self.cell.aryl("job", "describe", self.job_id, "-o", "json")
        value: dict[str, Any] = json.loads(text)["description"]
        return value

    @property
    def state(self) -> str:
        """Its state, in the word of `aryl job list`."""
        return str(self.described()["job"]["state"])

    def nodes(self, *, flexible: bool) -> list[str]:
        """The nodes of its flexible workers, or of its base workers."""
        workers = self.described()["workers"]
        return [one["node"] for one in workers if one["is_flexible"] == flexible]

    def log(self, worker: int = 0) -> str:
        """The log of a worker of its newest attempt; empty before there is one."""
        return self.cell.printed("job", "logs", self.job_id, "--worker", str(worker))

    def ends(self) -> str:
        """Wait for its end; its state then."""
        self.cell.wait(f"the end of {self.job_id}", lambda: self.state in ("succeeded", "failed"))
        return self.state

    def ranks(self, script: str) -> list[psutil.Process]:
        """The processes that run its script, not those that launch it."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
                is_rank = words[-1:] == [script] and not any("launcher" in word for word in words)
                if is_rank and process.environ().get("ARYL_JOB_ID") == self.job_id:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found


def curve(file: Path) -> list[Step]:
    """Every step that was trained, in the order of time; a line that is half written is not one."""
    if not file.exists():
        return []
    *lines, _ = file.read_text().split("\n")
    rows = (line.split(",") for line in lines)
    return [
        Step(float(at), int(step), int(ranks), float(loss), int(pid))
        for at, step, ranks, loss, pid in rows
    ]
