"""An agent that hangs while its node is lent, as a process of its own with a real last resort."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec
import pytest

from agent.proc.process_tree import thread_states
from agent.shim.files import boot_id
from agent.storage import node_lock
from agent.storage.ledger import frame, peek
from common.model import NodeRole
from tests.harness.node.daemon import DaemonHarness, end, lend, make_daemon_harness
from tests.harness.node.stalling_agent import STALL
from tests.harness.node.workers import is_alive

R = NodeRole
MASKED = "00000000-0000-4000-8000-000000000000"

pytestmark = [pytest.mark.nats, pytest.mark.slow]
harness = pytest.fixture(make_daemon_harness)


async def stop(harness: DaemonHarness, agent: asyncio.subprocess.Process) -> None:
    """SIGSTOP, and wait until it stands still."""
    os.kill(agent.pid, signal.SIGSTOP)
    await harness.until(lambda: thread_states(agent.pid) == {"T"}, "the agent is stopped")


async def go_home(harness: DaemonHarness) -> tuple[int | None, str]:
    """`--go-home` by hand: exit status and what it said."""
    config = str(harness.directory / "agent.toml")
    return await harness.run("--go-home", "--config", config, "--fake-nvml", str(harness.fleet))


async def test_a_lent_node_whose_agent_hangs_comes_home(harness: DaemonHarness) -> None:
    """The last resort ends the agent that keeps the lock, adopts its workers and goes on."""
    agent = await harness.start(harness.config(inference=True))
    pid = await lend(harness, ttl_s=6.0)
    harness.is_renewing = False
    await stop(harness, agent)
    await harness.until(lambda: harness.mark("routed").exists(), "the node is routed again")
    assert harness.mark("up").exists()
    assert not is_alive(pid)
    assert await agent.wait() == -signal.SIGKILL


async def mask(harness: DaemonHarness) -> None:
    """Have all that an agent wrote name a boot of which nobody else hears, as where a container
    lays an id of its own over the kernel's. The agent must stand still."""
    memory = peek(harness.state_dir)
    assert memory is not None
    ledger = harness.state_dir / "ledger"
    memory.boot_id = MASKED
    ledger.write_bytes(ledger.read_bytes() + frame(msgspec.msgpack.encode(memory)))
    path = node_lock.path_in(harness.state_dir)
    path.write_text(path.read_text().replace(boot_id(), MASKED))


@pytest.mark.parametrize("has_worker", [True, False])
async def test_a_lent_node_whose_agent_hangs_and_sees_another_boot_id_comes_home(
    harness: DaemonHarness, has_worker: bool
) -> None:
    """The last resort may be where the boot has its right name, and the agent not. It goes on with
    what the agent remembers: there was no boot, and no way home since one."""
    agent = await harness.start(harness.config(inference=True))
    pid = 0
    if has_worker:
        pid = await lend(harness, ttl_s=6.0)
    else:
        await harness.until_role(R.SERVING)
        await harness.want(R.ON_LOAN, ttl_s=6.0)
        await harness.until_role(R.ON_LOAN)
    harness.is_renewing = False
    await stop(harness, agent)
    await mask(harness)
    await harness.until(lambda: harness.mark("routed").exists(), "the node is routed again")
    assert not (has_worker and is_alive(pid))
    assert await agent.wait() == -signal.SIGKILL

    def is_home() -> bool:
        memory = peek(harness.state_dir)
        return memory is not None and (memory.role, memory.boot_id) == (R.SERVING, MASKED)

    await harness.until(is_home, "its ledger says so")


async def test_an_agent_that_was_stopped_and_goes_on_within_its_lease_keeps_its_loan(
    harness: DaemonHarness,
) -> None:
    """Nobody ends anything: neither the agent, nor the worker, nor the loan."""
    agent = await harness.start(harness.config(inference=True))
    pid = await lend(harness, ttl_s=12.0)
    await stop(harness, agent)
    status, text = await go_home(harness)
    assert (status, "another agent" in text) == (2, True)
    seen = len(harness.reports)
    os.kill(agent.pid, signal.SIGCONT)
    await harness.until(lambda: len(harness.reports) > seen + 2, "it reports again")
    assert agent.returncode is None
    assert is_alive(pid)
    assert harness.reports[-1].role == R.ON_LOAN
    assert not harness.mark("routed").exists()


async def test_an_agent_that_goes_on_after_its_lease_was_over_is_not_ended(
    harness: DaemonHarness,
) -> None:
    """It brings its node home by itself, as long as it was not silent for longer than it may be."""
    agent = await harness.start(harness.config(inference=True))
    await lend(harness, ttl_s=8.0)
    harness.is_renewing = False
    over_at_s = harness.clock.now_s() + (harness.reports[-1].lease_remaining_s or 0.0)
    await harness.until(lambda: harness.clock.now_s() > over_at_s - 1.0, "the lease is nearly over")
    await stop(harness, agent)
    await harness.until(lambda: harness.clock.now_s() > over_at_s + 0.5, "the lease is over")
    os.kill(agent.pid, signal.SIGCONT)
    await harness.until_role(R.SERVING)
    assert harness.mark("routed").exists()
    assert agent.returncode is None


async def test_the_last_resort_beside_an_agent_that_is_home_has_nothing_to_do(
    harness: DaemonHarness,
) -> None:
    """It succeeds: one that failed would be run again for ever, as it is past disarming."""
    agent = await harness.start(harness.config(inference=True))
    await lend(harness, ttl_s=60.0)
    await harness.want(R.SERVING)
    await harness.until_role(R.SERVING)
    status, text = await go_home(harness)
    assert (status, "not away" in text) == (0, True)
    assert agent.returncode is None


async def test_an_agent_that_ends_says_that_it_holds_nothing(harness: DaemonHarness) -> None:
    """The next one to look is never sent to a process that has left."""
    agent = await harness.start(harness.config())
    said = node_lock.read(harness.state_dir)
    assert said is not None
    assert (said.pid, said.is_running(harness.state_dir)) == (agent.pid, True)
    assert await end(agent) == 0
    assert node_lock.read(harness.state_dir) is None


async def test_a_lent_node_comes_home_from_an_agent_with_a_step_that_never_ends(
    harness: DaemonHarness,
) -> None:
    """Its loop turns, so that only what it has begun tells: the last resort ends it like one that
    hangs, and goes on."""
    config = harness.config(inference=True)
    agent = await harness.start(config, program="tests.harness.node.stalling_agent")
    await lend(harness, ttl_s=6.0)
    (config.parent / STALL).touch()  # as on a mount that is gone
    await harness.until(lambda: is_silent(harness), "it reports no more")
    beat = node_lock.read(harness.state_dir)
    await harness.until(lambda: node_lock.read(harness.state_dir) != beat, "it beats all the same")
    harness.is_renewing = False  # as a coordinator that hears no report
    await harness.until(lambda: harness.mark("routed").exists(), "the node is routed again")
    assert harness.mark("up").exists()
    assert await agent.wait() == -signal.SIGKILL


def is_silent(harness: DaemonHarness) -> bool:
    """Whether the last report is older than ten periods."""
    return harness.clock.now_s() - harness.reports[-1].sequence / 1000 > 2.0
