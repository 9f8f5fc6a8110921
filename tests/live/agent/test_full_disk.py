"""A lent node whose state disk takes no more, as processes of their own: it comes home all the
same."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.messages import WorkerPhase
from common.model import NodeRole
from tests.harness.node.daemon import (
    KEY,
    WAITING,
    DaemonHarness,
    kill_9,
    lend,
    make_daemon_harness,
    order,
    pids,
)
from tests.harness.node.full_disk import SmallDisk, small_disk
from tests.harness.node.workers import is_alive

R = NodeRole
pytestmark = [pytest.mark.nats, pytest.mark.slow]


@pytest.fixture
def disk(tmp_path: Path) -> Generator[SmallDisk]:
    """A disk for the agent's state alone."""
    with small_disk(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
async def harness(tmp_path: Path, disk: SmallDisk) -> AsyncGenerator[DaemonHarness]:
    """A node whose state is on that disk."""
    async with asynccontextmanager(make_daemon_harness)(tmp_path) as harness:
        harness.use_state_dir(disk.path / "state")
        try:
            yield harness
        finally:
            disk.empty()


async def go_home(harness: DaemonHarness) -> tuple[int | None, str]:
    """`--go-home` by hand: exit status and what it said."""
    config = str(harness.directory / "agent.toml")
    return await harness.run("--go-home", "--config", config, "--fake-nvml", str(harness.fleet))


async def test_a_full_disk_does_not_keep_a_lent_node_whose_lease_is_over(
    harness: DaemonHarness, disk: SmallDisk
) -> None:
    """Its agent lives, says why it takes nothing new, keeps the loan that it has until it is over,
    knows how its worker ended, and writes it all down as soon as it can."""
    agent = await harness.start(harness.config(inference=True))
    pid = await lend(harness, ttl_s=6.0)
    disk.fill()
    await harness.until(lambda: "No space left" in harness.reports[-1].detail, "it says so")
    assert harness.reports[-1].role == R.ON_LOAN
    assert is_alive(pid)
    harness.is_renewing = False
    await harness.until(lambda: harness.mark("routed").exists(), "the node is routed again")
    await harness.until_role(R.SERVING)
    assert harness.mark("up").exists()
    assert not is_alive(pid)
    assert agent.returncode is None
    worker = harness.worker(KEY)
    assert worker is not None
    assert worker.exit_code is not None
    disk.empty()
    await harness.until(lambda: "No space" not in harness.reports[-1].detail, "it says so no more")
    await kill_9(agent)
    memory = harness.memory()
    assert memory is not None
    assert (memory.role, memory.lease) == (R.SERVING, None)


async def test_a_full_disk_does_not_keep_a_lent_node_whose_agent_is_dead(
    harness: DaemonHarness, disk: SmallDisk
) -> None:
    """The last resort brings it home; an agent that starts then from what the disk still has, a
    loan, finds the server that serves and leaves it alone."""
    config = harness.config(inference=True)
    agent = await harness.start(config)
    pid = await lend(harness, ttl_s=6.0)
    disk.fill()
    harness.is_renewing = False
    await kill_9(agent)
    await harness.until(lambda: harness.mark("routed").exists(), "the node is routed again")
    assert harness.mark("up").exists()
    assert not is_alive(pid)
    began_at_ns = harness.mark("routed").stat().st_ctime_ns
    again = await harness.start(config)
    await harness.until_role(R.SERVING)
    assert harness.mark("up").exists()
    assert harness.mark("routed").stat().st_ctime_ns >= began_at_ns
    assert again.returncode is None


async def test_a_disk_that_fills_up_under_a_start_keeps_neither_node_nor_next_agent(
    harness: DaemonHarness, disk: SmallDisk
) -> None:
    """The agent is killed between its order to a shim and the shim's first word. The next agent
    tells the worker's end and brings its node home before there is room."""
    config = harness.config(inference=True)
    agent = await harness.start(config)
    await harness.until_role(R.SERVING)
    await harness.want(R.ON_LOAN, ttl_s=6.0)
    await harness.until_role(R.ON_LOAN)
    begins = harness.workers.directory(KEY)
    await harness.want(R.ON_LOAN, order(harness, WAITING), ttl_s=6.0)
    await harness.until(begins.exists, "the worker's directory is there")
    disk.fill()
    await kill_9(agent)
    harness.is_renewing = False
    await harness.start(config)
    await harness.until(lambda: harness.mark("routed").exists(), "the node is routed again")
    await harness.until_role(R.SERVING)
    worker = harness.worker(KEY)
    assert worker is not None
    assert worker.phase in (WorkerPhase.EXITED, WorkerPhase.REFUSED)
    assert not any(is_alive(pid) for pid in pids(harness))
    disk.empty()
    await harness.until(lambda: "No space" not in harness.reports[-1].detail, "it is written down")
    assert len(pids(harness)) <= 1


async def test_a_node_goes_home_from_a_disk_that_is_read_only(
    harness: DaemonHarness, disk: SmallDisk
) -> None:
    """Neither lock, nor heartbeat, nor ledger can be written, and none of them is needed."""
    agent = await harness.start(harness.config(inference=True))
    await harness.until_role(R.SERVING)
    await harness.want(R.ON_LOAN, ttl_s=3.0)
    await harness.until_role(R.ON_LOAN)
    harness.is_renewing = False
    await kill_9(agent)
    (harness.state_dir / "last-resort.json").unlink()
    await harness.until(disk.freeze, "nobody writes there any more")
    try:
        over_at_s = harness.clock.now_s() + 3.0
        await harness.until(lambda: harness.clock.now_s() > over_at_s, "the lease is over")
        status, text = await go_home(harness)
    finally:
        disk.thaw()
    assert (status, "serving again" in text) == (0, True), text
    assert "Traceback" not in text
    assert harness.mark("routed").exists()


async def test_a_new_node_on_a_full_disk_serves_and_a_path_that_is_none_ends_with_2(
    harness: DaemonHarness, disk: SmallDisk
) -> None:
    """Its first server does not wait for its first record; what can never be is one line."""
    harness.state_dir.mkdir()
    (harness.state_dir / "lock").touch()
    disk.fill()
    await harness.start(harness.config(inference=True))
    await harness.until_role(R.SERVING)
    assert "No space left" in harness.reports[-1].detail
    wrong = harness.config(name="wrong", state_dir=str(disk.path / "filling" / "state"))
    status, text = await harness.run("--config", str(wrong), "--fake-nvml", str(harness.fleet))
    assert (status, len(text.splitlines()), "state_dir" in text) == (2, 1, True), text
