"""How a command that cannot be ended is told, and what is done about the rest of it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path

import pytest

from agent.hooks.runner import OneCommand, SystemCommands
from agent.hooks.running_command import CommandRecord, end_left
from agent.proc import sessions
from agent.proc.commands import ended, left_behind, started
from agent.proc.process_tree import name_of, thread_states
from common.clock import SystemClock
from tests.harness.fakes import FakeClock
from tests.harness.node.workers import PATIENCE_S, is_alive

# --- who may not be ended -----------------------------------------------------------------------


class Session:
    """A leader with a child that is another account's, to which no signal may be sent; nor to any
    other of `children`."""

    def __init__(self, process: asyncio.subprocess.Process, child_pid: int) -> None:
        self.process = process
        self.child_pid = child_pid
        self.children = [child_pid]
        self.sent: list[tuple[int, signal.Signals]] = []
        self.is_forbidden = True

    def kill(self, pid: int, number: signal.Signals) -> None:
        """In place of `os.kill`."""
        self.sent.append((pid, number))
        if pid in self.children and self.is_forbidden:
            raise PermissionError(1, "Operation not permitted")
        pid_fd = os.pidfd_open(pid)
        signal.pidfd_send_signal(pid_fd, number)
        os.close(pid_fd)


@pytest.fixture
async def session(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Session]:
    """Nothing of it is left at the end of a test."""
    process = await asyncio.create_subprocess_exec(
        # No child holds the pipe, which asyncio would wait for.
        *("sh", "-c", "sleep 1000 >&- & echo $!; exec >&-; wait"),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    session = Session(process, int(await process.stdout.readline()))
    await until_asleep(session.child_pid)
    with monkeypatch.context() as patched:
        patched.setattr(os, "kill", session.kill)
        yield session
    for pid in filter(is_alive, (*session.children, process.pid)):
        os.kill(pid, signal.SIGKILL)
    await process.communicate()


async def until_asleep(pid: int) -> None:
    """Return when a shell's child has become the program that it is to be, and does nothing."""
    await until(lambda: (name_of(pid), thread_states(pid)) == ("sleep", {"S"}))


async def until_ended(pid: int) -> None:
    """Return when a process has ended; an orphan is reaped by whoever took it in."""
    await until(lambda: not is_alive(pid))


async def until(is_so: Callable[[], bool]) -> None:
    """Return when it is so."""
    clock = SystemClock()
    async with clock.timeout(PATIENCE_S):
        while not is_so():
            await clock.sleep(sessions.LOOK_S)


async def test_a_process_that_may_not_be_ended_is_told_and_all_others_end(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """What a command runs as another account does not keep its caller, nor the rest alive; the
    operator hears which process it is, though the shell that began it is gone."""
    clock = FakeClock()
    doing = asyncio.create_task(
        ended(session.process, name="/opt/stop", clock=clock, timeout_s=0.0)
    )
    await clock.advance(0.0)
    assert await session.process.wait() == -signal.SIGKILL
    await clock.advance(sessions.END_S - 0.1)
    assert not doing.done()
    await clock.advance(0.1)
    with pytest.raises(TimeoutError) as found:
        await doing
    child = session.child_pid
    assert "cannot kill a process of it" in caplog.text
    assert f"not permitted: process {child} (sleep)" in caplog.text
    left = f"process {child} (sleep, state S) did not end and was left behind"
    assert left_behind(found.value) == [left]
    assert f"command /opt/stop: {left}" in caplog.text
    assert is_alive(child)


async def test_a_command_whose_last_process_ends_late_leaves_nobody(session: Session) -> None:
    """It is waited for as its leader is, and no longer."""
    clock = FakeClock()
    doing = asyncio.create_task(
        ended(session.process, name="/opt/stop", clock=clock, timeout_s=0.0)
    )
    await clock.advance(0.0)
    assert await session.process.wait() == -signal.SIGKILL
    await clock.advance(sessions.END_S / 2)
    assert not doing.done()
    session.is_forbidden = False
    os.kill(session.child_pid, signal.SIGKILL)
    await until_ended(session.child_pid)
    await clock.advance(sessions.LOOK_S)
    with pytest.raises(TimeoutError) as found:
        await doing
    assert left_behind(found.value) == []


async def test_all_of_a_command_stands_still_before_any_of_it_is_killed(session: Session) -> None:
    """A shell whose child is killed would go on with its script, and be killed too late."""
    session.is_forbidden = False
    sessions.end(session.process.pid)
    everybody = {session.process.pid, session.child_pid}
    assert [number for _, number in session.sent] == [signal.SIGSTOP] * 2 + [signal.SIGKILL] * 2
    assert {pid for pid, _ in session.sent[:2]} == {pid for pid, _ in session.sent[2:]} == everybody
    assert await session.process.wait() == -signal.SIGKILL


async def test_a_command_that_was_left_and_may_not_be_ended_is_told(
    session: Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent that waited for its end would wait for ever; the operator hears of it."""
    CommandRecord(tmp_path).write(session.process.pid)
    clock = FakeClock()
    await end_left(tmp_path, clock=clock)
    assert "cannot be killed" in caplog.text
    assert await session.process.wait() == -signal.SIGKILL


def test_a_command_that_had_ended_when_it_was_written_down_is_nobody(tmp_path: Path) -> None:
    """Neither that number nor any other that is free may be taken for it."""
    done = subprocess.Popen(("true",))
    done.wait()
    CommandRecord(tmp_path).write(done.pid)
    assert CommandRecord(tmp_path).running() is None


async def test_who_is_left_of_a_command_that_took_too_long_is_told_to_its_node(
    session: Session, tmp_path: Path
) -> None:
    """A script that runs a step as another account; beside the words for why it failed, which the
    node's next role forgets."""
    told, clock = tmp_path / "told", FakeClock()
    os.mkfifo(told)
    command = OneCommand(SystemCommands(clock))
    script = f"sleep 1000 & echo $$ $! > {told}; wait"
    doing = asyncio.create_task(command.run(("sh", "-c", script), timeout_s=5.0, variables={}))
    leader, child = map(int, (await asyncio.to_thread(told.read_text)).split())
    session.children.append(child)
    await until_asleep(child)
    await clock.advance(5.0)
    await until_ended(leader)
    await clock.advance(sessions.END_S)
    assert await doing == "sh did not end within 5 s"
    assert command.left == f"process {child} (sleep, state S) did not end and was left behind"


# --- what does not end --------------------------------------------------------------------------


class Unending(asyncio.subprocess.Process):
    """A process that has been sent SIGKILL and of whose end nobody is told, as of one in the
    kernel's hands."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self.process = process

    @property
    def returncode(self) -> None:
        return None

    async def wait(self) -> int:
        await asyncio.Event().wait()
        raise AssertionError("it ends")


@pytest.fixture
async def unending() -> AsyncGenerator[Unending]:
    """Of a real process, which is reaped at the end."""
    process = await asyncio.create_subprocess_exec("sleep", "1000", start_new_session=True)
    yield Unending(process)
    await process.wait()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_command_that_does_not_end_is_named_once(
    unending: Unending, caplog: pytest.LogCaptureFixture, is_cancelled: bool
) -> None:
    """When its time to end is over: which command, which process, and the state that it is in."""
    clock = FakeClock()
    doing = asyncio.create_task(ended(unending, name="/opt/stop", clock=clock, timeout_s=5.0))
    await clock.settle()
    if is_cancelled:
        doing.cancel()
    else:
        await clock.advance(5.0)
    await clock.advance(sessions.END_S - 0.1)
    assert not doing.done()
    await clock.advance(0.1)
    with pytest.raises(asyncio.CancelledError if is_cancelled else TimeoutError) as found:
        await doing
    (left,) = left_behind(found.value)
    assert left.startswith(f"process {unending.pid} (")
    assert left.endswith("did not end and was left behind")
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in told] == [f"command /opt/stop: {left}"]


async def test_a_start_that_does_not_end_keeps_nobody_for_ever(
    unending: Unending, caplog: pytest.LogCaptureFixture
) -> None:
    """A program on storage that hangs: its agent can leave, and says what it leaves behind."""
    clock, gate = FakeClock(), asyncio.Event()

    async def start() -> asyncio.subprocess.Process:
        await gate.wait()
        return unending

    doing = asyncio.create_task(started(start(), name="/opt/stop", clock=clock))
    await clock.settle()
    doing.cancel()
    await clock.settle()
    gate.set()
    await clock.settle()
    await clock.advance(sessions.END_S)
    with pytest.raises(asyncio.CancelledError):
        await doing
    assert f"command /opt/stop: process {unending.pid} (" in caplog.text


def in_proc(proc: Path, pid: int, name: str, session: int, *states: str) -> None:
    """A process in a made /proc, its main thread first."""
    for number, state in enumerate(states):
        thread = proc / str(pid) / "task" / str(pid + number)
        thread.mkdir(parents=True)
        (thread / "stat").write_text(f"{pid + number} ({name}) {state} 1 {session} {session} 0")
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {states[0]} 1 {session} {session} 0")


def test_who_is_left_of_a_session_is_told_with_the_states_of_the_threads(tmp_path: Path) -> None:
    """The leader first; one whose main thread has ended may still have one in the kernel."""
    in_proc(tmp_path, 7, "umount (a)", 7, "Z", "D")
    in_proc(tmp_path, 5, "sleep", 7, "S")
    in_proc(tmp_path, 9, "dead", 7, "Z")
    in_proc(tmp_path, 11, "other", 11, "R")
    said = sessions.left(7, proc=tmp_path)
    assert said == "process 7 (umount (a), state DZ), 5 (sleep, state S)"
    for pid in (20, 21, 22):
        in_proc(tmp_path, pid, "x", 7, "D")
    assert sessions.left(7, proc=tmp_path).endswith("20 (x, state D) and 2 more")
    assert sessions.left(8, proc=tmp_path) == "process 8 (gone)"


@pytest.mark.parametrize("states", [(), ("Z",), ("Z", "X")])
def test_a_leader_that_is_gone_is_not_named_before_those_that_it_left(
    tmp_path: Path, states: tuple[str, ...]
) -> None:
    """The shell of a script ends at once; what it waited for is what an operator looks for."""
    in_proc(tmp_path, 9, "umount", 7, "D")
    if states:
        in_proc(tmp_path, 7, "sh", 7, *states)
    assert sessions.living(7, proc=tmp_path) == {9}
    assert sessions.left(7, proc=tmp_path) == "process 9 (umount, state D)"


def test_a_process_of_whose_threads_one_lives_is_alive(tmp_path: Path) -> None:
    """Its main thread has ended, and another one waits in the kernel and may go on."""
    in_proc(tmp_path, 7, "stop", 7, "Z", "D")
    assert sessions.living(7, proc=tmp_path) == {7}


def test_the_leader_of_a_session_is_killed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that dies half-way leaves a leader to the next one, which finds by it all that stand
    still: without it they would do so for ever, with whatever they had locked."""
    for pid in (7, 8, 16):
        in_proc(tmp_path, pid, "x", 8, "S")
    sent: list[tuple[int, signal.Signals]] = []

    def kill(pid: int, number: signal.Signals) -> None:
        sent.append((pid, number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "kill", kill)
        sessions.end(8, proc=tmp_path)
    assert sent[3:] == [(pid, signal.SIGKILL) for pid in (7, 16, 8)]
    assert {pid for pid, number in sent[:3] if number == signal.SIGSTOP} == {7, 8, 16}


class Stuck:
    """Commands of which one cannot be ended, nor ends in its time."""

    def __init__(self) -> None:
        self.late = asyncio.Event()

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, variables: Mapping[str, str]
    ) -> str:
        """As `Commands.run`, for ever."""
        note = "process 7 (stop, state D) did not end and was left behind"
        try:
            await self.late.wait()
        except asyncio.CancelledError as error:
            error.add_note(note)
            raise
        late = TimeoutError()
        late.add_note(note)
        raise late


@pytest.mark.parametrize("is_late", [False, True])
async def test_who_is_left_of_a_command_that_was_ended_is_told_to_its_node(is_late: bool) -> None:
    """Whether its node was wanted back or its time was over; and of the one after it that nobody
    is."""
    commands = Stuck()
    command = OneCommand(commands)
    doing = asyncio.create_task(command.run(("stop",), timeout_s=1.5, variables={}))
    await FakeClock().settle()
    if is_late:
        commands.late.set()
        assert await doing == "stop did not end within 1.5 s"
    else:
        command.end()
        assert (await doing).startswith("stop was ended: ")
    commands.late.clear()
    assert command.left == "process 7 (stop, state D) did not end and was left behind"
    again = asyncio.create_task(command.run(("stop",), timeout_s=1.0, variables={}))
    await FakeClock().settle()
    assert command.left == ""
    again.cancel()
    with pytest.raises(asyncio.CancelledError):
        await again
