"""A lent node whose state disk takes no more, as processes of their own: it comes home all the
same."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.messages import WorkerPhase
from common.model import NodeRole
from tests.agent.daemon_house import (
    KEY,
    WAITING,
    DaemonHouse,
    kill_9,
    lend,
    make_daemon_house,
    order,
    pids,
)
from tests.agent.full_disk import SmallDisk, small_disk
from tests.agent.worker_house import is_alive

R = NodeRole
pytestmark = [pytest.mark.nats, pytest.mark.slow]


@pytest.fixture
def disk(tmp_path: Path) -> Generator[SmallDisk]:
    """A disk for the agent's state alone."""
    with small_disk(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
async def house(tmp_path: Path, disk: SmallDisk) -> AsyncGenerator[DaemonHouse]:
    """A node whose state is on that disk."""
    async with asynccontextmanager(make_daemon_house)(tmp_path) as house:
        house.use_state_dir(disk.path / "state")
        try:
            yield house
        finally:
            disk.empty()


async def go_home(house: DaemonHouse) -> tuple[int | None, str]:
    """`--go-home` by hand: exit status and what it said."""
    config = str(house.directory / "agent.toml")
    return await house.run("--go-home", "--config", config, "--fake-nvml", str(house.fleet))


async def test_a_full_disk_does_not_keep_a_lent_node_whose_lease_is_over(
    house: DaemonHouse, disk: SmallDisk
) -> None:
    """Its agent lives, says why it takes nothing new, keeps the loan that it has until it is over,
    knows how its worker ended, and writes it all down as soon as it can."""
    agent = await house.start(house.config(inference=True))
    pid = await lend(house, ttl_s=6.0)
    disk.fill()
    await house.until(lambda: "No space left" in house.reports[-1].detail, "it says so")
    assert house.reports[-1].role == R.ON_LOAN
    assert is_alive(pid)
    house.is_renewing = False
    await house.until(lambda: house.mark("routed").exists(), "the node is routed again")
    await house.until_role(R.SERVING)
    assert house.mark("up").exists()
    assert not is_alive(pid)
    assert agent.returncode is None
    worker = house.worker(KEY)
    assert worker is not None
    assert worker.exit_code is not None
    disk.empty()
    await house.until(lambda: "No space" not in house.reports[-1].detail, "it says so no more")
    await kill_9(agent)
    memory = house.memory()
    assert memory is not None
    assert (memory.role, memory.lease) == (R.SERVING, None)


async def test_a_full_disk_does_not_keep_a_lent_node_whose_agent_is_dead(
    house: DaemonHouse, disk: SmallDisk
) -> None:
    """The last resort brings it home; an agent that starts then from what the disk still has, a
    loan, finds the server that serves and leaves it alone."""
    config = house.config(inference=True)
    agent = await house.start(config)
    pid = await lend(house, ttl_s=6.0)
    disk.fill()
    house.is_renewing = False
    await kill_9(agent)
    await house.until(lambda: house.mark("routed").exists(), "the node is routed again")
    assert house.mark("up").exists()
    assert not is_alive(pid)
    began_at_ns = house.mark("routed").stat().st_ctime_ns
    again = await house.start(config)
    await house.until_role(R.SERVING)
    assert house.mark("up").exists()
    assert house.mark("routed").stat().st_ctime_ns >= began_at_ns
    assert again.returncode is None


async def test_a_disk_that_fills_up_under_a_start_keeps_neither_node_nor_next_agent(
    house: DaemonHouse, disk: SmallDisk
) -> None:
    """The agent is killed between its order to a shim and the shim's first word. The next agent
    tells the worker's end and brings its node home before there is room."""
    config = house.config(inference=True)
    agent = await house.start(config)
    await house.until_role(R.SERVING)
    await house.want(R.ON_LOAN, ttl_s=6.0)
    await house.until_role(R.ON_LOAN)
    begins = house.workers.directory(KEY)
    await house.want(R.ON_LOAN, order(house, WAITING), ttl_s=6.0)
    await house.until(begins.exists, "the worker's directory is there")
    disk.fill()
    await kill_9(agent)
    house.is_renewing = False
    await house.start(config)
    await house.until(lambda: house.mark("routed").exists(), "the node is routed again")
    await house.until_role(R.SERVING)
    worker = house.worker(KEY)
    assert worker is not None
    assert worker.phase in (WorkerPhase.EXITED, WorkerPhase.REFUSED)
    assert not any(is_alive(pid) for pid in pids(house))
    disk.empty()
    await house.until(lambda: "No space" not in house.reports[-1].detail, "it is written down")
    assert len(pids(house)) <= 1


async def test_a_node_goes_home_from_a_disk_that_is_read_only(
    house: DaemonHouse, disk: SmallDisk
) -> None:
    """Neither lock, nor heartbeat, nor ledger can be written, and none of them is needed."""
    agent = await house.start(house.config(inference=True))
    await house.until_role(R.SERVING)
    await house.want(R.ON_LOAN, ttl_s=3.0)
    await house.until_role(R.ON_LOAN)
    house.is_renewing = False
    await kill_9(agent)
    (house.state_dir / "last-resort.json").unlink()
    await house.until(disk.freeze, "nobody writes there any more")
    try:
        over_at_s = house.clock.now_s() + 3.0
        await house.until(lambda: house.clock.now_s() > over_at_s, "the lease is over")
        status, text = await go_home(house)
    finally:
        disk.thaw()
    assert (status, "serving again" in text) == (0, True), text
    assert "Traceback" not in text
    assert house.mark("routed").exists()


async def test_a_new_node_on_a_full_disk_serves_and_a_path_that_is_none_ends_with_2(
    house: DaemonHouse, disk: SmallDisk
) -> None:
    """Its first server does not wait for its first record; what can never be is one line."""
    house.state_dir.mkdir()
    (house.state_dir / "lock").touch()
    disk.fill()
    await house.start(house.config(inference=True))
    await house.until_role(R.SERVING)
    assert "No space left" in house.reports[-1].detail
    wrong = house.config(name="wrong", state_dir=str(disk.path / "filling" / "state"))
    status, text = await house.run("--config", str(wrong), "--fake-nvml", str(house.fleet))
    assert (status, len(text.splitlines()), "state_dir" in text) == (2, 1, True), text
