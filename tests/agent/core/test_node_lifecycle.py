"""A node's roles: serving, draining, on loan, and home again whatever happens."""

from __future__ import annotations

import msgspec
import pytest

from agent.core.state import HookKind, StopWorker
from common.faults import Fault
from common.messages import DesiredState, WorkerOrder, WorkerPhase
from common.model import LeaseId, NodeRole, StopReason
from tests.agent.bench import Bench, key, lease, order, page

R, H = NodeRole, HookKind


def test_a_new_inference_node_starts_its_server_before_it_takes_requests() -> None:
    """Start, health, route: in this order."""
    bench = Bench()
    assert bench.role() == R.WARMING
    bench.steps(4)
    assert (bench.hooks, bench.role()) == ([H.START, H.ROUTE], R.SERVING)


def test_a_server_that_never_gets_healthy_ends_in_quarantine() -> None:
    """The node is not put back into the routing."""
    bench = Bench(warm_up_timeout_s=10.0)
    bench.answers_hooks = False
    bench.step()
    bench.life.hook_done(H.START, error="", now_s=bench.now_s)
    bench.steps(11)
    assert (bench.role(), bench.hooks) == (R.QUARANTINED, [H.START])
    assert "healthy" in bench.life.detail


def test_a_server_that_misses_its_checks_in_a_row_is_told_as_down() -> None:
    """One missed check may be a busy server; three are none, and one answer ends it."""
    bench = Bench()
    bench.serve()
    bench.is_healthy = False
    bench.steps(2)
    assert not bench.life.is_server_down
    bench.step()
    assert (bench.role(), bench.life.is_server_down) == (R.SERVING, True)
    bench.is_healthy = True
    bench.step()
    assert not bench.life.is_server_down


def test_a_failed_command_is_tried_again_and_told() -> None:
    """A hook's error is in the report while it lasts."""
    bench = Bench()
    bench.answers_hooks = False
    bench.step()
    bench.life.hook_done(H.START, error="no such unit", now_s=bench.now_s)
    assert "start command: no such unit" in bench.life.detail
    bench.answers_hooks = True
    bench.steps(5)
    assert bench.hooks[:2] == [H.START, H.START]
    assert (bench.role(), bench.life.detail) == (R.SERVING, "")


def test_a_loan_begins_when_requests_have_ended_the_server_is_gone_and_the_lease_answered() -> None:
    """Each of the three alone is not enough."""
    bench = Bench()
    bench.serve()
    bench.page = page(running=2)
    bench.want(R.ON_LOAN, lease=lease())
    bench.steps(4)
    assert (bench.role(), bench.hooks) == (R.DRAINING, [H.UNROUTE])
    assert "2 requests" in bench.life.detail
    bench.page = page()
    bench.pids[0] = 77
    bench.steps(4)
    assert bench.hooks == [H.UNROUTE, H.STOP]
    assert "process 77" in bench.life.detail
    bench.pids.clear()
    bench.steps(2)
    assert bench.role() == R.DRAINING
    assert "not confirmed" in bench.life.detail
    bench.life.renewed(LeaseId("l1-1"), bench.now_s + 30.0)
    bench.step()
    assert bench.role() == R.ON_LOAN


def test_a_success_counter_that_moves_means_that_the_server_is_not_idle() -> None:
    """A request between two samples is seen by its completion."""
    bench = Bench()
    bench.serve()
    bench.want(R.ON_LOAN, lease=lease())
    for success in range(5):
        bench.page = page(success=success)
        bench.step()
    assert H.STOP not in bench.hooks
    bench.steps(3)
    assert H.STOP in bench.hooks


def test_a_rising_load_ends_a_drain_without_a_restart() -> None:
    """The server was not stopped yet: it is routed again and goes on."""
    bench = Bench()
    bench.serve()
    bench.page = page(running=1)
    bench.want(R.ON_LOAN, lease=lease())
    bench.steps(2)
    bench.want(R.SERVING)
    bench.steps(2)
    assert (bench.role(), bench.hooks) == (R.SERVING, [H.UNROUTE, H.ROUTE])
    assert bench.memory.lease is None


def test_a_drain_that_already_stopped_the_server_goes_home_by_a_warm_up() -> None:
    """What was stopped must be started."""
    bench = Bench()
    bench.serve()
    bench.want(R.ON_LOAN, lease=lease())
    bench.pids[0] = 77
    bench.steps(4)
    assert H.STOP in bench.hooks
    bench.want(R.SERVING)
    bench.pids.clear()
    bench.hooks.clear()
    bench.steps(5)
    assert (bench.role(), bench.hooks) == (R.SERVING, [H.START, H.ROUTE])


@pytest.mark.parametrize("how", ["asked", "refused", "silence"])
def test_an_on_loan_node_goes_home_when_asked_refused_or_left_alone(how: str) -> None:
    """Its workers are stopped, its GPUs seen free, its server started, and only then routed."""
    bench = Bench()
    bench.serve()
    bench.lend(until_s=100.0)
    bench.runs(key())
    bench.want(R.ON_LOAN, order(), lease=lease())
    bench.step()
    bench.hooks.clear()
    match how:
        case "asked":
            bench.want(R.SERVING, order(), reclaim_in_s=60.0)
        case "refused":
            bench.life.refused(LeaseId("l1-1"), "the loan was called back")
        case _:
            bench.now_s = 100.0
    stops = [a for a in bench.steps(2) if isinstance(a, StopWorker)]
    assert stops == [StopWorker(key(), StopReason.PREEMPT, 30.0)]
    assert (bench.role(), bench.hooks) == (R.VACATING, [])
    bench.ends(key(), -15, StopReason.PREEMPT)
    bench.pids[1] = 78
    bench.steps(3)
    assert bench.role() == R.VACATING
    bench.pids.clear()
    bench.steps(4)
    assert (bench.role(), bench.hooks) == (R.SERVING, [H.START, H.ROUTE])
    stages = set(bench.memory.stage_durations_s)
    assert stages - {"unattended"} == {"checkpoint", "exit", "device_free", "server_ready"}


def test_the_grace_of_a_return_is_cut_to_the_time_that_is_left() -> None:
    """A reclaim's deadline binds, and so does the node's own longest grace."""
    bench = Bench(vacate_grace_s=20.0)
    bench.serve()
    bench.lend()
    bench.runs(key())
    bench.want(R.ON_LOAN, order(), lease=lease())
    bench.step()
    bench.want(R.SERVING, order(), reclaim_in_s=11.0)
    assert StopWorker(key(), StopReason.PREEMPT, 10.0) in bench.steps(2)


def test_a_lease_that_ended_is_never_honoured_again() -> None:
    """A late or repeated order with the old lease leaves the node serving."""
    bench = Bench()
    bench.serve()
    bench.lend(until_s=50.0)
    bench.now_s = 50.0
    bench.steps(6)
    assert bench.role() == R.SERVING
    bench.want(R.ON_LOAN, lease=lease())
    bench.steps(3)
    assert (bench.role(), bench.memory.lease) == (R.SERVING, None)
    bench.want(R.ON_LOAN, lease=lease("l1-2"))
    bench.step()
    assert bench.role() == R.DRAINING


def test_an_agent_that_restarts_on_loan_stays_on_loan_until_its_ttl() -> None:
    """The end of the TTL is on the boot clock and survives in the ledger."""
    bench = Bench()
    bench.serve()
    bench.lend(until_s=60.0)
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(bench.memory), type=type(bench.memory))
    again = Bench(memory=kept, at_s=50.0)
    again.step()
    assert again.role() == R.ON_LOAN
    again.now_s = 60.0
    again.step()
    assert again.role() != R.ON_LOAN


def test_a_reboot_ends_the_lease_and_every_attempt() -> None:
    """A new boot id proves that nothing of the old boot runs: a node fault, not the job's."""
    bench = Bench()
    bench.serve()
    bench.lend()
    bench.runs(key())
    bench.want(R.ON_LOAN, order(), lease=lease())
    bench.step()
    again = Bench(memory=bench.memory, boot_id="boot-2")
    assert (again.role(), again.memory.lease) == (R.WARMING, None)
    (report,) = again.life.workers.reports()
    assert report.phase == WorkerPhase.EXITED
    assert (report.fault, report.error) == (Fault.NODE, "the node rebooted")


def test_a_device_that_stays_busy_is_quarantined_and_comes_back_when_it_is_free() -> None:
    """Serving on a GPU that somebody else uses would break the service."""
    bench = Bench(device_free_timeout_s=5.0, quarantine_s=10.0)
    bench.serve()
    bench.lend()
    bench.pids[0] = 99
    bench.want(R.SERVING)
    bench.steps(8)
    assert bench.role() == R.QUARANTINED
    bench.steps(12)
    assert bench.role() == R.QUARANTINED
    bench.pids.clear()
    bench.steps(5)
    assert bench.role() == R.SERVING


@pytest.mark.parametrize(
    ("node", "epoch", "generation", "field"),
    [("n2", 9, 9, "node"), ("n1", 2, 9, "epoch"), ("n1", 3, 4, "generation")],
)
def test_an_order_of_another_node_or_an_older_leader_is_refused(
    node: str, epoch: int, generation: int, field: str
) -> None:
    """The refusal names the field and changes nothing."""
    bench = Bench(inference=False)
    bench.generation = 4
    bench.want(R.TRAINING, epoch=3)
    before = msgspec.msgpack.encode(bench.memory)
    desired = msgspec.structs.replace(
        _desired(order()), node=node, epoch=epoch, generation=generation
    )
    reply = bench.life.accept(desired, now_s=1.0)
    assert not reply.is_accepted
    assert reply.error.startswith(field)
    assert (reply.epoch, reply.generation) == (3, 5)
    assert msgspec.msgpack.encode(bench.memory) == before


def test_the_same_order_twice_is_accepted_and_changes_nothing() -> None:
    """A push may be repeated at any time."""
    bench = Bench(inference=False)
    desired = _desired(order())
    assert bench.life.accept(desired, now_s=1.0).is_accepted
    before = msgspec.msgpack.encode(bench.memory)
    assert bench.life.accept(desired, now_s=2.0).is_accepted
    assert msgspec.msgpack.encode(bench.memory) == before


def _desired(*orders: WorkerOrder) -> DesiredState:
    return DesiredState(node="n1", epoch=3, generation=7, role=R.TRAINING, workers=orders)


def test_a_command_that_was_begun_in_a_role_that_is_over_counts_for_nothing() -> None:
    """The role after it asks for itself: what has happened since may have undone it."""
    bench = Bench(quarantine_s=5.0)
    bench.answers_hooks = False
    bench.step()
    bench.want(R.QUARANTINED)
    bench.step()
    bench.want(R.SERVING)
    bench.steps(7)
    assert (bench.role(), bench.hooks) == (R.WARMING, [H.START])
    bench.answer(H.START)
    bench.step()
    assert bench.hooks == [H.START, H.START]


def test_a_failure_of_a_role_that_is_over_is_not_told_of_the_next_one() -> None:
    """Nor does it delay the next try."""
    bench = Bench(quarantine_s=5.0)
    bench.answers_hooks = False
    bench.step()
    bench.want(R.QUARANTINED)
    bench.step()
    bench.answer(H.START, error="no such unit")
    assert "no such unit" not in bench.life.detail


OLD, NEW = LeaseId("l1-1"), LeaseId("l1-2")


@pytest.fixture
def bench() -> Bench:
    """A node on its way to its second loan."""
    bench = Bench()
    bench.serve()
    bench.want(NodeRole.ON_LOAN, lease=lease(NEW))
    bench.step()
    return bench


def test_a_grant_of_one_lease_prolongs_no_other(bench: Bench) -> None:
    """Nobody granted the one that the node has, so its loan is not confirmed."""
    bench.life.renewed(OLD, bench.now_s + 1000.0)
    assert bench.memory.lease_until_s is None


def test_a_refusal_of_one_lease_ends_no_other(bench: Bench) -> None:
    """The one that the node has was granted: it goes on loan."""
    bench.life.refused(OLD, "the load rises")
    bench.life.renewed(NEW, bench.now_s + 1000.0)
    bench.steps(6)
    assert bench.role() == NodeRole.ON_LOAN
