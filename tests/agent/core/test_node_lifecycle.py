"""A node's roles: serving, draining, on loan, and home again whatever happens."""

from __future__ import annotations

import msgspec
import pytest

from agent.core.state import HookKind, StopWorker
from common.faults import Fault
from common.messages import DesiredState, WorkerOrder, WorkerPhase
from common.model import LeaseId, NodeRole, StopReason
from tests.harness.node.life import LifeHarness, key, lease, order, page

R, H = NodeRole, HookKind


def test_a_new_inference_node_starts_its_server_before_it_takes_requests() -> None:
    """Start, health, route: in this order."""
    harness = LifeHarness()
    assert harness.role() == R.WARMING
    harness.steps(4)
    assert (harness.hooks, harness.role()) == ([H.START, H.ROUTE], R.SERVING)


def test_a_server_that_never_gets_healthy_ends_in_quarantine() -> None:
    """The node is not put back into the routing."""
    harness = LifeHarness(warm_up_timeout_s=10.0)
    harness.answers_hooks = False
    harness.step()
    harness.life.hook_done(H.START, error="", now_s=harness.now_s)
    harness.steps(11)
    assert (harness.role(), harness.hooks) == (R.QUARANTINED, [H.START])
    assert "healthy" in harness.life.detail


def test_a_server_that_misses_its_checks_in_a_row_is_told_as_down() -> None:
    """One missed check may be a busy server; three are none, and one answer ends it."""
    harness = LifeHarness()
    harness.serve()
    harness.is_healthy = False
    harness.steps(2)
    assert not harness.life.is_server_down
    harness.step()
    assert (harness.role(), harness.life.is_server_down) == (R.SERVING, True)
    harness.is_healthy = True
    harness.step()
    assert not harness.life.is_server_down


def test_a_failed_command_is_tried_again_and_told() -> None:
    """A hook's error is in the report while it lasts."""
    harness = LifeHarness()
    harness.answers_hooks = False
    harness.step()
    harness.life.hook_done(H.START, error="no such unit", now_s=harness.now_s)
    assert "start command: no such unit" in harness.life.detail
    harness.answers_hooks = True
    harness.steps(5)
    assert harness.hooks[:2] == [H.START, H.START]
    assert (harness.role(), harness.life.detail) == (R.SERVING, "")


def test_a_loan_begins_when_requests_have_ended_the_server_is_gone_and_the_lease_answered() -> None:
    """Each of the three alone is not enough."""
    harness = LifeHarness()
    harness.serve()
    harness.page = page(running=2)
    harness.want(R.ON_LOAN, lease=lease())
    harness.steps(4)
    assert (harness.role(), harness.hooks) == (R.DRAINING, [H.UNROUTE])
    assert "2 requests" in harness.life.detail
    harness.page = page()
    harness.pids[0] = 77
    harness.steps(4)
    assert harness.hooks == [H.UNROUTE, H.STOP]
    assert "process 77" in harness.life.detail
    harness.pids.clear()
    harness.steps(2)
    assert harness.role() == R.DRAINING
    assert "not confirmed" in harness.life.detail
    harness.life.renewed(LeaseId("l1-1"), harness.now_s + 30.0)
    harness.step()
    assert harness.role() == R.ON_LOAN


def test_a_success_counter_that_moves_means_that_the_server_is_not_idle() -> None:
    """A request between two samples is seen by its completion."""
    harness = LifeHarness()
    harness.serve()
    harness.want(R.ON_LOAN, lease=lease())
    for success in range(5):
        harness.page = page(success=success)
        harness.step()
    assert H.STOP not in harness.hooks
    harness.steps(3)
    assert H.STOP in harness.hooks


def test_a_rising_load_ends_a_drain_without_a_restart() -> None:
    """The server was not stopped yet: it is routed again and goes on."""
    harness = LifeHarness()
    harness.serve()
    harness.page = page(running=1)
    harness.want(R.ON_LOAN, lease=lease())
    harness.steps(2)
    harness.want(R.SERVING)
    harness.steps(2)
    assert (harness.role(), harness.hooks) == (R.SERVING, [H.UNROUTE, H.ROUTE])
    assert harness.memory.lease is None


def test_a_drain_that_already_stopped_the_server_goes_home_by_a_warm_up() -> None:
    """What was stopped must be started."""
    harness = LifeHarness()
    harness.serve()
    harness.want(R.ON_LOAN, lease=lease())
    harness.pids[0] = 77
    harness.steps(4)
    assert H.STOP in harness.hooks
    harness.want(R.SERVING)
    harness.pids.clear()
    harness.hooks.clear()
    harness.steps(5)
    assert (harness.role(), harness.hooks) == (R.SERVING, [H.START, H.ROUTE])


@pytest.mark.parametrize("how", ["asked", "refused", "silence"])
def test_an_on_loan_node_goes_home_when_asked_refused_or_left_alone(how: str) -> None:
    """Its workers are stopped, its GPUs seen free, its server started, and only then routed."""
    harness = LifeHarness()
    harness.serve()
    harness.lend(until_s=100.0)
    harness.runs(key())
    harness.want(R.ON_LOAN, order(), lease=lease())
    harness.step()
    harness.hooks.clear()
    match how:
        case "asked":
            harness.want(R.SERVING, order(), reclaim_in_s=60.0)
        case "refused":
            harness.life.refused(LeaseId("l1-1"), "the loan was called back")
        case _:
            harness.now_s = 100.0
    stops = [a for a in harness.steps(2) if isinstance(a, StopWorker)]
    assert stops == [StopWorker(key(), StopReason.PREEMPT, 30.0)]
    assert (harness.role(), harness.hooks) == (R.VACATING, [])
    harness.ends(key(), -15, StopReason.PREEMPT)
    harness.pids[1] = 78
    harness.steps(3)
    assert harness.role() == R.VACATING
    harness.pids.clear()
    harness.steps(4)
    assert (harness.role(), harness.hooks) == (R.SERVING, [H.START, H.ROUTE])
    stages = set(harness.memory.stage_durations_s)
    assert stages - {"unattended"} == {"checkpoint", "exit", "device_free", "server_ready"}


def test_the_grace_of_a_return_is_cut_to_the_time_that_is_left() -> None:
    """A reclaim's deadline binds, and so does the node's own longest grace."""
    harness = LifeHarness(vacate_grace_s=20.0)
    harness.serve()
    harness.lend()
    harness.runs(key())
    harness.want(R.ON_LOAN, order(), lease=lease())
    harness.step()
    harness.want(R.SERVING, order(), reclaim_in_s=11.0)
    assert StopWorker(key(), StopReason.PREEMPT, 10.0) in harness.steps(2)


def test_a_lease_that_ended_is_never_honoured_again() -> None:
    """A late or repeated order with the old lease leaves the node serving."""
    harness = LifeHarness()
    harness.serve()
    harness.lend(until_s=50.0)
    harness.now_s = 50.0
    harness.steps(6)
    assert harness.role() == R.SERVING
    harness.want(R.ON_LOAN, lease=lease())
    harness.steps(3)
    assert (harness.role(), harness.memory.lease) == (R.SERVING, None)
    harness.want(R.ON_LOAN, lease=lease("l1-2"))
    harness.step()
    assert harness.role() == R.DRAINING


def test_an_agent_that_restarts_on_loan_stays_on_loan_until_its_ttl() -> None:
    """The end of the TTL is on the boot clock and survives in the ledger."""
    harness = LifeHarness()
    harness.serve()
    harness.lend(until_s=60.0)
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(harness.memory), type=type(harness.memory))
    again = LifeHarness(memory=kept, at_s=50.0)
    again.step()
    assert again.role() == R.ON_LOAN
    again.now_s = 60.0
    again.step()
    assert again.role() != R.ON_LOAN


def test_a_reboot_ends_the_lease_and_every_attempt() -> None:
    """A new boot id proves that nothing of the old boot runs: a node fault, not the job's."""
    harness = LifeHarness()
    harness.serve()
    harness.lend()
    harness.runs(key())
    harness.want(R.ON_LOAN, order(), lease=lease())
    harness.step()
    again = LifeHarness(memory=harness.memory, boot_id="boot-2")
    assert (again.role(), again.memory.lease) == (R.WARMING, None)
    (report,) = again.life.workers.reports()
    assert report.phase == WorkerPhase.EXITED
    assert (report.fault, report.error) == (Fault.NODE, "the node rebooted")


def test_a_device_that_stays_busy_is_quarantined_and_comes_back_when_it_is_free() -> None:
    """Serving on a GPU that somebody else uses would break the service."""
    harness = LifeHarness(device_free_timeout_s=5.0, quarantine_s=10.0)
    harness.serve()
    harness.lend()
    harness.pids[0] = 99
    harness.want(R.SERVING)
    harness.steps(8)
    assert harness.role() == R.QUARANTINED
    harness.steps(12)
    assert harness.role() == R.QUARANTINED
    harness.pids.clear()
    harness.steps(5)
    assert harness.role() == R.SERVING


@pytest.mark.parametrize(
    ("node", "epoch", "generation", "field"),
    [("n2", 9, 9, "node"), ("n1", 2, 9, "epoch"), ("n1", 3, 4, "generation")],
)
def test_an_order_of_another_node_or_an_older_leader_is_refused(
    node: str, epoch: int, generation: int, field: str
) -> None:
    """The refusal names the field and changes nothing."""
    harness = LifeHarness(inference=False)
    harness.generation = 4
    harness.want(R.TRAINING, epoch=3)
    before = msgspec.msgpack.encode(harness.memory)
    desired = msgspec.structs.replace(
        _desired(order()), node=node, epoch=epoch, generation=generation
    )
    reply = harness.life.accept(desired, now_s=1.0)
    assert not reply.is_accepted
    assert reply.error.startswith(field)
    assert (reply.epoch, reply.generation) == (3, 5)
    assert msgspec.msgpack.encode(harness.memory) == before


def test_the_same_order_twice_is_accepted_and_changes_nothing() -> None:
    """A push may be repeated at any time."""
    harness = LifeHarness(inference=False)
    desired = _desired(order())
    assert harness.life.accept(desired, now_s=1.0).is_accepted
    before = msgspec.msgpack.encode(harness.memory)
    assert harness.life.accept(desired, now_s=2.0).is_accepted
    assert msgspec.msgpack.encode(harness.memory) == before


def _desired(*orders: WorkerOrder) -> DesiredState:
    return DesiredState(node="n1", epoch=3, generation=7, role=R.TRAINING, workers=orders)


def test_a_command_that_was_begun_in_a_role_that_is_over_counts_for_nothing() -> None:
    """The role after it asks for itself: what has happened since may have undone it."""
    harness = LifeHarness(quarantine_s=5.0)
    harness.answers_hooks = False
    harness.step()
    harness.want(R.QUARANTINED)
    harness.step()
    harness.want(R.SERVING)
    harness.steps(7)
    assert (harness.role(), harness.hooks) == (R.WARMING, [H.START])
    harness.answer(H.START)
    harness.step()
    assert harness.hooks == [H.START, H.START]


def test_a_failure_of_a_role_that_is_over_is_not_told_of_the_next_one() -> None:
    """Nor does it delay the next try."""
    harness = LifeHarness(quarantine_s=5.0)
    harness.answers_hooks = False
    harness.step()
    harness.want(R.QUARANTINED)
    harness.step()
    harness.answer(H.START, error="no such unit")
    assert "no such unit" not in harness.life.detail


OLD, NEW = LeaseId("l1-1"), LeaseId("l1-2")


@pytest.fixture
def harness() -> LifeHarness:
    """A node on its way to its second loan."""
    harness = LifeHarness()
    harness.serve()
    harness.want(NodeRole.ON_LOAN, lease=lease(NEW))
    harness.step()
    return harness


def test_a_grant_of_one_lease_prolongs_no_other(harness: LifeHarness) -> None:
    """Nobody granted the one that the node has, so its loan is not confirmed."""
    harness.life.renewed(OLD, harness.now_s + 1000.0)
    assert harness.memory.lease_until_s is None


def test_a_refusal_of_one_lease_ends_no_other(harness: LifeHarness) -> None:
    """The one that the node has was granted: it goes on loan."""
    harness.life.refused(OLD, "the load rises")
    harness.life.renewed(NEW, harness.now_s + 1000.0)
    harness.steps(6)
    assert harness.role() == NodeRole.ON_LOAN
