"""The end of whoever holds a node and hangs, with real processes that hold one."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import msgspec
import pytest

from agent.proc.process_tree import thread_states
from agent.shim.files import boot_id, start_ticks
from agent.storage import node_lock
from agent.storage.ledger import exclusive
from agent.storage.node_lock import HELD_UP_S, LOOK_S, WATCH_S, Heartbeat, Holder, end_if_hung
from common.clock import SystemClock
from common.errors import Unavailable
from tests.harness.fakes import FakeClock
from tests.harness.node.workers import PATIENCE_S, is_alive

ROOT = Path(__file__).parents[3]
CLOCK = SystemClock()
PATIENT_S = 2.0
LET_GO_S = 0.3
"""Where nobody will let it go."""
HOLD = """
import asyncio, pathlib, sys, time
from agent.storage.node_lock import beating
from agent.storage.ledger import exclusive
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


class HolderHarness:
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
        found = node_lock.read(self.state_dir)
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
            ended = await end_if_hung(
                self.state_dir, patience_s=PATIENT_S, clock=clock, let_go_s=LET_GO_S
            )
        except Unavailable as error:
            return str(error)
        assert ended is not None
        assert ended.pid == self.pid
        await self.until(lambda: not is_alive(self.pid), "it is gone")
        return ""


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncGenerator[HolderHarness]:
    """A process that holds a node and beats."""
    harness = HolderHarness(tmp_path)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLD, str(tmp_path), env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    harness.pid = process.pid
    try:
        await harness.until(lambda: node_lock.read(tmp_path) is not None, "it holds the node")
        await harness.until_beats()
        yield harness
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.slow
async def test_a_holder_that_beats_is_never_ended(harness: HolderHarness) -> None:
    """However old the node's lease is: an agent that is alive brings its node home by itself."""
    assert "is alive" in await harness.judge()
    assert is_alive(harness.pid)


@pytest.mark.slow
async def test_a_stopped_holder_is_ended_and_the_node_is_free(harness: HolderHarness) -> None:
    """Not before it was silent for as long as it may be."""
    await harness.stop()
    beat_at_s = harness.said().beat_at_s
    assert await harness.judge() == ""
    assert node_lock.monotonic_s() - beat_at_s >= PATIENT_S
    await harness.until(harness.is_free, "the kernel has closed the lock of the dead")


@pytest.mark.slow
async def test_a_holder_whose_event_loop_is_blocked_is_ended(harness: HolderHarness) -> None:
    """It is not stopped, and may even use a core: what counts is that its loop does not turn."""
    (harness.state_dir / "block").touch()
    assert await harness.judge() == ""


@pytest.mark.slow
async def test_a_holder_that_was_stopped_for_long_and_goes_on_is_not_ended(
    harness: HolderHarness,
) -> None:
    """Its last beat is older than it may be, but it is watched first, and beats again."""
    await harness.stop()
    silent_since_s = harness.said().beat_at_s
    await harness.until(
        lambda: node_lock.monotonic_s() - silent_since_s > PATIENT_S, "it was silent for too long"
    )
    judging = asyncio.create_task(harness.judge())
    await asyncio.sleep(0)  # the first look is taken
    harness.go_on()
    assert "is alive" in await judging
    assert is_alive(harness.pid)


class HeldUpClock(SystemClock):
    """A watcher that is held up once, near the end of its watch; the holder goes on a look later.

    As it is when a machine is suspended, or when somebody stops a whole container.
    """

    def __init__(self, harness: HolderHarness) -> None:
        self._harness = harness
        self._looks = 0
        self._jump_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self._jump_s

    async def sleep(self, delay_s: float) -> None:
        self._looks += 1
        watch = round(node_lock.WATCH_S / node_lock.LOOK_S)
        if self._looks == watch - 2:
            self._jump_s = 3600.0
        if self._looks == watch:
            self._harness.go_on()
        await super().sleep(delay_s)


@pytest.mark.slow
async def test_a_watcher_that_was_held_up_begins_to_watch_anew(harness: HolderHarness) -> None:
    """What held it up may have held up the holder, which is given its time to beat again."""
    await harness.stop()
    silent_since_s = harness.said().beat_at_s
    await harness.until(
        lambda: node_lock.monotonic_s() - silent_since_s > PATIENT_S, "it was silent for too long"
    )
    assert "is alive" in await harness.judge(clock=HeldUpClock(harness))
    assert is_alive(harness.pid)


class ThenClock(SystemClock):
    """Does something when it is first slept on: as soon as somebody waits."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._todo = [do]

    async def sleep(self, delay_s: float) -> None:
        while self._todo:
            self._todo.pop()()
        await super().sleep(delay_s)


async def left_lock(state_dir: Path) -> asyncio.subprocess.Process:
    """A process that has a node's lock from its parent, and no other part in it."""
    fd = os.open(node_lock.lock_path(state_dir), os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return await asyncio.create_subprocess_exec("sleep", "1000", pass_fds=(fd,))
    finally:
        os.close(fd)


@pytest.mark.slow
@pytest.mark.parametrize("says", ["who is gone", "nothing"])
async def test_a_lock_that_outlives_its_holder_is_waited_for(tmp_path: Path, says: str) -> None:
    """For a moment, in a child that is being begun, or when an agent ends in good order."""
    gone = await asyncio.create_subprocess_exec("true")
    await gone.wait()
    if says != "nothing":
        word = Holder(boot_id=boot_id(), pid=gone.pid, start_ticks=1, beat_count=7, beat_at_s=0.0)
        say(tmp_path, word)
    keeps = await left_lock(tmp_path)
    try:
        with pytest.raises(Unavailable, match="does not say which"):
            await end_if_hung(tmp_path, patience_s=0.0, clock=CLOCK, let_go_s=LET_GO_S)
        clock = ThenClock(keeps.kill)
        assert await end_if_hung(tmp_path, patience_s=0.0, clock=clock) is None
        with exclusive(tmp_path):
            pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            keeps.kill()
        await keeps.wait()


@pytest.mark.slow
@pytest.mark.parametrize("is_word_gone", [False, True])
async def test_a_holder_that_ends_while_it_is_watched_is_watched_no_longer(
    harness: HolderHarness, is_word_gone: bool
) -> None:
    """It is neither alive nor worth the patience that one has with the living."""
    await harness.stop()

    def end() -> None:
        if is_word_gone:
            node_lock.path_in(harness.state_dir).unlink()
        os.kill(harness.pid, signal.SIGKILL)

    async with CLOCK.timeout(PATIENCE_S):
        found = await end_if_hung(harness.state_dir, patience_s=1e6, clock=ThenClock(end))
    assert found is None
    assert harness.is_free()


@pytest.mark.slow
async def test_a_holder_that_waits_for_a_disk_is_not_ended(
    harness: HolderHarness, tmp_path: Path
) -> None:
    """No signal would reach it, and a slow disk is no fault of the agent's."""
    await harness.stop()
    thread = tmp_path / "proc" / str(harness.pid) / "task" / "7"
    thread.mkdir(parents=True)
    (thread / "stat").write_text("7 (a (name) D) D 1 7 7 0")
    with pytest.raises(Unavailable, match="waits for a disk"):
        await end_if_hung(harness.state_dir, patience_s=0.0, clock=CLOCK, proc=tmp_path / "proc")
    assert is_alive(harness.pid)


def say(state_dir: Path, said: Holder) -> None:
    """Have a node's holder say this of itself."""
    words = (said.boot_id, said.pid, said.start_ticks, said.beat_count, said.beat_at_s)
    node_lock.path_in(state_dir).write_text(" ".join(map(str, words)))


@pytest.mark.slow
@pytest.mark.parametrize("boot", ["", "another-boot"])
async def test_a_process_that_only_has_the_pid_is_never_ended(
    harness: HolderHarness, boot: str
) -> None:
    """A pid is used again."""
    await harness.stop()
    said = harness.said()
    boot = boot or said.boot_id
    say(harness.state_dir, msgspec.structs.replace(said, start_ticks=1, boot_id=boot))
    assert "does not say which" in await harness.judge()
    assert is_alive(harness.pid)


@pytest.mark.slow
async def test_a_process_that_has_pid_and_start_of_a_holder_before_a_boot_is_never_ended(
    harness: HolderHarness,
) -> None:
    """Machines boot alike, so that number and start may be another's by chance; whoever holds the
    node now, and has not said so yet, does not make that one its holder."""
    bystander = await asyncio.create_subprocess_exec("sleep", "1000")
    try:
        await harness.stop()
        ticks = start_ticks(bystander.pid)
        old = msgspec.structs.replace(
            harness.said(), boot_id="another-boot", pid=bystander.pid, start_ticks=ticks
        )
        say(harness.state_dir, old)
        assert "does not say which" in await harness.judge()
        assert is_alive(bystander.pid)
    finally:
        bystander.kill()
        await bystander.wait()


@pytest.mark.slow
async def test_a_holder_that_sees_another_boot_id_is_ended_as_any_other(
    harness: HolderHarness,
) -> None:
    """A container masks the file, for it or for whoever looks; the lock that it has is of now."""
    await harness.stop()
    say(harness.state_dir, msgspec.structs.replace(harness.said(), boot_id="masked"))
    assert await harness.judge() == ""
    await harness.until(harness.is_free, "the kernel has closed the lock of the dead")


@pytest.mark.slow
async def test_without_a_word_of_the_holder_nobody_is_ended(harness: HolderHarness) -> None:
    """A file that is gone, empty or rubbish names no process."""
    await harness.stop()
    for text in ("", "rubbish", "a b c d e"):
        node_lock.path_in(harness.state_dir).write_text(text)
        assert "does not say which" in await harness.judge()
    node_lock.path_in(harness.state_dir).unlink()
    assert "does not say which" in await harness.judge()
    assert is_alive(harness.pid)


@pytest.mark.slow
async def test_a_heartbeat_that_is_not_needed_is_not_written(tmp_path: Path) -> None:
    """A node at home does not wear its disk; once it is lent it beats again."""
    heartbeat = Heartbeat(tmp_path, is_needed=lambda: False)
    first = node_lock.read(tmp_path)
    asked: list[bool] = []
    heartbeat.is_needed = lambda: bool(asked.append(True))  # type: ignore[func-returns-value]
    beating = asyncio.create_task(heartbeat.beat_for_ever(CLOCK))
    async with CLOCK.timeout(PATIENCE_S):
        while len(asked) < 2:
            await CLOCK.sleep(0.02)
        assert node_lock.read(tmp_path) == first
        heartbeat.is_needed = lambda: True
        while node_lock.read(tmp_path) == first:
            await CLOCK.sleep(0.02)
    beating.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await beating
    heartbeat.close()
    assert node_lock.read(tmp_path) is None


@pytest.mark.slow
async def test_a_holder_whose_heartbeat_breaks_ends(tmp_path: Path) -> None:
    """It says what broke: one that went on would be taken for hung as soon as its node is away."""

    def is_needed() -> bool:
        raise RuntimeError("a defect")

    was_in_time = False
    with pytest.raises(RuntimeError, match="a defect"):
        async with node_lock.beating(tmp_path, CLOCK) as heartbeat:
            heartbeat.is_needed = is_needed
            # Its own: whatever ends the block, `beating` says at its end what broke.
            try:
                async with CLOCK.timeout(PATIENCE_S):
                    await asyncio.Event().wait()
            except asyncio.CancelledError:
                was_in_time = True
                raise
    assert was_in_time
    assert node_lock.read(tmp_path) is None
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


def says(state_dir: Path, pid: int) -> None:
    """Have this process hold the node, as far as its file says, and beat long ago."""
    line = f"{boot_id()} {pid:010d} {start_ticks(pid):020d} {1:012d} {0.0:020.6f}\n"
    node_lock.path_in(state_dir).write_text(line)


@pytest.mark.parametrize("is_reused", [False, True])
async def test_a_number_that_is_anothers_by_now_is_not_sent_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_reused: bool
) -> None:
    """A holder may end after the last look at it, and its number be given away at once."""
    held, other = [await asyncio.create_subprocess_exec("sleep", "1000") for _ in range(2)]
    real = os.pidfd_open

    def opened(pid: int) -> int:
        """The holder ends in this moment, and the next process of that number is `other`."""
        assert pid == held.pid
        if not is_reused:
            return real(pid)
        pid_fd = real(pid)
        held.kill()
        readable, _, _ = select.select([pid_fd], [], [], PATIENCE_S)  # as soon as it has ended
        os.close(pid_fd)
        assert readable
        return real(other.pid)

    try:
        says(tmp_path, held.pid)
        clock = FakeClock()
        with monkeypatch.context() as patched:
            patched.setattr(os, "pidfd_open", opened)
            ending = asyncio.create_task(end_if_hung(tmp_path, patience_s=0.0, clock=clock))
            assert LOOK_S < HELD_UP_S
            for _ in range(int(WATCH_S / LOOK_S) + 2):
                await clock.advance(LOOK_S)
            ended = await ending
        assert ended is not None
        assert ended.pid == held.pid
        assert await held.wait() < 0
        assert is_alive(other.pid)
    finally:
        for process in (held, other):
            if process.returncode is None:
                process.kill()
            await process.wait()
