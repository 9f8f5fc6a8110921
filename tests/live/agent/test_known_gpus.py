"""A node whose NVML hangs when its agent starts, as processes of their own: it comes home."""

from __future__ import annotations

import pytest

from common.messages import GpuHealth, WorkerPhase
from common.model import NodeRole
from tests.harness.node.daemon import KEY, DaemonHarness, kill_9, lend, make_daemon_harness
from tests.harness.node.workers import is_alive

R, P = NodeRole, WorkerPhase
HANG = '\n[[fault]]\nkind = "hang"\nat_s = 0.0\n'


pytestmark = [pytest.mark.nats, pytest.mark.slow]
harness = pytest.fixture(make_daemon_harness)


def hang(harness: DaemonHarness) -> None:
    """Each process that opens NVML from now on finds a driver that does not answer."""
    harness.fleet.write_text(harness.fleet.read_text() + HANG)


async def test_an_agent_restarted_while_nvml_hangs_reports_and_comes_home(
    harness: DaemonHarness,
) -> None:
    """Its worker goes on and the report says so; revoked, the node serves again."""
    config = harness.config(inference=True, collect_deadline_s=1.0)
    agent = await harness.start(config)
    pid = await lend(harness, ttl_s=60.0)
    hang(harness)
    await kill_9(agent)
    await harness.start(config)
    assert {gpu.health for gpu in harness.reports[-1].gpus} == {GpuHealth.UNRESPONSIVE}
    assert len(harness.reports[-1].gpus) == 2
    await harness.until_phase(KEY, P.RUNNING)
    assert is_alive(pid)
    await harness.want(R.SERVING)
    await harness.until_role(R.SERVING)
    assert harness.mark("up").exists()
    assert harness.mark("routed").exists()
    assert not is_alive(pid)
    worker = harness.worker(KEY)
    assert worker is not None
    assert worker.phase == P.EXITED


async def test_the_last_resort_brings_a_node_home_while_nvml_hangs(harness: DaemonHarness) -> None:
    """`--go-home` is a new process, which knows the GPUs from the ledger alone."""
    config = harness.config(inference=True, collect_deadline_s=1.0)
    agent = await harness.start(config)
    pid = await lend(harness, ttl_s=4.0)
    hang(harness)
    harness.is_renewing = False
    await kill_9(agent)
    await harness.until(lambda: harness.mark("routed").exists(), "the node is routed again")
    assert harness.mark("up").exists()
    assert not is_alive(pid)
