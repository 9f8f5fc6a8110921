"""A server command that outlives its agent: only its node's agent may move the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from agent.hooks.runner import WAITS, SystemCommands
from agent.hooks.running_command import CommandRecord, end_left
from agent.storage.ledger import peek
from common.clock import SystemClock
from common.model import NodeRole
from tests.harness.node.daemon import LOOK_S, DaemonHarness, kill_9, make_daemon_harness
from tests.harness.node.workers import PATIENCE_S, is_alive

R = NodeRole


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncGenerator[DaemonHarness]:
    """A daemon's harness; at its end commands that still wait are let go."""
    async for harness in make_daemon_harness(tmp_path):
        yield harness
        harness.mark("go").touch()


def hanging(harness: DaemonHarness, script: str) -> Path:
    """A settings file whose unroute command writes down its processes and waits to be let go; then
    it does what `script` says."""
    waits = f"while [ ! -e {harness.mark('go')} ]; do sleep 0.05; done"
    pids = harness.mark("command")
    text = f"sh -c 'echo $$ >> {pids}; {waits}' & echo $$ >> {pids}; wait; {script}"
    config = harness.config(inference=True)
    was = f"rm -f {harness.mark('routed')}"
    assert was in config.read_text()
    config.write_text(config.read_text().replace(was, text))
    return config


async def until_it_hangs(
    harness: DaemonHarness, config: Path
) -> tuple[asyncio.subprocess.Process, list[int]]:
    """An agent whose unroute command runs, and the command's two processes."""
    agent = await harness.start(config)
    await harness.until_role(R.SERVING)
    assert harness.mark("routed").exists()
    await harness.want(R.ON_LOAN, ttl_s=3.0)
    marks = harness.mark("command")
    await harness.until(
        lambda: marks.exists() and len(marks.read_text().splitlines()) == 2, "the command runs"
    )
    pids = [int(line) for line in marks.read_text().splitlines()]
    assert all(map(is_alive, pids))
    return agent, pids


@pytest.mark.nats
@pytest.mark.slow
async def test_an_agent_ends_the_command_of_the_one_before_it(harness: DaemonHarness) -> None:
    """Killed while its unroute runs, it leaves it to nobody: the next agent is home and routed to
    when the old command would have taken the node out of its routing."""
    config = hanging(harness, f"rm -f {harness.mark('routed')}")
    agent, pids = await until_it_hangs(harness, config)
    await kill_9(agent)
    assert all(map(is_alive, pids))
    await harness.start(config)
    assert not any(map(is_alive, pids))
    await harness.want(R.SERVING)
    await harness.until_role(R.SERVING)
    assert harness.mark("routed").exists()


@pytest.mark.nats
@pytest.mark.slow
async def test_a_last_resort_ends_the_command_of_a_dead_agent(harness: DaemonHarness) -> None:
    """It brings the node home, and nothing takes it out again."""
    config = hanging(harness, f"rm -f {harness.mark('routed')}")
    agent, pids = await until_it_hangs(harness, config)
    await kill_9(agent)
    assert all(map(is_alive, pids))

    def is_home() -> bool:
        memory = peek(harness.state_dir)
        return memory is not None and memory.role == R.SERVING

    # Nobody is to help it: two of them would take turns.
    await harness.until(is_home, "its last resort has brought the node home")
    assert not any(map(is_alive, pids))
    assert harness.mark("routed").exists()


def told(started: Path) -> list[int]:
    """The pids in the file; none before it is there."""
    return [int(word) for word in started.read_text().split()] if started.exists() else []


async def until_it_runs(started: Path, *, is_apart: bool) -> list[int]:
    """The pids that a script of `CHILDREN` writes down, once its child is where it is to be."""
    clock = SystemClock()
    async with clock.timeout(PATIENCE_S):
        while not (pids := told(started)):
            await clock.sleep(LOOK_S)
        while (os.getpgid(pids[1]) != pids[0]) != is_apart:
            await clock.sleep(LOOK_S)
    assert len(pids) == 2
    assert all(map(is_alive, pids))
    return pids


CHILDREN = pytest.mark.parametrize(
    ("child", "is_apart"), [("sleep 1000", False), ("timeout 1000 sleep 1000", True)]
)
"""A child in the command's process group, and one that makes a group of its own."""


def script_of(child: str, started: Path) -> str:
    """Begins the child, and writes down who runs."""
    return f"{child} & echo $$ $! > {started}.new; mv {started}.new {started}; wait"


@CHILDREN
async def test_a_command_that_takes_too_long_is_ended_with_its_children(
    tmp_path: Path, child: str, is_apart: bool
) -> None:
    """A child that goes on would move the server when its agent believes that nothing runs."""
    started = tmp_path / "started"
    argv = ("sh", "-c", script_of(child, started))
    commands = SystemCommands(SystemClock())
    doing = asyncio.create_task(commands.run(argv, timeout_s=1000.0, variables={}))
    pids = await until_it_runs(started, is_apart=is_apart)
    doing.cancel()
    await asyncio.wait({doing})
    clock = SystemClock()
    async with clock.timeout(PATIENCE_S):
        while any(map(is_alive, pids)):
            await clock.sleep(LOOK_S)


@CHILDREN
async def test_a_command_that_was_left_is_ended_with_its_children(
    tmp_path: Path, child: str, is_apart: bool
) -> None:
    """`timeout` in a script is how an operator bounds a step, and must not hide one."""
    started = tmp_path / "started"
    argv = ("sh", "-c", script_of(child, started))
    left = await asyncio.create_subprocess_exec(*argv, start_new_session=True)
    pids = await until_it_runs(started, is_apart=is_apart)
    CommandRecord(tmp_path).write(left.pid)
    await end_left(tmp_path, clock=SystemClock())
    assert not any(map(is_alive, pids))
    await left.wait()


def test_a_command_whose_agent_dies_before_it_is_written_down_does_nothing(tmp_path: Path) -> None:
    """Nobody could end it later, as nobody would know of it."""
    done = tmp_path / "done"
    for said, is_done in ((b"", False), (b"\n", True)):
        subprocess.run(
            ("/bin/sh", "-c", WAITS, "touch", "touch", done), input=said, check=False, timeout=30
        )
        assert done.exists() == is_done


async def test_a_command_runs_where_it_cannot_be_written_down(tmp_path: Path) -> None:
    """A node that stays away because a disk takes no line would be the greater harm."""
    commands = SystemCommands(SystemClock(), record=CommandRecord(tmp_path / "missing"))
    done = tmp_path / "done"
    assert await commands.run(("touch", str(done)), timeout_s=30.0, variables={}) == ""
    assert done.exists()


async def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    """As is one that cannot be run."""
    plain = tmp_path / "plain"
    plain.touch()
    commands = SystemCommands(SystemClock())
    for program, why in ((tmp_path / "none", "No such file"), (plain, "Permission denied")):
        said = await commands.run((str(program),), timeout_s=30.0, variables={})
        assert said.startswith(f"{program}: {why}")


@pytest.mark.parametrize("changed", ["", "boot", "ticks"])
async def test_only_the_very_process_that_was_written_down_is_ended(
    tmp_path: Path, changed: str
) -> None:
    """Its number may be another's by now, in this boot or the next."""
    other = await asyncio.create_subprocess_exec("sleep", "1000", start_new_session=True)
    try:
        CommandRecord(tmp_path).write(other.pid)
        path = tmp_path / "command"
        boot, pid, ticks = path.read_text().split()
        boot = "another" if changed == "boot" else boot
        ticks = str(int(ticks) + 1) if changed == "ticks" else ticks
        path.write_text(f"{boot} {pid} {ticks}\n")
        await end_left(tmp_path, clock=SystemClock())
        assert is_alive(other.pid) == bool(changed)
    finally:
        if other.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                other.kill()
        await other.wait()
