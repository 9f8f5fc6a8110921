"""The stages of a way home add up to all of the time for which its service waited."""

from __future__ import annotations

import msgspec
import pytest

from agent.core import return_timing
from agent.core.state import Memory, WorkerFact
from common.messages import OrderPhase, WorkerPhase
from common.model import NodeRole, StopReason
from tests.harness.node.life import LifeHarness, key, lease, order

R = NodeRole
LEASE_ENDS_AT_S = 100.0


def lent(harness: LifeHarness) -> None:
    """On loan with one worker, until `LEASE_ENDS_AT_S`."""
    harness.serve()
    harness.lend(until_s=LEASE_ENDS_AT_S)
    harness.runs(key())
    harness.want(R.ON_LOAN, order(phase=OrderPhase.RUN), lease=lease())
    harness.step()


def stages(harness: LifeHarness) -> dict[str, float]:
    """What the node tells of its latest way home."""
    return harness.memory.stage_durations_s


def from_disk(harness: LifeHarness) -> Memory:
    """What another process finds in the ledger."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(harness.memory), type=Memory)


@pytest.mark.parametrize("late_s", [0.0, 40.0])
def test_the_way_home_counts_from_the_end_of_the_lease(late_s: float) -> None:
    """However late somebody woke up to it: an agent that hung, a last resort that had to wait."""
    harness = LifeHarness()
    lent(harness)
    harness.now_s = LEASE_ENDS_AT_S + late_s - 1.0
    harness.step()
    assert harness.role() == R.VACATING
    harness.ends(key(), -15, StopReason.PREEMPT)
    while harness.role() != R.SERVING:
        harness.step()
    assert sum(stages(harness).values()) == pytest.approx(harness.now_s - LEASE_ENDS_AT_S)
    assert stages(harness).get("unattended", 0.0) == pytest.approx(late_s)


def test_a_way_home_that_another_process_ends_is_one_way() -> None:
    """What an agent that was ended had done, and the time until the next one, are all in it."""
    harness = LifeHarness()
    lent(harness)
    harness.now_s = LEASE_ENDS_AT_S
    harness.step()
    again = LifeHarness(memory=from_disk(harness), at_s=harness.now_s + 25.0)
    assert again.role() == R.VACATING
    again.ends(key(), -15, StopReason.PREEMPT)
    while again.role() != R.SERVING:
        again.step()
    assert sum(stages(again).values()) == pytest.approx(again.now_s - LEASE_ENDS_AT_S)
    assert stages(again)["unattended"] >= 25.0
    assert from_disk(again).stage_durations_s == stages(again)


def test_a_node_that_is_asked_back_in_time_was_never_unattended() -> None:
    """Then the way begins with the order, and ends before the lease would have."""
    harness = LifeHarness()
    lent(harness)
    harness.want(R.SERVING, order(), reclaim_in_s=60.0)
    harness.step()
    harness.ends(key(), -15, StopReason.PREEMPT)
    while harness.role() != R.SERVING:
        harness.step()
    assert set(stages(harness)) == {"checkpoint", "exit", "device_free", "server_ready"}


def test_quarantine_on_the_way_is_part_of_it() -> None:
    """The service does not have the node while its device is stuck."""
    harness = LifeHarness(device_free_timeout_s=10.0, quarantine_s=30.0)
    lent(harness)
    harness.pids[0] = 77
    harness.now_s = LEASE_ENDS_AT_S - 1.0
    harness.step()
    harness.ends(key(), -15, StopReason.PREEMPT)
    while harness.role() != R.QUARANTINED:
        harness.step()
    harness.pids.clear()
    while harness.role() != R.SERVING:
        harness.step()
    assert sum(stages(harness).values()) == pytest.approx(harness.now_s - LEASE_ENDS_AT_S)


def test_a_lent_node_that_its_coordinator_quarantines_is_away_from_then_on() -> None:
    """Its lease ends there, however long it stays."""
    harness = LifeHarness(quarantine_s=30.0)
    lent(harness)
    harness.want(R.QUARANTINED)
    harness.step()
    began_at_s = harness.now_s
    harness.ends(key(), -15, StopReason.PREEMPT)
    harness.steps(40)
    assert harness.role() == R.QUARANTINED
    harness.want(R.SERVING)
    while harness.role() != R.SERVING:
        harness.step()
    assert sum(stages(harness).values()) == pytest.approx(harness.now_s - began_at_s)


def test_a_new_loan_forgets_the_way_home_of_the_last_one() -> None:
    """One that is called back before the node moved has no way home of its own."""
    harness = LifeHarness()
    lent(harness)
    harness.now_s = LEASE_ENDS_AT_S
    harness.step()
    harness.ends(key(), -15, StopReason.PREEMPT)
    while harness.role() != R.SERVING:
        harness.step()
    assert stages(harness)
    harness.want(R.ON_LOAN, lease=lease("l1-2"))
    assert stages(harness) == {}


@pytest.mark.parametrize("is_lease_over", [False, True])
def test_a_reboot_of_a_lent_node_counts_from_the_boot(is_lease_over: bool) -> None:
    """Instants of an earlier boot mean nothing, and the boot has ended the loan."""
    harness = LifeHarness()
    lent(harness)
    if is_lease_over:
        harness.now_s = LEASE_ENDS_AT_S
        harness.step()
    again = LifeHarness(memory=harness.memory, boot_id="boot-2", at_s=50.0)
    again.steps(4)
    assert again.role() == R.SERVING
    assert stages(again)["unattended"] >= 50.0
    assert sum(stages(again).values()) <= again.now_s


def test_a_reboot_of_a_node_at_home_is_no_way_home() -> None:
    """It only waits for its server."""
    harness = LifeHarness()
    harness.serve()
    again = LifeHarness(memory=harness.memory, boot_id="boot-2", at_s=50.0)
    again.steps(4)
    assert (again.role(), set(stages(again))) == (R.SERVING, {"server_ready"})


def test_readings_of_the_clock_are_no_stage() -> None:
    """What only rounding left over is not told."""
    harness = LifeHarness()
    return_timing.began(harness.memory, now_s=10.0)
    return_timing.vacated(harness.memory, 10.0, 10.5, 11.0, 13.0)
    return_timing.arrived(
        harness.memory, now_s=14.0 + return_timing.LEAST_S / 2, server_ready_s=1.0
    )
    assert set(stages(harness)) == {"checkpoint", "exit", "device_free", "server_ready"}


@pytest.mark.parametrize(
    ("save_over_after_s", "checkpoint_s"), [(3.0, 3.0), (-5.0, 0.0), (None, 6.0)]
)
def test_what_its_workers_take_to_save_is_told_from_what_they_take_to_leave(
    save_over_after_s: float | None, checkpoint_s: float
) -> None:
    """Whoever had saved before it was asked needed no time; who never said so saved to its end."""
    harness = LifeHarness()
    lent(harness)
    harness.now_s = LEASE_ENDS_AT_S - 1.0
    harness.step()
    began_at_s = harness.now_s
    harness.steps(5)
    harness.workers[key()] = WorkerFact(
        key=key(),
        phase=WorkerPhase.EXITED,
        ended_at_s=began_at_s + 6.0,
        save_over_at_s=None if save_over_after_s is None else began_at_s + save_over_after_s,
    )
    harness.step()
    harness.workers.clear()  # its end is known, and its traces are gone
    while harness.role() != R.SERVING:
        harness.step()
    found = stages(harness)
    assert found["checkpoint"] == pytest.approx(checkpoint_s)
    assert found["checkpoint"] + found["exit"] == pytest.approx(7.0)  # seen gone by the next look
    assert sum(found.values()) == pytest.approx(harness.now_s - LEASE_ENDS_AT_S)


def test_when_the_way_home_was_over_outlives_the_agent_until_the_next_loan() -> None:
    """Its report may come late, from another process."""
    harness = LifeHarness()
    lent(harness)
    harness.now_s = LEASE_ENDS_AT_S
    harness.step()
    harness.ends(key(), -15, StopReason.PREEMPT)
    while harness.role() != R.SERVING:
        harness.step()
    assert from_disk(harness).home_at_s == harness.now_s
    harness.want(R.ON_LOAN, lease=lease("l1-2"))
    assert harness.memory.home_at_s is None
