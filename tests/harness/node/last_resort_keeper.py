"""A keeper's file, its process, and what it looks at."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from agent.lease.last_resort import KeeperLastResort
from common.clock import SystemClock
from tests.harness.node.workers import PATIENCE_S, is_alive, kill

CLOCK = SystemClock()


class KeeperHarness:
    """A keeper's file whose command writes down that it ran."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "go-home"
        self.mark = directory / "fired"
        self.resort = self.new_resort()

    def new_resort(self, script: str = "") -> KeeperLastResort:
        """A last resort as an agent that starts anew would make it."""
        argv = ("sh", "-c", script or f"echo fired >> {self.mark}")
        return KeeperLastResort(self.path, argv, clock=CLOCK)

    @property
    def fired_count(self) -> int:
        """How often the command ran."""
        return self.mark.read_text().count("fired") if self.mark.exists() else 0

    def keepers(self) -> list[int]:
        """The keeper processes of the file."""
        wanted = os.fsencode(self.path)
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and is_alive(int(entry.name)):
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if wanted in words:
                    found.append(int(entry.name))
        return found

    async def until(self, fact: Callable[[], bool], what: str) -> None:
        """Return when a fact holds."""
        try:
            async with CLOCK.timeout(PATIENCE_S):
                while not fact():
                    await CLOCK.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not in {PATIENCE_S:g} s: {what}") from None


async def make_keeper_harness(tmp_path: Path) -> AsyncGenerator[KeeperHarness]:
    """The body of a fixture: a keeper's file; whatever waits at the end of a test is ended."""
    harness = KeeperHarness(tmp_path)
    try:
        yield harness
    finally:
        for pid in harness.keepers():
            kill(pid)


class Look:
    """What a keeper sees the next time that it reads its file: nothing before a test says it.

    Args:
        path: the keeper's file; a pipe takes its place, so that who reads it waits.
        number: of the look, from 1.
    """

    def __init__(self, path: Path, number: int) -> None:
        self._pipe = path.with_name(f"look-{number}")
        self._fd = -1
        os.mkfifo(self._pipe)
        new = path.with_name(f"{path.name}.look")
        os.link(self._pipe, new)  # found by this name wherever the other one goes
        new.replace(path)

    def is_begun(self) -> bool:
        """Whether somebody waits for what is there."""
        if self._fd < 0:
            try:
                self._fd = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                assert error.errno == errno.ENXIO
        return self._fd >= 0

    def answer(self, text: str) -> None:
        """Let whoever waits have this."""
        os.write(self._fd, text.encode())
        os.close(self._fd)
