"""The way home of a node: each worker's grace, and a node whose agent is dead."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from agent.core.state import HUNG_TTL_RATIO, first_memory, hung_after_s, lease_left_s
from agent.go_home import go_home
from agent.lease.renewal import RENEWALS_PER_TTL
from common.errors import Unavailable
from common.messages import (
    StopOrder,
    WorkerPhase,
)
from common.model import STORE_INDEX, JobId, NodeRole, StopReason, WorkerKey
from tests.harness.node.agent import NodeHarness
from tests.harness.node.life import key, lease, order, settings
from tests.tables import each_row

R, P = NodeRole, WorkerPhase


async def test_each_worker_keeps_its_own_grace_when_the_node_goes_home() -> None:
    """A short one must not shorten that of the workers after it."""
    harness = NodeHarness(inference=True)
    short, long = order(key(0), gpus=(0,), grace_s=2.0), order(key(1), gpus=(1,), grace_s=25.0)
    await harness.lend_with(short, long)
    harness.accept(R.SERVING)
    await harness.turn()
    assert harness.runner.stops == [
        (key(0), StopReason.PREEMPT, 2.0),
        (key(1), StopReason.PREEMPT, 25.0),
    ]


async def test_a_stop_that_is_under_way_is_shortened_when_the_node_must_go_home() -> None:
    """The service has its deadline, whatever grace the coordinator gave before; told once."""
    harness = NodeHarness(inference=True, vacate_grace_s=10.0)
    await harness.lend_with(order(grace_s=600.0), until_s=harness.clock.now_s() + 40.0)
    harness.runner.is_deaf = True
    stop = StopOrder(key=key(), reason=StopReason.RELEASE, grace_s=600.0)
    harness.accept(R.ON_LOAN, order(grace_s=600.0), stops=(stop,), is_lent=True)
    await harness.turn(2)
    await harness.turn(8, after_s=5.0)
    assert harness.role() == R.VACATING
    assert harness.runner.stops == [
        (key(), StopReason.RELEASE, 600.0),
        (key(), StopReason.RELEASE, 10.0),
    ]


async def test_what_a_shim_says_of_a_save_is_told_as_a_stage() -> None:
    """The worker had saved long before it left; the store that it left behind saved nothing."""
    harness = NodeHarness(inference=True)
    store = WorkerKey(JobId("j1"), 1, STORE_INDEX)
    await harness.lend_with(order())
    harness.runner.is_deaf = True
    harness.accept(R.SERVING)
    await harness.turn()
    assert harness.role() == R.VACATING
    began_at_s = harness.clock.now_s()
    await harness.turn(4)
    harness.runner.end(key())
    left = structs.replace(harness.runner.known[key()], save_over_at_s=began_at_s + 1.5)
    harness.runner.known[key()] = left
    harness.runner.known[store] = structs.replace(left, key=store, save_over_at_s=began_at_s + 3.0)
    await harness.turn(8)
    assert harness.role() == R.SERVING
    assert harness.life.memory.stage_durations_s["checkpoint"] == pytest.approx(1.5)


# --- go home ----------------------------------------------------------------------------------


async def test_a_node_whose_agent_is_dead_goes_home_when_its_lease_is_over() -> None:
    """Workers end, the GPUs are seen free, the server starts, and only then it is routed."""
    harness = NodeHarness(inference=True)
    await harness.lend_with(order(), until_s=harness.clock.now_s() + 20.0)
    harness.machine.commands.clear()
    await harness.clock.advance(20.0)
    going = asyncio.create_task(go_home(harness.node, clock=harness.clock))
    await harness.until(going.done)
    assert "serving again" in going.result()
    assert harness.role() == R.SERVING
    assert harness.machine.commands == ["start", "route"]
    assert harness.runner.stops == [(key(), StopReason.PREEMPT, 30.0)]


async def test_a_valid_lease_is_left_alone_and_whoever_calls_must_call_again() -> None:
    """Success would end the last resort, and nobody would be left to bring the node home."""
    harness = NodeHarness(inference=True)
    await harness.lend_with(until_s=harness.clock.now_s() + 20.0)
    going = asyncio.create_task(go_home(harness.node, clock=harness.clock))
    await harness.until(going.done)
    with pytest.raises(Unavailable, match="valid for another"):
        going.result()
    assert harness.role() == R.ON_LOAN


async def test_a_drain_whose_lease_was_never_confirmed_comes_home_too() -> None:
    """Agent and coordinator died in the first moments of the loan."""
    harness = NodeHarness(inference=True)
    await harness.turn(5)
    harness.accept(R.ON_LOAN, is_lent=True)
    await harness.turn(6)
    assert (harness.role(), harness.machine.is_healthy) == (R.DRAINING, False)
    await harness.clock.advance(30.0)
    going = asyncio.create_task(go_home(harness.node, clock=harness.clock))
    await harness.until(going.done)
    assert harness.role() == R.SERVING
    assert harness.machine.is_healthy


@pytest.mark.parametrize("inference", [True, False])
async def test_a_node_at_home_is_left_as_it_is(inference: bool) -> None:
    """The last resort of a loan that ended well finds nothing to do."""
    harness = NodeHarness(inference=inference)
    await harness.turn(5)
    commands = list(harness.machine.commands)
    assert await go_home(harness.node, clock=harness.clock) == ""
    assert harness.machine.commands == commands


async def test_a_node_that_cannot_get_home_ends_in_quarantine_with_the_reason() -> None:
    """A service is never given a server that does not work."""
    harness = NodeHarness(inference=True, warm_up_timeout_s=20.0)
    await harness.lend_with(until_s=harness.clock.now_s() + 20.0)
    await harness.clock.advance(20.0)
    harness.machine.command_errors = ["start exited with 1"] * 1000
    going = asyncio.create_task(go_home(harness.node, clock=harness.clock))
    await harness.until(going.done)
    assert harness.role() == R.QUARANTINED
    assert "start exited with 1" in going.result()


# --- a hung agent -----------------------------------------------------------------------------


@each_row(
    ("after_s", "ttl_s", "expected_s"),
    [(10.0, None, 10.0), (10.0, 30.0, 10.0), (10.0, 12.0, 6.0), (10.0, 1.0, 2.0), (3.0, 30.0, 3.0)],
)
def test_an_agent_may_be_silent_for_half_its_ttl_at_most(
    after_s: float, ttl_s: float | None, expected_s: float
) -> None:
    """A setting cannot break the promise of a short lease, and no lease makes a beat too few."""
    chosen = settings(hung_after_s=after_s)
    memory = first_memory(chosen, "boot-1")
    memory.lease = None if ttl_s is None else lease(ttl_s=ttl_s)
    assert hung_after_s(chosen, memory) == expected_s


def test_an_agent_that_hung_with_everybody_else_costs_no_time() -> None:
    """It asked for the last time a renewal's period before that at the most: when its lease is over
    it has been silent for longer than it may be."""
    assert HUNG_TTL_RATIO <= 1.0 - 1.0 / RENEWALS_PER_TTL


def test_what_is_left_of_a_lease_counts_from_what_was_confirmed() -> None:
    """Or from when it was taken, until then; without one nothing is left."""
    memory = first_memory(settings(), "boot-1")
    memory.lease_unconfirmed_until_s = 30.0
    assert lease_left_s(memory, 10.0) == 0.0
    memory.lease = lease()
    assert lease_left_s(memory, 10.0) == 20.0
    memory.lease_until_s = 45.0
    assert lease_left_s(memory, 10.0) == 35.0
    assert lease_left_s(memory, 50.0) == 0.0


async def test_a_loan_is_told_in_the_log_step_by_step(caplog: pytest.LogCaptureFixture) -> None:
    """The node leaves its service, is on loan, is called back and why, is home with each stage."""
    caplog.set_level("INFO")
    harness = NodeHarness(inference=True)
    await harness.lend_with(order())
    harness.accept(R.SERVING)
    await harness.turn(8)
    assert harness.role() == R.SERVING
    name = harness.life.memory.node
    lines = [line for line in caplog.messages if line.startswith(f"node {name} ")]
    while "leaves" not in lines[0]:  # it first came to serve
        del lines[0]
    assert [line.partition(":")[0] for line in lines[:4]] == [
        f"node {name} leaves its service (serving -> draining)",
        f"node {name} is on loan (draining -> on_loan)",
        f"node {name} goes home (on_loan -> vacating)",
        f"node {name} starts its server (vacating -> warming)",
    ]
    assert lines[2].partition(": ")[2]
    assert lines[-1].startswith(f"node {name} is home again (warming -> serving): checkpoint ")
    assert all(stage in lines[-1] for stage in ("exit", "device_free", "server_ready"))
