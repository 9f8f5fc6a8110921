"""A state disk that is full or read-only: what was begun goes on or home, nothing new begins."""

from __future__ import annotations

import os

from agent.core.node_lifecycle import Life
from agent.core.state import (
    CheckReserve,
    StartWorker,
    StopWorker,
)
from common.faults import Fault
from common.messages import OrderPhase, WorkerPhase
from common.model import LeaseId, NodeRole, StopReason
from tests.agent.agent_house import AgentHouse, NodeHouse
from tests.agent.bench import Bench, key, lease, order
from tests.tables import each_row

R, P = NodeRole, WorkerPhase
FULL = "no space left"


def test_a_worker_of_a_ledger_that_is_behind_does_not_begin() -> None:
    """It may be over and run elsewhere. One that is seen to run goes on."""
    bench = Bench(inference=False)
    bench.want(R.TRAINING, order(), order(key(1), gpus=(1,)), order(key(2), gpus=(1,)))
    held = bench.memory.workers
    held[str(key(1))].is_begun = held[str(key(2))].is_begun = True
    life = Life(bench.settings, bench.memory, boot_id="boot-1", now_s=0.0, is_behind=True)
    bench.life = life
    bench.runs(key(2))
    actions = bench.steps(3)
    assert not any(isinstance(action, StartWorker | CheckReserve) for action in actions)
    assert [action.key for action in actions if isinstance(action, StopWorker)] == [key(1)]
    said = {report.key: report for report in life.workers.reports()}
    assert (said[key()].phase, said[key()].fault) == (P.REFUSED, Fault.NODE)
    assert (said[key(1)].phase, said[key(1)].stop_reason) == (P.EXITED, StopReason.PREEMPT)
    assert said[key(2)].phase == P.RUNNING


# --- the node ---------------------------------------------------------------------------------


async def test_a_worker_waits_with_the_reason_until_the_ledger_can_be_written() -> None:
    """No process begins that an agent which starts anew would know nothing of."""
    house = NodeHouse()
    await house.turn()
    house.accept(R.TRAINING, order())
    house.ledger.is_full = True
    await house.turn(3)
    assert house.runner.calls == []
    assert house.said().phase == P.RESERVING
    assert FULL in house.said().error
    assert FULL in house.life.detail
    house.ledger.is_full = False
    await house.turn(4)
    assert house.said().phase == P.RUNNING
    assert FULL not in house.life.detail


async def test_a_worker_that_is_ready_is_not_started_on_a_disk_that_has_just_filled_up() -> None:
    """It begins once, as soon as its start can be written down."""
    house = NodeHouse()
    house.accept(R.TRAINING, order(phase=OrderPhase.RESERVE))
    await house.turn(3)
    assert house.said().phase == P.READY
    house.accept(R.TRAINING, order())
    house.ledger.is_full = True
    await house.turn(2)
    assert [name for name, _ in house.runner.calls] == ["check"]
    house.ledger.is_full = False
    await house.turn(3)
    assert [name for name, _ in house.runner.calls].count("start") == 1


async def test_a_worker_is_stopped_and_its_end_told_on_a_full_disk() -> None:
    """What gives back needs no disk."""
    house = NodeHouse()
    await house.run_one()
    house.ledger.is_full = True
    house.stop_one(grace_s=9.0)
    await house.turn(2)
    assert house.runner.stops == [(key(), StopReason.CANCEL, 9.0)]
    assert house.said().phase == P.EXITED


async def test_files_of_a_worker_stay_until_its_end_is_written_down() -> None:
    """They are what keeps an agent with an older ledger from starting it a second time."""
    house = NodeHouse()
    await house.run_one()
    house.ledger.is_full = True
    house.runner.end(key())
    await house.turn()
    house.accept(R.TRAINING, acknowledged=(key(),))
    await house.turn(2)
    assert key() in house.runner.known
    house.ledger.is_full = False
    await house.turn(2)
    assert key() not in house.runner.known


async def test_a_loan_is_not_begun_on_a_full_disk() -> None:
    """The node serves on, holds no lease, and its server was not touched."""
    house = NodeHouse(inference=True)
    await house.turn(5)
    commands = list(house.machine.commands)
    house.ledger.is_full = True
    house.accept(R.ON_LOAN, is_lent=True)
    await house.turn(5)
    assert house.role() == R.SERVING
    assert house.life.memory.lease is None
    assert FULL in house.life.detail
    assert "stop" not in house.machine.commands[len(commands) :]
    assert "unroute" not in house.machine.commands[len(commands) :]


@each_row("turns", [1, 2, 3, 4, 5])
async def test_a_drain_turns_back_when_the_disk_fills_up(turns: int) -> None:
    """Wherever it was: the node ends up serving, with its server up and routed."""
    house = NodeHouse(inference=True)
    await house.turn(5)
    house.accept(R.ON_LOAN, is_lent=True)
    await house.turn(turns)
    assert house.role() == R.DRAINING
    house.ledger.is_full = True
    await house.turn(12)
    assert house.role() == R.SERVING
    assert house.machine.is_healthy
    assert house.machine.commands[-1] in ("route", "start")
    assert house.life.memory.lease is None


async def test_a_loan_goes_on_and_comes_home_on_a_full_disk() -> None:
    """Its jobs are not ended for it, and its service does not wait for room on a disk."""
    house = NodeHouse(inference=True)
    await house.lend_with(order(), until_s=house.clock.now_s() + 60.0)
    house.ledger.is_full = True
    await house.turn(3)
    assert (house.role(), house.said().phase) == (R.ON_LOAN, P.RUNNING)
    house.life.renewed(LeaseId("l1-1"), house.clock.now_s() + 20.0)
    await house.turn(10)
    assert house.role() == R.ON_LOAN
    await house.turn(25)
    assert house.role() == R.SERVING
    assert house.runner.stops == [(key(), StopReason.PREEMPT, 30.0)]
    assert house.machine.commands[-2:] == ["start", "route"]


async def test_an_agent_with_an_older_ledger_does_not_wait_for_the_gpus_of_its_own_server() -> None:
    """The node came home on a full disk and its agent died: the next one reads of a loan, finds the
    server that answers, and serves on at once."""
    house = NodeHouse(inference=True)
    await house.lend_with(order(), until_s=house.clock.now_s() + 25.0)
    house.ledger.is_full = True
    await house.turn(30)
    assert house.role() == R.SERVING
    house.machine.pids[0] = os.getpid()
    seen = len(house.machine.commands)
    again = NodeHouse(inference=True, before=house)
    assert again.role() == R.ON_LOAN
    await again.turn(6)
    assert again.role() == R.SERVING
    assert "stop" not in again.machine.commands[seen:]
    assert [name for name, _ in again.runner.calls].count("start") == 1


async def test_a_desired_state_that_is_not_on_disk_is_refused_and_what_it_takes_back_is_done() -> (
    None
):
    """The answer is what it says: written down, or the reason; the report shows what is done."""
    house = AgentHouse(inference=True)
    async with house:
        await house.lend()
        house.ledger.is_full = True
        reply = await house.want(R.SERVING)
        assert not reply.is_accepted
        assert FULL in reply.error
        await house.until_role(R.SERVING)
        assert house.report.generation == house.generation
        assert FULL in house.report.detail
        assert house.agent.bad_messages == 0


async def test_a_loan_that_a_full_disk_refuses_is_told_to_the_coordinator() -> None:
    """A report of the order's own generation without a lease is what ends the loan there."""
    house = AgentHouse(inference=True)
    async with house:
        await house.until_role(R.SERVING)
        house.ledger.is_full = True
        reply = await house.want(R.ON_LOAN, lease=lease())
        assert not reply.is_accepted
        await house.until(lambda: house.report.generation == house.generation)
        await house.until(lambda: house.report.lease is None)
        assert house.report.role == R.SERVING
        assert R.DRAINING not in {report.role for report in house.reports}


async def test_a_report_says_that_the_disk_is_full_until_it_is_not() -> None:
    """Whoever places workers and lends nodes need not find out by trying."""
    async with AgentHouse() as house:
        await house.until(lambda: bool(house.reports))
        assert house.report.ledger_error == ""
        house.ledger.is_full = True
        refused = await house.want(R.TRAINING, order())
        assert not refused.is_accepted
        await house.until(lambda: "no space left" in house.report.ledger_error)
        house.ledger.is_full = False
        await house.until(lambda: house.report.ledger_error == "")
