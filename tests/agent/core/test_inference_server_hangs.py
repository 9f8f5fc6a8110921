"""A command that hangs while its node is wanted back: it may not cost the promise."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from agent.core.inference_server import SLOW_S, ServerCommands
from agent.core.state import Facts, HookKind, Memory
from agent.hooks.runner import OneCommand, SystemCommands
from agent.proc import sessions
from agent.workers.starters import run_command
from common.clock import SystemClock
from common.errors import Unavailable
from common.model import LeaseId, NodeRole
from tests.harness.fakes import FakeClock
from tests.harness.node.agent import AgentHarness
from tests.harness.node.life import SERVER, LifeHarness, lease, settings
from tests.harness.node.workers import (
    PATIENCE_S,
    is_alive,
)
from tests.tables import each_row

TTL_S, DEVICE_FREE_S = 30.0, 20.0
STEP_S = 1.0


def draining(hangs: HookKind) -> LifeHarness:
    """A node whose lease nobody prolongs, in a drain whose command hangs."""
    life_harness = LifeHarness(device_free_timeout_s=DEVICE_FREE_S)
    life_harness.serve()
    life_harness.want(NodeRole.ON_LOAN, lease=lease(ttl_s=TTL_S))
    life_harness.answers_hooks = False
    for _ in range(10):
        life_harness.step(STEP_S)
        if life_harness.hooks[-1] == hangs:
            return life_harness
        life_harness.answer(life_harness.hooks[-1])
    raise AssertionError(f"it never runs its {hangs} command")


def until_home(life_harness: LifeHarness, within_s: float) -> float:
    """Seconds until it serves; every command but the one that hangs succeeds."""
    life_harness.answers_hooks = True
    began_at_s = life_harness.now_s
    while life_harness.role() != NodeRole.SERVING:
        life_harness.step(STEP_S)
        assert life_harness.now_s <= began_at_s + within_s, (
            life_harness.role(),
            life_harness.hooks,
        )
    return life_harness.now_s - began_at_s


def test_an_unroute_that_hangs_is_ended_when_the_lease_is_over() -> None:
    """It is undone next, so nothing is gained by waiting for it."""
    life_harness = draining(HookKind.UNROUTE)
    while (
        life_harness.memory.lease_ends_at_s is not None
        and life_harness.now_s < life_harness.memory.lease_ends_at_s
    ):
        life_harness.step(STEP_S)
    until_home(life_harness, 3 * STEP_S)
    assert life_harness.ended_hooks == [HookKind.UNROUTE]
    assert life_harness.hooks == [HookKind.UNROUTE, HookKind.ROUTE]


def test_an_unroute_that_hangs_is_ended_when_home_is_ordered() -> None:
    """A coordinator that calls the node back has it as soon as one whose lease ran out."""
    life_harness = draining(HookKind.UNROUTE)
    life_harness.want(NodeRole.SERVING)
    until_home(life_harness, 3 * STEP_S)
    assert life_harness.ended_hooks == [HookKind.UNROUTE]


def test_a_command_is_told_once_to_end() -> None:
    """One that takes its time to die is not disturbed at it."""
    life_harness = draining(HookKind.UNROUTE)
    life_harness.want(NodeRole.SERVING)
    life_harness.ends_hooks = False
    life_harness.steps(5)
    assert life_harness.ended_hooks == [HookKind.UNROUTE]
    life_harness.answer(HookKind.UNROUTE, error="was ended")
    until_home(life_harness, 3 * STEP_S)


def test_a_stop_that_hangs_has_the_time_in_which_devices_become_free() -> None:
    """Until then the server is not started beside one that ends; then it is, whatever hangs."""
    life_harness = draining(HookKind.STOP)
    began_at_s = life_harness.now_s
    life_harness.want(NodeRole.SERVING)
    while not life_harness.ended_hooks:
        life_harness.step(STEP_S)
        assert life_harness.now_s <= began_at_s + DEVICE_FREE_S
    assert life_harness.now_s == began_at_s + DEVICE_FREE_S
    assert life_harness.ended_hooks == [HookKind.STOP]
    until_home(life_harness, 6 * STEP_S)


def test_a_stop_that_hangs_has_no_more_time_than_the_node_was_given() -> None:
    """Who calls it back says when it must serve again."""
    life_harness = draining(HookKind.STOP)
    began_at_s = life_harness.now_s
    life_harness.want(NodeRole.SERVING, reclaim_in_s=DEVICE_FREE_S / 4)
    while not life_harness.ended_hooks:
        life_harness.step(STEP_S)
        assert life_harness.now_s <= began_at_s + DEVICE_FREE_S / 4
    assert life_harness.now_s == began_at_s + DEVICE_FREE_S / 4


def test_no_command_is_ended_while_the_loan_goes_on() -> None:
    """Until then only its own time limit ends it."""
    for hangs in (HookKind.UNROUTE, HookKind.STOP):
        life_harness = draining(hangs)
        assert life_harness.memory.lease is not None
        life_harness.life.renewed(life_harness.memory.lease.lease_id, life_harness.now_s + 1000.0)
        life_harness.steps(int(2 * DEVICE_FREE_S))
        assert not life_harness.ended_hooks


def going_home(hangs: HookKind, *, reclaim_in_s: float | None) -> LifeHarness:
    """A lent node that is called back, in the first try of a command that hangs."""
    life_harness = LifeHarness()
    life_harness.serve()
    life_harness.lend()
    life_harness.hooks.clear()
    call_back(life_harness, hangs, reclaim_in_s=reclaim_in_s)
    return life_harness


def call_back(life_harness: LifeHarness, hangs: HookKind, *, reclaim_in_s: float | None) -> None:
    """Order a lent node home, as far as the first try of a command that hangs."""
    life_harness.want(NodeRole.SERVING, reclaim_in_s=reclaim_in_s)
    life_harness.answers_hooks = False
    for _ in range(10):
        life_harness.step(STEP_S)
        if life_harness.hooks and life_harness.hooks[-1] == hangs:
            return
        if life_harness.hooks:
            life_harness.answer(life_harness.hooks[-1])
    raise AssertionError(f"it never runs its {hangs} command")


def ended_after_s(life_harness: LifeHarness, within_s: float) -> float:
    """Seconds until a command is told to end."""
    began_at_s, told = life_harness.now_s, len(life_harness.ended_hooks)
    while len(life_harness.ended_hooks) == told:
        assert life_harness.now_s < began_at_s + within_s, "no command was ended"
        life_harness.step(STEP_S)
    return life_harness.now_s - began_at_s


@each_row("hangs", [HookKind.START, HookKind.ROUTE])
@each_row(("left_s", "ended_s"), [(40.0, 35.0), (10.0, 5.0), (6.0, 3.0)])
def test_what_hangs_on_the_way_home_is_tried_again_in_time(
    hangs: HookKind, left_s: float, ended_s: float
) -> None:
    """Long enough before the node must serve that another try can end before it."""
    life_harness = going_home(hangs, reclaim_in_s=1000.0)
    life_harness.want(NodeRole.SERVING, reclaim_in_s=left_s)
    life_harness.ends_hooks = False
    assert ended_after_s(life_harness, left_s) == ended_s
    assert life_harness.ended_hooks == [hangs]
    life_harness.answer(hangs, error="was ended")
    until_home(life_harness, left_s - ended_s)
    assert life_harness.hooks.count(hangs) == 2


def test_an_agent_that_restarts_on_the_way_home_knows_by_when_it_must_serve() -> None:
    """The order is not repeated to it; only a boot makes the instant void."""
    life_harness = going_home(HookKind.START, reclaim_in_s=40.0)
    kept = msgspec.msgpack.encode(life_harness.memory)
    again = LifeHarness(
        memory=msgspec.msgpack.decode(kept, type=Memory), at_s=life_harness.now_s + 2.0
    )
    again.answers_hooks = again.is_healthy = False
    due_s = life_harness.memory.serve_by_s
    assert due_s is not None
    ended_after_s(again, 40.0)
    assert again.now_s == due_s - 5.0
    rebooted = LifeHarness(memory=msgspec.msgpack.decode(kept, type=Memory), boot_id="boot-2")
    assert rebooted.memory.serve_by_s is None


def test_what_was_late_on_one_way_home_is_ended_on_the_next_one_too() -> None:
    """Once in a role, and not once for ever."""
    life_harness = going_home(HookKind.ROUTE, reclaim_in_s=30.0)
    ended_after_s(life_harness, 30.0)
    until_home(life_harness, 30.0)
    life_harness.hooks.clear()
    life_harness.want(NodeRole.ON_LOAN, lease=lease("l1-2", ttl_s=1000.0))
    life_harness.step(STEP_S)
    life_harness.life.renewed(LeaseId("l1-2"), life_harness.now_s + 1000.0)
    life_harness.steps(6)
    assert life_harness.role() == NodeRole.ON_LOAN
    life_harness.hooks.clear()
    call_back(life_harness, HookKind.ROUTE, reclaim_in_s=30.0)
    ended_after_s(life_harness, 30.0)
    assert life_harness.ended_hooks == [HookKind.ROUTE] * 2


def test_a_warm_up_is_not_over_while_its_command_runs() -> None:
    """A node in quarantine whose start command goes on would have its server come up there."""
    life_harness = LifeHarness(warm_up_timeout_s=10.0)
    life_harness.answers_hooks = False
    life_harness.steps(30)
    assert (life_harness.role(), life_harness.hooks) == (NodeRole.WARMING, [HookKind.START])
    life_harness.answer(HookKind.START, error="did not end")
    life_harness.step(STEP_S / 2)
    assert life_harness.role() == NodeRole.QUARANTINED


def test_what_hangs_again_on_the_way_home_has_its_own_time_limit_alone() -> None:
    """A command that takes longer than there was must end well at last."""
    life_harness = going_home(HookKind.ROUTE, reclaim_in_s=30.0)
    ended_after_s(life_harness, 30.0)
    life_harness.steps(100)
    assert life_harness.ended_hooks == [HookKind.ROUTE]
    assert life_harness.hooks[-2:] == [HookKind.ROUTE] * 2


@pytest.mark.parametrize("reclaim_in_s", [None, 0.0])
def test_without_time_that_is_left_no_command_on_the_way_home_is_ended(
    reclaim_in_s: float | None,
) -> None:
    """Where nobody said by when, or it is late already: to begin again would be later still."""
    life_harness = going_home(HookKind.START, reclaim_in_s=reclaim_in_s)
    life_harness.steps(100)
    assert not life_harness.ended_hooks


def test_what_hangs_on_the_way_back_from_a_drain_is_tried_again_in_time() -> None:
    """As on the way home: the node is out of its routing and wanted back in it."""
    life_harness = draining(HookKind.UNROUTE)
    life_harness.want(NodeRole.SERVING, reclaim_in_s=20.0)
    life_harness.step(STEP_S)
    life_harness.step(STEP_S)
    assert life_harness.hooks[-1] == HookKind.ROUTE
    assert ended_after_s(life_harness, 20.0) == 20.0 - 2 * STEP_S - 5.0
    assert life_harness.ended_hooks == [HookKind.UNROUTE, HookKind.ROUTE]
    until_home(life_harness, 3 * STEP_S)


async def test_a_node_ends_the_process_of_the_command_and_goes_home() -> None:
    """What its life asks for is done, and the next command runs."""
    async with AgentHarness(inference=True) as harness:
        await harness.until_role(NodeRole.SERVING)
        harness.machine.gate = asyncio.Event()
        harness.machine.commands.clear()
        await harness.want(NodeRole.ON_LOAN, lease=lease(ttl_s=TTL_S))
        await harness.clock.advance(5.0)
        assert harness.machine.commands == ["unroute"]
        await harness.want(NodeRole.SERVING)
        await harness.clock.advance(1.0)
        harness.machine.gate.set()
        await harness.until_role(NodeRole.SERVING)
        assert harness.machine.commands == ["unroute", "cancelled", "route"]


async def test_a_node_tells_who_does_not_end_of_a_command() -> None:
    """Its detail says so when it serves again, which is the event of its way back."""
    async with AgentHarness(inference=True) as harness:
        await harness.until_role(NodeRole.SERVING)
        harness.machine.gate = asyncio.Event()
        harness.machine.left_behind = "process 7 (stuck, state D) did not end"
        await harness.want(NodeRole.ON_LOAN, lease=lease(ttl_s=TTL_S))
        await harness.clock.advance(5.0)
        await harness.want(NodeRole.SERVING)
        await harness.clock.advance(1.0)
        harness.machine.gate.set()
        await harness.until_role(NodeRole.SERVING)
        assert "unroute command: process 7 (stuck, state D)" in harness.reports[-1].detail


def test_who_is_left_of_a_command_is_told_until_one_of_its_kind_succeeds() -> None:
    """It may yet undo what its node does, in whatever role that is by then."""
    life_harness = draining(HookKind.UNROUTE)
    life_harness.want(NodeRole.SERVING)
    life_harness.ends_hooks = False
    life_harness.step(STEP_S)
    life_harness.life.hook_done(
        HookKind.UNROUTE, error="was ended", now_s=life_harness.now_s, left="process 7"
    )
    until_home(life_harness, 3 * STEP_S)
    assert "unroute command: process 7" in life_harness.life.detail
    life_harness.want(NodeRole.ON_LOAN, lease=lease("l1-2", ttl_s=TTL_S))
    life_harness.answers_hooks = False
    life_harness.step(STEP_S)
    life_harness.answer(HookKind.UNROUTE, error="failed")
    assert "process 7" in life_harness.life.detail, "it failed, perhaps for the sake of that one"
    life_harness.answers_hooks = True
    life_harness.steps(3)
    assert "process 7" not in life_harness.life.detail


def test_who_is_left_of_a_command_of_a_role_that_is_over_is_told_too() -> None:
    """What it said counts for nothing then; that it is there may matter all the more."""
    commands = ServerCommands(0.0)
    commands.run(HookKind.UNROUTE, 1.0)
    commands.new_role(2.0)
    commands.answered(HookKind.UNROUTE, error="was ended", left="process 7", now_s=3.0)
    assert (commands.error, commands.left) == ("", "unroute command: process 7")


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


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_short_command_leaves_no_process(tmp_path: Path, is_cancelled: bool) -> None:
    """Neither one that took too long nor one that nobody waits for any more, nor their children:
    they are gone when the caller goes on."""
    said, clock = tmp_path / "said", FakeClock()
    os.mkfifo(said)
    script = f"sleep 1000 & echo $$ $! > {said}; wait"
    doing = asyncio.create_task(
        run_command(("sh", "-c", script), log=tmp_path / "log", clock=clock, timeout_s=5.0)
    )
    own_pid, child_pid = map(int, (await asyncio.to_thread(said.read_text)).split())
    if is_cancelled:
        doing.cancel()
    else:
        await clock.advance(5.0)
    real = SystemClock()
    async with real.timeout(PATIENCE_S):
        while not doing.done():
            if not is_alive(own_pid) and not is_alive(child_pid):
                await clock.advance(sessions.LOOK_S)  # it may have looked before they were dead
            await real.sleep(0.02)
    with pytest.raises(ProcessLookupError):
        os.kill(own_pid, 0)
    assert not is_alive(child_pid)
    if is_cancelled:
        assert doing.cancelled()
    else:
        with pytest.raises(Unavailable, match=r"sh: no end in 5 s$"):
            await doing


async def test_a_node_that_is_closed_takes_its_command_along() -> None:
    """A cancelled caller is no command that was ended: whoever cancels it is told so."""
    harness = AgentHarness(inference=True)
    harness.machine.gate = asyncio.Event()
    command = OneCommand(harness.machine)
    doing = asyncio.create_task(command.run(("start",), timeout_s=1.0, variables={}))
    await harness.clock.settle()
    doing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doing
    assert harness.machine.commands == ["start", "cancelled"]


def test_a_command_may_not_run_longer_than_devices_may_take_without_a_warning() -> None:
    """The fields are named, and a training node has none of this."""
    for limit_s, is_told in ((DEVICE_FREE_S, False), (DEVICE_FREE_S + 1.0, True)):
        server = msgspec.structs.replace(SERVER, hook_timeout_s=limit_s)
        told = settings(server=server, device_free_timeout_s=DEVICE_FREE_S).warning()
        assert bool(told) == is_told
        assert not is_told or ("hook_timeout_s" in told and "device_free_timeout_s" in told)
    assert not settings(inference=False, device_free_timeout_s=1.0).warning()


def test_a_command_that_runs_for_long_is_told_before_it_has_ended() -> None:
    """And what one said that had failed before it is not told of it."""
    life_harness = draining(HookKind.UNROUTE)
    life_harness.step(STEP_S)
    assert "command" not in life_harness.life.detail, "most are over soon"
    life_harness.steps(int(SLOW_S))
    assert "the unroute command runs for more than" in life_harness.life.detail
    life_harness.want(NodeRole.SERVING)
    life_harness.step(STEP_S)
    assert life_harness.ended_hooks == [HookKind.UNROUTE]
    life_harness.step(STEP_S)
    assert life_harness.hooks[-1] == HookKind.ROUTE
    assert "unroute" not in life_harness.life.detail
    life_harness.steps(int(SLOW_S) + 1)
    assert "the route command runs for more than" in life_harness.life.detail


def test_no_command_is_run_before_the_gpus_were_seen() -> None:
    """Each is told which they are."""
    life_harness = LifeHarness()
    assert life_harness.role() == NodeRole.WARMING
    assert life_harness.life.step(Facts(now_s=life_harness.now_s)) == []
    life_harness.step()
    assert life_harness.hooks == [HookKind.START]
