"""A holder that is ended: that very process, whatever happens between a look and the signal."""

from __future__ import annotations

import asyncio
import os
import select
from pathlib import Path

import pytest

from agent.shim.files import boot_id, start_ticks
from agent.storage import node_lock
from agent.storage.node_lock import HELD_UP_S, LOOK_S, WATCH_S, end_if_hung
from tests.agent.worker_house import PATIENCE_S, is_alive
from tests.fakes import FakeClock


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
