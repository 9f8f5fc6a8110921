"""The worker's process as its shim handles it: started, signalled, ended to the last descendant.

Standard library only and without `typing`, because a shim must stay under 12 MB.
"""

from __future__ import annotations

import contextlib
import os
import signal

from agent.shim import files as shim_files
from agent.shim import paths as shim_paths

NOT_FOUND_EXIT_CODE = 127
NOT_EXECUTABLE_EXIT_CODE = 126


class Worker:
    """One process in a session and group of its own, and all its descendants."""

    def __init__(
        self,
        argv: list[str],
        env: dict[str, str],
        workdir: str,
        log_fd: int,
        mark: int | None = None,
    ) -> None:
        self.exit_code: int | None = None
        self.error = ""
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid == 0:
            _become(argv, env, workdir, log_fd, write_fd, mark)
        os.close(write_fd)
        self.start_ticks = shim_files.start_ticks(self.pid)
        with open(read_fd, "rb") as pipe:
            self.error = pipe.read().decode()  # empty once exec has closed it

    def seen_exit_code(self) -> int | None:
        """How its process has ended, reaped or not; None while it runs."""
        if self.exit_code is not None:
            return self.exit_code
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def signal_main(self, number: int) -> None:
        """Signal the named process only; it signals its own children as it needs.

        Data loaders that die first take the emergency save with them.
        """
        if self.exit_code is None:
            os.kill(self.pid, number)

    def kill_all(self, spared: set[int]) -> int:
        """SIGKILL the worker's group and all processes below the shim.

        Returns how many still have to die.
        """
        if self.exit_code is None:
            # Until it is reaped its number, and so its group's, cannot be reused.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        below = shim_files.descendants(os.getpid())
        left = [pid for pid in below if pid not in spared]
        for pid in left:
            _signal(pid, below[pid], signal.SIGKILL)
        return len(left)

    def is_childless(self) -> bool:
        """True if the shim has no child, and so no descendant, as it adopts every orphan.

        The kernel answers this: a look through /proc can miss a process that forks meanwhile.
        """
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        return False

    def freeze(self, spared: set[int], *, is_frozen: bool) -> None:
        """SIGSTOP, or SIGCONT, to all processes below the shim.

        It repeats until no new process appears: a process that was about to fork may have done so
        first.
        """
        number, seen = signal.SIGSTOP if is_frozen else signal.SIGCONT, set(spared)
        while True:
            below = shim_files.descendants(os.getpid())
            new = [pid for pid in below if pid not in seen]
            if not new:
                break
            seen.update(new)
            for pid in new:
                _signal(pid, below[pid], number)

    def reap(self) -> list[int]:
        """Collect every child that ended, its own or adopted; their process ids."""
        ended: list[int] = []
        with contextlib.suppress(ChildProcessError):
            while True:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is None:
                    break
                if found.si_pid == self.pid:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(self.pid, signal.SIGKILL)
                _, status = os.waitpid(found.si_pid, 0)
                if found.si_pid == self.pid:
                    self.exit_code = os.waitstatus_to_exitcode(status)
                ended.append(found.si_pid)
        return ended


RLIMIT_LOCKS = 10
"""As `agent.workers.process_marks.RLIMIT_LOCKS`."""


def _signal(pid: int, start_ticks: int, number: int) -> None:
    """Signal a process that was seen below the shim, unless its number is another's by now."""
    if shim_files.start_ticks(pid) == start_ticks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _bear(mark: int | None) -> None:
    """In the child: set the mark that every process of the worker inherits.

    The hard limit stays, so that a shim inside a job can mark its own worker. Where a lower hard
    limit is set, the environment is the only mark.
    """
    import resource  # only here: the shim itself does without its memory

    if mark is not None:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(RLIMIT_LOCKS, (mark, resource.getrlimit(RLIMIT_LOCKS)[1]))


def _become(
    argv: list[str],
    env: dict[str, str],
    workdir: str,
    log_fd: int,
    error_fd: int,
    mark: int | None,
) -> None:
    """In the child: become the worker, or report on `error_fd` why not."""
    exit_code = NOT_EXECUTABLE_EXIT_CODE
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (
            signal.SIGHUP,
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGCHLD,
            signal.SIGPIPE,
        ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        null_fd = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null_fd, 0)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.chdir(workdir)
        os.umask(0o022)
        _bear(mark)
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            exit_code = NOT_FOUND_EXIT_CODE
        reason = shim_paths.error_text(error.errno or 0)
        is_its_own = error.errno in shim_paths.JOB_ERRNOS
        what = "cannot start" if is_its_own else f"{shim_paths.NODE_ERROR}:"
        os.write(error_fd, f"{what} {argv[0]!r}: {reason}".encode())
    except (ValueError, TypeError) as error:  # a zero byte in an argument or variable
        os.write(error_fd, f"cannot start {argv[0]!r}: {error}".encode())
    finally:
        os._exit(exit_code)
