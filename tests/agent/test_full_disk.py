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
from tests.harness.node.agent import AgentHarness, NodeHarness
from tests.harness.node.life import LifeHarness, key, lease, order
from tests.tables import each_row

R, P = NodeRole, WorkerPhase
FULL = "no space left"


def test_a_worker_of_a_ledger_that_is_behind_does_not_begin() -> None:
    """It may be over and run elsewhere. One that is seen to run goes on."""
    life_harness = LifeHarness(inference=False)
    life_harness.want(R.TRAINING, order(), order(key(1), gpus=(1,)), order(key(2), gpus=(1,)))
    held = life_harness.memory.workers
    held[str(key(1))].is_begun = held[str(key(2))].is_begun = True
    life = Life(
        life_harness.settings, life_harness.memory, boot_id="boot-1", now_s=0.0, is_behind=True
    )
    life_harness.life = life
    life_harness.runs(key(2))
    actions = life_harness.steps(3)
    assert not any(isinstance(action, StartWorker | CheckReserve) for action in actions)
    assert [action.key for action in actions if isinstance(action, StopWorker)] == [key(1)]
    said = {report.key: report for report in life.workers.reports()}
    assert (said[key()].phase, said[key()].fault) == (P.REFUSED, Fault.NODE)
    assert (said[key(1)].phase, said[key(1)].stop_reason) == (P.EXITED, StopReason.PREEMPT)
    assert said[key(2)].phase == P.RUNNING


# --- the node ---------------------------------------------------------------------------------


async def test_a_worker_waits_with_the_reason_until_the_ledger_can_be_written() -> None:
    """No process begins that an agent which starts anew would know nothing of."""
    harness = NodeHarness()
    await harness.turn()
    harness.accept(R.TRAINING, order())
    harness.ledger.is_full = True
    await harness.turn(3)
    assert harness.runner.calls == []
    assert harness.said().phase == P.RESERVING
    assert FULL in harness.said().error
    assert FULL in harness.life.detail
    harness.ledger.is_full = False
    await harness.turn(4)
    assert harness.said().phase == P.RUNNING
    assert FULL not in harness.life.detail


async def test_a_worker_that_is_ready_is_not_started_on_a_disk_that_has_just_filled_up() -> None:
    """It begins once, as soon as its start can be written down."""
    harness = NodeHarness()
    harness.accept(R.TRAINING, order(phase=OrderPhase.RESERVE))
    await harness.turn(3)
    assert harness.said().phase == P.READY
    harness.accept(R.TRAINING, order())
    harness.ledger.is_full = True
    await harness.turn(2)
    assert [name for name, _ in harness.runner.calls] == ["check"]
    harness.ledger.is_full = False
    await harness.turn(3)
    assert [name for name, _ in harness.runner.calls].count("start") == 1


async def test_a_worker_is_stopped_and_its_end_told_on_a_full_disk() -> None:
    """What gives back needs no disk."""
    harness = NodeHarness()
    await harness.run_one()
    harness.ledger.is_full = True
    harness.stop_one(grace_s=9.0)
    await harness.turn(2)
    assert harness.runner.stops == [(key(), StopReason.CANCEL, 9.0)]
    assert harness.said().phase == P.EXITED


async def test_files_of_a_worker_stay_until_its_end_is_written_down() -> None:
    """They are what keeps an agent with an older ledger from starting it a second time."""
    harness = NodeHarness()
    await harness.run_one()
    harness.ledger.is_full = True
    harness.runner.end(key())
    await harness.turn()
    harness.accept(R.TRAINING, acknowledged=(key(),))
    await harness.turn(2)
    assert key() in harness.runner.known
    harness.ledger.is_full = False
    await harness.turn(2)
    assert key() not in harness.runner.known


async def test_a_loan_is_not_begun_on_a_full_disk() -> None:
    """The node serves on, holds no lease, and its server was not touched."""
    harness = NodeHarness(inference=True)
    await harness.turn(5)
    commands = list(harness.machine.commands)
    harness.ledger.is_full = True
    harness.accept(R.ON_LOAN, is_lent=True)
    await harness.turn(5)
    assert harness.role() == R.SERVING
    assert harness.life.memory.lease is None
    assert FULL in harness.life.detail
    assert "stop" not in harness.machine.commands[len(commands) :]
    assert "unroute" not in harness.machine.commands[len(commands) :]


@each_row("turns", [1, 2, 3, 4, 5])
async def test_a_drain_turns_back_when_the_disk_fills_up(turns: int) -> None:
    """Wherever it was: the node ends up serving, with its server up and routed."""
    harness = NodeHarness(inference=True)
    await harness.turn(5)
    harness.accept(R.ON_LOAN, is_lent=True)
    await harness.turn(turns)
    assert harness.role() == R.DRAINING
    harness.ledger.is_full = True
    await harness.turn(12)
    assert harness.role() == R.SERVING
    assert harness.machine.is_healthy
    assert harness.machine.commands[-1] in ("route", "start")
    assert harness.life.memory.lease is None


async def test_a_loan_goes_on_and_comes_home_on_a_full_disk() -> None:
    """Its jobs are not ended for it, and its service does not wait for room on a disk."""
    harness = NodeHarness(inference=True)
    await harness.lend_with(order(), until_s=harness.clock.now_s() + 60.0)
    harness.ledger.is_full = True
    await harness.turn(3)
    assert (harness.role(), harness.said().phase) == (R.ON_LOAN, P.RUNNING)
    harness.life.renewed(LeaseId("l1-1"), harness.clock.now_s() + 20.0)
    await harness.turn(10)
    assert harness.role() == R.ON_LOAN
    await harness.turn(25)
    assert harness.role() == R.SERVING
    assert harness.runner.stops == [(key(), StopReason.PREEMPT, 30.0)]
    assert harness.machine.commands[-2:] == ["start", "route"]


async def test_an_agent_with_an_older_ledger_does_not_wait_for_the_gpus_of_its_own_server() -> None:
    """The node came home on a full disk and its agent died: the next one reads of a loan, finds the
    server that answers, and serves on at once."""
    harness = NodeHarness(inference=True)
    await harness.lend_with(order(), until_s=harness.clock.now_s() + 25.0)
    harness.ledger.is_full = True
    await harness.turn(30)
    assert harness.role() == R.SERVING
    harness.machine.pids[0] = os.getpid()
    seen = len(harness.machine.commands)
    again = NodeHarness(inference=True, before=harness)
    assert again.role() == R.ON_LOAN
    await again.turn(6)
    assert again.role() == R.SERVING
    assert "stop" not in again.machine.commands[seen:]
    assert [name for name, _ in again.runner.calls].count("start") == 1


async def test_a_desired_state_that_is_not_on_disk_is_refused_and_what_it_takes_back_is_done() -> (
    None
):
    """The answer is what it says: written down, or the reason; the report shows what is done."""
    harness = AgentHarness(inference=True)
    async with harness:
        await harness.lend()
        harness.ledger.is_full = True
        reply = await harness.want(R.SERVING)
        assert not reply.is_accepted
        assert FULL in reply.error
        await harness.until_role(R.SERVING)
        assert harness.report.generation == harness.generation
        assert FULL in harness.report.detail
        assert harness.agent.bad_messages == 0


async def test_a_loan_that_a_full_disk_refuses_is_told_to_the_coordinator() -> None:
    """A report of the order's own generation without a lease is what ends the loan there."""
    harness = AgentHarness(inference=True)
    async with harness:
        await harness.until_role(R.SERVING)
        harness.ledger.is_full = True
        reply = await harness.want(R.ON_LOAN, lease=lease())
        assert not reply.is_accepted
        await harness.until(lambda: harness.report.generation == harness.generation)
        await harness.until(lambda: harness.report.lease is None)
        assert harness.report.role == R.SERVING
        assert R.DRAINING not in {report.role for report in harness.reports}


async def test_a_report_says_that_the_disk_is_full_until_it_is_not() -> None:
    """Whoever places workers and lends nodes need not find out by trying."""
    async with AgentHarness() as harness:
        await harness.until(lambda: bool(harness.reports))
        assert harness.report.ledger_error == ""
        harness.ledger.is_full = True
        refused = await harness.want(R.TRAINING, order())
        assert not refused.is_accepted
        await harness.until(lambda: "no space left" in harness.report.ledger_error)
        harness.ledger.is_full = False
        await harness.until(lambda: harness.report.ledger_error == "")
