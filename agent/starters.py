"""How a shim comes to life apart from the agent: detached, or as a unit of systemd. Must not know
what a worker is told.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol

from agent import shim_files
from agent.worker_record import file_tail
from agent.worker_spec import grace_s
from common.clock import Clock
from common.errors import Unavailable
from common.messages import WorkerOrder
from common.model import WorkerKey

SHIM = Path(__file__).with_name("shim.py")
SLICE = "aryl-jobs.slice"
START_TIMEOUT_S = 10.0
POLL_S = 0.02
SHIM_LOG = "shim.log"
BARE_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8"}
"""Nothing of the agent's own environment reaches a worker, its shim included."""


class ShimStarter(Protocol):
    """Starts the shim of a directory so that no death of the agent reaches it."""

    async def start(self, directory: Path, order: WorkerOrder) -> None:
        """Return when the shim is on its way.

        Raises:
            Unavailable: it could not be started; the text says why.
        """
        ...


def shim_argv(directory: Path) -> tuple[str, ...]:
    """The shim's command line: isolated, without site, so that it stays small."""
    return (sys.executable, "-I", "-S", str(SHIM), str(directory))


def detached_argv(directory: Path) -> tuple[str, ...]:
    """The command line of a process that leaves a detached shim behind and ends."""
    *command, last = shim_argv(directory)
    return (*command, "--detach", last)


def systemd_argv(
    directory: Path,
    order: WorkerOrder,
    *,
    is_user_manager: bool = False,
    user: tuple[int, int] | None = None,
) -> tuple[str, ...]:
    """The command line that makes a shim a transient unit (systemd-run(1)).

    user: (uid, gid) of the unit; without it the system's manager runs it as root.
    KillMode=mixed: a stop of the unit or of the machine reaches the shim alone, which gives the
    worker its grace; the rest of the cgroup is killed only after it. OOMPolicy=continue: the
    kernel's choice of a victim inside the job is the job's exit, not the shim's.
    """
    spec, is_store = order.spec, order.key.is_store
    properties = [
        "Type=exec",
        "KillMode=mixed",
        f"TimeoutStopSec={grace_s(order) + START_TIMEOUT_S:g}",
        "OOMPolicy=continue",
        "OOMScoreAdjust=0",
        f"StandardOutput=append:{directory / SHIM_LOG}",
        f"StandardError=append:{directory / SHIM_LOG}",
    ]
    if spec.memory_bytes_per_worker and not is_store:  # the limits of a worker are for workers
        properties.append(f"MemoryMax={spec.memory_bytes_per_worker}")
    if spec.cpus_per_worker and not is_store:
        properties.append(f"CPUWeight={min(10_000, 100 * spec.cpus_per_worker)}")
    return (
        "systemd-run",
        *(["--user"] if is_user_manager else []),
        "--quiet",
        "--collect",
        "--no-ask-password",
        *([] if user is None else [f"--uid={user[0]}", f"--gid={user[1]}"]),
        f"--slice={SLICE}",
        f"--unit=aryl-worker-{order.key}.service",
        f"--description=Aryl worker {order.key} of {order.tenant}/{order.user}",
        *(f"--property={name}" for name in properties),
        "--",
        *shim_argv(directory),
    )


async def run_command(
    argv: tuple[str, ...],
    *,
    log: Path,
    clock: Clock,
    timeout_s: float,
    exit_codes: tuple[int, ...] = (0,),
    env: Mapping[str, str] = BARE_ENVIRONMENT,
    cwd: str = "/",
) -> None:
    """Run a short command to its end, its output appended to `log`.

    exit_codes: those that mean success.

    Raises:
        Unavailable: it is not there, failed, or took longer.
    """
    with _opened(log) as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=cwd,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            raise Unavailable(f"{argv[0]}: {error}") from error
    try:
        async with clock.timeout(timeout_s):
            exit_code = await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):  # it may have ended in this very moment
            process.kill()
        raise Unavailable(f"{argv[0]}: no end in {timeout_s:g} s") from None
    if exit_code not in exit_codes:
        text = _last_words(log)
        raise Unavailable(f"{argv[0]}: exit code {exit_code}: {text}")


def _opened(log: Path) -> BinaryIO:
    """What a command says is worth less than what it does: a disk may refuse the former."""
    try:
        return log.open("ab")
    except OSError:
        return Path(os.devnull).open("ab")


def _last_words(log: Path) -> str:
    try:
        return log.read_bytes()[-500:].decode(errors="replace").strip()
    except OSError as error:
        return f"what it said was not kept: {error}"


async def first_word(key: WorkerKey, directory: Path, *, clock: Clock) -> None:
    """Return when the shim of a directory has said something of its worker.

    Raises:
        Unavailable: it has not in `START_TIMEOUT_S`, with the last that it wrote.
    """
    try:
        async with clock.timeout(START_TIMEOUT_S):
            while not (directory / shim_files.STATUS_FILE).exists():
                await clock.sleep(POLL_S)
    except TimeoutError:
        text = file_tail(directory / SHIM_LOG, 500).decode(errors="replace").strip()
        raise Unavailable(f"{key}: its shim did not start: {text}") from None


class DetachedStarter:
    """Where there is no systemd: a session of its own, nobody's child."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def start(self, directory: Path, order: WorkerOrder) -> None:
        """As `ShimStarter.start`."""
        await run_command(
            detached_argv(directory),
            log=directory / SHIM_LOG,
            clock=self._clock,
            timeout_s=START_TIMEOUT_S,
        )


class SystemdStarter:
    """Where there is systemd: PID 1 keeps the unit and its cgroup whatever becomes of the agent."""

    def __init__(self, clock: Clock, *, is_user_manager: bool = False) -> None:
        self._clock = clock
        self._is_user_manager = is_user_manager

    def argv(self, directory: Path, order: WorkerOrder) -> tuple[str, ...]:
        """What is run: a unit of the agent's own user, whoever's manager it is.

        An agent may manage the system's units without being root (systemd/50-aryl-agent.rules):
        what it starts there must not be root either, for jobs never are (design 10).
        """
        user = None if self._is_user_manager else (os.geteuid(), os.getegid())
        return systemd_argv(directory, order, is_user_manager=self._is_user_manager, user=user)

    async def start(self, directory: Path, order: WorkerOrder) -> None:
        """As `ShimStarter.start`."""
        await run_command(
            self.argv(directory, order),
            log=directory / SHIM_LOG,
            clock=self._clock,
            timeout_s=START_TIMEOUT_S,
        )
