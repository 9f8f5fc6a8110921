"""Small bounds of a node's life that nothing else would notice: what is kept, told and asked."""

from __future__ import annotations

import pytest

from agent.core.state import FORGOTTEN_KEPT, Facts, HookKind, StopWorker
from common.messages import OrderPhase, StopOrder, WorkerPhase
from common.model import GpuUuid, NodeRole, StopReason
from tests.agent.bench import Bench, key, order
from tests.agent.worker_house import PATIENCE_S, WorkerHouse, make_order, make_workers, talker

R = NodeRole
GPUS = (GpuUuid("GPU-0"),)
GRACE_S = 10.0


house = pytest.fixture(make_workers)


def runs(bench: Bench) -> None:
    """Bring the default worker to run there."""
    bench.runs(key())
    bench.want(bench.role(), order())
    bench.step()
    assert bench.life.workers.live()


def stops(bench: Bench, after_s: float) -> list[StopWorker]:
    """What the next step tells to stop."""
    return [action for action in bench.step(after_s) if isinstance(action, StopWorker)]


def test_the_workers_that_are_forgotten_are_kept_up_to_a_number() -> None:
    """The ledger is written whole each time; the oldest ones go first."""
    bench = Bench(inference=False)
    bench.memory.forgotten = [key(index, job="old") for index in range(FORGOTTEN_KEPT)]
    bench.want(R.TRAINING, acknowledged=(key(job="new"),))
    assert len(bench.memory.forgotten) == FORGOTTEN_KEPT
    assert bench.memory.forgotten[0] == key(1, job="old")
    assert bench.memory.forgotten[-1] == key(job="new")


@pytest.mark.parametrize(("grace_s", "told"), [(GRACE_S + 0.9, 0), (GRACE_S + 5.0, 1)])
def test_a_stop_under_way_is_told_anew_only_to_end_noticeably_earlier(
    grace_s: float, told: int
) -> None:
    """Steps come often, and each would find it a little too late."""
    bench = Bench(vacate_grace_s=GRACE_S)
    bench.serve()
    bench.lend()
    runs(bench)
    stop = StopOrder(key=key(), reason=StopReason.PREEMPT, grace_s=grace_s)
    bench.want(R.ON_LOAN, order(), stops=(stop,))
    assert [action.grace_s for action in stops(bench, 0.1)] == [grace_s]
    bench.want(R.SERVING)
    assert [action.grace_s for action in stops(bench, 0.0)] == [GRACE_S] * told
    assert stops(bench, 0.1) == []


def test_a_worker_that_was_never_begun_has_left_no_gpu() -> None:
    """The next one need not wait for a look after its end."""
    bench = Bench(inference=False)
    bench.want(R.TRAINING, order(phase=OrderPhase.RESERVE))
    bench.step()
    stop = StopOrder(key=key(), reason=StopReason.PREEMPT, grace_s=GRACE_S)
    bench.want(R.TRAINING, stops=(stop,))
    bench.step()
    assert not bench.life.workers.live()
    assert bench.life.workers.gpu_left_at_s(GPUS) == 0.0


def test_a_worker_that_ran_has_left_its_gpu() -> None:
    """At its end, as far as the node saw."""
    bench = Bench(inference=False)
    runs(bench)
    bench.ends(key())
    bench.step()
    assert bench.life.workers.gpu_left_at_s(GPUS) == bench.now_s


def test_no_grace_is_less_than_none() -> None:
    """A node that looks when it should serve already ends its workers at once."""
    bench = Bench()
    bench.serve()
    bench.lend()
    runs(bench)
    bench.want(R.SERVING, reclaim_in_s=1.0)
    assert [action.grace_s for action in stops(bench, 5.0)] == [0.0]


def test_no_command_is_run_before_the_gpus_were_seen() -> None:
    """Each is told which they are."""
    bench = Bench()
    assert bench.role() == R.WARMING
    assert bench.life.step(Facts(now_s=bench.now_s)) == []
    bench.step()
    assert bench.hooks == [HookKind.START]


@pytest.mark.slow
async def test_a_worker_that_is_to_stop_is_suspended_no_more(house: WorkerHouse) -> None:
    """It saves for good; one that was frozen then could not."""
    body = """
for line in hear:
    message = json.loads(line)
    log("heard", message["type"], message.get("worker_count"))
    if message["type"] == "checkpoint_request":
        say(type="checkpoint", stage="working")
"""
    given = await house.start(make_order(*talker(body)))
    await house.runner.resize(given, 5)
    await house.until_said(given, "heard resize 5")
    await house.runner.stop(given, StopReason.PREEMPT, 10 * PATIENCE_S)
    await house.until_said(given, "heard checkpoint_request")
    await house.runner.pause(given, is_suspended=True)
    await house.runner.resize(given, 6)
    await house.until_said(given, "heard resize 6")
    assert (await house.status(given)).phase == WorkerPhase.STOPPING
    await house.runner.stop(given, StopReason.PREEMPT, 0.0)
    await house.until_exited(given)
