"""A service and a GPU that is lost or never free: its node must be at home and serve, if it can."""

from __future__ import annotations

import pytest

from agent.core.state import HookKind
from common.messages import GpuHealth
from common.model import LeaseId, NodeRole
from tests.agent.bench import Bench, key, lease, order, page

R, H = NodeRole, HookKind
FREE_S = 20.0
"""`device_free_timeout_s` here."""


def draining(bench: Bench) -> None:
    """A node that is to be lent, and whose lease is renewed as long as it has it."""
    bench.serve()
    bench.want(R.ON_LOAN, lease=lease())


def renewed(bench: Bench, count: int) -> None:
    """Steps of a second; the coordinator prolongs the lease each time."""
    for _ in range(count):
        bench.life.renewed(LeaseId("l1-1"), bench.now_s + 30.0)
        bench.step()


def lent(bench: Bench) -> None:
    """A node on loan that nobody uses."""
    bench.serve()
    bench.lend()
    bench.hooks.clear()


def test_a_drain_whose_gpu_is_never_free_gives_the_node_back() -> None:
    """Its server was stopped for it: that is started again, however long the lease would last."""
    bench = Bench(device_free_timeout_s=FREE_S)
    draining(bench)
    while H.STOP not in bench.hooks:
        renewed(bench, 1)
    bench.sick[1] = GpuHealth.LOST
    renewed(bench, int(FREE_S))
    assert bench.role() == R.DRAINING
    renewed(bench, 12)
    assert (bench.role(), bench.memory.lease) == (R.SERVING, None)
    assert bench.hooks == [H.UNROUTE, H.STOP, H.START, H.ROUTE]


def test_a_drain_whose_server_cannot_be_stopped_gives_the_node_back() -> None:
    """A stop command that fails again and again leaves the service without a node as well."""
    bench = Bench(device_free_timeout_s=FREE_S)
    draining(bench)
    bench.answers_hooks = False
    renewed(bench, 1)
    bench.answer(H.UNROUTE)
    for _ in range(int(FREE_S) + 12):
        renewed(bench, 1)
        if bench.role() == R.DRAINING and bench.hooks[-1] == H.STOP:
            bench.answer(H.STOP, error="no such unit")
    assert bench.role() == R.WARMING
    assert bench.memory.lease is None


@pytest.mark.parametrize("health", [GpuHealth.LOST, GpuHealth.FAULTY])
def test_no_server_is_stopped_for_gpus_that_nobody_could_have(health: GpuHealth) -> None:
    """One that gets sick on the way is seen before the server is stopped: it is routed again."""
    bench = Bench()
    draining(bench)
    bench.page = page(running=1)
    renewed(bench, 3)
    bench.sick[0] = health
    bench.page = page()
    renewed(bench, 3)
    assert (bench.role(), bench.memory.lease) == (R.SERVING, None)
    assert bench.hooks == [H.UNROUTE, H.ROUTE]


def test_a_drain_that_turned_back_does_not_turn_again() -> None:
    """Its server may be routed already when the reason is gone: that drain is over."""
    bench = Bench()
    draining(bench)
    bench.page = page(running=1)
    renewed(bench, 3)
    bench.sick[0] = GpuHealth.FAULTY
    bench.step()
    assert (bench.role(), bench.hooks) == (R.DRAINING, [H.UNROUTE, H.ROUTE])
    bench.sick.clear()
    bench.page = page()
    renewed(bench, 4)
    assert (bench.role(), bench.hooks) == (R.SERVING, [H.UNROUTE, H.ROUTE])


@pytest.mark.parametrize("health", [GpuHealth.LOST, GpuHealth.FAULTY])
def test_a_sick_gpu_keeps_no_node_from_coming_home(health: GpuHealth) -> None:
    """The server is started at once, and its health check says whether it can do without."""
    bench = Bench(device_free_timeout_s=FREE_S)
    lent(bench)
    bench.sick[1] = health
    bench.want(R.SERVING)
    bench.steps(5)
    assert (bench.role(), bench.hooks) == (R.SERVING, [H.START, H.ROUTE])


def test_a_sick_gpu_excuses_no_process_on_another_one() -> None:
    """Somebody who is seen on a GPU would break the server: the node is quarantined."""
    bench = Bench(device_free_timeout_s=FREE_S)
    lent(bench)
    bench.sick[1] = GpuHealth.LOST
    bench.pids[0] = 77
    bench.want(R.SERVING)
    bench.steps(int(FREE_S) + 3)
    assert (bench.role(), bench.hooks) == (R.QUARANTINED, [])
    assert "process 77" in bench.life.detail


def test_a_gpu_that_does_not_answer_is_waited_for_and_then_left_to_the_health_check() -> None:
    """It may yet tell of somebody who has it; the wait is far shorter than for a busy GPU."""
    bench = Bench(device_free_timeout_s=FREE_S, unresponsive_gpu_wait_s=4.0)
    lent(bench)
    bench.sick[1] = GpuHealth.UNRESPONSIVE
    bench.want(R.SERVING)
    bench.steps(5)
    assert (bench.role(), bench.hooks) == (R.VACATING, [])
    bench.steps(4)
    assert (bench.role(), bench.hooks) == (R.SERVING, [H.START, H.ROUTE])


def test_a_server_that_cannot_do_without_its_lost_gpu_is_quarantined_and_tried_again() -> None:
    """It is never routed, and each try is `quarantine_s` after the last; one that works serves."""
    bench = Bench(warm_up_timeout_s=10.0, quarantine_s=30.0)
    lent(bench)
    bench.sick[1] = GpuHealth.LOST
    bench.want(R.SERVING)
    bench.answers_hooks = False
    bench.steps(3)
    bench.life.hook_done(H.START, error="", now_s=bench.now_s)
    bench.steps(12)
    assert (bench.role(), bench.hooks) == (R.QUARANTINED, [H.START])
    bench.answers_hooks = True
    bench.steps(36)
    assert (bench.role(), bench.hooks) == (R.SERVING, [H.START, H.START, H.ROUTE])


def test_workers_get_no_sick_gpu_out_of_quarantine() -> None:
    """Of a training node nothing else would say whether its GPUs are well."""
    bench = Bench(inference=False, quarantine_s=5.0)
    bench.want(R.QUARANTINED)
    bench.step()
    bench.sick[1] = GpuHealth.LOST
    bench.want(R.TRAINING)
    bench.steps(10)
    assert bench.role() == R.QUARANTINED
    assert "GPU-1 is lost" in bench.life.detail
    bench.sick.clear()
    bench.steps(2)
    assert bench.role() == R.TRAINING


def test_a_worker_that_does_not_end_still_keeps_the_server_out() -> None:
    """A lost GPU is no sign that its worker has gone."""
    bench = Bench(device_free_timeout_s=FREE_S, vacate_grace_s=5.0)
    lent(bench)
    bench.runs(key())
    bench.want(R.ON_LOAN, order(), lease=lease())
    bench.step()
    bench.sick[0] = GpuHealth.LOST
    bench.want(R.SERVING, order())
    bench.steps(int(FREE_S) + 10)
    assert (bench.role(), bench.hooks) == (R.QUARANTINED, [])
