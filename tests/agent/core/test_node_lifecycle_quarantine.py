"""The way out of quarantine: by time, or by an order, and what keeps a node there meanwhile."""

from __future__ import annotations

import msgspec

from agent.core.state import HookKind, Memory
from common.messages import DesiredState
from common.model import LeaseId, NodeRole
from tests.agent.bench import Bench, key, lease, order

R, H = NodeRole, HookKind
LONG_S = 3600.0
"""`quarantine_s` that no test waits for."""


def quarantined(bench: Bench, lease_name: str = "l1-1") -> None:
    """A serving node whose GPUs did not get free after a loan, and are by now."""
    bench.want(R.ON_LOAN, lease=lease(lease_name))
    bench.step()
    bench.life.renewed(LeaseId(lease_name), bench.now_s + 1000.0)
    bench.steps(6)
    assert bench.role() == R.ON_LOAN
    bench.hooks.clear()
    bench.pids[0] = 77
    bench.want(R.SERVING)
    while bench.role() != R.QUARANTINED:
        bench.step()
    bench.pids.clear()
    bench.steps(3)


def validate(bench: Bench, validation: int) -> None:
    """The order to leave quarantine."""
    bench.generation += 1
    desired = DesiredState(
        node="n1", epoch=1, generation=bench.generation, role=R.SERVING, validation=validation
    )
    assert bench.life.accept(desired, now_s=bench.now_s).is_accepted


def stuck() -> Bench:
    """A node in a quarantine that lasts long."""
    bench = Bench(device_free_timeout_s=5.0, quarantine_s=LONG_S)
    bench.serve()
    quarantined(bench)
    assert bench.role() == R.QUARANTINED
    return bench


def test_a_node_that_waits_for_the_time_says_how_it_is_ended_sooner() -> None:
    """Whoever asks why it is there reads the cause and the way out."""
    detail = stuck().life.detail
    assert "GPU-0 is used by process 77" in detail
    assert "aryl node uncordon n1" in detail


def test_an_ordered_validation_ends_the_quarantine_of_a_node_that_is_well() -> None:
    """Through warm-up and its health check, as at the end of `quarantine_s`."""
    bench = stuck()
    validate(bench, 1)
    bench.step()
    assert bench.role() == R.WARMING
    bench.steps(4)
    assert (bench.role(), bench.hooks) == (R.SERVING, [H.START, H.ROUTE])


def test_an_ordered_validation_excuses_nobody_who_is_on_a_gpu() -> None:
    """The node stays and says who it is; it goes as soon as that one has left."""
    bench = stuck()
    bench.pids[1] = 78
    validate(bench, 1)
    bench.steps(3)
    assert bench.role() == R.QUARANTINED
    assert "kept in quarantine: GPU GPU-1 is used by process 78" in bench.life.detail
    bench.pids.clear()
    bench.steps(2)
    assert bench.role() == R.WARMING


def test_an_order_that_was_obeyed_does_not_end_the_next_quarantine() -> None:
    """It is repeated until the node is heard elsewhere; only a new one counts."""
    bench = stuck()
    validate(bench, 1)
    bench.steps(6)
    assert bench.role() == R.SERVING
    quarantined(bench, "l1-2")
    validate(bench, 1)
    bench.steps(6)
    assert bench.role() == R.QUARANTINED
    validate(bench, 2)
    bench.steps(6)
    assert bench.role() == R.SERVING


def test_an_agent_that_restarts_does_not_forget_the_order() -> None:
    """It is in the ledger with all else that was accepted."""
    bench = stuck()
    bench.pids[0] = 77
    validate(bench, 1)
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(bench.memory), type=Memory)
    again = Bench(memory=kept, at_s=bench.now_s + 1.0, quarantine_s=LONG_S)
    again.steps(6)
    assert again.role() == R.SERVING


def test_an_order_that_finds_the_node_at_work_ends_no_later_quarantine() -> None:
    """It was meant for the one before, which had ended by itself."""
    bench = Bench(device_free_timeout_s=5.0, quarantine_s=LONG_S)
    bench.serve()
    validate(bench, 1)
    quarantined(bench)
    bench.steps(20)
    assert bench.role() == R.QUARANTINED


def test_a_worker_that_has_not_ended_keeps_its_node_in_quarantine() -> None:
    """Its name is told, and the order does not help."""
    bench = Bench(device_free_timeout_s=5.0, vacate_grace_s=5.0, quarantine_s=1.0)
    bench.serve()
    bench.lend()
    bench.runs(key())
    bench.want(R.ON_LOAN, order(), lease=lease())
    bench.step()
    bench.want(R.SERVING, order())
    bench.steps(20)
    assert bench.role() == R.QUARANTINED
    validate(bench, 1)
    bench.steps(5)
    assert bench.role() == R.QUARANTINED
    assert f"kept in quarantine: worker {key()} has not ended" in bench.life.detail
