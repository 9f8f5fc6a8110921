"""A node whose NVML hangs when its agent starts, as processes of their own: it comes home."""

from __future__ import annotations

import pytest

from common.messages import GpuHealth, WorkerPhase
from common.model import NodeRole
from tests.agent.daemon_house import KEY, DaemonHouse, kill_9, lend, make_daemon_house
from tests.agent.worker_house import is_alive

R, P = NodeRole, WorkerPhase
HANG = '\n[[fault]]\nkind = "hang"\nat_s = 0.0\n'


pytestmark = [pytest.mark.nats, pytest.mark.slow]
house = pytest.fixture(make_daemon_house)


def hang(house: DaemonHouse) -> None:
    """Each process that opens NVML from now on finds a driver that does not answer."""
    house.fleet.write_text(house.fleet.read_text() + HANG)


async def test_an_agent_restarted_while_nvml_hangs_reports_and_comes_home(
    house: DaemonHouse,
) -> None:
    """Its worker goes on and the report says so; revoked, the node serves again."""
    config = house.config(inference=True, collect_deadline_s=1.0)
    agent = await house.start(config)
    pid = await lend(house, ttl_s=60.0)
    hang(house)
    await kill_9(agent)
    await house.start(config)
    assert {gpu.health for gpu in house.reports[-1].gpus} == {GpuHealth.UNRESPONSIVE}
    assert len(house.reports[-1].gpus) == 2
    await house.until_phase(KEY, P.RUNNING)
    assert is_alive(pid)
    await house.want(R.SERVING)
    await house.until_role(R.SERVING)
    assert house.mark("up").exists()
    assert house.mark("routed").exists()
    assert not is_alive(pid)
    worker = house.worker(KEY)
    assert worker is not None
    assert worker.phase == P.EXITED


async def test_the_last_resort_brings_a_node_home_while_nvml_hangs(house: DaemonHouse) -> None:
    """`--go-home` is a new process, which knows the GPUs from the ledger alone."""
    config = house.config(inference=True, collect_deadline_s=1.0)
    agent = await house.start(config)
    pid = await lend(house, ttl_s=4.0)
    hang(house)
    house.is_renewing = False
    await kill_9(agent)
    await house.until(lambda: house.mark("routed").exists(), "the node is routed again")
    assert house.mark("up").exists()
    assert not is_alive(pid)
