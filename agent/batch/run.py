"""Runs the batch script of a Slurm job on one worker, and passes signals on as Slurm does.

    python -I -S agent/batch/run.py SCRIPT ARGUMENT...

SCRIPT is the text of the script. Its output goes to the file of `--output`; the worker's log names
the file, and has its end where the script failed. Standard library only: it runs as the job's user.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

CHECKOUT = str(Path(__file__).resolve().parents[2])
if CHECKOUT not in sys.path:
    sys.path.insert(
        0, CHECKOUT
    )  # a script has only its own folder on its path, and -I not even that

from agent.batch import variables  # noqa: E402 - behind the path
from common.slurm import patterns  # noqa: E402 - the same

OUTPUT, ERROR = "ARYL_BATCH_OUTPUT", "ARYL_BATCH_ERROR"
"""File names with Slurm's patterns; without an output file all goes into the worker's log."""
OPEN_MODE = "SLURM_OPEN_MODE"
SIGNAL = "ARYL_BATCH_SIGNAL"
"""`USR2` or `B:USR2`: the signal of `--signal`; B: for the script's shell alone."""
DIRECTORY = "ARYL_BATCH_DIR"
STEP = Path(__file__).with_name("step.py")
CLIENTS = ("sbatch", "squeue", "sinfo", "scancel", "scontrol", "sacct")
ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
PASSED_ON = (*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGCONT)
TAIL_BYTES = 64 << 10
KILL_WAIT_S = 30.0
"""What a cancelled script has at most, as with Slurm's KillWait; `--signal` may give it more
before a preemption or the end of its time."""
POLL_S = 0.2


def main(words: list[str]) -> int:
    """Run the script; its exit code. A signal that ended it ends this process as well."""
    script, *arguments = words
    host = socket.gethostname().partition(".")[0]
    environ = variables.of_script(os.environ, host=host)
    directory = Path(tempfile.mkdtemp(prefix="aryl-batch-"))
    try:
        code = _run(script, arguments, environ, directory, host)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler to take back
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _run(
    script: str, arguments: list[str], environ: dict[str, str], directory: Path, host: str
) -> int:
    path = directory / "slurm_script"
    path.write_text(script)
    path.chmod(0o700)
    (directory / "steps").mkdir()
    _write_programs(directory / "bin")
    environ |= {
        DIRECTORY: str(directory),
        "PATH": f"{directory / 'bin'}:{environ.get('PATH', '/usr/local/bin:/usr/bin:/bin')}",
    }
    output, error = _files(environ, host)
    try:
        out = _opened(output, environ)
        err = out if error in (None, output) else _opened(error, environ)
    except OSError as failure:
        sys.stderr.write(f"batch: {failure.filename}: {failure.strerror}\n")
        return 1
    argv = [*interpreter(script), str(path), *arguments]
    awake = _wakeup_fd()  # before the script starts: no signal is lost, and none ends us alone
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT if out is None or err == out else err,
            env=environ,
            process_group=0,
        )
    except OSError as failure:
        sys.stderr.write(f"batch: {argv[0]}: {failure.strerror}\n")
        return 127
    code = Supervisor(child, directory / "steps", environ, awake).wait()
    if code and output is not None:
        _show_end(error or output)
    return code


def interpreter(script: str) -> list[str]:
    """The program of the script's first line, with its one argument."""
    first = script.partition("\n")[0].removeprefix("#!").strip()
    return first.split(None, 1) or ["/bin/sh"]


def _write_programs(directory: Path) -> None:
    """Slurm's commands for the script: first on its path, wherever it was submitted."""
    directory.mkdir()
    python = _quoted(sys.executable)
    programs = {"srun": f"{python} -I -S {_quoted(str(STEP))}"}
    for name in CLIENTS:
        programs[name] = f"{python} -I -m coordinator.cli.slurm.main {name}"
    for name, command in programs.items():
        program = directory / name
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        program.chmod(0o755)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _files(environ: Mapping[str, str], host: str) -> tuple[Path | None, Path | None]:
    """The files of output and errors; None: the worker's log, or where the output goes."""
    asked = environ.get(OUTPUT, "")
    if not asked:
        return None, None
    letters = variables.of_patterns(environ, host=host)
    output = _file(asked, letters)
    return output, _file(environ[ERROR], letters) if environ.get(ERROR) else None


def _file(pattern: str, letters: Mapping[str, str]) -> Path:
    """The file of a pattern; a node behind the first has one of its own."""
    name = patterns.filled(pattern, letters)
    is_shared = letters["n"] != "0" and not any(f"%{letter}" in pattern for letter in "nNt")
    path = Path(name)
    is_file = not path.exists() or path.is_file()
    return Path(f"{name}.{letters['n']}") if is_shared and is_file else path


def _opened(path: Path | None, environ: Mapping[str, str]) -> int | None:
    if path is None:
        return None
    sys.stdout.write(f"batch: output goes to {path.absolute()}\n")
    sys.stdout.flush()
    # A script that starts again after a preemption adds to what it wrote before.
    is_new = environ.get(OPEN_MODE, "truncate") != "append" and "SLURM_RESTART_COUNT" not in environ
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if is_new else 0)
    return os.open(path, flags, 0o666)


def _show_end(path: Path) -> None:
    """The end of the output in the worker's log: why a job failed is read there."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if not path.is_file():
            return
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        sys.stdout.write(f"batch: the end of {path.absolute()}:\n")
        sys.stdout.flush()
        sys.stdout.buffer.write(file.read())
        sys.stdout.buffer.flush()


class Supervisor:
    """Waits for a script and passes on its signals.

    A request to leave gets the signal of `--signal`: for the tasks of the steps, or with `B:` for
    the shell of the script. An ending signal goes to the steps; without any, to the shell and to
    the programs that it has started.

    Args:
        awake: where the numbers of signals arrive.
    """

    def __init__(
        self, child: subprocess.Popen[bytes], steps: Path, environ: Mapping[str, str], awake: int
    ) -> None:
        self._child = child
        self._steps = steps
        self._signal = environ.get(SIGNAL, "")
        self._was_signalled = False
        self._give_up_at_s = float("inf")
        self._control: socket.socket | None = None
        if self._signal:
            self._connect(environ.get("ARYL_CONTROL_SOCKET", ""))
        self._lines = b""
        self._awake = awake

    def _connect(self, path: str) -> None:
        with contextlib.suppress(OSError):
            control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            control.connect(path)
            self._control = control
            self._say(type="hello")

    def _say(self, **line: object) -> None:
        with contextlib.suppress(OSError):
            if self._control is not None:
                self._control.sendall(json.dumps(line).encode() + b"\n")

    def wait(self) -> int:
        """The exit code of the script; negative: the signal that ended it.

        A process that is left behind is ended with the worker.
        """
        while self._child.poll() is None or self._is_group_alive():
            sources: list[int | socket.socket] = [self._awake]
            if self._control is not None:
                sources.append(self._control)
            # A program that outlives its shell after a signal saves: nothing reports its end.
            is_leaving = self._was_signalled or self._give_up_at_s < float("inf")
            ready, _, _ = select.select(sources, (), (), POLL_S if is_leaving else None)
            if self._awake in ready:
                for number in os.read(self._awake, 256):
                    if number != signal.SIGCHLD:
                        self._pass_on(signal.Signals(number))
            if self._control in ready:
                self._hear()
            if time.monotonic() > self._give_up_at_s:
                return -signal.SIGKILL
        return self._child.returncode

    def _is_group_alive(self) -> bool:
        """Whether programs of a script that was signalled still run."""
        if not self._was_signalled:
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, 0)
            return True
        return False

    def _hear(self) -> None:
        assert self._control is not None
        data = b""
        with contextlib.suppress(OSError):
            data = self._control.recv(65_536)
        if not data:
            self._control.close()
            self._control = None
            return
        *lines, self._lines = (self._lines + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message.get("type") == "checkpoint_request":
                self._say(type="checkpoint", stage="working", eta_s=message.get("grace_s", 0.0))
                self._ask()
            elif message.get("type") == "stop" and message.get("reason") == "cancel":
                self._give_up_at_s = time.monotonic() + KILL_WAIT_S

    def _ask(self) -> None:
        """The signal of `--signal`, as the job has to leave."""
        shell_only, name = self._signal.startswith("B:"), self._signal.removeprefix("B:")
        number = signal.Signals[f"SIG{name}"]
        self._was_signalled = True
        if shell_only:
            _kill(self._child.pid, number)
            return
        for pid in self._running_steps() or children(self._child.pid):
            _kill(pid, number)

    def _pass_on(self, number: signal.Signals) -> None:
        steps = self._running_steps()
        targets = steps or children(self._child.pid)
        if number in ENDING:
            self._was_signalled = True
            if not steps:
                targets = [self._child.pid, *targets]
        for pid in targets:
            _kill(pid, number)

    def _running_steps(self) -> list[int]:
        """Processes of `srun` that run a step."""
        found: list[int] = []
        for path in sorted(self._steps.glob("*/pid")):
            with contextlib.suppress(OSError, ValueError):
                pid = int(path.read_text())
                os.kill(pid, 0)
                found.append(pid)
        return found


def children(pid: int) -> list[int]:
    """Processes that a process has started and that run."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # A name in brackets may hold blanks and brackets: the rest begins behind the last one.
            state, parent, *_ = path.read_text(errors="replace").rpartition(")")[2].split()
            if int(parent) == pid and state != "Z":
                found.append(int(path.parent.name))
    return sorted(found)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _wakeup_fd() -> int:
    """Take signals from now on; the end of a pipe that has their numbers."""
    awake, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (*PASSED_ON, signal.SIGCHLD):
        signal.signal(number, _noted)
    return awake


def _noted(number: int, frame: FrameType | None) -> None:
    """The wakeup pipe has the number."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
