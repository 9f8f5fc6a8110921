"""A server command that outlived its agent where the boot has two names, as in a container."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.left_commands import NODE_VARIABLE, CommandRecord, end_left
from common.clock import SystemClock
from tests.agent.worker_house import is_alive


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
        CommandRecord(state_dir).write(process.pid)
        path = state_dir / "command"
        _, pid, began = path.read_text().split()
        path.write_text(f"11111111-2222-3333-4444-555555555555 {pid} {int(began) + ticks}\n")
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
