"""How a command begins and how it ends: written down before it does anything, never nobody's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

import pytest

from agent.hooks.runner import ERROR_TEXT_BYTES, WAITER, WAITS, SystemCommands
from agent.proc.commands import started
from common.clock import SystemClock
from tests.harness.node.daemon import LOOK_S
from tests.harness.node.workers import PATIENCE_S, is_alive

ROOT = Path(__file__).parents[3]
CLOCK = SystemClock()
ODD_NAME = "aryl.odd-name"
"""Of a variable that no shell could use."""
WAYS = pytest.mark.parametrize(
    "waiting", [("/bin/sh", "-c", WAITS, "x"), (sys.executable, "-I", "-S", str(WAITER))]
)
"""Both ways to begin a command."""


async def until_gone(*pids: int) -> None:
    """Return when none of these is alive; an orphan is reaped by whoever took it in."""
    async with CLOCK.timeout(PATIENCE_S):
        while any(map(is_alive, pids)):
            await CLOCK.sleep(LOOK_S)


# --- written down first -------------------------------------------------------------------------

DIES_AT_ITS_RECORD = """
import asyncio, os, signal, sys
from agent.hooks.runner import SystemCommands
from common.clock import SystemClock

class Record:
    def write(self, pid):
        print(pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

commands = SystemCommands(SystemClock(), record=Record())
asyncio.run(commands.run(("touch", sys.argv[1]), timeout_s=30.0, variables={sys.argv[2]: "1"}))
"""
"""An agent that is killed when it is about to write down the command that it has started."""


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["ARYL_NODE", ODD_NAME])
async def test_a_command_whose_agent_is_killed_before_its_record_does_nothing(
    tmp_path: Path, variable: str
) -> None:
    """The next agent knows of no such command, and could not end it."""
    done = tmp_path / "done"
    agent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", DIES_AT_ITS_RECORD, str(done), variable),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    said, _ = await agent.communicate()
    assert agent.returncode == -signal.SIGKILL
    await until_gone(int(said))
    assert not done.exists()


@WAYS
def test_a_process_becomes_its_command_when_it_is_told_to(
    waiting: tuple[str, ...], tmp_path: Path
) -> None:
    """And does nothing when its agent has left without a word."""
    done = tmp_path / "done"
    for said, is_done in ((b"", False), (b"\n", True)):
        subprocess.run((*waiting, "touch", done), input=said, check=False, timeout=30)
        assert done.exists() == is_done


def ignored_signals(*argv: str | Path) -> str:
    """What a program that reads its input to the end finds ignored; nothing was in its input."""
    argv = (*argv, "cat", "-", "/proc/self/status")
    done = subprocess.run(argv, input=b"\nmore", capture_output=True, check=True, timeout=30)
    first, *_ = lines = done.stdout.decode().splitlines()
    assert first.startswith("Name:"), "it was given what was said to the process before"
    return next(line for line in lines if line.startswith("SigIgn:"))


@WAYS
def test_a_command_has_nothing_of_what_its_process_was_before(waiting: tuple[str, ...]) -> None:
    """No input to wait for, and signals as they are for any program."""
    assert ignored_signals(*waiting) == ignored_signals("sh", "-c", 'exec "$@" </dev/null', "x")


# --- its environment ----------------------------------------------------------------------------


async def environment_of(tmp_path: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """What a command finds in its environment."""
    told = tmp_path / "told"
    argv = ("sh", "-c", f"cat /proc/$$/environ > {told}")
    said = await SystemCommands(CLOCK).run(argv, timeout_s=30.0, variables=variables)
    assert said == ""
    pairs = (text.partition("=") for text in told.read_text().split("\0") if text)
    return {name: value for name, _, value in pairs}


async def test_a_command_is_given_each_variable_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell drops those whose names it could not use itself, as of a function that bash exports,
    and nothing else is changed on the way."""
    monkeypatch.setenv(ODD_NAME, "of the agent's own")
    monkeypatch.setenv("ARYL_NODE", "of an agent before")
    monkeypatch.delenv("LC_CTYPE", raising=False)
    monkeypatch.setenv("LANG", "C")
    monkeypatch.delenv("LC_ALL", raising=False)
    found = await environment_of(tmp_path, {"ARYL_NODE": "n1", "1st": "a\nb=c"})
    assert found == {**os.environ, "ARYL_NODE": "n1", "1st": "a\nb=c"}


@pytest.mark.parametrize("variable", ["ARYL_NODE", ODD_NAME])
async def test_a_script_that_does_not_say_whose_it_is_is_a_shell_s(
    tmp_path: Path, variable: str
) -> None:
    """As execvp has it, and as an operator's file of two lines expects."""
    script, done = tmp_path / "script", tmp_path / "done"
    script.write_text(f"touch {done}\n")
    script.chmod(0o755)
    commands = SystemCommands(CLOCK)
    assert await commands.run((str(script),), timeout_s=30.0, variables={variable: "1"}) == ""
    assert done.exists()


async def test_a_program_that_cannot_be_run_is_an_error_of_its_command(tmp_path: Path) -> None:
    """It says so whichever way it was begun."""
    script = tmp_path / "script"
    script.write_text(f"#!{tmp_path}/none\n")
    script.chmod(0o755)
    for variable in ("ARYL_NODE", ODD_NAME):
        said = await SystemCommands(CLOCK).run(
            (str(script),), timeout_s=30.0, variables={variable: "1"}
        )
        program, _, why = said.partition(" exited with ")
        assert program == str(script), variable
        assert str(script) in why, variable


async def test_a_command_s_last_line_is_told_and_no_more_of_it_than_an_operator_reads() -> None:
    """Whatever it wrote before: it may be a whole log."""
    long = ("sh", "-c", "seq 100000; printf %01000d 7; exit 3")
    said = await SystemCommands(CLOCK).run(long, timeout_s=30.0, variables={})
    assert said == f"sh exited with 3: {'7'.rjust(ERROR_TEXT_BYTES, '0')}"
    said = await SystemCommands(CLOCK).run(("sh", "-c", "exit 3"), timeout_s=30.0, variables={})
    assert said == "sh exited with 3"


# --- cancelled ----------------------------------------------------------------------------------

MARK = "ARYL_TEST_COMMAND"


def marked(text: str) -> list[int]:
    """Pids of processes with this mark in their environment, zombies among them."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"{MARK}={text}\0".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("turns", range(8))
async def test_a_command_that_is_cancelled_while_it_starts_leaves_no_process(
    tmp_path: Path, turns: int
) -> None:
    """At whichever turn of the loop; what it began has ended when its caller goes on."""
    commands = SystemCommands(CLOCK)
    argv = ("sh", "-c", f"sleep 1000 & touch {tmp_path}/begun; wait")
    doing = asyncio.create_task(
        commands.run(argv, timeout_s=1000.0, variables={MARK: str(tmp_path)})
    )
    for _ in range(turns):
        await asyncio.sleep(0)
    doing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doing
    await until_gone(*marked(str(tmp_path)))


class Starting:
    """A process whose start takes until it is let go, though it runs already with a child."""

    def __init__(self, said: Path) -> None:
        self.pids: list[int] = []
        self.runs = asyncio.Event()
        self.is_let_go = asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None
        self.said = said

    async def start(self) -> asyncio.subprocess.Process:
        """The coroutine that is awaited for the process."""
        self.process = await asyncio.create_subprocess_exec(
            *("sh", "-c", f"sleep 1000 & echo $!; wait; echo went on > {self.said}"),
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.pids = [self.process.pid, int(await self.process.stdout.readline())]
        self.runs.set()
        await self.is_let_go.wait()
        return self.process


@pytest.fixture
async def starting(tmp_path: Path) -> AsyncGenerator[Starting]:
    """Nothing of it is left at the end of a test, whatever came of that."""
    said = tmp_path / "said"
    said.touch()
    starting = Starting(said)
    yield starting
    for pid in filter(is_alive, starting.pids):
        os.kill(pid, signal.SIGKILL)


async def test_a_start_that_is_cancelled_ends_what_it_started(starting: Starting) -> None:
    """Process and children; the caller goes on when the process has ended and is known to have."""
    doing = asyncio.create_task(started(starting.start(), name="sh", clock=CLOCK))
    await starting.runs.wait()
    doing.cancel()
    await asyncio.sleep(0)
    starting.is_let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await doing
    assert starting.process is not None
    assert starting.process.returncode == -signal.SIGKILL
    await until_gone(*starting.pids)
    assert starting.said.read_text() == ""


async def test_a_start_that_is_cancelled_twice_ends_what_it_started_all_the_same(
    starting: Starting,
) -> None:
    """A time limit and an agent that leaves may both cancel it."""
    doing = asyncio.create_task(started(starting.start(), name="sh", clock=CLOCK))
    await starting.runs.wait()
    for _ in range(2):
        doing.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await doing
    starting.is_let_go.set()
    await until_gone(*starting.pids)


async def test_a_start_that_fails_after_it_was_cancelled_is_no_error() -> None:
    """Nobody waits for it, and there is nothing to end."""
    gate = asyncio.Event()

    async def fails() -> asyncio.subprocess.Process:
        await gate.wait()
        raise FileNotFoundError("none")

    doing = asyncio.create_task(started(fails(), name="none", clock=CLOCK))
    await asyncio.sleep(0)
    doing.cancel()
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await doing
