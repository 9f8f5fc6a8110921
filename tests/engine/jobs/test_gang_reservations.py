"""A job does not wait for a node that was never ordered to run it; that node keeps only GPUs."""

from __future__ import annotations

from common.messages import OrderPhase, WorkerPhase
from common.model import JobState, Launcher, NodeName, NodeRole, WorkerKey
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.state.events import (
    JobCancelRequested,
    LeaderStarted,
    NodeSilent,
    OperatorAction,
    OperatorAsked,
    RecordsLost,
)
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Placement, Preempt, Resize
from coordinator.service.api.explain_node import reasons as explain_node
from coordinator.sim.run.cluster import Delays
from tests.harness.cluster.engine import EngineHarness, start, state
from tests.tables import each_row

T0, T1 = NodeName("t0"), NodeName("t1")
TIMEOUT_S = 40.0


def dying(
    *, workers: tuple[int, int] = (1, 1), launcher: Launcher = Launcher.NONE
) -> tuple[EngineHarness, JobEntry]:
    """A job that starts on t0, which hears no order and says nothing more."""
    harness = EngineHarness(delays=Delays(ready_s=1.0), training=3, gang_ready_timeout_s=TIMEOUT_S)
    job = harness.submit(workers=workers, work_s=1e6, launcher=launcher)
    harness.toggle_deaf(T0)
    harness.sim.nodes[T0].crash()
    harness.start(job, *("t0", "t1")[: workers[0]])
    assert state(job) == JobState.STARTING
    return harness, job


def lose(harness: EngineHarness) -> None:
    """The coordinator calls t0 lost."""
    harness.sim.handle(NodeSilent(node=T0, silent_s=20.0))


def boot(harness: EngineHarness) -> None:
    """It is back, with nothing of before."""
    harness.toggle_deaf(T0)
    harness.sim.nodes[T0].boot()
    harness.wait(2.0)


def cancel(harness: EngineHarness, job: JobEntry) -> None:
    """Its user asks for its end."""
    harness.sim.handle(JobCancelRequested(job_id=job.job_id, by="u"))


def operate(harness: EngineHarness, action: OperatorAction) -> None:
    """An operator's order of t0."""
    harness.sim.handle(OperatorAsked(action=action, by="ops/me", target="t0"))


def held(harness: EngineHarness, name: str = "t0") -> int:
    """GPUs of a node that somebody holds, as the engine sees them."""
    return sum(slot.holder is not None for slot in harness.node(name).gpus)


@each_row("launcher", list(Launcher))
@each_row("is_lost", [False, True])
def test_a_gang_whose_node_died_before_it_was_ready_goes_elsewhere(
    launcher: Launcher, *, is_lost: bool
) -> None:
    """After the gang timeout it waits for a pass alone; the GPUs there stay held until the node is
    heard. Its rendezvous store, ordered with the reservations, does not hold it either.
    """
    harness, job = dying(workers=(2, 3), launcher=launcher)
    assert (job.store is not None) == (launcher == Launcher.TORCHRUN)
    if is_lost:
        harness.wait(10.0)
        lose(harness)
    assert state(job) == JobState.STARTING
    harness.wait(TIMEOUT_S)
    assert (state(job), job.workers, job.counts.node_faults) == (JobState.PENDING, {}, 0)
    assert (held(harness), held(harness, "t1")) == (8, 0)
    assert any(
        "8 GPUs stay held for j" in said
        for said in explain_node(harness.engine, harness.node("t0"))
    )
    harness.start(job, "t1", "t2")
    harness.wait(3.0)
    assert (state(job), job.attempt.number) == (JobState.RUNNING, 2)
    boot(harness)
    assert (held(harness), harness.node("t0").ledger.left_reservations) == (0, [])
    assert (state(job), job.attempt.number) == (JobState.RUNNING, 2)


def test_a_cancel_of_a_gang_that_never_ran_ends_at_once() -> None:
    """Whether its node is lost yet or not, and also where the job was being stopped already."""
    for is_lost in (False, True):
        harness, job = dying()
        if is_lost:
            lose(harness)
        cancel(harness, job)
        assert (state(job), held(harness)) == (JobState.CANCELLED, 8)
    harness, job = dying(workers=(2, 2))
    harness.decide(Preempt(job_id=job.job_id, reason="another turn"))
    harness.wait(2.0)
    assert (state(job), [w.node for w in job.workers.values()]) == (JobState.PREEMPTING, ["t0"])
    cancel(harness, job)
    assert state(job) == JobState.CANCELLED


def test_a_job_that_stops_for_another_reason_leaves_a_node_when_it_is_lost() -> None:
    """Its other workers are gone, and on the silent node none ever ran."""
    harness, job = dying(workers=(2, 2))
    harness.decide(Preempt(job_id=job.job_id, reason="another turn"))
    harness.wait(2.0)
    assert state(job) == JobState.PREEMPTING
    lose(harness)
    assert (state(job), held(harness)) == (JobState.PENDING, 8)


def test_a_resize_ends_without_a_node_that_died_before_it_was_ready() -> None:
    """The job runs on as it was, may grow again, and a later cancel waits for no lost node."""
    harness = EngineHarness(delays=Delays(ready_s=1.0), training=3, gang_ready_timeout_s=TIMEOUT_S)
    job = harness.submit(workers=(1, 2), work_s=1e6)
    harness.start(job, "t1")
    harness.wait(3.0)
    harness.sim.nodes[T0].crash()
    added = (Placement(node=T0, worker_count=1, is_flexible=True),)
    harness.decide(Resize(job_id=job.job_id, added=added, reason="room"))
    assert state(job) == JobState.RESIZING
    harness.wait(TIMEOUT_S + 1.0)
    assert (state(job), len(job.workers), held(harness)) == (JobState.RUNNING, 1, 8)
    added = (Placement(node=NodeName("t2"), worker_count=1, is_flexible=True),)
    harness.decide(Resize(job_id=job.job_id, added=added, reason="room"))
    harness.wait(3.0)
    assert (state(job), job.running_workers) == (JobState.RUNNING, 2)


def test_a_release_of_a_worker_that_never_ran_ends_its_resize() -> None:
    """Its node is lost by then, so no report will say that the worker has gone."""
    harness = EngineHarness(delays=Delays(ready_s=1.0), training=3)
    job = harness.submit(workers=(1, 2), work_s=1e6)
    harness.start(job, "t1")
    harness.wait(3.0)
    harness.sim.nodes[T0].crash()
    added = (Placement(node=T0, worker_count=1, is_flexible=True),)
    harness.decide(Resize(job_id=job.job_id, added=added, reason="room"))
    lose(harness)
    harness.decide(Resize(job_id=job.job_id, removed_workers=(1,), reason="no room"))
    assert (state(job), job.attempt.gang_deadline_s) == (JobState.RUNNING, None)


def test_what_was_ordered_to_run_is_waited_for() -> None:
    """The order may be on its way: on a node that is not heard the worker is unknown, not gone."""
    harness = EngineHarness(delays=Delays(ready_s=1.0, start_s=5.0))
    job = harness.submit(workers=(2, 2), work_s=1e6)
    harness.start(job, "t0", "t1")
    harness.wait(1.5)
    assert state(job) == JobState.RUNNING
    assert harness.sim.nodes[T0].keys(WorkerPhase.READY) != []
    harness.sim.nodes[T0].is_up = False  # it is stopped, and goes on later
    lose(harness)
    cancel(harness, job)
    harness.wait(100.0)
    assert state(job) == JobState.PREEMPTING or job.after_vacating is not None
    assert {worker.node for worker in job.workers.values()} == {T0}


def test_a_node_that_goes_on_is_told_to_stop_what_it_reserved() -> None:
    """It was only silent: the old attempt is fenced off, and never runs beside the new one."""
    harness = EngineHarness(delays=Delays(ready_s=1.0), training=3, gang_ready_timeout_s=TIMEOUT_S)
    job = harness.submit(workers=(2, 2), work_s=1e6)
    harness.toggle_deaf(T1)
    harness.start(job, "t0", "t1")
    harness.wait(2.0)
    harness.toggle_deaf(T0)
    pretend = harness.sim.nodes[T0]
    assert pretend.keys(WorkerPhase.READY) == [WorkerKey(job.job_id, 1, 0)]
    lose(harness)
    harness.wait(TIMEOUT_S)
    assert state(job) == JobState.PENDING
    harness.start(job, "t2", "t1")
    harness.toggle_deaf(T1)
    harness.wait(3.0)
    assert state(job) == JobState.RUNNING
    pretend.report_soon()
    harness.wait(1.0)
    assert harness.node("t0").role == NodeRole.TRAINING
    assert held(harness) == 8  # the order to stop has not reached it
    harness.toggle_deaf(T0)
    harness.wait(2.0)
    assert (pretend.keys(), held(harness), harness.node("t0").ledger.left_reservations) == (
        [],
        0,
        [],
    )
    assert (state(job), job.attempt.number) == (JobState.RUNNING, 2)


def test_an_operator_frees_the_gpus_by_vouching_for_the_node() -> None:
    """A removal needs no such word: a reservation never runs."""
    harness, job = dying()
    lose(harness)
    cancel(harness, job)
    operate(harness, OperatorAction.CONFIRM_DEAD)
    assert (held(harness), harness.node("t0").ledger.left_reservations) == (0, [])
    harness, job = dying()
    lose(harness)
    cancel(harness, job)
    operate(harness, OperatorAction.REMOVE)
    assert T0 not in harness.engine.state.nodes


def test_a_confirmed_death_ends_every_reservation_of_a_gang_there() -> None:
    """Two of its workers were there; the first is a node fault, the second goes with it."""
    harness = EngineHarness(delays=Delays(ready_s=1.0), gang_ready_timeout_s=TIMEOUT_S)
    job = harness.submit(workers=(2, 2), gpus_per_worker=4, work_s=1e6)
    harness.sim.nodes[T0].crash()
    harness.start(job, "t0", "t0")
    lose(harness)
    operate(harness, OperatorAction.CONFIRM_DEAD)
    assert (state(job), held(harness), job.counts.node_faults) == (JobState.PENDING, 0, 1)


def test_another_leader_knows_what_was_left_behind() -> None:
    """The state is saved and read; the GPUs come free when the node speaks to the new leader."""
    harness, job = dying()
    lose(harness)
    cancel(harness, job)
    again = Engine(harness.engine.settings, decode_state(harness.engine.encode_state()))
    again.policy = harness.engine.policy
    harness.sim.engine = harness.engine = again
    harness.sim.handle(LeaderStarted(epoch=2, holder="new"))
    assert (held(harness), again.check()) == (8, [])
    boot(harness)
    assert held(harness) == 0


def test_a_reservation_of_a_lost_journal_is_waited_for() -> None:
    """A ledger says `reserve`, and the lost journal may have said `run` to the rest of the gang."""
    harness = EngineHarness(delays=Delays(ready_s=1.0), gang_ready_timeout_s=TIMEOUT_S)
    job = harness.submit(workers=(2, 2), work_s=1e6)
    harness.toggle_deaf(T1)
    harness.start(job, "t0", "t1")
    harness.wait(2.0)
    harness.lose_journal()
    job = harness.engine.state.jobs[job.job_id]
    assert {worker.node for worker in job.workers.values()} == {T0}
    harness.sim.nodes[T0].is_up = False
    lose(harness)
    cancel(harness, job)
    harness.wait(TIMEOUT_S)
    assert (state(job), len(job.workers)) == (JobState.STARTING, 1)


def test_gpus_of_a_node_that_is_heard_are_promised_while_it_lets_go() -> None:
    """As those of any worker that was told to stop: the next job need not wait for a report."""
    harness = EngineHarness(delays=Delays(ready_s=5.0, report_s=1.0))
    harness.wait(2.0)
    job, other = harness.submit("j", work_s=1e6), harness.submit("other", work_s=1e6)
    harness.start(job, "t0")
    cancel(harness, job)
    assert (state(job), held(harness)) == (JobState.CANCELLED, 8)
    harness.decide(start(other, "t0"))
    assert state(other) == JobState.STARTING
    harness.wait(10.0)
    assert state(other) == JobState.RUNNING


# --- after records were lost ----------------------------------------------------------------------


def doubt(harness: EngineHarness) -> None:
    """Another leader finds that the end of its journal is gone; all nodes but t0 report to it."""
    harness.sim.handle(LeaderStarted(epoch=2, holder="two"))
    harness.sim.handle(RecordsLost(first=9, last=9, from_s=0.0))
    for name, node in harness.sim.nodes.items():
        if name != T0:
            node.report_soon()
    harness.wait(2.0)
    assert list(harness.engine.state.doubted_nodes) == [T0]


def test_a_doubted_gang_is_left_only_when_every_node_was_heard() -> None:
    """A lost record may have ordered it to run; a report of its node without it ends the doubt."""
    harness, job = dying()
    doubt(harness)
    harness.wait(2 * TIMEOUT_S)
    assert state(job) == JobState.STARTING
    cancel(harness, job)
    assert (list(job.workers), harness.node("t0").ledger.left_reservations) == ([0], [])
    harness.sim.nodes[T0].boot()
    harness.wait(2.0)
    assert state(job) == JobState.CANCELLED
    assert [left.key.attempt for left in harness.node("t0").ledger.left_reservations] == [1]
    assert harness.engine.check() == []


def test_a_doubted_gang_times_out_when_its_nodes_were_heard() -> None:
    """Its deadline is not forgotten meanwhile, and the next pass is soon."""
    harness, job = dying()
    doubt(harness)
    harness.wait(2 * TIMEOUT_S)
    assert state(job) == JobState.STARTING
    harness.sim.nodes[T0].boot()
    harness.wait(2.0)
    assert (state(job), job.workers) == (JobState.PENDING, {})
    assert harness.engine.state.counters.gang_timeouts == 1


def test_a_worker_that_its_node_reports_as_running_is_not_left() -> None:
    """Its node has the order to run, also where the journal has lost it."""
    harness = EngineHarness(gang_ready_timeout_s=TIMEOUT_S, training=3)
    job = harness.submit(workers=(2, 2), work_s=1e6)
    harness.start(job, "t0", "t1")
    harness.wait(5.0)
    for worker in job.workers.values():
        worker.order = OrderPhase.RESERVE
    for name in (T0, T1):
        harness.toggle_deaf(name)
    cancel(harness, job)
    assert len(job.workers) == 2
    assert harness.engine.state.nodes[T0].ledger.left_reservations == []
