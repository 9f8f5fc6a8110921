"""The workers of a node: reserve, ready, run, stop, and never twice."""

from __future__ import annotations

import pytest

from agent.core.state import (
    FORGOTTEN_KEPT,
    CheckReserve,
    ForgetWorker,
    Refusal,
    ResizeWorker,
    StartWorker,
    StopWorker,
)
from common.faults import Fault
from common.messages import OrderPhase, StopOrder, WorkerPhase, WorkerReport
from common.model import GpuUuid, NodeRole, StopReason, WorkerKey
from tests.harness.node.life import LifeHarness, key, order

P, R = WorkerPhase, NodeRole


def training() -> LifeHarness:
    """A training node."""
    return LifeHarness(inference=False)


def report(harness: LifeHarness, worker: WorkerKey | None = None) -> WorkerReport:
    """What the node says of a worker."""
    found = {r.key: r for r in harness.life.workers.reports()}
    return found[worker or key()]


def ready(harness: LifeHarness, phase: OrderPhase = OrderPhase.RESERVE) -> None:
    """Bring the default worker to READY, or to running."""
    harness.want(R.TRAINING, order(phase=phase))
    harness.step()
    harness.life.workers.checked(key(), endpoint="n1:29500", refusal=None)
    harness.step()
    if phase == OrderPhase.RUN:
        harness.life.workers.started(key(), error="")
        harness.runs(key())
        harness.step()


def test_a_reserved_worker_is_checked_then_ready_with_an_endpoint_and_not_started() -> None:
    """A gang runs only when every node said ready."""
    harness = training()
    harness.want(R.TRAINING, order(phase=OrderPhase.RESERVE))
    assert [type(action) for action in harness.steps(2)] == [CheckReserve]
    harness.life.workers.checked(key(), endpoint="n1:29500", refusal=None)
    assert harness.steps(2) == []
    assert (report(harness).phase, report(harness).endpoint) == (P.READY, "n1:29500")


def test_a_run_order_starts_a_ready_worker_once() -> None:
    """However often the order is repeated."""
    harness = training()
    ready(harness)
    harness.want(R.TRAINING, order())
    assert [type(action) for action in harness.step()] == [StartWorker]
    harness.life.workers.started(key(), error="")
    harness.runs(key())
    harness.want(R.TRAINING, order())
    assert harness.steps(3) == []
    assert report(harness).phase == P.RUNNING


@pytest.mark.parametrize(("what", "why"), [("workdir", "/nope is missing"), ("command", "no x")])
def test_a_worker_that_can_never_run_here_is_refused_with_the_reason(what: str, why: str) -> None:
    """The coordinator hears it and places the gang elsewhere."""
    harness = training()
    harness.want(R.TRAINING, order(phase=OrderPhase.RESERVE))
    harness.step()
    harness.life.workers.checked(key(), endpoint="", refusal=Refusal(why, Fault.JOB, what))
    found = report(harness)
    assert (found.phase, found.error) == (P.REFUSED, why)
    assert (found.fault, found.refused_for) == (Fault.JOB, what)


def test_an_order_for_a_gpu_that_is_not_here_is_refused() -> None:
    """No process is ever given a GPU of another node; one that fell out is no fault of the job."""
    harness = training()
    harness.want(R.TRAINING, order(gpus=(0, 7)))
    harness.step()
    assert report(harness).phase == P.REFUSED
    assert report(harness).fault == Fault.NODE
    assert "GPU-7" in report(harness).error


def test_a_reservation_waits_until_the_device_is_seen_free() -> None:
    """What it waits for is in the report."""
    harness = training()
    harness.pids[0] = 4242
    harness.want(R.TRAINING, order(phase=OrderPhase.RESERVE))
    assert harness.steps(2) == []
    assert (report(harness).phase, report(harness).error) == (
        P.RESERVING,
        "GPU GPU-0 is used by process 4242",
    )
    harness.pids.clear()
    assert [type(action) for action in harness.step()] == [CheckReserve]


def test_a_reservation_waits_for_the_worker_before_it() -> None:
    """Two workers never share a GPU, not even for a moment."""
    harness = training()
    ready(harness, OrderPhase.RUN)
    later = key(job="j2")
    stop = StopOrder(key=key(), reason=StopReason.PREEMPT, grace_s=5.0)
    harness.want(R.TRAINING, order(), order(later), stops=(stop,))
    assert harness.step() == [StopWorker(key(), StopReason.PREEMPT, 5.0)]
    assert report(harness, later).phase == P.RESERVING
    assert "j1.1.0" in report(harness, later).error
    harness.ends(key(), -15, StopReason.PREEMPT)
    harness.steps(2)
    harness.life.workers.checked(later, endpoint="n1:29501", refusal=None)
    assert [type(action) for action in harness.step()] == [StartWorker]


def test_a_sample_from_before_the_last_worker_left_says_nothing_of_its_gpu() -> None:
    """It may show the GPU free because that worker had not begun to use it yet."""
    harness = training()
    ready(harness, OrderPhase.RUN)
    later = key(job="j2")
    harness.want(R.TRAINING, order(), order(later, phase=OrderPhase.RESERVE))
    harness.step()
    harness.sampled_at_s = harness.now_s
    harness.ends(key())
    assert not any(isinstance(action, CheckReserve) for action in harness.steps(3))
    waits = report(harness, later)
    assert waits.phase == P.RESERVING
    assert "sample" in waits.error
    harness.sampled_at_s = None
    assert [type(action) for action in harness.step()] == [CheckReserve]


def test_absence_from_the_desired_state_stops_nothing() -> None:
    """Only an explicit stop does: a coordinator that lost its journal harms nobody."""
    harness = training()
    ready(harness, OrderPhase.RUN)
    harness.want(R.TRAINING, epoch=9)
    assert harness.steps(3) == []
    assert report(harness).phase == P.RUNNING


def test_a_stop_of_a_worker_that_never_ran_is_its_end() -> None:
    """Its reason is reported at once and nothing is started later."""
    harness = training()
    ready(harness)
    stop = StopOrder(key=key(), reason=StopReason.GANG_TIMEOUT, grace_s=5.0)
    harness.want(R.TRAINING, order(phase=OrderPhase.RESERVE), stops=(stop,))
    assert harness.step() == []
    assert (report(harness).phase, report(harness).stop_reason) == (
        P.EXITED,
        StopReason.GANG_TIMEOUT,
    )
    harness.want(R.TRAINING, order())
    assert harness.steps(2) == []


def test_an_ended_worker_is_reported_until_it_is_acknowledged_and_never_starts_again() -> None:
    """The journal of the coordinator must have its end first."""
    harness = training()
    ready(harness, OrderPhase.RUN)
    harness.ends(key(), 3)
    harness.steps(3)
    assert (report(harness).phase, report(harness).exit_code) == (P.EXITED, 3)
    harness.want(R.TRAINING, acknowledged=(key(),))
    assert harness.step() == [ForgetWorker(key())]
    harness.workers.clear()
    assert harness.life.workers.reports() == ()
    harness.want(R.TRAINING, order())
    assert harness.steps(2) == []
    assert harness.life.workers.reports() == ()


def test_a_live_worker_cannot_be_acknowledged_away() -> None:
    """A wrong acknowledgement must not lose a running process."""
    harness = training()
    ready(harness, OrderPhase.RUN)
    harness.want(R.TRAINING, acknowledged=(key(),))
    assert harness.step() == []
    assert report(harness).phase == P.RUNNING


def test_a_new_worker_count_is_a_resize_told_once() -> None:
    """The job hears of each new size of its gang."""
    harness = training()
    ready(harness, OrderPhase.RUN)
    harness.want(R.TRAINING, order(worker_count=3))
    assert harness.step() == [ResizeWorker(key(), 3)]
    assert harness.steps(2) == []


def test_a_worker_without_its_shim_is_a_node_fault() -> None:
    """The job is not blamed for what it did not do."""
    harness = training()
    ready(harness, OrderPhase.RUN)
    harness.workers.clear()
    harness.step()
    assert report(harness).phase == P.EXITED
    assert report(harness).fault == Fault.SHIM_LOST


def test_a_worker_that_cannot_be_started_is_a_node_fault() -> None:
    """The attempt ends; its job queues again free of charge."""
    harness = training()
    ready(harness)
    harness.want(R.TRAINING, order())
    harness.step()
    harness.life.workers.started(key(), error="no space left on device")
    assert report(harness).phase == P.REFUSED
    assert report(harness).fault == Fault.NODE
    assert "no space" in report(harness).error


def test_a_restarted_agent_finds_a_worker_that_it_had_begun_to_start() -> None:
    """Killed between the start and the note of it: the shim on disk is the truth."""
    harness = training()
    ready(harness)
    harness.want(R.TRAINING, order())
    harness.step()
    again = LifeHarness(inference=False, memory=harness.memory)
    again.runs(key())
    assert again.step() == [ResizeWorker(key(), 1)]
    assert report(again).phase == P.RUNNING


def test_nothing_starts_on_a_node_that_is_not_training_or_on_loan() -> None:
    """An inference node that serves holds no worker; the report says what it waits for."""
    harness = LifeHarness()
    harness.serve()
    harness.want(R.SERVING, order())
    assert harness.steps(2) == []
    assert report(harness).error == "the node is serving"


# --- starts that take their time --------------------------------------------------------------


def begun(harness: LifeHarness) -> None:
    """The default worker's start was asked for and is not answered."""
    ready(harness)
    harness.want(R.TRAINING, order())
    assert [type(action) for action in harness.step()] == [StartWorker]


def test_a_worker_whose_start_is_under_way_stays_ready_whatever_is_seen_on_its_gpus() -> None:
    """It may be there already, and its shim may not have said so; nobody else gets its GPU."""
    harness = training()
    begun(harness)
    harness.pids[0] = 4242
    harness.want(R.TRAINING, order(), order(key(job="j2"), phase=OrderPhase.RESERVE))
    assert harness.steps(3) == []
    assert report(harness).phase == P.READY
    harness.pids.clear()
    assert harness.steps(3) == []
    assert report(harness, key(job="j2")).error == "waits for worker j1.1.0 to leave"


@pytest.mark.parametrize("error", ["", "its shim did not start in time"])
def test_what_a_shim_says_counts_more_than_a_late_answer_to_its_start(error: str) -> None:
    """It was ordered to stop meanwhile, or it runs though its starter gave up."""
    harness = training()
    begun(harness)
    harness.runs(key(), P.STOPPING)
    harness.step()
    harness.life.workers.started(key(), error=error)
    assert (report(harness).phase, report(harness).error) == (P.STOPPING, "")


def test_a_gang_that_grew_while_a_worker_was_being_started_is_told_to_it() -> None:
    """It came to life with the number that it was started with."""
    harness = training()
    begun(harness)
    harness.want(R.TRAINING, order(worker_count=3))
    harness.step()
    harness.life.workers.started(key(), error="")
    harness.runs(key())
    assert harness.steps(2) == [ResizeWorker(key(), 3)]


def test_a_stop_told_to_a_start_under_way_is_told_again_once_its_shim_speaks() -> None:
    """It may not have listened yet."""
    harness = training()
    begun(harness)
    stop = StopOrder(key=key(), reason=StopReason.PREEMPT, grace_s=5.0)
    harness.want(R.TRAINING, order(), stops=(stop,))
    assert harness.step() == [StopWorker(key(), StopReason.PREEMPT, 0.0)]
    assert harness.step() == []
    harness.runs(key())
    assert harness.step() == [StopWorker(key(), StopReason.PREEMPT, 5.0)]
    assert harness.step() == []


def test_the_gpus_of_a_start_that_was_withdrawn_are_looked_at_anew() -> None:
    """Its process may have been on them after the last sample."""
    harness = training()
    begun(harness)
    harness.sampled_at_s = harness.now_s
    stop = StopOrder(key=key(), reason=StopReason.PREEMPT, grace_s=5.0)
    later = order(key(job="j2"), phase=OrderPhase.RESERVE)
    harness.want(R.TRAINING, later, stops=(stop,))
    harness.step()
    harness.life.workers.started(key(), error="its shim did not start")
    assert harness.steps(3) == []
    assert report(harness).phase == P.EXITED
    assert "waits for a GPU sample" in report(harness, later.key).error
    harness.sampled_at_s = None
    assert [type(action) for action in harness.step()] == [CheckReserve]


def test_a_start_that_an_agent_before_this_one_began_keeps_its_gpus() -> None:
    """Whatever keeps it waiting now: its shim may come to life at any time."""
    harness = training()
    begun(harness)
    after = LifeHarness(inference=False, memory=harness.memory, at_s=harness.now_s)
    other = key(job="j0")
    after.want(R.TRAINING, order(other, phase=OrderPhase.RESERVE))
    after.life.ledger_error = "no space left on device"
    after.steps(2)
    after.life.ledger_error = ""
    actions = after.steps(2)
    assert [type(action) for action in actions] == [StartWorker]
    assert report(after, other).error == "waits for worker j1.1.0 to leave"


@pytest.mark.parametrize("is_this_ones", [True, False])
def test_a_start_that_is_withdrawn_is_not_over_while_somebody_may_be_there(
    *, is_this_ones: bool
) -> None:
    """A shim that never spoke may have begun its worker, whichever agent had it started."""
    harness = training()
    begun(harness)
    if not is_this_ones:
        harness = LifeHarness(inference=False, memory=harness.memory, at_s=harness.now_s)
    stop = StopOrder(key=key(), reason=StopReason.PREEMPT, grace_s=5.0)
    harness.want(R.TRAINING, order(key(job="j2"), phase=OrderPhase.RESERVE), stops=(stop,))
    assert harness.step() == [StopWorker(key(), StopReason.PREEMPT, 0.0)]
    assert harness.life.workers.withdrawn == ([] if is_this_ones else [key()])
    harness.life.workers.started(key(), error="its shim did not start")
    assert harness.life.workers.withdrawn == [key()]
    harness.leaving = frozenset({key()})
    assert harness.steps(9) == []
    assert report(harness).phase == P.READY
    assert report(harness, key(job="j2")).error == "waits for worker j1.1.0 to leave"
    harness.leaving = frozenset()
    harness.step()
    assert (report(harness).phase, report(harness).stop_reason) == (P.EXITED, StopReason.PREEMPT)
    assert harness.life.workers.withdrawn == []


GPUS = (GpuUuid("GPU-0"),)


GRACE_S = 10.0


def runs(harness: LifeHarness) -> None:
    """Bring the default worker to run there."""
    harness.runs(key())
    harness.want(harness.role(), order())
    harness.step()
    assert harness.life.workers.live()


def stops(harness: LifeHarness, after_s: float) -> list[StopWorker]:
    """What the next step tells to stop."""
    return [action for action in harness.step(after_s) if isinstance(action, StopWorker)]


def test_the_workers_that_are_forgotten_are_kept_up_to_a_number() -> None:
    """The ledger is written whole each time; the oldest ones go first."""
    harness = LifeHarness(inference=False)
    harness.memory.forgotten = [key(index, job="old") for index in range(FORGOTTEN_KEPT)]
    harness.want(R.TRAINING, acknowledged=(key(job="new"),))
    assert len(harness.memory.forgotten) == FORGOTTEN_KEPT
    assert harness.memory.forgotten[0] == key(1, job="old")
    assert harness.memory.forgotten[-1] == key(job="new")


@pytest.mark.parametrize(("grace_s", "told"), [(GRACE_S + 0.9, 0), (GRACE_S + 5.0, 1)])
def test_a_stop_under_way_is_told_anew_only_to_end_noticeably_earlier(
    grace_s: float, told: int
) -> None:
    """Steps come often, and each would find it a little too late."""
    harness = LifeHarness(vacate_grace_s=GRACE_S)
    harness.serve()
    harness.lend()
    runs(harness)
    stop = StopOrder(key=key(), reason=StopReason.PREEMPT, grace_s=grace_s)
    harness.want(R.ON_LOAN, order(), stops=(stop,))
    assert [action.grace_s for action in stops(harness, 0.1)] == [grace_s]
    harness.want(R.SERVING)
    assert [action.grace_s for action in stops(harness, 0.0)] == [GRACE_S] * told
    assert stops(harness, 0.1) == []


def test_a_worker_that_was_never_begun_has_left_no_gpu() -> None:
    """The next one need not wait for a look after its end."""
    harness = LifeHarness(inference=False)
    harness.want(R.TRAINING, order(phase=OrderPhase.RESERVE))
    harness.step()
    stop = StopOrder(key=key(), reason=StopReason.PREEMPT, grace_s=GRACE_S)
    harness.want(R.TRAINING, stops=(stop,))
    harness.step()
    assert not harness.life.workers.live()
    assert harness.life.workers.gpu_left_at_s(GPUS) == 0.0


def test_a_worker_that_ran_has_left_its_gpu() -> None:
    """At its end, as far as the node saw."""
    harness = LifeHarness(inference=False)
    runs(harness)
    harness.ends(key())
    harness.step()
    assert harness.life.workers.gpu_left_at_s(GPUS) == harness.now_s


def test_no_grace_is_less_than_none() -> None:
    """A node that looks when it should serve already ends its workers at once."""
    harness = LifeHarness()
    harness.serve()
    harness.lend()
    runs(harness)
    harness.want(R.SERVING, reclaim_in_s=1.0)
    assert [action.grace_s for action in stops(harness, 5.0)] == [0.0]
