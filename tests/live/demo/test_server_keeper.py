"""Servers that are kept, real ones killed and stopped; how long one waits for its next start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.clock import SystemClock
from coordinator.demo.server_ctl import Files, has_died, locked, running_pid
from coordinator.demo.server_keeper import LONGEST_WAIT_S, STEADY_S, Backoff, ServerKeeper
from coordinator.demo.supervise import RESTART_S
from tests.demo.processes import LIMIT_S, run_script
from tests.harness.fake_clock import FakeClock
from tests.harness.node.workers import kill

pytestmark = pytest.mark.slow

NODE = "n1"
WELL = ("--port=0", "--env=A_NAME=a value", "--", "--warm-up-s=0")


class Kept:
    """One server with its hooks, kept; its environment names the test's directory."""

    def __init__(self, directory: Path) -> None:
        self.files = Files(str(directory), NODE)
        self._where = (f"--node={NODE}", f"--state-dir={directory}")

    async def hook(self, action: str, *more: str) -> None:
        """Run one of the server's hooks as the agent does."""
        assert await run_script("server_ctl.py", action, *self._where, *more) == (0, "")

    async def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Look until it is so."""
        try:
            async with asyncio.timeout(LIMIT_S):
                while not is_so():
                    await SystemClock().sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not in {LIMIT_S:g} s: {what}") from None

    async def killed(self) -> int:
        """kill -9 of the server, and its pid; it is seen as dead."""
        pid = running_pid(self.files)
        assert pid is not None
        kill(pid)
        await self.until(lambda: running_pid(self.files) is None, "it is gone")
        return pid


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[Kept]:
    """A server of which nothing runs afterwards."""
    found = Kept(tmp_path)
    try:
        yield found
    finally:
        await found.hook("stop")


@asynccontextmanager
async def kept_by(keeper: ServerKeeper) -> AsyncIterator[None]:
    """Somebody looks after the servers while the block runs."""
    keeper.start()
    try:
        yield
    finally:
        await keeper.leave_alone()


async def test_a_killed_server_is_started_again_as_it_was(kept: Kept, tmp_path: Path) -> None:
    """With its arguments and its variables, and with those of the keeper's own."""
    await kept.hook("start", *WELL)
    first = await kept.killed()
    keeper = ServerKeeper({NODE: tmp_path}, env={"OF_THE_CELL": "yes"}, clock=SystemClock())
    async with kept_by(keeper):
        await kept.until(lambda: running_pid(kept.files) is not None, "another one runs")
    second = running_pid(kept.files)
    assert second not in (None, first)
    assert {"coordinator.demo.server", "--warm-up-s=0"} <= of_process(second, "cmdline")
    assert {"A_NAME=a value", "OF_THE_CELL=yes"} <= of_process(second, "environ")


def of_process(pid: int | None, what: str) -> set[str]:
    """The words of its command line, or its variables."""
    return set(Path(f"/proc/{pid}/{what}").read_text().split("\0"))


async def test_a_server_that_was_stopped_stays_so(kept: Kept, tmp_path: Path) -> None:
    """A lent node's GPUs are not its server's; one that died before it was stopped stays so too."""
    for is_killed in (False, True):
        await kept.hook("start", *WELL)
        if is_killed:
            await kept.killed()
        await kept.hook("stop")
        assert not has_died(kept.files)
        clock = FakeClock()
        async with kept_by(ServerKeeper({NODE: tmp_path}, env={}, clock=clock)):
            await clock.advance(60.0)
        await kept.hook("revive")
        assert running_pid(kept.files) is None


async def test_a_server_that_a_hook_is_at_work_on_has_not_died(kept: Kept) -> None:
    """Between the end of its process and the end of its stop hook it is the hook's."""
    await kept.hook("start", *WELL)
    await kept.killed()
    with locked(kept.files):
        assert not has_died(kept.files)
    assert has_died(kept.files)


def test_a_server_that_ends_again_and_again_is_started_less_and_less_often() -> None:
    """Each wait twice the one before, up to the longest; after a time of health the shortest."""
    backoff, now_s, waits_s = Backoff(), 100.0, list[float]()
    for _ in range(7):
        assert not backoff.is_due(now_s)
        assert backoff.ended(now_s)
        assert not backoff.ended(now_s + 0.1), "it ended once"
        assert not backoff.is_due(now_s + 0.9 * backoff.wait_s)
        now_s += backoff.wait_s
        assert backoff.is_due(now_s)
        waits_s.append(backoff.wait_s)
        backoff.started(now_s)
        now_s += 0.9 * STEADY_S
    assert waits_s == [RESTART_S, 1.0, 2.0, 4.0, 8.0, LONGEST_WAIT_S, LONGEST_WAIT_S]
    assert backoff.ended(now_s + STEADY_S)
    assert backoff.wait_s == RESTART_S


def test_a_server_that_somebody_else_started_or_stopped_is_not_due() -> None:
    """What ended before that is over."""
    backoff = Backoff()
    assert backoff.ended(100.0)
    backoff.runs()
    assert not backoff.is_due(200.0)
