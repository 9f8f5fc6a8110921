"""An agent that is told to end does so although its NATS server hangs; real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE

import pytest

from common.model import NodeRole
from coordinator.demo.supervise import TERM_S
from tests.harness.node.daemon import KEY, ROOT, DaemonHarness, end, lend, make_daemon_harness
from tests.harness.node.workers import is_alive

pytestmark = [pytest.mark.nats, pytest.mark.slow]
harness = pytest.fixture(make_daemon_harness)


def halt_nats(harness: DaemonHarness) -> int:
    """Its server takes connections and answers nobody; its pid."""
    assert harness.nats is not None
    pid = harness.nats.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return pid


async def test_an_agent_told_to_end_while_nats_hangs_leaves_all_as_it_is(
    harness: DaemonHarness,
) -> None:
    """Before whoever supervises it loses patience, with 0: the loan stands in its ledger, its
    worker runs, and what brings the node home in time is still armed."""
    agent = await harness.start(harness.config(inference=True))
    worker = await lend(harness, ttl_s=600.0)
    nats = halt_nats(harness)
    try:
        async with asyncio.timeout(TERM_S):
            assert await end(agent) == 0
    finally:
        os.kill(nats, signal.SIGCONT)
    memory = harness.memory()
    assert memory is not None
    assert memory.role == NodeRole.ON_LOAN
    assert memory.lease is not None
    assert [held.order.key for held in memory.workers.values()] == [KEY]
    assert is_alive(worker)
    assert (harness.state_dir / "last-resort.json").exists()


FILLER = """
import asyncio, contextlib, sys
from common.bus import connect_nats, leave
from common.clock import SystemClock

async def main():
    clock = SystemClock()
    bus = await connect_nats(sys.argv[1], identity="n2", clock=clock)
    print("connected", flush=True)
    sys.stdin.readline()
    with contextlib.suppress(TimeoutError):
        async with clock.timeout(1.0):
            while True:
                await bus.publish("aryl.v1.c1.node.n2.report", bytes(1 << 20))
    await leave(bus, clock=clock)

asyncio.run(main())
"""
"""A client of a server that is halted once it is connected: it sends until nothing more fits in."""


async def test_a_bus_full_of_what_nobody_takes_is_left_all_the_same(harness: DaemonHarness) -> None:
    """More than all buffers on the way hold is dropped: a report that late says what was."""
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FILLER, harness.nats_url, cwd=ROOT, stdin=PIPE, stdout=PIPE
    )
    nats = None
    try:
        assert client.stdin is not None
        assert client.stdout is not None
        assert await client.stdout.readline() == b"connected\n"
        nats = halt_nats(harness)
        client.stdin.write(b"\n")
        async with asyncio.timeout(TERM_S):
            assert await client.wait() == 0
    finally:
        if nats is not None:
            os.kill(nats, signal.SIGCONT)
        if client.returncode is None:
            client.kill()
        await client.communicate()
