"""`aryl up` as a newcomer and a script run it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.demo.supervise import mentioning

pytestmark = [pytest.mark.nats, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
SMALL = ("--nodes", "1+1", "--gpus-per-node", "4")

FIGURES = {
    "jobs_finished", "queueing_s", "jct_s", "loans", "reclaims", "reclaim_s", "reclaims_late",
    "preemptions", "flexible_workers_released", "jobs_finished_on_loan", "resizes",
    "requests_refused",
}  # fmt: skip


async def aryl(home: Path, *arguments: str) -> asyncio.subprocess.Process:
    """The CLI as a process, with a registry and temporary files of its own."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "coordinator.cli.main", *arguments,
        cwd=ROOT,
        env={**os.environ, "ARYL_HOME": str(home / "registry"), "TMPDIR": str(home)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


def files_in(directory: Path) -> set[str]:
    """Names of what is there."""
    return {path.name for path in directory.iterdir()}


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    """Exit status and what it said."""
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_short_run_prints_its_figures_and_leaves_nothing(tmp_path: Path) -> None:
    """One JSON object under the glossary's names, exit code 0, no process and no file left."""
    process = await aryl(tmp_path, "up", "--duration", "8", "-o", "json", *SMALL)
    status, out, err = await ended(process)
    assert status == 0, err
    run: dict[str, Any] = json.loads(out)
    assert run.keys() >= FIGURES
    assert set(run["jct_s"]) == set(run["queueing_s"]) == {"mean", "p50", "p95"}
    assert set(run["reclaim_s"]) == {"p50", "max"}
    assert run["jobs_submitted"] > 0
    assert run["requests_served"] > 0
    assert run["requests_refused"] == 0
    assert mentioning(tmp_path) == []
    assert files_in(tmp_path) == {"registry"}


async def test_an_empty_cell_is_found_kept_alone_and_stopped_by_ctrl_c(tmp_path: Path) -> None:
    """The CLI finds it, a second one is refused by name, and Ctrl-C ends it with its table."""
    cell = await aryl(tmp_path, "up", "--no-workload", *SMALL)
    try:
        assert cell.stderr is not None
        async with asyncio.timeout(PATIENCE_S):
            while b"nodes on loan" not in (line := await cell.stderr.readline()):
                assert line, "the cell ended"
        status, out, err = await ended(await aryl(tmp_path, "up", *SMALL))
        assert status != 0
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
