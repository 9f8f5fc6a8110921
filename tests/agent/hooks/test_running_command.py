"""A server command that outlived its agent where the boot has two names, as in a container."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.hooks import running_command
from agent.hooks.runner import SystemCommands
from agent.hooks.running_command import NODE_VARIABLE, CommandRecord, end_left
from agent.proc.process_tree import name_of, thread_states
from agent.storage.node_lock import WAITING_IN_KERNEL
from common.clock import SystemClock
from tests.harness.node.workers import PATIENCE_S, is_alive


def mask(state_dir: Path, *, ticks: int = 0) -> int:
    """Have the record name another boot, and a start that was so much later; the command's pid."""
    path = state_dir / "command"
    _, pid, began = path.read_text().split()
    path.write_text(f"11111111-2222-3333-4444-555555555555 {pid} {int(began) + ticks}\n")
    return int(pid)


def waits_for_a_disk(_: int) -> set[str]:
    """As `agent.proc.process_tree.thread_states`: what any process may be in for a moment."""
    return {WAITING_IN_KERNEL}


def environment_of(pid: int) -> bytes:
    """What the kernel still has of it (proc(5))."""
    return Path(f"/proc/{pid}/environ").read_bytes()


@asynccontextmanager
async def left(
    state_dir: Path, *, variables: dict[str, str], leads: bool = True, ticks: int = 0
) -> AsyncGenerator[int]:
    """A process that an agent wrote down who sees another boot id.

    leads: it has a session of its own. ticks: so much later than it began it is said to.
    """
    environment = {name: text for name, text in os.environ.items() if name != NODE_VARIABLE}
    process = await asyncio.create_subprocess_exec(
        "sleep", "1000", start_new_session=leads, env=environment | variables
    )
    try:
        clock = SystemClock()
        async with clock.timeout(PATIENCE_S):
            while thread_states(process.pid) != {"S"}:  # it may yet wait for its program's pages
                await clock.sleep(0.01)
        CommandRecord(state_dir).write(process.pid)
        mask(state_dir, ticks=ticks)
        yield process.pid
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()


async def test_a_command_of_an_agent_that_saw_another_boot_id_is_ended(tmp_path: Path) -> None:
    """It would take the node out of its routing when the last resort has brought it home."""
    async with left(tmp_path, variables={NODE_VARIABLE: "n1"}) as pid:
        await end_left(tmp_path, clock=SystemClock())
        assert not is_alive(pid)


@pytest.mark.parametrize(
    ("redirected", "is_on_disk"),
    [("", True), ("", False), (">/dev/null", True), ("2>/dev/null", True)],
)
async def test_a_command_that_clears_its_environment_is_ended_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redirected: str, *, is_on_disk: bool
) -> None:
    """`env -i` leaves no variable; what it writes goes to a file of its agent's, or to memory where
    no disk takes one, unless it sends both of its outputs elsewhere. That can be asked for also
    while it waits for a disk."""
    if not is_on_disk:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    clock, record = SystemClock(), CommandRecord(tmp_path)
    argv = ("sh", "-c", f"exec env -i sleep 1000 {redirected}")
    doing = asyncio.create_task(
        SystemCommands(clock, record=record).run(
            argv, timeout_s=PATIENCE_S, variables={NODE_VARIABLE: "n1"}
        )
    )
    try:
        async with clock.timeout(PATIENCE_S):
            while (pid := record.running()) is None or name_of(pid) != "sleep":
                await clock.sleep(0.02)
        assert environment_of(pid) == b""
        assert mask(tmp_path) == pid
        assert record.running() == pid
        with monkeypatch.context() as patched:
            patched.setattr(running_command, "thread_states", waits_for_a_disk)
            assert record.running() == pid
        await end_left(tmp_path, clock=clock)
        assert await doing == "sh exited with -9"
    finally:
        doing.cancel()
        await asyncio.wait({doing})


@pytest.mark.parametrize("unlike", ["variable", "session", "start"])
async def test_a_process_that_is_not_proven_to_be_that_command_is_let_be(
    tmp_path: Path, unlike: str
) -> None:
    """After a boot its number may be anybody's."""
    variables = {} if unlike == "variable" else {NODE_VARIABLE: "n1"}
    ticks = 1 if unlike == "start" else 0
    async with left(tmp_path, variables=variables, leads=unlike != "session", ticks=ticks) as pid:
        assert CommandRecord(tmp_path).running() is None
        await end_left(tmp_path, clock=SystemClock())
        assert is_alive(pid)


async def test_the_environment_of_a_process_that_waits_for_a_disk_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in that process's own memory, and whoever asks may wait with it for ever."""
    monkeypatch.setattr(running_command, "thread_states", waits_for_a_disk)
    async with left(tmp_path, variables={NODE_VARIABLE: "n1"}) as pid:
        assert CommandRecord(tmp_path).running() is None
        await end_left(tmp_path, clock=SystemClock())
        assert is_alive(pid)
