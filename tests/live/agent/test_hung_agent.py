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
from tests.agent.daemon_house import DaemonHouse, end, lend, make_daemon_house
from tests.agent.stalling_agent import STALL
from tests.agent.worker_house import is_alive

R = NodeRole
MASKED = "00000000-0000-4000-8000-000000000000"

pytestmark = [pytest.mark.nats, pytest.mark.slow]
house = pytest.fixture(make_daemon_house)


async def stop(house: DaemonHouse, agent: asyncio.subprocess.Process) -> None:
    """SIGSTOP, and wait until it stands still."""
    os.kill(agent.pid, signal.SIGSTOP)
    await house.until(lambda: thread_states(agent.pid) == {"T"}, "the agent is stopped")


async def go_home(house: DaemonHouse) -> tuple[int | None, str]:
    """`--go-home` by hand: exit status and what it said."""
    config = str(house.directory / "agent.toml")
    return await house.run("--go-home", "--config", config, "--fake-nvml", str(house.fleet))


async def test_a_lent_node_whose_agent_hangs_comes_home(house: DaemonHouse) -> None:
    """The last resort ends the agent that keeps the lock, adopts its workers and goes on."""
    agent = await house.start(house.config(inference=True))
    pid = await lend(house, ttl_s=6.0)
    house.is_renewing = False
    await stop(house, agent)
    await house.until(lambda: house.mark("routed").exists(), "the node is routed again")
    assert house.mark("up").exists()
    assert not is_alive(pid)
    assert await agent.wait() == -signal.SIGKILL


async def mask(house: DaemonHouse) -> None:
    """Have all that an agent wrote name a boot of which nobody else hears, as where a container
    lays an id of its own over the kernel's. The agent must stand still."""
    memory = peek(house.state_dir)
    assert memory is not None
    ledger = house.state_dir / "ledger"
    memory.boot_id = MASKED
    ledger.write_bytes(ledger.read_bytes() + frame(msgspec.msgpack.encode(memory)))
    path = node_lock.path_in(house.state_dir)
    path.write_text(path.read_text().replace(boot_id(), MASKED))


@pytest.mark.parametrize("has_worker", [True, False])
async def test_a_lent_node_whose_agent_hangs_and_sees_another_boot_id_comes_home(
    house: DaemonHouse, has_worker: bool
) -> None:
    """The last resort may be where the boot has its right name, and the agent not. It goes on with
    what the agent remembers: there was no boot, and no way home since one."""
    agent = await house.start(house.config(inference=True))
    pid = 0
    if has_worker:
        pid = await lend(house, ttl_s=6.0)
    else:
        await house.until_role(R.SERVING)
        await house.want(R.ON_LOAN, ttl_s=6.0)
        await house.until_role(R.ON_LOAN)
    house.is_renewing = False
    await stop(house, agent)
    await mask(house)
    await house.until(lambda: house.mark("routed").exists(), "the node is routed again")
    assert not (has_worker and is_alive(pid))
    assert await agent.wait() == -signal.SIGKILL

    def is_home() -> bool:
        memory = peek(house.state_dir)
        return memory is not None and (memory.role, memory.boot_id) == (R.SERVING, MASKED)

    await house.until(is_home, "its ledger says so")


async def test_an_agent_that_was_stopped_and_goes_on_within_its_lease_keeps_its_loan(
    house: DaemonHouse,
) -> None:
    """Nobody ends anything: neither the agent, nor the worker, nor the loan."""
    agent = await house.start(house.config(inference=True))
    pid = await lend(house, ttl_s=12.0)
    await stop(house, agent)
    status, text = await go_home(house)
    assert (status, "another agent" in text) == (2, True)
    seen = len(house.reports)
    os.kill(agent.pid, signal.SIGCONT)
    await house.until(lambda: len(house.reports) > seen + 2, "it reports again")
    assert agent.returncode is None
    assert is_alive(pid)
    assert house.reports[-1].role == R.ON_LOAN
    assert not house.mark("routed").exists()


async def test_an_agent_that_goes_on_after_its_lease_was_over_is_not_ended(
    house: DaemonHouse,
) -> None:
    """It brings its node home by itself, as long as it was not silent for longer than it may be."""
    agent = await house.start(house.config(inference=True))
    await lend(house, ttl_s=8.0)
    house.is_renewing = False
    over_at_s = house.clock.now_s() + (house.reports[-1].lease_remaining_s or 0.0)
    await house.until(lambda: house.clock.now_s() > over_at_s - 1.0, "the lease is nearly over")
    await stop(house, agent)
    await house.until(lambda: house.clock.now_s() > over_at_s + 0.5, "the lease is over")
    os.kill(agent.pid, signal.SIGCONT)
    await house.until_role(R.SERVING)
    assert house.mark("routed").exists()
    assert agent.returncode is None


async def test_the_last_resort_beside_an_agent_that_is_home_has_nothing_to_do(
    house: DaemonHouse,
) -> None:
    """It succeeds: one that failed would be run again for ever, as it is past disarming."""
    agent = await house.start(house.config(inference=True))
    await lend(house, ttl_s=60.0)
    await house.want(R.SERVING)
    await house.until_role(R.SERVING)
    status, text = await go_home(house)
    assert (status, "not away" in text) == (0, True)
    assert agent.returncode is None


async def test_an_agent_that_ends_says_that_it_holds_nothing(house: DaemonHouse) -> None:
    """The next one to look is never sent to a process that has left."""
    agent = await house.start(house.config())
    said = node_lock.read(house.state_dir)
    assert said is not None
    assert (said.pid, said.is_running(house.state_dir)) == (agent.pid, True)
    assert await end(agent) == 0
    assert node_lock.read(house.state_dir) is None


async def test_a_lent_node_comes_home_from_an_agent_with_a_step_that_never_ends(
    house: DaemonHouse,
) -> None:
    """Its loop turns, so that only what it has begun tells: the last resort ends it like one that
    hangs, and goes on."""
    config = house.config(inference=True)
    agent = await house.start(config, program="tests.agent.stalling_agent")
    await lend(house, ttl_s=6.0)
    (config.parent / STALL).touch()  # as on a mount that is gone
    await house.until(lambda: is_silent(house), "it reports no more")
    beat = node_lock.read(house.state_dir)
    await house.until(lambda: node_lock.read(house.state_dir) != beat, "it beats all the same")
    house.is_renewing = False  # as a coordinator that hears no report
    await house.until(lambda: house.mark("routed").exists(), "the node is routed again")
    assert house.mark("up").exists()
    assert await agent.wait() == -signal.SIGKILL


def is_silent(house: DaemonHouse) -> bool:
    """Whether the last report is older than ten periods."""
    return house.clock.now_s() - house.reports[-1].sequence / 1000 > 2.0
