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
from tests.agent.bench import Bench, key, order

P, R = WorkerPhase, NodeRole


def training() -> Bench:
    """A training node."""
    return Bench(inference=False)


def report(bench: Bench, worker: WorkerKey | None = None) -> WorkerReport:
    """What the node says of a worker."""
    found = {r.key: r for r in bench.life.workers.reports()}
    return found[worker or key()]


def ready(bench: Bench, phase: OrderPhase = OrderPhase.RESERVE) -> None:
    """Bring the default worker to READY, or to running."""
    bench.want(R.TRAINING, order(phase=phase))
    bench.step()
    bench.life.workers.checked(key(), endpoint="n1:29500", refusal=None)
    bench.step()
    if phase == OrderPhase.RUN:
        bench.life.workers.started(key(), error="")
        bench.runs(key())
        bench.step()


def test_a_reserved_worker_is_checked_then_ready_with_an_endpoint_and_not_started() -> None:
    """A gang runs only when every node said ready."""
    bench = training()
    bench.want(R.TRAINING, order(phase=OrderPhase.RESERVE))
    assert [type(action) for action in bench.steps(2)] == [CheckReserve]
    bench.life.workers.checked(key(), endpoint="n1:29500", refusal=None)
    assert bench.steps(2) == []
    assert (report(bench).phase, report(bench).endpoint) == (P.READY, "n1:29500")


def test_a_run_order_starts_a_ready_worker_once() -> None:
    """However often the order is repeated."""
    bench = training()
    ready(bench)
    bench.want(R.TRAINING, order())
    assert [type(action) for action in bench.step()] == [StartWorker]
    bench.life.workers.started(key(), error="")
    bench.runs(key())
    bench.want(R.TRAINING, order())
    assert bench.steps(3) == []
    assert report(bench).phase == P.RUNNING


@pytest.mark.parametrize(("what", "why"), [("workdir", "/nope is missing"), ("command", "no x")])
def test_a_worker_that_can_never_run_here_is_refused_with_the_reason(what: str, why: str) -> None:
    """The coordinator hears it and places the gang elsewhere."""
    bench = training()
    bench.want(R.TRAINING, order(phase=OrderPhase.RESERVE))
    bench.step()
    bench.life.workers.checked(key(), endpoint="", refusal=Refusal(why, Fault.JOB, what))
    found = report(bench)
    assert (found.phase, found.error) == (P.REFUSED, why)
    assert (found.fault, found.refused_for) == (Fault.JOB, what)


def test_an_order_for_a_gpu_that_is_not_here_is_refused() -> None:
    """No process is ever given a GPU of another node; one that fell out is no fault of the job."""
    bench = training()
    bench.want(R.TRAINING, order(gpus=(0, 7)))
    bench.step()
    assert report(bench).phase == P.REFUSED
    assert report(bench).fault == Fault.NODE
    assert "GPU-7" in report(bench).error


def test_a_reservation_waits_until_the_device_is_seen_free() -> None:
    """What it waits for is in the report."""
    bench = training()
    bench.pids[0] = 4242
    bench.want(R.TRAINING, order(phase=OrderPhase.RESERVE))
    assert bench.steps(2) == []
    assert (report(bench).phase, report(bench).error) == (
        P.RESERVING,
        "GPU GPU-0 is used by process 4242",
    )
    bench.pids.clear()
    assert [type(action) for action in bench.step()] == [CheckReserve]


def test_a_reservation_waits_for_the_worker_before_it() -> None:
    """Two workers never share a GPU, not even for a moment."""
    bench = training()
    ready(bench, OrderPhase.RUN)
    later = key(job="j2")
    stop = StopOrder(key=key(), reason=StopReason.PREEMPT, grace_s=5.0)
    bench.want(R.TRAINING, order(), order(later), stops=(stop,))
    assert bench.step() == [StopWorker(key(), StopReason.PREEMPT, 5.0)]
    assert report(bench, later).phase == P.RESERVING
    assert "j1.1.0" in report(bench, later).error
    bench.ends(key(), -15, StopReason.PREEMPT)
    bench.steps(2)
    bench.life.workers.checked(later, endpoint="n1:29501", refusal=None)
    assert [type(action) for action in bench.step()] == [StartWorker]


def test_a_sample_from_before_the_last_worker_left_says_nothing_of_its_gpu() -> None:
    """It may show the GPU free because that worker had not begun to use it yet."""
    bench = training()
    ready(bench, OrderPhase.RUN)
    later = key(job="j2")
    bench.want(R.TRAINING, order(), order(later, phase=OrderPhase.RESERVE))
    bench.step()
    bench.sampled_at_s = bench.now_s
    bench.ends(key())
    assert not any(isinstance(action, CheckReserve) for action in bench.steps(3))
    waits = report(bench, later)
    assert waits.phase == P.RESERVING
    assert "sample" in waits.error
    bench.sampled_at_s = None
    assert [type(action) for action in bench.step()] == [CheckReserve]


def test_absence_from_the_desired_state_stops_nothing() -> None:
    """Only an explicit stop does: a coordinator that lost its journal harms nobody."""
    bench = training()
    ready(bench, OrderPhase.RUN)
    bench.want(R.TRAINING, epoch=9)
    assert bench.steps(3) == []
    assert report(bench).phase == P.RUNNING


def test_a_stop_of_a_worker_that_never_ran_is_its_end() -> None:
    """Its reason is reported at once and nothing is started later."""
    bench = training()
    ready(bench)
    stop = StopOrder(key=key(), reason=StopReason.GANG_TIMEOUT, grace_s=5.0)
    bench.want(R.TRAINING, order(phase=OrderPhase.RESERVE), stops=(stop,))
    assert bench.step() == []
    assert (report(bench).phase, report(bench).stop_reason) == (P.EXITED, StopReason.GANG_TIMEOUT)
    bench.want(R.TRAINING, order())
    assert bench.steps(2) == []


def test_an_ended_worker_is_reported_until_it_is_acknowledged_and_never_starts_again() -> None:
    """The journal of the coordinator must have its end first."""
    bench = training()
    ready(bench, OrderPhase.RUN)
    bench.ends(key(), 3)
    bench.steps(3)
    assert (report(bench).phase, report(bench).exit_code) == (P.EXITED, 3)
    bench.want(R.TRAINING, acknowledged=(key(),))
    assert bench.step() == [ForgetWorker(key())]
    bench.workers.clear()
    assert bench.life.workers.reports() == ()
    bench.want(R.TRAINING, order())
    assert bench.steps(2) == []
    assert bench.life.workers.reports() == ()


def test_a_live_worker_cannot_be_acknowledged_away() -> None:
    """A wrong acknowledgement must not lose a running process."""
    bench = training()
    ready(bench, OrderPhase.RUN)
    bench.want(R.TRAINING, acknowledged=(key(),))
    assert bench.step() == []
    assert report(bench).phase == P.RUNNING


def test_a_new_worker_count_is_a_resize_told_once() -> None:
    """The job hears of each new size of its gang."""
    bench = training()
    ready(bench, OrderPhase.RUN)
    bench.want(R.TRAINING, order(worker_count=3))
    assert bench.step() == [ResizeWorker(key(), 3)]
    assert bench.steps(2) == []


def test_a_worker_without_its_shim_is_a_node_fault() -> None:
    """The job is not blamed for what it did not do."""
    bench = training()
    ready(bench, OrderPhase.RUN)
    bench.workers.clear()
    bench.step()
    assert report(bench).phase == P.EXITED
    assert report(bench).fault == Fault.SHIM_LOST


def test_a_worker_that_cannot_be_started_is_a_node_fault() -> None:
    """The attempt ends; its job queues again free of charge."""
    bench = training()
    ready(bench)
    bench.want(R.TRAINING, order())
    bench.step()
    bench.life.workers.started(key(), error="no space left on device")
    assert report(bench).phase == P.REFUSED
    assert report(bench).fault == Fault.NODE
    assert "no space" in report(bench).error


def test_a_restarted_agent_finds_a_worker_that_it_had_begun_to_start() -> None:
    """Killed between the start and the note of it: the shim on disk is the truth."""
    bench = training()
    ready(bench)
    bench.want(R.TRAINING, order())
    bench.step()
    again = Bench(inference=False, memory=bench.memory)
    again.runs(key())
    assert again.step() == [ResizeWorker(key(), 1)]
    assert report(again).phase == P.RUNNING


def test_nothing_starts_on_a_node_that_is_not_training_or_on_loan() -> None:
    """An inference node that serves holds no worker; the report says what it waits for."""
    bench = Bench()
    bench.serve()
    bench.want(R.SERVING, order())
    assert bench.steps(2) == []
    assert report(bench).error == "the node is serving"


# --- starts that take their time --------------------------------------------------------------


def begun(bench: Bench) -> None:
    """The default worker's start was asked for and is not answered."""
    ready(bench)
    bench.want(R.TRAINING, order())
    assert [type(action) for action in bench.step()] == [StartWorker]


def test_a_worker_whose_start_is_under_way_stays_ready_whatever_is_seen_on_its_gpus() -> None:
    """It may be there already, and its shim may not have said so; nobody else gets its GPU."""
    bench = training()
    begun(bench)
    bench.pids[0] = 4242
    bench.want(R.TRAINING, order(), order(key(job="j2"), phase=OrderPhase.RESERVE))
    assert bench.steps(3) == []
    assert report(bench).phase == P.READY
    bench.pids.clear()
    assert bench.steps(3) == []
    assert report(bench, key(job="j2")).error == "waits for worker j1.1.0 to leave"


@pytest.mark.parametrize("error", ["", "its shim did not start in time"])
def test_what_a_shim_says_counts_more_than_a_late_answer_to_its_start(error: str) -> None:
    """It was ordered to stop meanwhile, or it runs though its starter gave up."""
    bench = training()
    begun(bench)
    bench.runs(key(), P.STOPPING)
    bench.step()
    bench.life.workers.started(key(), error=error)
    assert (report(bench).phase, report(bench).error) == (P.STOPPING, "")


def test_a_gang_that_grew_while_a_worker_was_being_started_is_told_to_it() -> None:
    """It came to life with the number that it was started with."""
    bench = training()
    begun(bench)
    bench.want(R.TRAINING, order(worker_count=3))
    bench.step()
    bench.life.workers.started(key(), error="")
    bench.runs(key())
    assert bench.steps(2) == [ResizeWorker(key(), 3)]


def test_a_stop_told_to_a_start_under_way_is_told_again_once_its_shim_speaks() -> None:
    """It may not have listened yet."""
    bench = training()
    begun(bench)
    stop = StopOrder(key=key(), reason=StopReason.PREEMPT, grace_s=5.0)
    bench.want(R.TRAINING, order(), stops=(stop,))
    assert bench.step() == [StopWorker(key(), StopReason.PREEMPT, 0.0)]
    assert bench.step() == []
    bench.runs(key())
    assert bench.step() == [StopWorker(key(), StopReason.PREEMPT, 5.0)]
    assert bench.step() == []


def test_the_gpus_of_a_start_that_was_withdrawn_are_looked_at_anew() -> None:
    """Its process may have been on them after the last sample."""
    bench = training()
    begun(bench)
    bench.sampled_at_s = bench.now_s
    stop = StopOrder(key=key(), reason=StopReason.PREEMPT, grace_s=5.0)
    later = order(key(job="j2"), phase=OrderPhase.RESERVE)
    bench.want(R.TRAINING, later, stops=(stop,))
    bench.step()
    bench.life.workers.started(key(), error="its shim did not start")
    assert bench.steps(3) == []
    assert report(bench).phase == P.EXITED
    assert "waits for a GPU sample" in report(bench, later.key).error
    bench.sampled_at_s = None
    assert [type(action) for action in bench.step()] == [CheckReserve]


def test_a_start_that_an_agent_before_this_one_began_keeps_its_gpus() -> None:
    """Whatever keeps it waiting now: its shim may come to life at any time."""
    bench = training()
    begun(bench)
    after = Bench(inference=False, memory=bench.memory, at_s=bench.now_s)
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
    bench = training()
    begun(bench)
    if not is_this_ones:
        bench = Bench(inference=False, memory=bench.memory, at_s=bench.now_s)
    stop = StopOrder(key=key(), reason=StopReason.PREEMPT, grace_s=5.0)
    bench.want(R.TRAINING, order(key(job="j2"), phase=OrderPhase.RESERVE), stops=(stop,))
    assert bench.step() == [StopWorker(key(), StopReason.PREEMPT, 0.0)]
    assert bench.life.workers.withdrawn == ([] if is_this_ones else [key()])
    bench.life.workers.started(key(), error="its shim did not start")
    assert bench.life.workers.withdrawn == [key()]
    bench.leaving = frozenset({key()})
    assert bench.steps(9) == []
    assert report(bench).phase == P.READY
    assert report(bench, key(job="j2")).error == "waits for worker j1.1.0 to leave"
    bench.leaving = frozenset()
    bench.step()
    assert (report(bench).phase, report(bench).stop_reason) == (P.EXITED, StopReason.PREEMPT)
    assert bench.life.workers.withdrawn == []


GPUS = (GpuUuid("GPU-0"),)


GRACE_S = 10.0


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
