"""A command that hangs while its node is wanted back: it may not cost the promise."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from agent.hooks import OneCommand, SystemCommands
from agent.state import HookKind
from common.clock import SystemClock
from common.model import NodeRole
from tests.agent.agent_house import AgentHouse
from tests.agent.bench import SERVER, Bench, lease, settings

TTL_S, DEVICE_FREE_S = 30.0, 20.0
STEP_S = 1.0


def draining(hangs: HookKind) -> Bench:
    """A node whose lease nobody prolongs, in a drain whose command hangs."""
    bench = Bench(device_free_timeout_s=DEVICE_FREE_S)
    bench.serve()
    bench.want(NodeRole.ON_LOAN, lease=lease(ttl_s=TTL_S))
    bench.answers_hooks = False
    for _ in range(10):
        bench.step(STEP_S)
        if bench.hooks[-1] == hangs:
            return bench
        bench.answer(bench.hooks[-1])
    raise AssertionError(f"it never runs its {hangs} command")


def until_home(bench: Bench, within_s: float) -> float:
    """Seconds until it serves; every command but the one that hangs succeeds."""
    bench.answers_hooks = True
    began_at_s = bench.now_s
    while bench.role() != NodeRole.SERVING:
        bench.step(STEP_S)
        assert bench.now_s <= began_at_s + within_s, (bench.role(), bench.hooks)
    return bench.now_s - began_at_s


def test_an_unroute_that_hangs_is_ended_when_the_lease_is_over() -> None:
    """It is undone next, so nothing is gained by waiting for it."""
    bench = draining(HookKind.UNROUTE)
    while bench.memory.lease_ends_at_s is not None and bench.now_s < bench.memory.lease_ends_at_s:
        bench.step(STEP_S)
    until_home(bench, 3 * STEP_S)
    assert bench.ended_hooks == [HookKind.UNROUTE]
    assert bench.hooks == [HookKind.UNROUTE, HookKind.ROUTE]


def test_an_unroute_that_hangs_is_ended_when_home_is_ordered() -> None:
    """A coordinator that calls the node back has it as soon as one whose lease ran out."""
    bench = draining(HookKind.UNROUTE)
    bench.want(NodeRole.SERVING)
    until_home(bench, 3 * STEP_S)
    assert bench.ended_hooks == [HookKind.UNROUTE]


def test_a_command_is_told_once_to_end() -> None:
    """One that takes its time to die is not disturbed at it."""
    bench = draining(HookKind.UNROUTE)
    bench.want(NodeRole.SERVING)
    bench.ends_hooks = False
    bench.steps(5)
    assert bench.ended_hooks == [HookKind.UNROUTE]
    bench.answer(HookKind.UNROUTE, error="was ended")
    until_home(bench, 3 * STEP_S)


def test_a_stop_that_hangs_has_the_time_in_which_devices_become_free() -> None:
    """Until then the server is not started beside one that ends; then it is, whatever hangs."""
    bench = draining(HookKind.STOP)
    began_at_s = bench.now_s
    bench.want(NodeRole.SERVING)
    while not bench.ended_hooks:
        bench.step(STEP_S)
        assert bench.now_s <= began_at_s + DEVICE_FREE_S
    assert bench.now_s == began_at_s + DEVICE_FREE_S
    assert bench.ended_hooks == [HookKind.STOP]
    until_home(bench, 6 * STEP_S)


def test_a_stop_that_hangs_has_no_more_time_than_the_node_was_given() -> None:
    """Who calls it back says when it must serve again."""
    bench = draining(HookKind.STOP)
    began_at_s = bench.now_s
    bench.want(NodeRole.SERVING, reclaim_in_s=DEVICE_FREE_S / 4)
    while not bench.ended_hooks:
        bench.step(STEP_S)
        assert bench.now_s <= began_at_s + DEVICE_FREE_S / 4
    assert bench.now_s == began_at_s + DEVICE_FREE_S / 4


def test_no_command_is_ended_while_the_loan_goes_on() -> None:
    """Until then only its own time limit ends it."""
    for hangs in (HookKind.UNROUTE, HookKind.STOP):
        bench = draining(hangs)
        assert bench.memory.lease is not None
        bench.life.renewed(bench.memory.lease.lease_id, bench.now_s + 1000.0)
        bench.steps(int(2 * DEVICE_FREE_S))
        assert not bench.ended_hooks


async def test_a_node_ends_the_process_of_the_command_and_goes_home() -> None:
    """What its life asks for is done, and the next command runs."""
    async with AgentHouse(inference=True) as house:
        await house.until_role(NodeRole.SERVING)
        house.machine.gate = asyncio.Event()
        house.machine.commands.clear()
        await house.want(NodeRole.ON_LOAN, lease=lease(ttl_s=TTL_S))
        await house.clock.advance(5.0)
        assert house.machine.commands == ["unroute"]
        await house.want(NodeRole.SERVING)
        await house.clock.advance(1.0)
        house.machine.gate.set()
        await house.until_role(NodeRole.SERVING)
        assert house.machine.commands == ["unroute", "cancelled", "route"]


async def test_a_command_that_is_ended_leaves_no_process(tmp_path: Path) -> None:
    """It is gone when its caller goes on, who is told which command it was."""
    started = tmp_path / "started"
    command = OneCommand(SystemCommands(SystemClock()))
    os.mkfifo(started)
    script = f"echo $$ > {started}; exec sleep 1000"
    doing = asyncio.create_task(command.run(("sh", "-c", script), timeout_s=1000.0, variables={}))
    pid = int(await asyncio.to_thread(started.read_text))
    command.end()
    assert (await doing).startswith("sh was ended")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_node_that_is_closed_takes_its_command_along() -> None:
    """A cancelled caller is no command that was ended: whoever cancels it is told so."""
    house = AgentHouse(inference=True)
    house.machine.gate = asyncio.Event()
    command = OneCommand(house.machine)
    doing = asyncio.create_task(command.run(("start",), timeout_s=1.0, variables={}))
    await house.clock.settle()
    doing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doing
    assert house.machine.commands == ["start", "cancelled"]


def test_a_command_may_not_run_longer_than_devices_may_take_without_a_warning() -> None:
    """The fields are named, and a training node has none of this."""
    for limit_s, is_told in ((DEVICE_FREE_S, False), (DEVICE_FREE_S + 1.0, True)):
        server = msgspec.structs.replace(SERVER, hook_timeout_s=limit_s)
        told = settings(server=server, device_free_timeout_s=DEVICE_FREE_S).warning()
        assert bool(told) == is_told
        assert not is_told or ("hook_timeout_s" in told and "device_free_timeout_s" in told)
    assert not settings(inference=False, device_free_timeout_s=1.0).warning()
