"""Other settings, the same boot: a node moves to another pool as safely as by a reboot."""

from __future__ import annotations

import msgspec
import pytest

from agent.core.state import HookKind, Memory, StopWorker
from common.model import LeaseId, NodeRole, Pool, StopReason
from tests.harness.node.life import LifeHarness, key, lease, order

R, H = NodeRole, HookKind


def moved(harness: LifeHarness, *, inference: bool) -> LifeHarness:
    """The same machine after its agent started again with the settings of the other pool."""
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(harness.memory), type=Memory)
    again = LifeHarness(inference=inference, memory=kept, at_s=harness.now_s + 1.0)
    again.pids, again.is_healthy, again.page = harness.pids, harness.is_healthy, harness.page
    again.workers = harness.workers
    return again


def training(harness: LifeHarness) -> None:
    """A training node with a worker."""
    harness.runs(key())
    harness.want(R.TRAINING, order())
    harness.step()
    assert harness.life.workers.live()


def test_a_training_node_that_becomes_one_of_a_service_starts_its_server() -> None:
    """At once, as no worker is there."""
    harness = LifeHarness(inference=False)
    harness.step()
    again = moved(harness, inference=True)
    assert "moved from the training pool to the inference pool" in again.life.detail
    again.steps(5)
    assert (again.role(), again.hooks) == (R.SERVING, [H.START, H.ROUTE])
    assert again.memory.desired_role == R.SERVING


def test_its_workers_leave_before_its_server_starts() -> None:
    """With their grace, as preempted ones; and their GPUs are seen free."""
    harness = LifeHarness(inference=False)
    training(harness)
    harness.pids[0] = 77
    again = moved(harness, inference=True)
    assert StopWorker(key(), StopReason.PREEMPT, 30.0) in again.steps(3)
    assert (again.role(), again.hooks) == (R.QUARANTINED, [])
    again.ends(key(), -15, StopReason.PREEMPT)
    again.steps(3)
    assert (again.role(), again.hooks) == (R.QUARANTINED, [])
    again.pids.clear()
    again.steps(5)
    assert (again.role(), again.hooks) == (R.SERVING, [H.START, H.ROUTE])


def test_nothing_is_placed_beside_a_server_that_nobody_stopped() -> None:
    """Its settings name no command for it any more: the report says who is still on the GPUs."""
    harness = LifeHarness()
    harness.serve()
    harness.pids[1] = 77
    again = moved(harness, inference=False)
    again.want(R.TRAINING, order())
    again.steps(5)
    assert again.role() == R.QUARANTINED
    assert "kept in quarantine: GPU GPU-1 is used by process 77" in again.life.detail
    again.pids.clear()
    again.steps(2)
    assert (again.role(), again.hooks) == (R.TRAINING, [])


def test_a_lent_node_that_moves_has_ended_its_loan() -> None:
    """Nobody could bring it home; its workers are preempted, and the lease is never honoured."""
    harness = LifeHarness()
    harness.serve()
    harness.lend(until_s=1000.0)
    harness.runs(key())
    harness.want(R.ON_LOAN, order(), lease=lease())
    harness.step()
    again = moved(harness, inference=False)
    assert (again.memory.lease, again.memory.ended_leases) == (None, [LeaseId("l1-1")])
    assert StopWorker(key(), StopReason.PREEMPT, 30.0) in again.steps(3)
    again.ends(key(), -15, StopReason.PREEMPT)
    again.steps(2)
    assert again.role() == R.TRAINING


def test_a_reboot_needs_no_such_way() -> None:
    """Nothing of the old pool can be running."""
    harness = LifeHarness(inference=False)
    training(harness)
    again = LifeHarness(memory=harness.memory, boot_id="boot-2")
    assert again.role() == R.WARMING
    again.steps(4)
    assert again.role() == R.SERVING


@pytest.mark.parametrize("inference", [False, True])
def test_an_agent_that_starts_again_in_the_same_pool_changes_nothing(*, inference: bool) -> None:
    """Whatever role it has, and whichever version wrote the ledger; the next one names the pool."""
    harness = LifeHarness(inference=inference)
    if inference:
        harness.serve()
        harness.lend()
    role = harness.role()
    again = moved(harness, inference=inference)
    assert again.role() == role
    assert again.memory.home_pool == (Pool.INFERENCE if inference else Pool.TRAINING)
    again.want(R.QUARANTINED)
    again.step()
    later = moved(again, inference=inference)
    assert (later.role(), later.life.detail) == (R.QUARANTINED, "")
