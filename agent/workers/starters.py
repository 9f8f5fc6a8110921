"""Starts a shim that outlives the agent: detached, or as a systemd unit."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Protocol

from agent.proc.commands import ended, left_behind, started
from agent.shim import files as shim_files
from agent.workers.lost import is_shim_silent
from agent.workers.record import file_tail
from agent.workers.runner import StorageSilentError
from agent.workers.spec import grace_s
from common.clock import Clock
from common.errors import Unavailable
from common.faults import STORAGE_SILENT
from common.messages import WorkerOrder
from common.model import WorkerKey

SHIM = Path(__file__).parents[1] / "shim/main.py"
SLICE = "aryl-jobs.slice"
START_TIMEOUT_S = 10.0
UNIT_EXISTS = ("was already loaded or has a fragment file", "already exists")
"""systemd's texts for a unit name that exists: since version 252, and before."""
POLL_S = 0.02
SHIM_LOG = "shim.log"
BARE_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8"}
"""Nothing of the agent's own environment reaches a worker, its shim included."""


class ShimStarter(Protocol):
    """Starts the shim of a directory so that the agent's death does not end it."""

    async def start(self, directory: Path, order: WorkerOrder) -> None:
        """Return when the shim is starting.

        Raises:
            Unavailable: it could not be started; the text gives the reason.
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
    unit: str = "",
) -> tuple[str, ...]:
    """The command line that makes a shim a transient unit (systemd-run(1)).

    user: (uid, gid) of the unit; without it the system's manager runs it as root.
    unit: its name; empty: that of its worker.

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
        f"--unit={unit or unit_name(order.key)}",
        f"--description=Aryl worker {order.key} of {order.tenant}/{order.user}",
        *(f"--property={name}" for name in properties),
        "--",
        *shim_argv(directory),
    )


def unit_name(key: WorkerKey) -> str:
    """The unit of a worker."""
    return f"aryl-worker-{key}.service"


def own_unit_name(key: WorkerKey, directory: Path) -> str:
    """A second unit name, where another worker's unit has the first: no two share one directory."""
    digest = blake2b(os.fsencode(directory), digest_size=4).hexdigest()
    return f"aryl-worker-{key}-{digest}.service"


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
    """Run a short command to its end, its output appended to `log`; it never outlives its caller.

    exit_codes: those that mean success.

    Raises:
        Unavailable: the command is missing, failed, or took longer.
    """
    with _opened(log) as output:
        try:
            starting = asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=cwd,
                env=env,
                start_new_session=True,
            )
            process = await started(starting, name=argv[0], clock=clock)
        except OSError as error:
            raise Unavailable(f"{argv[0]}: {error}") from error
    try:
        exit_code = await ended(process, name=argv[0], clock=clock, timeout_s=timeout_s)
    except TimeoutError as error:
        said = f"{argv[0]}: no end in {timeout_s:g} s"
        raise Unavailable("; ".join((said, *left_behind(error)))) from None
    if exit_code not in exit_codes:
        text = _last_words(log)
        raise Unavailable(f"{argv[0]}: exit code {exit_code}: {text}")


def _opened(log: Path) -> BinaryIO:
    """Open the log of a command, if the disk allows: the command matters more than its output."""
    try:
        return log.open("ab")
    except OSError:
        return Path(os.devnull).open("ab")


def _last_words(log: Path) -> str:
    try:
        return log.read_bytes()[-500:].decode(errors="replace").strip()
    except OSError as error:
        return f"its output was not kept: {error}"


async def first_word(key: WorkerKey, directory: Path, *, clock: Clock) -> None:
    """Return when the shim of a directory has written a first status of its worker.

    Raises:
        Unavailable: it has not in `START_TIMEOUT_S`, with its last output. For a shim that exists
            and writes nothing, the text names the storage on which its worker begins.
    """
    try:
        async with clock.timeout(START_TIMEOUT_S):
            while not (directory / shim_files.STATUS_FILE).exists():
                await clock.sleep(POLL_S)
    except TimeoutError:
        text = file_tail(directory / SHIM_LOG, 500).decode(errors="replace").strip()
        if is_shim_silent(directory):  # its worker enters its directory before its first status
            text = f"workdir or command: {STORAGE_SILENT} in {START_TIMEOUT_S:g} s {text}".strip()
            raise StorageSilentError(f"{key}: its shim did not start: {text}") from None
        text = text or f"no output in {START_TIMEOUT_S:g} s"
        raise Unavailable(f"{key}: its shim did not start: {text}") from None


class DetachedStarter:
    """Starts shims without systemd: each in a session of its own, without a parent."""

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


class Systemd(Protocol):
    """The calls that a starter makes to systemd; `RealSystemd` runs its programs."""

    async def run(self, argv: tuple[str, ...], *, log: Path, timeout_s: float) -> None:
        """Run a command to its end, its output appended to `log`.

        Raises:
            Unavailable: the command is missing, failed, or took too long; with its output.
        """
        ...

    async def ask(self, argv: tuple[str, ...], *, timeout_s: float) -> str:
        """A command's output; errors as `run`."""
        ...


class RealSystemd:
    """Runs systemd's own programs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def run(self, argv: tuple[str, ...], *, log: Path, timeout_s: float) -> None:
        """As `Systemd.run`."""
        await run_command(argv, log=log, clock=self._clock, timeout_s=timeout_s)

    async def ask(self, argv: tuple[str, ...], *, timeout_s: float) -> str:
        """As `Systemd.ask`."""
        with tempfile.TemporaryDirectory() as scratch:
            answer = Path(scratch, "answer")
            await run_command(argv, log=answer, clock=self._clock, timeout_s=timeout_s)
            return await asyncio.to_thread(answer.read_text, errors="replace")


class SystemdStarter:
    """Starts shims with systemd: PID 1 keeps the unit and its cgroup whatever happens to the agent.

    A unit of this name may exist already, and its node is not at fault for that: an agent that was
    killed in the middle of a start had asked for it, or it has failed and is still remembered. A
    live unit is the worker's own if its command names the worker's directory: the shim in it is the
    wanted shim. A unit of another directory, as of a second agent on this machine, is left alone,
    and ours gets another name.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        is_user_manager: bool = False,
        systemd: Systemd | None = None,
    ) -> None:
        self._clock = clock
        self._is_user_manager = is_user_manager
        self._systemd = systemd or RealSystemd(clock)

    def argv(self, directory: Path, order: WorkerOrder, *, unit: str = "") -> tuple[str, ...]:
        """The command line: a unit with the agent's own user, under any manager.

        An agent may manage the system's units without being root (systemd/50-aryl-agent.rules):
        what it starts there must not be root either, for jobs never are.
        """
        user = None if self._is_user_manager else (os.geteuid(), os.getegid())
        manages_user = self._is_user_manager
        return systemd_argv(directory, order, is_user_manager=manages_user, user=user, unit=unit)

    async def start(self, directory: Path, order: WorkerOrder) -> None:
        """As `ShimStarter.start`; all calls to systemd share one time limit."""
        log, end_s = directory / SHIM_LOG, self._clock.now_s() + START_TIMEOUT_S
        try:
            await self._systemd.run(self.argv(directory, order), log=log, timeout_s=START_TIMEOUT_S)
        except Unavailable as error:
            if not any(words in str(error) for words in UNIT_EXISTS):
                raise
            await self._start_beside(directory, order, log=log, end_s=end_s)

    async def _start_beside(
        self, directory: Path, order: WorkerOrder, *, log: Path, end_s: float
    ) -> None:
        """Go on where a unit of this name exists; errors as `start`."""

        def left_s() -> float:
            return max(0.0, end_s - self._clock.now_s())

        unit = unit_name(order.key)
        show = self._systemctl("show", "--property=ActiveState,ExecStart", unit)
        found = (await self._systemd.ask(show, timeout_s=left_s())).split()
        is_gone = any(f"ActiveState={state}" in found for state in ("failed", "inactive"))
        if is_gone:
            reset = self._systemctl("reset-failed", unit)
            with suppress(Unavailable):  # one that is being forgotten at this moment cannot be
                await self._systemd.run(reset, log=log, timeout_s=left_s())
        elif str(directory) in found:
            return
        own = "" if is_gone else own_unit_name(order.key, directory)
        again = self.argv(directory, order, unit=own)
        await self._systemd.run(again, log=log, timeout_s=left_s())

    def _systemctl(self, *words: str) -> tuple[str, ...]:
        manager = ("--user",) if self._is_user_manager else ()
        return ("systemctl", *manager, "--no-ask-password", *words)
