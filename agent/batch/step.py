"""`srun` within a batch script: starts the tasks of a step that belong to this node.

    python -I -S agent/batch/step.py [OPTION...] PROGRAM [ARGUMENT...]

Each node of a job runs the script, so each calls `srun` itself and starts its own tasks. Standard
library only, as `run.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

CHECKOUT = str(Path(__file__).resolve().parents[2])
if CHECKOUT not in sys.path:
    sys.path.insert(
        0, CHECKOUT
    )  # a script has only its own folder on its path, and -I not even that

from agent.batch import variables  # noqa: E402 - behind the path
from agent.batch.run import DIRECTORY, OPEN_MODE, PASSED_ON  # noqa: E402 - the same
from common.slurm import patterns  # noqa: E402 - the same
from common.slurm.nodelists import compress  # noqa: E402 - the same
from common.slurm.options import Kind, OptionError, read  # noqa: E402 - the same
from common.slurm.srun_options import STEP_OPTIONS  # noqa: E402 - the same

NO_FILE = {"none": "/dev/null", "all": ""}
MOST_STEPS = 100_000


_WRITING = threading.Lock()
"""Lines of several tasks do not mix."""


class StepError(Exception):
    """A step that cannot start; the text says why."""


@dataclass
class Shape:
    """The tasks of a step: how many in all, and on how many nodes."""

    tasks: int
    nodes: int

    @property
    def each(self) -> int:
        """Tasks on one node."""
        return self.tasks // self.nodes


def main(words: list[str]) -> int:
    """Run the tasks of this node; the highest of their exit codes."""
    environ = dict(os.environ)
    try:
        options, command = _read(words)
        shape = _shape(options, environ)
        is_on_all = shape.nodes == variables.node_count(environ)  # indices can lie beyond the count
        if not is_on_all and variables.node_index(environ) >= shape.nodes:
            return 0
        step = _take_step(environ)
        host = socket.gethostname().partition(".")[0]
        given = _variables(options, environ, shape, step)
        return Step(command, options, given, shape, host).run()
    except StepError as error:
        sys.stderr.write(f"srun: error: {error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"srun: error: {error.filename}: {error.strerror}\n")
        return 1


def _read(words: list[str]) -> tuple[dict[str, str], list[str]]:
    try:
        found, command = read(words, STEP_OPTIONS)
    except OptionError as error:
        raise StepError(str(error)) from None
    for option, _ in found:
        if option.kind == Kind.REFUSED:
            raise StepError(f"--{option.name} is not supported: {option.why}")
    options = {option.name: value for option, value in found}
    if options.get("mpi", "none") != "none":
        raise StepError("--mpi: expected none; Aryl starts no MPI daemons (use PyTorch's launcher)")
    if not command:
        raise StepError("no command given to execute")
    return options, command


def _number(options: dict[str, str], name: str, default: int) -> int:
    text = options.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise StepError(f"--{name}: {text!r}, expected a number of at least 1")
    return int(text)


def _shape(options: dict[str, str], environ: dict[str, str]) -> Shape:
    """The tasks of the step.

    Raises:
        StepError: more nodes than the job has, or tasks that do not spread evenly.
    """
    own = options.get("jobid")
    if own and own not in (variables.job_number(environ), environ.get("ARYL_JOB_ID")):
        raise StepError(f"--jobid: this is job {variables.job_number(environ)}, not {own}")
    all_nodes = variables.node_count(environ)
    least = options.get("nodes", "").partition("-")[0]
    nodes = _number(options | {"nodes": least}, "nodes", all_nodes)
    if nodes > all_nodes:
        raise StepError(f"--nodes: {nodes}, the job has {all_nodes}")
    each = _number(options, "ntasks-per-node", variables.tasks_per_node(environ))
    tasks = _number(options, "ntasks", nodes * each)
    if tasks < nodes and "nodes" not in options:
        nodes = tasks
    if tasks % nodes:
        raise StepError(f"--ntasks: {tasks} tasks do not spread evenly over {nodes} nodes")
    return Shape(tasks, nodes)


def _take_step(environ: dict[str, str]) -> int:
    """The number of the step; notes who runs it, so that signals of the job reach it."""
    directory = environ.get(DIRECTORY)
    if directory is None:
        raise StepError("this is no batch script of Aryl's")
    for step in range(MOST_STEPS):
        path = Path(directory) / "steps" / str(step)
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            (path / "pid").write_text(str(os.getpid()))
            return step
    raise StepError(f"the job has started {MOST_STEPS} steps")


def _variables(
    options: dict[str, str], environ: dict[str, str], shape: Shape, step: int
) -> dict[str, str]:
    """The variables that all tasks of the step share."""
    nodes = [name for name in environ.get("ARYL_NODES", "").split(",") if name][: shape.nodes]
    found = variables.of_script(environ, host=socket.gethostname().partition(".")[0]) | {
        "SLURM_STEP_ID": str(step),
        "SLURM_STEPID": str(step),
        "SLURM_NTASKS": str(shape.tasks),
        "SLURM_NPROCS": str(shape.tasks),
        "SLURM_NNODES": str(shape.nodes),
        "SLURM_STEP_NUM_TASKS": str(shape.tasks),
        "SLURM_STEP_NUM_NODES": str(shape.nodes),
        "SLURM_STEP_TASKS_PER_NODE": variables.each(shape.each, shape.nodes),
        "SLURM_TASKS_PER_NODE": variables.each(shape.each, shape.nodes),
    }
    if nodes:
        found["SLURM_STEP_NODELIST"] = compress(nodes)
    if "cpus-per-task" in options:
        found["SLURM_CPUS_PER_TASK"] = options["cpus-per-task"]
    if "job-name" in options:
        found["SLURM_STEP_NAME"] = options["job-name"]
    return _exported(options.get("export", "ALL"), found)


def _exported(asked: str, environ: dict[str, str]) -> dict[str, str]:
    """What `--export` leaves of the variables, and what it adds."""
    names = asked.split(",")
    kept = dict(environ)
    if "ALL" not in names:
        wanted = {name.partition("=")[0] for name in names}
        prefixes = ("SLURM", "ARYL", "CUDA", "MASTER")
        kept = {k: v for k, v in environ.items() if k in wanted or k.startswith(prefixes)}
        kept.setdefault("PATH", environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"))
    return kept | dict(name.split("=", 1) for name in names if "=" in name)


class Step:
    """The tasks of one step on this node."""

    def __init__(
        self,
        command: list[str],
        options: dict[str, str],
        environ: dict[str, str],
        shape: Shape,
        host: str,
    ) -> None:
        self._command, self._options, self._environ = command, options, environ
        self._shape, self._host = shape, host
        self._tasks: list[subprocess.Popen[bytes]] = []
        self._copies: list[threading.Thread] = []
        self._opened: dict[str, int] = {}
        self._early: list[int] | None = []
        """Signals that came before all tasks had started; None: they have."""

    def run(self) -> int:
        """Start all tasks and wait for them; the highest exit code."""
        for number in PASSED_ON:
            signal.signal(number, self._pass_on)
        every = range(self._shape.each)
        gpus = [self._own_gpus(index) for index in every]  # before any of them starts
        for index in every:
            self._tasks.append(self._start(index, gpus[index]))
        early, self._early = self._early, None
        for held in early or ():
            self._send(held)
        running = {task.pid: index for index, task in enumerate(self._tasks)}
        codes: list[int] = []
        while running:  # in the order in which they end: one that failed may have to end the rest
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            if found is None:
                continue
            if found.si_pid in running:
                index = running.pop(found.si_pid)
                codes.append(self._end(index, self._tasks[index]))
            else:  # started by the shell whose place srun took by `exec`
                os.waitpid(found.si_pid, 0)
        for copy in self._copies:
            copy.join()
        return max(codes)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """A task gets the signal, and passes it on as it needs: its helpers may have to go on."""
        if self._early is not None:
            self._early.append(number)  # a task that starts now is in no list yet
        else:
            self._send(number)

    def _send(self, number: int) -> None:
        """Send a signal to the tasks of which no end was seen.

        Without `poll`, which would take the end of a task away from the loop that waits for it.
        """
        for task in self._tasks:
            if task.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(task.pid, number)

    def _start(self, index: int, gpus: dict[str, str]) -> subprocess.Popen[bytes]:
        rank = variables.node_index(self._environ) * self._shape.each + index
        environ = self._environ | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(index)} | gpus
        out = self._file("output", environ)
        err = self._file("error", environ)
        piped = subprocess.PIPE if "label" in self._options and out is None else None
        try:
            task = subprocess.Popen(
                self._command,
                stdin=self._stdin(rank),
                stdout=out if piped is None else piped,
                stderr=err if err is not None else piped if out is None else subprocess.STDOUT,
                env=environ,
                cwd=self._options.get("chdir"),
                process_group=0,
            )
        except FileNotFoundError as error:
            raise StepError(f"execve(): {error.filename}: {error.strerror}") from None
        for pipe, to_fd in ((task.stdout, 1), (task.stderr, 2)):
            if pipe is not None:
                copy = threading.Thread(target=_label, args=(rank, pipe, to_fd), daemon=True)
                copy.start()
                self._copies.append(copy)
        return task

    def _own_gpus(self, index: int) -> dict[str, str]:
        """The GPUs of one task, where each task has its own."""
        text = self._options.get("gpus-per-task") or self._environ.get("SLURM_GPUS_PER_TASK", "")
        count = text.rpartition(":")[2]
        if not count.isdecimal():
            return {}
        uuids = variables.gpus(self._environ)
        own = uuids[index * int(count) : (index + 1) * int(count)]
        if len(own) < int(count):
            raise StepError(
                f"--gpus-per-task: {self._shape.each} tasks of {count} GPUs, "
                f"this node has {len(uuids)}"
            )
        return {"CUDA_VISIBLE_DEVICES": ",".join(own)}

    def _stdin(self, rank: int) -> int | None:
        asked = self._options.get("input", "all")
        if asked in ("none", "/dev/null") or (asked == "all" and rank > 0):
            return subprocess.DEVNULL
        return None if asked == "all" else os.open(asked, os.O_RDONLY | os.O_CLOEXEC)

    def _file(self, option: str, environ: dict[str, str]) -> int | None:
        """The file of a task's output; None: where that of the script goes."""
        asked = self._options.get(option, "all")
        name = NO_FILE.get(asked, asked)
        if not name:
            return None
        letters = variables.of_patterns(environ, host=self._host)
        path = patterns.filled(name, letters)
        if path not in self._opened:
            mode = self._options.get("open-mode") or environ.get(OPEN_MODE, "truncate")
            is_new = not mode.startswith("a") and "SLURM_RESTART_COUNT" not in environ
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._opened[path] = os.open(path, flags | (os.O_TRUNC if is_new else 0), 0o666)
        return self._opened[path]

    def _end(self, index: int, task: subprocess.Popen[bytes]) -> int:
        code = task.wait()
        rank = variables.node_index(self._environ) * self._shape.each + index
        if code and "quiet" not in self._options:
            how = f"Exited with exit code {code}" if code > 0 else signal.strsignal(-code)
            node = variables.node_name(self._environ, host=self._host)
            sys.stderr.write(f"srun: error: {node}: task {rank}: {how}\n")
        if code and self._options.get("kill-on-bad-exit", "0") != "0":
            self._send(signal.SIGTERM)
        return 128 - code if code < 0 else code


def _label(rank: int, pipe: IO[bytes], to_fd: int) -> None:
    """Copy a task's output, each line with its number and in one piece.

    Where nothing takes it any more, as behind `| head`, the pipe is closed. Its task then gets
    SIGPIPE as it would without labels, and does not wait for a reader for ever.
    """
    with pipe, contextlib.suppress(OSError):
        for line in pipe:
            data = f"{rank}: ".encode() + line + (b"" if line.endswith(b"\n") else b"\n")
            with _WRITING:
                while data:
                    data = data[os.write(to_fd, data) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
