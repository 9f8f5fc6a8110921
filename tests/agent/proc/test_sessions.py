"""The end of a session, with real processes: whoever may not be signalled or comes late."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from agent.hooks.running_command import CommandRecord, end_left
from agent.proc import sessions
from agent.proc.sessions import LOOK_S
from common.clock import SystemClock
from tests.harness.fakes import FakeClock
from tests.harness.node.workers import PATIENCE_S, is_alive

FORKS = "sleep 1000 <&- >&- & echo $!; read -r word; sleep 1000 <&- >&- & echo $!; wait"
"""A leader with a child, and another one when it is told to."""


class Session:
    """A leader with a child, and what was sent to whom."""

    def __init__(self) -> None:
        self.leader = subprocess.Popen(
            ("sh", "-c", FORKS),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.pids = [self.leader.pid, self._child()]
        self.forbidden: int | None = None
        self.forks_at: signal.Signals | None = None
        self.is_held = False
        self.sent: list[tuple[int, signal.Signals]] = []

    def _child(self) -> int:
        assert self.leader.stdout is not None
        return int(self.leader.stdout.readline())

    def kill(self, pid: int, number: signal.Signals) -> None:
        """In place of `os.kill`."""
        if number == self.forks_at:
            self.forks_at = None
            assert self.leader.stdin is not None
            self.leader.stdin.write(b"\n")
            self.leader.stdin.flush()
            self.pids.append(self._child())
        self.sent.append((pid, number))
        if pid == self.forbidden:
            raise PermissionError(1, "Operation not permitted")
        if not self.is_held:
            deliver(pid, number)

    def killed(self) -> list[int]:
        """Who was sent SIGKILL."""
        return sorted(pid for pid, number in self.sent if number == signal.SIGKILL)

    def close(self) -> None:
        """Leave nobody."""
        for pid in filter(is_alive, self.pids):
            deliver(pid, signal.SIGKILL)
        self.leader.communicate()


def deliver(pid: int, number: signal.Signals) -> None:
    """The signal, by a descriptor: `os.kill` is another one here."""
    pid_fd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pid_fd, number)
    finally:
        os.close(pid_fd)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Generator[Session]:
    """Nobody of it is left at the end of a test."""
    session = Session()
    with monkeypatch.context() as patched:
        patched.setattr(os, "kill", session.kill)
        yield session
    session.close()


@pytest.mark.parametrize("place", [0, 1])
def test_whoever_may_not_be_signalled_spares_nobody_else(session: Session, place: int) -> None:
    """In whichever order they are signalled; and whoever asked is told."""
    session.forbidden = session.pids[place]
    with pytest.raises(PermissionError):
        sessions.end(session.leader.pid)
    assert session.killed() == sorted(session.pids)


async def test_a_process_that_is_begun_meanwhile_is_ended_too(session: Session) -> None:
    """As a script begins its next step when the last one is killed."""
    session.forks_at = signal.SIGSTOP
    sessions.end(session.leader.pid)
    assert len(session.pids) == 3
    assert session.killed() == sorted(session.pids)
    await gone(session)


async def test_nothing_goes_on_before_a_command_that_was_left_is_gone(
    session: Session, tmp_path: Path
) -> None:
    """It may move the server until its last process has ended, and that takes its time."""
    CommandRecord(tmp_path).write(session.leader.pid)
    session.is_held = True
    clock = FakeClock()
    ending = asyncio.create_task(end_left(tmp_path, clock=clock))
    await clock.advance(sessions.END_S / 2)
    assert session.killed() == sorted(session.pids)
    assert not ending.done()
    for pid in session.pids:
        deliver(pid, signal.SIGKILL)
    await gone(session)
    await clock.advance(LOOK_S)
    assert ending.done()
    await ending


async def gone(session: Session) -> None:
    """Return when nobody of it runs."""
    clock = SystemClock()
    async with clock.timeout(PATIENCE_S):
        while any(map(is_alive, session.pids)):
            await clock.sleep(LOOK_S)
