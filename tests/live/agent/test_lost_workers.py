"""A lent node whose job removes or spoils its files: a real agent brings it home."""

from __future__ import annotations

import shutil

import msgspec
import pytest

from agent.shim import files as shim_files
from agent.storage.ledger import peek
from common.messages import WorkerPhase
from common.model import NodeRole
from tests.harness.node.daemon import KEY, DaemonHarness, lend, make_daemon_harness, order
from tests.harness.node.workers import (
    is_alive,
)

P, R = WorkerPhase, NodeRole
pytestmark = [pytest.mark.nats, pytest.mark.slow]
harness = pytest.fixture(make_daemon_harness)
REMOVES_ITS_DIRECTORY = (
    'd=$ARYL_WORKER_DIRECTORY; while [ -e "$d" ]; do rm -rf "$d"; done; '
    'echo $$ >> "$OUT/pids"; exec sleep 600'
)


@pytest.mark.parametrize("is_directory", [True, False])
async def test_a_lent_node_serves_again_when_nothing_of_a_job_is_left(
    harness: DaemonHarness, *, is_directory: bool
) -> None:
    """Whatever its job has removed meanwhile: two would be on its GPUs."""
    await harness.start(harness.config(inference=True))
    pid = await lend(harness, ttl_s=30.0)
    directory = harness.workers.directory(KEY)
    if is_directory:
        while directory.exists():
            shutil.rmtree(directory, ignore_errors=True)
    else:
        (directory / shim_files.STATUS_FILE).unlink()
    await harness.want(R.SERVING)
    await harness.until_role(R.SERVING)
    assert not is_alive(pid)


async def test_a_lent_node_comes_home_whatever_a_job_makes_of_its_status(
    harness: DaemonHarness,
) -> None:
    """Neither its agent nor any after it ends for what a job writes, and its reports are taken."""
    agent = await harness.start(harness.config(inference=True))
    pid = await lend(harness, ttl_s=30.0)
    raw = harness.workers.raw(KEY)
    path = harness.workers.directory(KEY) / shim_files.STATUS_FILE
    path.write_bytes(msgspec.json.encode(raw | {"progress": {"step": 10**30}}))
    await harness.until_phase(KEY, P.EXITED)
    path.write_bytes(b'{"error":"\xff"}')
    await harness.want(R.SERVING)
    await harness.until_role(R.SERVING)
    assert agent.returncode is None
    assert not is_alive(pid)
    memory = peek(harness.state_dir)
    assert memory is not None
    assert memory.role == R.SERVING


async def test_a_lent_node_serves_beside_no_job_that_removed_its_directory(
    harness: DaemonHarness,
) -> None:
    """As it began, so that its start was never answered."""
    await harness.start(harness.config(inference=True))
    await harness.until_role(R.SERVING)
    await harness.want(R.ON_LOAN, ttl_s=60.0)
    await harness.until_role(R.ON_LOAN)
    await harness.want(R.ON_LOAN, order(harness, REMOVES_ITS_DIRECTORY), ttl_s=60.0)
    await harness.until(lambda: (harness.directory / "pids").exists(), "it has begun")
    await harness.want(R.SERVING)
    await harness.until_role(R.SERVING)
    pids = [int(word) for word in (harness.directory / "pids").read_text().split()]
    assert [pid for pid in pids if is_alive(pid)] == []
