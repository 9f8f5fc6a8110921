"""Other settings, the same boot: a node moves to another pool as safely as by a reboot."""

from __future__ import annotations

import msgspec
import pytest

from agent.core.state import HookKind, Memory, StopWorker
from common.model import LeaseId, NodeRole, Pool, StopReason
from tests.agent.bench import Bench, key, lease, order

R, H = NodeRole, HookKind


def moved(bench: Bench, *, inference: bool) -> Bench:
    """The same machine after its agent started again with the settings of the other pool."""
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(bench.memory), type=Memory)
    again = Bench(inference=inference, memory=kept, at_s=bench.now_s + 1.0)
    again.pids, again.is_healthy, again.page = bench.pids, bench.is_healthy, bench.page
    again.workers = bench.workers
    return again


def training(bench: Bench) -> None:
    """A training node with a worker."""
    bench.runs(key())
    bench.want(R.TRAINING, order())
    bench.step()
    assert bench.life.workers.live()


def test_a_training_node_that_becomes_one_of_a_service_starts_its_server() -> None:
    """At once, as no worker is there."""
    bench = Bench(inference=False)
    bench.step()
    again = moved(bench, inference=True)
    assert "moved from the training pool to the inference pool" in again.life.detail
    again.steps(5)
    assert (again.role(), again.hooks) == (R.SERVING, [H.START, H.ROUTE])
    assert again.memory.desired_role == R.SERVING


def test_its_workers_leave_before_its_server_starts() -> None:
    """With their grace, as preempted ones; and their GPUs are seen free."""
    bench = Bench(inference=False)
    training(bench)
    bench.pids[0] = 77
    again = moved(bench, inference=True)
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
    bench = Bench()
    bench.serve()
    bench.pids[1] = 77
    again = moved(bench, inference=False)
    again.want(R.TRAINING, order())
    again.steps(5)
    assert again.role() == R.QUARANTINED
    assert "kept in quarantine: GPU GPU-1 is used by process 77" in again.life.detail
    again.pids.clear()
    again.steps(2)
    assert (again.role(), again.hooks) == (R.TRAINING, [])


def test_a_lent_node_that_moves_has_ended_its_loan() -> None:
    """Nobody could bring it home; its workers are preempted, and the lease is never honoured."""
    bench = Bench()
    bench.serve()
    bench.lend(until_s=1000.0)
    bench.runs(key())
    bench.want(R.ON_LOAN, order(), lease=lease())
    bench.step()
    again = moved(bench, inference=False)
    assert (again.memory.lease, again.memory.ended_leases) == (None, [LeaseId("l1-1")])
    assert StopWorker(key(), StopReason.PREEMPT, 30.0) in again.steps(3)
    again.ends(key(), -15, StopReason.PREEMPT)
    again.steps(2)
    assert again.role() == R.TRAINING


def test_a_reboot_needs_no_such_way() -> None:
    """Nothing of the old pool can be running."""
    bench = Bench(inference=False)
    training(bench)
    again = Bench(memory=bench.memory, boot_id="boot-2")
    assert again.role() == R.WARMING
    again.steps(4)
    assert again.role() == R.SERVING


@pytest.mark.parametrize("inference", [False, True])
def test_an_agent_that_starts_again_in_the_same_pool_changes_nothing(*, inference: bool) -> None:
    """Whatever role it has, and whichever version wrote the ledger; the next one names the pool."""
    bench = Bench(inference=inference)
    if inference:
        bench.serve()
        bench.lend()
    role = bench.role()
    again = moved(bench, inference=inference)
    assert again.role() == role
    assert again.memory.home_pool == (Pool.INFERENCE if inference else Pool.TRAINING)
    again.want(R.QUARANTINED)
    again.step()
    later = moved(again, inference=inference)
    assert (later.role(), later.life.detail) == (R.QUARANTINED, "")
