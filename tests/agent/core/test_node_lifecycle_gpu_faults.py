"""A service and a GPU that is lost or never free: its node must be at home and serve, if it can."""

from __future__ import annotations

import pytest

from agent.core.state import HookKind
from common.messages import GpuHealth
from common.model import LeaseId, NodeRole
from tests.harness.node.life import LifeHarness, key, lease, order, page

R, H = NodeRole, HookKind
FREE_S = 20.0
"""`device_free_timeout_s` here."""


def draining(harness: LifeHarness) -> None:
    """A node that is to be lent, and whose lease is renewed as long as it has it."""
    harness.serve()
    harness.want(R.ON_LOAN, lease=lease())


def renewed(harness: LifeHarness, count: int) -> None:
    """Steps of a second; the coordinator prolongs the lease each time."""
    for _ in range(count):
        harness.life.renewed(LeaseId("l1-1"), harness.now_s + 30.0)
        harness.step()


def lent(harness: LifeHarness) -> None:
    """A node on loan that nobody uses."""
    harness.serve()
    harness.lend()
    harness.hooks.clear()


def test_a_drain_whose_gpu_is_never_free_gives_the_node_back() -> None:
    """Its server was stopped for it: that is started again, however long the lease would last."""
    harness = LifeHarness(device_free_timeout_s=FREE_S)
    draining(harness)
    while H.STOP not in harness.hooks:
        renewed(harness, 1)
    harness.sick[1] = GpuHealth.LOST
    renewed(harness, int(FREE_S))
    assert harness.role() == R.DRAINING
    renewed(harness, 12)
    assert (harness.role(), harness.memory.lease) == (R.SERVING, None)
    assert harness.hooks == [H.UNROUTE, H.STOP, H.START, H.ROUTE]


def test_a_drain_whose_server_cannot_be_stopped_gives_the_node_back() -> None:
    """A stop command that fails again and again leaves the service without a node as well."""
    harness = LifeHarness(device_free_timeout_s=FREE_S)
    draining(harness)
    harness.answers_hooks = False
    renewed(harness, 1)
    harness.answer(H.UNROUTE)
    for _ in range(int(FREE_S) + 12):
        renewed(harness, 1)
        if harness.role() == R.DRAINING and harness.hooks[-1] == H.STOP:
            harness.answer(H.STOP, error="no such unit")
    assert harness.role() == R.WARMING
    assert harness.memory.lease is None


@pytest.mark.parametrize("health", [GpuHealth.LOST, GpuHealth.FAULTY])
def test_no_server_is_stopped_for_gpus_that_nobody_could_have(health: GpuHealth) -> None:
    """One that gets sick on the way is seen before the server is stopped: it is routed again."""
    harness = LifeHarness()
    draining(harness)
    harness.page = page(running=1)
    renewed(harness, 3)
    harness.sick[0] = health
    harness.page = page()
    renewed(harness, 3)
    assert (harness.role(), harness.memory.lease) == (R.SERVING, None)
    assert harness.hooks == [H.UNROUTE, H.ROUTE]


def test_a_drain_that_turned_back_does_not_turn_again() -> None:
    """Its server may be routed already when the reason is gone: that drain is over."""
    harness = LifeHarness()
    draining(harness)
    harness.page = page(running=1)
    renewed(harness, 3)
    harness.sick[0] = GpuHealth.FAULTY
    harness.step()
    assert (harness.role(), harness.hooks) == (R.DRAINING, [H.UNROUTE, H.ROUTE])
    harness.sick.clear()
    harness.page = page()
    renewed(harness, 4)
    assert (harness.role(), harness.hooks) == (R.SERVING, [H.UNROUTE, H.ROUTE])


@pytest.mark.parametrize("health", [GpuHealth.LOST, GpuHealth.FAULTY])
def test_a_sick_gpu_keeps_no_node_from_coming_home(health: GpuHealth) -> None:
    """The server is started at once, and its health check says whether it can do without."""
    harness = LifeHarness(device_free_timeout_s=FREE_S)
    lent(harness)
    harness.sick[1] = health
    harness.want(R.SERVING)
    harness.steps(5)
    assert (harness.role(), harness.hooks) == (R.SERVING, [H.START, H.ROUTE])


def test_a_sick_gpu_excuses_no_process_on_another_one() -> None:
    """Somebody who is seen on a GPU would break the server: the node is quarantined."""
    harness = LifeHarness(device_free_timeout_s=FREE_S)
    lent(harness)
    harness.sick[1] = GpuHealth.LOST
    harness.pids[0] = 77
    harness.want(R.SERVING)
    harness.steps(int(FREE_S) + 3)
    assert (harness.role(), harness.hooks) == (R.QUARANTINED, [])
    assert "process 77" in harness.life.detail


def test_a_gpu_that_does_not_answer_is_waited_for_and_then_left_to_the_health_check() -> None:
    """It may yet tell of somebody who has it; the wait is far shorter than for a busy GPU."""
    harness = LifeHarness(device_free_timeout_s=FREE_S, unresponsive_gpu_wait_s=4.0)
    lent(harness)
    harness.sick[1] = GpuHealth.UNRESPONSIVE
    harness.want(R.SERVING)
    harness.steps(5)
    assert (harness.role(), harness.hooks) == (R.VACATING, [])
    harness.steps(4)
    assert (harness.role(), harness.hooks) == (R.SERVING, [H.START, H.ROUTE])


def test_a_server_that_cannot_do_without_its_lost_gpu_is_quarantined_and_tried_again() -> None:
    """It is never routed, and each try is `quarantine_s` after the last; one that works serves."""
    harness = LifeHarness(warm_up_timeout_s=10.0, quarantine_s=30.0)
    lent(harness)
    harness.sick[1] = GpuHealth.LOST
    harness.want(R.SERVING)
    harness.answers_hooks = False
    harness.steps(3)
    harness.life.hook_done(H.START, error="", now_s=harness.now_s)
    harness.steps(12)
    assert (harness.role(), harness.hooks) == (R.QUARANTINED, [H.START])
    harness.answers_hooks = True
    harness.steps(36)
    assert (harness.role(), harness.hooks) == (R.SERVING, [H.START, H.START, H.ROUTE])


def test_workers_get_no_sick_gpu_out_of_quarantine() -> None:
    """Of a training node nothing else would say whether its GPUs are well."""
    harness = LifeHarness(inference=False, quarantine_s=5.0)
    harness.want(R.QUARANTINED)
    harness.step()
    harness.sick[1] = GpuHealth.LOST
    harness.want(R.TRAINING)
    harness.steps(10)
    assert harness.role() == R.QUARANTINED
    assert "GPU-1 is lost" in harness.life.detail
    harness.sick.clear()
    harness.steps(2)
    assert harness.role() == R.TRAINING


def test_a_worker_that_does_not_end_still_keeps_the_server_out() -> None:
    """A lost GPU is no sign that its worker has gone."""
    harness = LifeHarness(device_free_timeout_s=FREE_S, vacate_grace_s=5.0)
    lent(harness)
    harness.runs(key())
    harness.want(R.ON_LOAN, order(), lease=lease())
    harness.step()
    harness.sick[0] = GpuHealth.LOST
    harness.want(R.SERVING, order())
    harness.steps(int(FREE_S) + 10)
    assert (harness.role(), harness.hooks) == (R.QUARANTINED, [])
