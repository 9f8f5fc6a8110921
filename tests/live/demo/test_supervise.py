"""Units kept running and stopped, and the sweep after them: real processes, none left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from common.clock import SystemClock
from coordinator.demo.supervise import RESTART_S, Supervisor, Unit, mentioning, sweep
from tests.demo.processes import LIMIT_S
from tests.harness.fake_clock import FakeClock
from tests.harness.node.workers import is_alive, kill

pytestmark = pytest.mark.slow

PYTHON = (sys.executable, "-I", "-S", "-c")
STUBBORN = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "open(sys.argv[1], 'w').close()\n"
    "while True: time.sleep(1)\n"
)
"""Ignores SIGTERM, and makes a file once it does."""
POLITE = (
    "import signal, sys\n"
    "signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1] + '.bye', 'w').close(), exit(0)))\n"
    "open(sys.argv[1], 'w').close()\n"
    "while True: signal.pause()\n"
)
"""Writes a farewell on SIGTERM."""
ORPHANER = (
    "import os, sys\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0:\n"
    "        os.execv(sys.executable, [sys.executable, '-I', '-S', '-c', *sys.argv[1:]])\n"
    "    os._exit(0)\n"
    "os.wait()\n"
)
"""Leaves a program behind that is nobody's child, in a session of its own."""


async def until(fact: Callable[[], bool], what: str) -> None:
    """Return when a fact holds."""
    clock = SystemClock()
    try:
        async with clock.timeout(LIMIT_S):
            while not fact():
                await clock.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not in {LIMIT_S:g} s: {what}") from None


@contextlib.asynccontextmanager
async def bystander(*argv: str, **variables: str) -> AsyncIterator[int]:
    """A process that is no part of any cell; its pid."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        env={**os.environ, **variables},
    )
    try:
        yield process.pid
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.fixture
async def cell_dir(tmp_path: Path) -> AsyncIterator[Path]:
    """The directory of a cell; whatever a failing test left of it is killed."""
    directory = tmp_path / "cell-a1"
    directory.mkdir()
    yield directory
    for pid in mentioning(directory):
        kill(pid)


def unit(name: str, program: str, *words: str, is_restarted: bool = True) -> Unit:
    return Unit(name=name, argv=(*PYTHON, program, *words), is_restarted=is_restarted)


# --- units -------------------------------------------------------------------------------------


async def test_a_unit_that_dies_is_started_again(cell_dir: Path) -> None:
    """kill -9 brings another process under the same name; a stop brings none."""
    units = Supervisor(cell_dir / "logs", clock=SystemClock())
    units.start(unit("a", POLITE, str(cell_dir / "up")))
    await until((cell_dir / "up").exists, "the unit runs")
    first = units.pid("a")
    assert first is not None
    units.signal("a", signal.SIGKILL)
    await until(lambda: units.starts("a") == 2, "a second start")
    second = units.pid("a")
    assert second not in (first, None)
    await units.stop()
    assert mentioning(cell_dir) == []


async def test_a_unit_for_one_run_is_not_started_again(cell_dir: Path) -> None:
    """`is_restarted=False`: its end is its end, and stopping it then is no error."""
    units = Supervisor(cell_dir / "logs", clock=SystemClock())
    units.start(unit("a", "pass", is_restarted=False))
    await until(lambda: units.starts("a") == 1 and units.pid("a") is None, "its end")
    await units.stop("a")
    with pytest.raises(KeyError):
        units.pid("a")


async def test_a_polite_unit_is_let_finish(cell_dir: Path) -> None:
    """SIGTERM comes first, and a unit that obeys it is never killed."""
    units = Supervisor(cell_dir / "logs", clock=SystemClock())
    units.start(unit("a", POLITE, str(cell_dir / "up")))
    await until((cell_dir / "up").exists, "the unit runs")
    await units.stop()
    assert (cell_dir / "up.bye").exists()


async def test_a_unit_that_ignores_sigterm_is_killed(cell_dir: Path) -> None:
    """After its time it gets SIGKILL, the others have long gone, and stop returns."""
    clock = FakeClock()
    units = Supervisor(cell_dir / "logs", clock=clock)
    units.start(unit("a", STUBBORN, str(cell_dir / "a")))
    units.start(unit("b", POLITE, str(cell_dir / "b")))
    await until(lambda: (cell_dir / "a").exists() and (cell_dir / "b").exists(), "both run")
    stubborn, polite = units.pid("a"), units.pid("b")
    assert stubborn is not None
    assert polite is not None
    stopping = asyncio.create_task(units.stop())
    await until(lambda: not is_alive(polite), "the polite one has gone")
    assert is_alive(stubborn)
    await clock.advance(60.0)
    async with asyncio.timeout(LIMIT_S):
        await stopping
    assert not is_alive(stubborn)
    assert (cell_dir / "b.bye").exists()


async def test_a_stop_between_two_runs_starts_no_third(cell_dir: Path) -> None:
    """A unit that waits for its next start is over at once, and no process of it appears."""
    clock = FakeClock()
    units = Supervisor(cell_dir / "logs", clock=clock)
    runs = cell_dir / "runs"
    units.start(unit("a", "import sys; open(sys.argv[1], 'a').write('run ')", str(runs)))
    await until(lambda: clock.next_deadline_s is not None, "the pause before the next start")
    stopping = asyncio.create_task(units.stop("a"))
    await clock.advance(RESTART_S)
    async with asyncio.timeout(LIMIT_S):
        await stopping
    assert runs.read_text() == "run "


async def test_a_stop_that_overtakes_a_start_still_ends_it(cell_dir: Path) -> None:
    """Told to stop before its process was there, the unit does not live on for ten seconds."""
    clock = FakeClock()  # its time stands still: only the signal can end the unit
    units = Supervisor(cell_dir / "logs", clock=clock)
    units.start(unit("a", "import time; time.sleep(3600)"))
    await asyncio.sleep(0)
    async with asyncio.timeout(LIMIT_S):
        await units.stop("a")
    assert mentioning(cell_dir) == []


async def test_a_unit_that_cannot_be_started_is_tried_again(cell_dir: Path) -> None:
    """A program that is missing for a moment does not end the unit, nor its supervisor."""
    program = cell_dir / "program"
    units = Supervisor(cell_dir / "logs", clock=SystemClock())
    units.start(Unit(name="a", argv=(str(program),)))
    units.start(unit("b", POLITE, str(cell_dir / "up")))
    await until((cell_dir / "up").exists, "the other unit runs")
    program.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(3600)\n")
    program.chmod(0o755)
    await until(lambda: units.pid("a") is not None, "the mended unit runs")
    await units.stop()
    assert mentioning(cell_dir) == []


# --- the sweep ---------------------------------------------------------------------------------


async def test_a_sweep_leaves_nothing_of_a_cell(cell_dir: Path) -> None:
    """Orphans in sessions of their own, known by a variable or by their command line, polite or
    not: all are gone, and how many there were is told."""
    units = Supervisor(cell_dir / "logs", clock=SystemClock())
    marked = {"ARYL_CELL_DIR": str(cell_dir)}
    for name, program in (("a", STUBBORN), ("b", POLITE)):
        words = (program, str(cell_dir / name))
        units.start(
            Unit(name=name, argv=(*PYTHON, ORPHANER, *words), is_restarted=False, env=marked)
        )
    units.start(
        Unit(
            name="c",
            argv=(*PYTHON, ORPHANER, "import time; time.sleep(3600)"),
            is_restarted=False,
            env=marked,
        )
    )
    await until(lambda: (cell_dir / "a").exists() and (cell_dir / "b").exists(), "orphans run")
    await until(lambda: all(units.pid(name) is None for name in "abc"), "their parents ended")
    await units.stop()
    left = mentioning(cell_dir)
    assert len(left) == 3
    assert await sweep(cell_dir, clock=SystemClock()) == 3
    assert mentioning(cell_dir) == []
    assert not any(is_alive(pid) for pid in left)
    assert (cell_dir / "b.bye").exists(), "a sweep asks first"
    assert await sweep(cell_dir, clock=SystemClock()) == 0


async def test_a_sweep_hits_no_other_cell(cell_dir: Path) -> None:
    """A directory whose name only begins alike is another cell's; one below it is the cell's."""
    other = cell_dir.with_name("cell-a10")
    below = str(cell_dir / "nodes" / "n1")
    idle = (*PYTHON, "import time; time.sleep(3600)")
    async with (
        bystander(*idle, str(other)) as by_words,
        bystander(*idle, ARYL_CELL_DIR=str(other)) as by_variable,
        bystander(*idle, ARYL_CONTROL_SOCKET=below) as mine,
    ):
        await until(lambda: mentioning(cell_dir) == [mine], "only the cell's own is found")
        assert await sweep(cell_dir, clock=SystemClock()) == 1
        assert is_alive(by_words)
        assert is_alive(by_variable)


async def test_a_sweep_does_not_end_the_readers_of_a_log(cell_dir: Path) -> None:
    """`tail -f` on a log of the cell, or an editor that was started in its directory, lives on."""
    log = cell_dir / "agent.log"
    log.write_text("a line\n")
    idle = (*PYTHON, "import time; time.sleep(3600)")
    async with (
        bystander("tail", "-f", str(log)) as tail,
        bystander(*idle, PWD=str(cell_dir), OLDPWD=str(cell_dir)) as editor,
    ):
        assert await sweep(cell_dir, clock=SystemClock()) == 0
        assert is_alive(tail)
        assert is_alive(editor)
