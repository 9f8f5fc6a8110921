"""Keeps the processes of a cell on one machine running, as systemd would.

An edge. Every process started here, and every descendant, has the cell's directory in a variable of
Aryl's or in its command line; `sweep` finds the remains of a cell by that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
from pathlib import Path

from msgspec import Struct, field

from common.children import send_signal
from common.clock import Clock

log = logging.getLogger(__name__)

RESTART_S = 0.5
TERM_S = 10.0
SWEEP_TERM_S = 3.0
SWEEP_POLL_S = 0.05
PROC = Path("/proc")
PROGRAMS = ("python", "nats-server")
"""Programs of a cell's own processes; jobs are identified by their environment."""


class Unit(Struct, frozen=True, kw_only=True):
    """One process. `is_restarted`: whether an exit without a stop is followed by a start."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict[str, str])
    is_restarted: bool = True


class _Running(Struct):
    unit: Unit
    task: asyncio.Task[None]
    process: asyncio.subprocess.Process | None = None
    starts: int = 0
    end_signal: signal.Signals | None = None
    """The signal that ends it, once requested; also for a process that is being created."""


def _send(running: _Running, number: signal.Signals) -> None:
    if running.process is not None:
        send_signal(running.process, number)


class Supervisor:
    """Starts units, restarts them, stops them.

    Args:
        log_dir: `<unit>.log` of each goes there.
    """

    def __init__(self, log_dir: Path, *, clock: Clock) -> None:
        self._log_dir = log_dir
        self._clock = clock
        self._running: dict[str, _Running] = {}
        log_dir.mkdir(parents=True, exist_ok=True)

    def start(self, unit: Unit) -> None:
        """Start a unit; its process appears soon."""
        task = asyncio.create_task(self._keep(unit.name), name=f"unit {unit.name}")
        self._running[unit.name] = _Running(unit, task)

    def pid(self, name: str) -> int | None:
        """Its process now; None between two processes."""
        process = self._running[name].process
        return process.pid if process is not None and process.returncode is None else None

    def starts(self, name: str) -> int:
        """How often it was started."""
        return self._running[name].starts

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a unit's process, if there is one."""
        _send(self._running[name], number)

    async def _keep(self, name: str) -> None:
        running = self._running[name]
        while running.end_signal is None:
            try:
                await self._run_once(running)
            except OSError as error:  # no memory, no file: the next try may find it better
                log.error("%s cannot be started: %s", name, error)
            if not running.unit.is_restarted or running.end_signal is not None:
                return
            await self._clock.sleep(RESTART_S)

    async def _run_once(self, running: _Running) -> None:
        unit = running.unit
        with (self._log_dir / f"{unit.name}.log").open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *unit.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **unit.env},
                start_new_session=True,
            )
        running.process = process
        running.starts += 1
        if running.end_signal is not None:  # it came while there was no process to send it to
            _send(running, running.end_signal)
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            send_signal(process, signal.SIGKILL)
            await process.wait()
            raise
        if running.end_signal is None:
            log.warning("%s ended with %d", unit.name, status)

    async def stop(self, *names: str) -> None:
        """SIGTERM, and SIGKILL after a while; returns when they are gone."""
        chosen = [self._running[name] for name in (names if names else tuple(self._running))]
        for running in chosen:
            running.end_signal = signal.SIGTERM
            _send(running, signal.SIGTERM)
        waiting = [running.task for running in chosen]
        try:
            async with self._clock.timeout(TERM_S):
                await asyncio.gather(*waiting, return_exceptions=True)
        except TimeoutError:
            for running in chosen:
                running.end_signal = signal.SIGKILL
                _send(running, signal.SIGKILL)
            await asyncio.gather(*waiting, return_exceptions=True)
        for running in chosen:
            self._running.pop(running.unit.name, None)

    async def kill(self, *names: str) -> None:
        """SIGKILL without a restart: the machine's end of these units, as in a power cut."""
        chosen = [self._running.pop(name) for name in names]
        for running in chosen:
            running.end_signal = signal.SIGKILL
            _send(running, signal.SIGKILL)
        await asyncio.gather(*(running.task for running in chosen), return_exceptions=True)


def mentioning(directory: Path, *, proc: Path = PROC) -> list[int]:
    """Processes of the cell in this directory, by pid.

    These are processes that have it, or a path below it, in a variable of Aryl's, and interpreters
    and nats-servers that have it in their command line. A person who reads the cell's logs with
    another program is safe, wherever that was started.
    """
    # Not a neighbor directory whose name only begins alike.
    wanted = re.compile(re.escape(os.fsencode(directory)) + rb"(?![\w.-])")
    found: list[int] = []
    for entry in proc.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command, *words = (entry / "cmdline").read_bytes().split(b"\0")
            if not Path(os.fsdecode(command)).name.startswith(PROGRAMS):
                words = []
            variables = (entry / "environ").read_bytes().split(b"\0")
            texts = [*words, *(text for text in variables if text.startswith(b"ARYL_"))]
            state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
            if state != b"Z" and any(map(wanted.search, texts)):
                found.append(int(entry.name))
    return sorted(found)


async def sweep(directory: Path, *, clock: Clock) -> int:
    """End every process that mentions the directory; how many there were.

    The directory's name is unique to its cell, so nothing else can be hit.
    """
    first = mentioning(directory)
    for number, limit_s in ((signal.SIGTERM, SWEEP_TERM_S), (signal.SIGKILL, TERM_S)):
        end_s = clock.now_s() + limit_s
        sent: set[int] = set()
        while left := mentioning(directory):
            for pid in left:
                if pid not in sent:
                    sent.add(pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            if clock.now_s() >= end_s:
                break
            await clock.sleep(SWEEP_POLL_S)
        else:
            break
    return len(first)
