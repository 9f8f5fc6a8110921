"""The look at a job's paths, in a process of its own: what becomes of it when it hangs."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import psutil
import pytest

from agent.workers import reserve_check
from common.clock import SystemClock
from common.faults import Fault
from tests.agent.worker_house import PATIENCE_S
from tests.fakeclock import FakeClock

pytestmark = pytest.mark.slow


class Hanging:
    """Storage that does not answer: its checker says that it has begun, and waits for ever."""

    def __init__(self, directory: Path) -> None:
        self._mark = directory / "pid"
        self.checker = directory / "checker.py"
        new = f"{self._mark}.new"
        self.checker.write_text(
            f"import os, time\nopen({new!r}, 'w').write(str(os.getpid()))\n"
            f"os.rename({new!r}, {str(self._mark)!r})\ntime.sleep(600)\n"
        )

    def _process(self) -> psutil.Process | None:
        return psutil.Process(int(self._mark.read_text())) if self._mark.exists() else None

    async def begun(self) -> psutil.Process:
        """The process that looks, once it does."""
        clock = SystemClock()
        async with clock.timeout(PATIENCE_S):
            while (found := self._process()) is None:
                await clock.sleep(0.01)
        return found


async def until_ended(process: psutil.Process) -> None:
    """Gone, and buried by its parent's loop, which must not end before."""
    clock = SystemClock()
    async with clock.timeout(PATIENCE_S):
        while process.is_running():
            await clock.sleep(0.01)


async def test_an_agent_that_ends_leaves_nobody_behind_who_looks(tmp_path: Path) -> None:
    """The look is cancelled with the agent's step, and its process ends with it."""
    hanging, clock = Hanging(tmp_path), SystemClock()
    looking = asyncio.create_task(
        reserve_check.refusal({}, account=None, clock=clock, checker=hanging.checker)
    )
    process = await hanging.begun()
    looking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looking
    await until_ended(process)


async def test_storage_that_does_not_answer_is_a_refusal(tmp_path: Path) -> None:
    """The limit is told, and the process that waits for the storage is ended."""
    hanging, clock = Hanging(tmp_path), FakeClock()
    looking = asyncio.create_task(
        reserve_check.refusal({}, account=None, clock=clock, checker=hanging.checker)
    )
    process = await hanging.begun()
    await clock.advance(reserve_check.CHECK_TIMEOUT_S)
    said = await looking
    assert said is not None
    assert "did not answer in 10 s" in said.error
    assert said.fault == Fault.STORAGE
    await until_ended(process)
