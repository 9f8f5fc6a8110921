"""Arms the last resort, which brings the node home if its agent dies: a process or a systemd timer.

The module also chooses which of the two a node uses, and the command that it runs. Both kinds
implement `agent.lease.renewal.LastResort`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

from agent.lease import last_resort_process
from agent.lease.renewal import LastResort
from agent.settings import AgentSettings, Starter
from agent.shim import files as shim_files
from agent.workers.starters import run_command
from common.clock import Clock
from common.errors import Unavailable


def go_home_argv(config: Path, state_dir: Path, fake_nvml: Path | None) -> tuple[str, ...]:
    """The command that brings a node home by itself.

    It names the state directory too, because the settings file may no longer name it by then.
    """
    fake = () if fake_nvml is None else ("--fake-nvml", str(fake_nvml.resolve()))
    return (
        sys.executable,
        "-m",
        "agent.daemon",
        "--go-home",
        "--config",
        str(config.absolute()),  # drop-ins are beside a link, not beside its target
        "--state-dir",
        str(state_dir.absolute()),
        *fake,
    )


def last_resort(
    settings: AgentSettings, *, config: Path, fake_nvml: Path | None, clock: Clock
) -> LastResort:
    """The last resort of this node, by its settings."""
    state_dir = Path(settings.state_dir)
    argv = go_home_argv(config, state_dir, fake_nvml)
    if settings.last_resort == Starter.SYSTEMD:
        log = state_dir / "last-resort.log"
        return SystemdLastResort(settings.node, argv, log=log, clock=clock)
    return KeeperLastResort(state_dir / "last-resort.json", argv, clock=clock)


START_TIMEOUT_S = 10.0
ARM_LIMIT_S = 3 * START_TIMEOUT_S
"""For all commands of one arming, of which an agent's first has a fourth."""
RETRY_S = last_resort_process.RETRY_S
NOT_LOADED_EXIT_CODE = 5
"""systemctl's answer for a unit that does not exist, which is the aim of a disarm."""
SLOTS = ("a", "b")
"""A node's two timers; an agent finds one armed by the agent before it, under either name."""
KEEPER = Path(last_resort_process.__file__)
OWN_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")
"""Variables that systemd gives to the agent alone: another process that used them would speak for
the agent."""


class KeeperLastResort:
    """A small detached process, one per file, that runs `argv` at the instant in the file.

    Args:
        path: where the instant is kept; its directory must exist and outlive the agent.
        argv: the command; run again and again until it succeeds or an agent disarms it.
    """

    def __init__(self, path: Path, argv: tuple[str, ...], *, clock: Clock) -> None:
        self._path = path.absolute()
        self._argv = argv
        self._clock = clock
        self._lock = asyncio.Lock()

    async def arm(self, after_s: float) -> None:
        """As `agent.lease.renewal.LastResort.arm`; on disk before it returns.

        Raises:
            Unavailable: the keeper could not be started.
            OSError: the file could not be written.
        """
        async with self._lock:
            orders: dict[str, object] = {
                "boot_id": last_resort_process.boot_id(),
                "fire_at_s": self._clock.now_s() + after_s,
                "argv": list(self._argv),
            }
            path = str(self._path)
            try:
                await asyncio.to_thread(shim_files.write_json, path, orders, is_durable=True)
            except RuntimeError as error:  # no thread can start: a job has filled the task limit
                raise Unavailable(f"{path}: {error}") from error
            lock_fd = last_resort_process.take_lock(path)
            if lock_fd is None:
                return
            os.close(lock_fd)
            await run_command(
                (sys.executable, "-I", "-S", str(KEEPER), last_resort_process.DETACH_FLAG, path),
                log=self._path.with_name(f"{self._path.name}.log"),
                clock=self._clock,
                timeout_s=START_TIMEOUT_S,
                env={name: v for name, v in os.environ.items() if name not in OWN_VARIABLES},
                cwd=os.getcwd(),  # noqa: PTH109 - a string, as the command will see it
            )

    async def disarm(self) -> None:
        """As `agent.lease.renewal.LastResort.disarm`; does not stop a command that already runs."""
        async with self._lock:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()


def timer_unit(node: str, slot: str) -> str:
    """The name of one of a node's two timers, without suffix.

    slot: one of `SLOTS`.
    """
    return f"aryl-go-home-{node}-{slot}"


def arm_argv(
    node: str, slot: str, argv: tuple[str, ...], after_s: float, *, is_user_manager: bool = False
) -> tuple[str, ...]:
    """The command line of a timer that runs `argv` in `after_s` (systemd-run(1))."""
    return (
        "systemd-run",
        *(["--user"] if is_user_manager else []),
        "--quiet",
        "--collect",
        "--no-ask-password",
        # PID 1 would run it as root, and leave a ledger that the agent cannot read.
        *([] if is_user_manager else [f"--uid={os.geteuid()}", f"--gid={os.getegid()}"]),
        f"--unit={timer_unit(node, slot)}",
        f"--on-active={max(1, round(after_s * 1000))}ms",
        "--timer-property=AccuracySec=100ms",
        "--property=Restart=on-failure",
        f"--property=RestartSec={RETRY_S:g}",
        "--property=StartLimitIntervalSec=0",
        "--",
        *argv,
    )


def disarm_argv(
    node: str, slots: tuple[str, ...], *, is_user_manager: bool = False
) -> tuple[str, ...]:
    """The command line that stops timers, but no command that one has already started."""
    user = ["--user"] if is_user_manager else []
    return ("systemctl", *user, "stop", *(f"{timer_unit(node, slot)}.timer" for slot in slots))


def is_armed_argv(node: str, slot: str, *, is_user_manager: bool = False) -> tuple[str, ...]:
    """The command line that succeeds while a timer is armed."""
    user = ["--user"] if is_user_manager else []
    return ("systemctl", *user, "is-active", "--quiet", f"{timer_unit(node, slot)}.timer")


class SystemdLastResort:
    """A transient timer of PID 1.

    A transient unit cannot be changed, so two names take turns: the new timer runs before the old
    one is stopped, and an agent that dies in between leaves at least one. A restarted agent keeps
    this rule: it first asks which name has the timer of the agent before it.

    Args:
        node: the node's name; part of the units' names.
        argv: the command; PID 1 runs it again until it succeeds.
        log: file for the messages of systemd.
    """

    def __init__(
        self,
        node: str,
        argv: tuple[str, ...],
        *,
        clock: Clock,
        log: Path,
        is_user_manager: bool = False,
    ) -> None:
        self._node = node
        self._argv = argv
        self._clock = clock
        self._log = log
        self._is_user_manager = is_user_manager
        self._slots: tuple[str, str] | None = None
        """The armed timer and the next one; None until this process has armed one."""
        self._is_next_free = False
        """Stopping a missing unit costs a line of the log, which is never cut."""
        self._lock = asyncio.Lock()

    async def arm(self, after_s: float) -> None:
        """As `agent.lease.renewal.LastResort.arm`.

        Raises:
            Unavailable: systemd refused it; an earlier timer is still armed then.
        """
        async with self._lock:
            try:
                async with self._clock.timeout(ARM_LIMIT_S):
                    await self._arm(after_s)
            except TimeoutError:
                raise Unavailable(f"systemd: no timer armed in {ARM_LIMIT_S:g} s") from None

    async def _arm(self, after_s: float) -> None:
        old, new = self._slots or SLOTS
        if self._slots is None and not await self._is_armed(old):
            # Not stopped first: a systemd that did not answer may have a timer of that name.
            old, new = new, old
        elif not self._is_next_free:
            await self._stop(new)
        self._is_next_free = False
        user = self._is_user_manager
        await self._run(arm_argv(self._node, new, self._argv, after_s, is_user_manager=user), (0,))
        self._slots = (new, old)
        await self._stop(old)
        self._is_next_free = True

    async def disarm(self) -> None:
        """As `agent.lease.renewal.LastResort.disarm`.

        Raises:
            Unavailable: systemd does not answer.
        """
        async with self._lock:
            await self._stop(*SLOTS)

    async def _is_armed(self, slot: str) -> bool:
        """True if systemd reports the timer as armed.

        A systemd that does not answer reports nothing.
        """
        argv = is_armed_argv(self._node, slot, is_user_manager=self._is_user_manager)
        try:
            await self._run(argv, (0,))
        except Unavailable:
            return False
        return True

    async def _stop(self, *slots: str) -> None:
        argv = disarm_argv(self._node, slots, is_user_manager=self._is_user_manager)
        await self._run(argv, (0, NOT_LOADED_EXIT_CODE))

    async def _run(self, argv: tuple[str, ...], exit_codes: tuple[int, ...]) -> None:
        await run_command(
            argv,
            log=self._log,
            clock=self._clock,
            timeout_s=START_TIMEOUT_S,
            exit_codes=exit_codes,
            env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"},
        )
