"""The end of whoever holds a node and hangs, with real processes that hold one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import msgspec
import pytest

from agent import holder
from agent.holder import Heartbeat, Holder, end_if_hung
from agent.ledger import exclusive
from agent.processes import thread_states
from common.clock import SystemClock
from common.errors import Unavailable
from tests.agent.worker_house import PATIENCE_S, is_alive

ROOT = Path(__file__).parents[2]
CLOCK = SystemClock()
PATIENT_S = 2.0
HOLD = """
import asyncio, pathlib, sys, time
from agent.holder import beating
from agent.ledger import exclusive
from common.clock import SystemClock

async def hold(state_dir):
    with exclusive(state_dir):
        async with beating(state_dir, SystemClock()):
            while not (state_dir / "block").exists():
                await asyncio.sleep(0.02)
            time.sleep(600)

asyncio.run(hold(pathlib.Path(sys.argv[1])))
"""
"""Holds a node and beats, until a file says that its event loop is to block."""


class HolderHouse:
    """A node that a process of its own holds."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.pid = 0

    async def until(self, fact: Callable[[], bool], what: str) -> None:
        """Return when a fact holds."""
        try:
            async with CLOCK.timeout(PATIENCE_S):
                while not fact():
                    await CLOCK.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not in {PATIENCE_S:g} s: {what}") from None

    def said(self) -> Holder:
        """What the holder says of itself."""
        found = holder.read(self.state_dir)
        assert found is not None
        return found

    def is_free(self) -> bool:
        """Whether nobody holds the node."""
        try:
            with exclusive(self.state_dir):
                return True
        except Unavailable:
            return False

    async def until_beats(self) -> None:
        """Return when it has beaten again."""
        before = self.said()
        await self.until(lambda: self.said() != before, "it beats")

    async def stop(self) -> None:
        """SIGSTOP, and wait until it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        await self.until(lambda: thread_states(self.pid) == {"T"}, "it is stopped")

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    async def judge(self, *, clock: SystemClock = CLOCK) -> str:
        """End it if it hangs; why not, or an empty text when it was ended and is gone."""
        try:
            ended = await end_if_hung(self.state_dir, patience_s=PATIENT_S, clock=clock)
        except Unavailable as error:
            return str(error)
        assert ended.pid == self.pid
        await self.until(lambda: not is_alive(self.pid), "it is gone")
        return ""


@pytest.fixture
async def house(tmp_path: Path) -> AsyncGenerator[HolderHouse]:
    """A process that holds a node and beats."""
    house = HolderHouse(tmp_path)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLD, str(tmp_path), env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    house.pid = process.pid
    try:
        await house.until(lambda: holder.read(tmp_path) is not None, "it holds the node")
        await house.until_beats()
        yield house
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


pytestmark = pytest.mark.slow


async def test_a_holder_that_beats_is_never_ended(house: HolderHouse) -> None:
    """However old the node's lease is: an agent that is alive brings its node home by itself."""
    assert "is alive" in await house.judge()
    assert is_alive(house.pid)


async def test_a_stopped_holder_is_ended_and_the_node_is_free(house: HolderHouse) -> None:
    """Not before it was silent for as long as it may be."""
    await house.stop()
    beat_at_s = house.said().beat_at_s
    assert await house.judge() == ""
    assert holder.monotonic_s() - beat_at_s >= PATIENT_S
    await house.until(house.is_free, "the kernel has closed the lock of the dead")


async def test_a_holder_whose_event_loop_is_blocked_is_ended(house: HolderHouse) -> None:
    """It is not stopped, and may even use a core: what counts is that its loop does not turn."""
    (house.state_dir / "block").touch()
    assert await house.judge() == ""


async def test_a_holder_that_was_stopped_for_long_and_goes_on_is_not_ended(
    house: HolderHouse,
) -> None:
    """Its last beat is older than it may be, but it is watched first, and beats again."""
    await house.stop()
    silent_since_s = house.said().beat_at_s
    await house.until(
        lambda: holder.monotonic_s() - silent_since_s > PATIENT_S, "it was silent for too long"
    )
    judging = asyncio.create_task(house.judge())
    await asyncio.sleep(0)  # the first look is taken
    house.go_on()
    assert "is alive" in await judging
    assert is_alive(house.pid)


class HeldUpClock(SystemClock):
    """A watcher that is held up once, near the end of its watch; the holder goes on a look later.

    As it is when a machine is suspended, or when somebody stops a whole container.
    """

    def __init__(self, house: HolderHouse) -> None:
        self._house = house
        self._looks = 0
        self._jump_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self._jump_s

    async def sleep(self, delay_s: float) -> None:
        self._looks += 1
        watch = round(holder.WATCH_S / holder.LOOK_S)
        if self._looks == watch - 2:
            self._jump_s = 3600.0
        if self._looks == watch:
            self._house.go_on()
        await super().sleep(delay_s)


async def test_a_watcher_that_was_held_up_begins_to_watch_anew(house: HolderHouse) -> None:
    """What held it up may have held up the holder, which is given its time to beat again."""
    await house.stop()
    silent_since_s = house.said().beat_at_s
    await house.until(
        lambda: holder.monotonic_s() - silent_since_s > PATIENT_S, "it was silent for too long"
    )
    assert "is alive" in await house.judge(clock=HeldUpClock(house))
    assert is_alive(house.pid)


async def test_a_holder_that_waits_for_a_disk_is_not_ended(
    house: HolderHouse, tmp_path: Path
) -> None:
    """No signal would reach it, and a slow disk is no fault of the agent's."""
    await house.stop()
    thread = tmp_path / "proc" / str(house.pid) / "task" / "7"
    thread.mkdir(parents=True)
    (thread / "stat").write_text("7 (a (name) D) D 1 7 7 0")
    with pytest.raises(Unavailable, match="waits for a disk"):
        await end_if_hung(house.state_dir, patience_s=0.0, clock=CLOCK, proc=tmp_path / "proc")
    assert is_alive(house.pid)


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"boot_id": "another-boot"}])
async def test_a_process_that_only_has_the_pid_is_never_ended(
    house: HolderHouse, change: dict[str, object]
) -> None:
    """A pid is used again: by another process, and after a boot by any."""
    await house.stop()
    said = msgspec.structs.replace(house.said(), **change)
    words = (said.boot_id, said.pid, said.start_ticks, said.beat_count, said.beat_at_s)
    holder.path_in(house.state_dir).write_text(" ".join(map(str, words)))
    assert "says not which" in await house.judge()
    assert is_alive(house.pid)


async def test_without_a_word_of_the_holder_nobody_is_ended(house: HolderHouse) -> None:
    """A file that is gone, empty or rubbish names no process."""
    await house.stop()
    for text in ("", "rubbish", "a b c d e"):
        holder.path_in(house.state_dir).write_text(text)
        assert "says not which" in await house.judge()
    holder.path_in(house.state_dir).unlink()
    assert "says not which" in await house.judge()
    assert is_alive(house.pid)


async def test_a_heartbeat_that_is_not_needed_is_not_written(tmp_path: Path) -> None:
    """A node at home does not wear its disk; once it is lent it beats again."""
    heartbeat = Heartbeat(tmp_path, is_needed=lambda: False)
    first = holder.read(tmp_path)
    asked: list[bool] = []
    heartbeat.is_needed = lambda: bool(asked.append(True))  # type: ignore[func-returns-value]
    beating = asyncio.create_task(heartbeat.beat_for_ever(CLOCK))
    async with CLOCK.timeout(PATIENCE_S):
        while len(asked) < 2:
            await CLOCK.sleep(0.02)
        assert holder.read(tmp_path) == first
        heartbeat.is_needed = lambda: True
        while holder.read(tmp_path) == first:
            await CLOCK.sleep(0.02)
    beating.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await beating
    heartbeat.close()
    assert holder.read(tmp_path) is None


async def test_a_holder_whose_heartbeat_breaks_ends(tmp_path: Path) -> None:
    """It says what broke: one that went on would be taken for hung as soon as its node is away."""

    def is_needed() -> bool:
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        async with CLOCK.timeout(PATIENCE_S), holder.beating(tmp_path, CLOCK) as heartbeat:
            heartbeat.is_needed = is_needed
            await asyncio.Event().wait()
    assert holder.read(tmp_path) is None
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
