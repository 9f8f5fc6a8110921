"""The way out of quarantine: by time, or by an order, and what keeps a node there meanwhile."""

from __future__ import annotations

import msgspec

from agent.core.state import HookKind, Memory
from common.messages import DesiredState
from common.model import LeaseId, NodeRole
from tests.harness.node.life import LifeHarness, key, lease, order

R, H = NodeRole, HookKind
LONG_S = 3600.0
"""`quarantine_s` that no test waits for."""


def quarantined(harness: LifeHarness, lease_name: str = "l1-1") -> None:
    """A serving node whose GPUs did not get free after a loan, and are by now."""
    harness.want(R.ON_LOAN, lease=lease(lease_name))
    harness.step()
    harness.life.renewed(LeaseId(lease_name), harness.now_s + 1000.0)
    harness.steps(6)
    assert harness.role() == R.ON_LOAN
    harness.hooks.clear()
    harness.pids[0] = 77
    harness.want(R.SERVING)
    while harness.role() != R.QUARANTINED:
        harness.step()
    harness.pids.clear()
    harness.steps(3)


def validate(harness: LifeHarness, validation: int) -> None:
    """The order to leave quarantine."""
    harness.generation += 1
    desired = DesiredState(
        node="n1", epoch=1, generation=harness.generation, role=R.SERVING, validation=validation
    )
    assert harness.life.accept(desired, now_s=harness.now_s).is_accepted


def stuck() -> LifeHarness:
    """A node in a quarantine that lasts long."""
    harness = LifeHarness(device_free_timeout_s=5.0, quarantine_s=LONG_S)
    harness.serve()
    quarantined(harness)
    assert harness.role() == R.QUARANTINED
    return harness


def test_a_node_that_waits_for_the_time_says_how_it_is_ended_sooner() -> None:
    """Whoever asks why it is there reads the cause and the way out."""
    detail = stuck().life.detail
    assert "GPU-0 is used by process 77" in detail
    assert "aryl node uncordon n1" in detail


def test_an_ordered_validation_ends_the_quarantine_of_a_node_that_is_well() -> None:
    """Through warm-up and its health check, as at the end of `quarantine_s`."""
    harness = stuck()
    validate(harness, 1)
    harness.step()
    assert harness.role() == R.WARMING
    harness.steps(4)
    assert (harness.role(), harness.hooks) == (R.SERVING, [H.START, H.ROUTE])


def test_an_ordered_validation_excuses_nobody_who_is_on_a_gpu() -> None:
    """The node stays and says who it is; it goes as soon as that one has left."""
    harness = stuck()
    harness.pids[1] = 78
    validate(harness, 1)
    harness.steps(3)
    assert harness.role() == R.QUARANTINED
    assert "kept in quarantine: GPU GPU-1 is used by process 78" in harness.life.detail
    harness.pids.clear()
    harness.steps(2)
    assert harness.role() == R.WARMING


def test_an_order_that_was_obeyed_does_not_end_the_next_quarantine() -> None:
    """It is repeated until the node is heard elsewhere; only a new one counts."""
    harness = stuck()
    validate(harness, 1)
    harness.steps(6)
    assert harness.role() == R.SERVING
    quarantined(harness, "l1-2")
    validate(harness, 1)
    harness.steps(6)
    assert harness.role() == R.QUARANTINED
    validate(harness, 2)
    harness.steps(6)
    assert harness.role() == R.SERVING


def test_an_agent_that_restarts_does_not_forget_the_order() -> None:
    """It is in the ledger with all else that was accepted."""
    harness = stuck()
    harness.pids[0] = 77
    validate(harness, 1)
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(harness.memory), type=Memory)
    again = LifeHarness(memory=kept, at_s=harness.now_s + 1.0, quarantine_s=LONG_S)
    again.steps(6)
    assert again.role() == R.SERVING


def test_an_order_that_finds_the_node_at_work_ends_no_later_quarantine() -> None:
    """It was meant for the one before, which had ended by itself."""
    harness = LifeHarness(device_free_timeout_s=5.0, quarantine_s=LONG_S)
    harness.serve()
    validate(harness, 1)
    quarantined(harness)
    harness.steps(20)
    assert harness.role() == R.QUARANTINED


def test_a_worker_that_has_not_ended_keeps_its_node_in_quarantine() -> None:
    """Its name is told, and the order does not help."""
    harness = LifeHarness(device_free_timeout_s=5.0, vacate_grace_s=5.0, quarantine_s=1.0)
    harness.serve()
    harness.lend()
    harness.runs(key())
    harness.want(R.ON_LOAN, order(), lease=lease())
    harness.step()
    harness.want(R.SERVING, order())
    harness.steps(20)
    assert harness.role() == R.QUARANTINED
    validate(harness, 1)
    harness.steps(5)
    assert harness.role() == R.QUARANTINED
    assert f"kept in quarantine: worker {key()} has not ended" in harness.life.detail
