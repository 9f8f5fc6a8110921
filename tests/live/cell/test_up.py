"""`aryl up` as a newcomer and a script run it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.api import ApiErrorCode, GetStatus, Status
from common.bus import connect_nats
from common.clock import SystemClock
from coordinator.client import EXIT_CODES, Client, registry
from coordinator.demo.nats_server import find_binary
from coordinator.demo.supervise import mentioning, sweep
from tests.harness.live import commands

pytestmark = [pytest.mark.nats, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
PATIENCE_S = 60.0
LOOK_S = 0.2
EMPTY = ("--no-workload", "--nodes", "1+0")
SMALL = ("--nodes", "1+1", "--gpus-per-node", "4")
BUSY = ("--nodes", "3+6", "--gpus-per-node", "16", "--agents-per-process", "9", "--speed", "150")
"""A day in 96 seconds, with more nodes to lend than there are for training: a night lends several.
Not faster: on a busy machine jobs would take longer to start and to stop than a night lasts."""
SHOWN = ("loans", "reclaims", "resizes", "jobs_finished", "jobs_finished_on_loan")

FIGURES = {
    "jobs_finished", "queueing_s", "jct_s", "loans", "reclaims", "reclaim_s", "reclaims_late",
    "preemptions", "flexible_workers_released", "jobs_finished_on_loan", "resizes",
    "requests_refused", "requests_refused_total", "training_gpu_busy_ratio",
    "on_loan_gpu_busy_ratio", "inference_gpu_busy_ratio", "figures_age_s",
}  # fmt: skip


async def aryl(
    home: Path, *arguments: str, python: Path = Path(sys.executable)
) -> asyncio.subprocess.Process:
    """The CLI as a process, with a registry and temporary files of its own."""
    return await asyncio.create_subprocess_exec(
        python, "-m", "coordinator.cli.main", *arguments,
        cwd=ROOT,
        env=environ(home),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


def environ(home: Path) -> dict[str, str]:
    """This process's, with a registry and temporary files of the test's own."""
    return {**os.environ, "ARYL_HOME": str(home / "registry"), "TMPDIR": str(home)}


def files_in(directory: Path) -> set[str]:
    """Names of what is there."""
    return {path.name for path in directory.iterdir()}


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    """Exit status and what it said."""
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("bus", ["nats", "mqtt"])
async def test_a_short_run_prints_its_figures_and_leaves_nothing(tmp_path: Path, bus: str) -> None:
    """One JSON object under the glossary's names, exit code 0, no process and no file left; so it
    is over each protocol that agents speak."""
    process = await aryl(tmp_path, "up", "--bus", bus, "--duration", "8", "-o", "json", *SMALL)
    status, out, err = await ended(process)
    assert status == 0, err
    run: dict[str, Any] = json.loads(out)
    assert run.keys() >= FIGURES
    assert set(run["jct_s"]) == set(run["queueing_s"]) == {"mean", "p50", "p95"}
    assert (run["reclaims"], run["reclaim_s"]) == (0, {"p50": None, "max": None})
    assert run["jobs_submitted"] > 0
    assert run["requests_served"] > 0
    assert (run["requests_refused"], run["requests_refused_total"]) == (0, 0)
    assert run["training_gpu_busy_ratio"] > 0
    assert run["queueing_s"]["mean"] > 0
    assert mentioning(tmp_path) == []
    assert files_in(tmp_path) == {"registry"}


async def test_the_main_job_shows_what_aryl_is_for(tmp_path: Path) -> None:
    """What `make up` is to show, on a smaller cell and a faster day: a loan, a reclaim in time, a
    resize, a job that finished on a lent node, and not one request refused."""
    cell = await aryl(tmp_path, "up", "--duration", str(8 * PATIENCE_S), "-o", "json", *BUSY)

    try:
        await first_line(cell)
        async with client_of(tmp_path) as client:
            await until_shown(client)
    finally:
        cell.send_signal(signal.SIGINT)
        status, out, err = await ended(cell)
    assert status == 0, err
    run: dict[str, Any] = json.loads(out)
    assert all(run[key] > 0 for key in SHOWN), run
    assert run["reclaims_late"] == 0
    assert run["reclaim_s"]["max"] <= run["reclaim_deadline_s"]
    assert run["requests_served"] > 0
    assert (run["requests_refused"], run["requests_refused_total"]) == (0, 0)


async def until_shown(client: Client) -> None:
    """Wait until a cell's figures tell of all that it is to show."""
    figures: dict[str, Any] = {}

    async def has_shown_all() -> bool:
        figures.update((await client.ask(GetStatus(), Status)).figures)
        is_back = figures["reclaim_s"]["max"] is not None  # not only ordered back
        return is_back and all(figures[key] for key in SHOWN)

    try:
        await until(has_shown_all, within_s=6 * PATIENCE_S)
    except AssertionError as error:
        raise AssertionError(f"{error}; last seen: {figures}") from None


@contextlib.asynccontextmanager
async def client_of(home: Path) -> AsyncIterator[Client]:
    """An operator of the cell that runs there, without an interpreter for each question."""
    info = registry.find(home / "registry")
    assert info is not None
    bus = await connect_nats(info.nats_url, identity="test", clock=SystemClock())
    try:
        yield Client(bus, cell=info.cell, tenant="ops", user="test")
    finally:
        await bus.close()


async def test_what_a_killed_cell_left_is_ended_by_the_next_one(tmp_path: Path) -> None:
    """kill -9 gives `aryl up` no chance to tidy up: the next one does, says so, and leaves no
    process of either behind; the load driver's own counts are among the files."""
    first = await aryl(tmp_path, "up", *SMALL)

    async def is_driven() -> bool:
        return has_load_stats(tmp_path)

    try:
        try:
            await first_line(first)
            await until(is_driven)
        finally:
            first.kill()
            await ended(first)
        left = mentioning(tmp_path)
        assert len(left) >= 6, "nats-server, coordinator, two agents, router and load driver"
        status, _, err = await ended(await aryl(tmp_path, "up", "--duration", "1", *EMPTY))
        assert status == 0, err
        assert f"which process {first.pid} left behind" in err
        assert mentioning(tmp_path) == []
    finally:
        await sweep(tmp_path, clock=SystemClock())


async def test_a_cell_killed_before_its_nats_server_takes_clients_leaves_nothing(
    tmp_path: Path,
) -> None:
    """kill -9 at the very beginning: the nats-server that was started is ended by the next one."""
    python = python_with_halted_nats(tmp_path)
    cell = await aryl(tmp_path, "up", *EMPTY, python=python)
    try:
        nats = await first_halted(tmp_path)
        cell.kill()
        await ended(cell)
        os.kill(nats, signal.SIGCONT)

        async def is_running() -> bool:
            return is_nats(nats) and has_ports(tmp_path)

        await until(is_running)
        await assert_next_one_ends(tmp_path, cell.pid, nats)
    finally:
        await sweep(tmp_path, clock=SystemClock())


async def test_a_cell_killed_while_it_stops_leaves_nothing(tmp_path: Path) -> None:
    """kill -9 when only its nats-server is left, halted: that one is still found."""
    cell = await aryl(tmp_path, "up", *EMPTY)
    try:
        await first_line(cell)
        (nats,) = [pid for pid in mentioning(tmp_path) if is_nats(pid)]
        os.kill(nats, signal.SIGSTOP)
        cell.send_signal(signal.SIGTERM)

        async def is_almost_stopped() -> bool:
            return mentioning(tmp_path) == sorted((cell.pid, nats))

        await until(is_almost_stopped)
        cell.kill()
        await ended(cell)
        await assert_next_one_ends(tmp_path, cell.pid, nats)
    finally:
        await sweep(tmp_path, clock=SystemClock())


async def assert_next_one_ends(home: Path, killed: int, left: int) -> None:
    """The next `aryl up` ends the one process that a killed one has left, and says so."""
    assert mentioning(home) == [left]
    status, _, err = await ended(await aryl(home, "up", "--duration", "1", *EMPTY))
    assert status == 0, err
    assert f"ended 1 process of cell local, which process {killed} left behind" in err
    assert mentioning(home) == []


async def test_a_killed_nats_server_is_started_again(tmp_path: Path) -> None:
    """The cell goes on on the same port, so that whoever knew its address reaches it."""
    cell = await aryl(tmp_path, "up", *EMPTY)
    try:
        await first_line(cell)
        (nats,) = [pid for pid in mentioning(tmp_path) if is_nats(pid)]
        os.kill(nats, signal.SIGKILL)

        async def is_another() -> bool:
            return any(is_nats(pid) and pid != nats for pid in mentioning(tmp_path))

        async def is_answering() -> bool:
            return (await commands.aryl(environ(tmp_path), "status", "-o", "name")).code == 0

        await until(is_another)
        await until(is_answering)
    finally:
        cell.send_signal(signal.SIGINT)
        status, out, err = await ended(cell)
    assert status == 0, err
    assert "nats-server exited; restarting it" in err
    assert "jobs finished" in out
    assert mentioning(tmp_path) == []


def python_with_halted_nats(home: Path) -> Path:
    """An environment like this one, whose nats-server waits for SIGCONT before it begins."""
    here, there = Path(sys.prefix), home / "environment"
    (there / "bin").mkdir(parents=True)
    (there / "lib").symlink_to(here / "lib")
    shutil.copy(here / "pyvenv.cfg", there)
    python, nats = there / "bin" / "python", there / "bin" / "nats-server"
    python.symlink_to(sys.executable)
    nats.write_text(
        f"#!{python}\nimport os, signal, sys\nos.kill(os.getpid(), signal.SIGSTOP)\n"
        f"os.execv({str(find_binary())!r}, sys.argv)\n"
    )
    nats.chmod(0o755)
    return python


async def first_halted(home: Path) -> int:
    """The process of a cell that has halted, as soon as one has."""
    found: list[int] = []

    async def is_there() -> bool:
        found[:] = [pid for pid in mentioning(home) if psutil.Process(pid).status() == "stopped"]
        return bool(found)

    await until(is_there)
    return found[0]


def has_ports(home: Path) -> bool:
    """Whether the nats-server of a cell has said where it listens."""
    return any(home.glob("aryl-cell-*/nats/ports/*.ports"))


def has_load_stats(home: Path) -> bool:
    """Whether the load driver of a cell below has written its counts."""
    return any(home.glob("aryl-cell-*/load.json"))


def is_nats(pid: int) -> bool:
    """Whether a process is a nats-server."""
    with contextlib.suppress(OSError):
        return b"nats-server" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    return False


async def until(is_so: Callable[[], Awaitable[bool]], *, within_s: float = PATIENCE_S) -> None:
    """Look again and again until it is so."""
    end_s = asyncio.get_running_loop().time() + within_s
    while not await is_so():
        assert asyncio.get_running_loop().time() < end_s, f"never so: {is_so.__name__}"
        await asyncio.sleep(LOOK_S)


async def first_line(cell: asyncio.subprocess.Process) -> None:
    """Wait until a cell is ready and says what it does."""
    assert cell.stderr is not None
    async with asyncio.timeout(PATIENCE_S):
        while b"nodes on loan" not in (line := await cell.stderr.readline()):
            assert line, "the cell ended"


async def test_an_empty_cell_is_found_kept_alone_and_stopped_by_ctrl_c(tmp_path: Path) -> None:
    """The CLI finds it, a second one is refused by name as a conflict, and Ctrl-C ends it with its
    table."""
    cell = await aryl(tmp_path, "up", "--no-workload", "--nodes", "2+0")
    try:
        await first_line(cell)
        status, out, err = await ended(await aryl(tmp_path, "up", *SMALL))
        assert status == EXIT_CODES[ApiErrorCode.CONFLICT]
        assert f"process {cell.pid}" in err
        assert out == ""
        status, out, err = await ended(await aryl(tmp_path, "status", "-o", "json"))
        assert status == 0, err
        assert json.loads(out)["status"]["nodes_heard"] == 2
    finally:
        cell.send_signal(signal.SIGINT)
        status, out, err = await ended(cell)
    assert status == 0, err
    assert "jobs finished" in out
    assert mentioning(tmp_path) == []
