"""The rendezvous store of a gang: where it is, what waits for it, and what its end means."""

from __future__ import annotations

import pytest

from common.faults import Fault
from common.messages import DesiredState, OrderPhase, WorkerOrder, WorkerPhase
from common.model import (
    STORE_INDEX,
    JobId,
    JobSpec,
    JobState,
    Launcher,
    NodeName,
    NodeRole,
    Pool,
    RendezvousSpec,
    RetrySpec,
    StopReason,
    WorkerKey,
)
from coordinator.engine.engine import Engine
from coordinator.engine.state.commands import Outcome, PushDesired
from coordinator.engine.state.events import (
    GpuFact,
    JobCancelRequested,
    JobSubmitted,
    LeaderStarted,
    NodeReported,
    OperatorAction,
    OperatorAsked,
    PassDue,
    WorkerFact,
)
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import JobEntry
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import EngineHarness, state
from tests.tables import each_row

JOB = JobId("j")
P = WorkerPhase
STORE = WorkerKey(JOB, 1, STORE_INDEX)


def gang(harness: EngineHarness, *, max_restarts: int = 0) -> JobEntry:
    """An elastic job under torchrun with two base workers and a flexible one, which runs."""
    job = harness.submit("j", workers=(2, 3), launcher=Launcher.TORCHRUN, max_restarts=max_restarts)
    harness.start(job, "t0", "t1", flexible=("t2",))
    harness.wait(1.0)
    return job


class Node:
    """An engine and the one node that it hears; a test says what the node reports."""

    def __init__(self, spec: JobSpec) -> None:
        self.engine = Engine(EngineSettings(policy="fifo"))
        self.now_s = 0.0
        self.desired: DesiredState | None = None
        self.handle(LeaderStarted(epoch=1, holder="t"))
        self.report()
        self.handle(JobSubmitted(job_id=JOB, spec=spec, tenant="t", user="u"))
        self.handle(PassDue())

    def handle(self, event: object) -> Outcome:
        """A second passes, and this happens."""
        self.now_s += 1.0
        outcome = self.engine.handle(event, now_s=self.now_s)  # type: ignore[arg-type]  # any event
        for command in outcome.commands:
            if isinstance(command, PushDesired):
                self.desired = self.engine.desired(command.node)
        assert self.engine.check() == []
        return outcome

    def report(self, *workers: WorkerFact) -> None:
        """What the node holds; it has seen every order."""
        generation = 0 if self.desired is None else self.desired.generation
        gpus = tuple(GpuFact(f"g{i}", "H100") for i in range(8))  # type: ignore[arg-type]
        self.handle(
            NodeReported(
                node=NodeName("n"), boot_id="b", home_pool=Pool.TRAINING, role=NodeRole.TRAINING,
                epoch=1, generation=generation, gpus=gpus, workers=workers,
            )
        )  # fmt: skip

    def orders(self) -> dict[int, WorkerOrder]:
        """What the node is ordered, by worker index."""
        assert self.desired is not None
        return {order.key.worker_index: order for order in self.desired.workers}

    def job(self) -> JobEntry:
        """The job as it is now."""
        return self.engine.state.jobs[JOB]


def spec(
    *,
    launcher: Launcher = Launcher.TORCHRUN,
    workers: tuple[int, int] = (1, 2),
    command: tuple[str, ...] = (),
    max_restarts: int = 0,
) -> JobSpec:
    """A job of one GPU a worker."""
    return make_spec(
        workers=workers,
        launcher=launcher,
        rendezvous=RendezvousSpec(command=command),
        retry=RetrySpec(max_restarts=max_restarts),
    )


def worker(phase: WorkerPhase = P.READY) -> WorkerFact:
    """What the node says of worker 0."""
    return WorkerFact(key=WorkerKey(JOB, 1, 0), phase=phase, endpoint="n:1000")


def store(
    phase: WorkerPhase,
    *,
    exit_code: int | None = None,
    error: str = "",
    fault: Fault = Fault.NONE,
    reason: StopReason | None = None,
) -> WorkerFact:
    """What the node says of the store."""
    return WorkerFact(
        key=STORE, phase=phase, endpoint="n:2000", exit_code=exit_code, error=error,
        stop_reason=reason, fault=fault,
    )  # fmt: skip


@each_row(
    ("job", "has_store"),
    [
        (spec(), True),
        (spec(workers=(2, 2)), False),
        (spec(launcher=Launcher.NONE), False),
        (spec(launcher=Launcher.NONE, command=("kv",)), True),
        (spec(launcher=Launcher.NONE, command=("kv",), workers=(1, 1)), True),
    ],
)
def test_who_gets_a_store(job: JobSpec, has_store: bool) -> None:
    """Elastic jobs under torchrun, and whoever names a command for it; nobody else."""
    node = Node(job)
    orders = node.orders()
    assert (STORE_INDEX in orders) == has_store
    assert orders[0].has_store == has_store


def test_a_gang_runs_only_when_its_store_does_and_meets_there() -> None:
    """Ready workers wait for it; then they are told its endpoint and not worker 0's."""
    node = Node(spec())
    assert node.orders()[STORE_INDEX].gpu_uuids == ()
    node.report(worker(), store(P.RESERVING))
    assert node.orders()[0].phase == OrderPhase.RESERVE
    node.report(worker(), store(P.RUNNING))
    assert (node.orders()[0].phase, node.orders()[0].endpoint) == (OrderPhase.RUN, "n:2000")


def test_a_gang_whose_store_never_listens_is_told_so_and_queues_again_for_free() -> None:
    """Its time is up as that of any gang, and the reason names what was missing."""
    node = Node(spec())
    node.report(worker(), store(P.RESERVING))
    node.now_s += node.engine.settings.gang_ready_timeout_s
    node.handle(PassDue())
    assert (node.job().counts.own_faults, node.job().counts.node_faults) == (0, 0)
    assert any("the rendezvous store on n" in line.reason for line in node.engine.state.stories)


@each_row(
    ("end", "has_run", "own", "node_faults"),
    [
        (store(P.EXITED, exit_code=-9), True, 0, 1),
        (store(P.EXITED, error="shim lost", fault=Fault.SHIM_LOST), True, 0, 1),
        (store(P.EXITED, error="shim lost", fault=Fault.SHIM_LOST), False, 0, 1),
        (store(P.EXITED, exit_code=75), False, 0, 1),
        (store(P.EXITED, exit_code=1), False, 1, 0),
        (store(P.EXITED, exit_code=-11), False, 1, 0),
        (store(P.EXITED, exit_code=0), True, 1, 0),
        (store(P.EXITED, exit_code=127, error="cannot start 'kv'"), False, 1, 0),
        (store(P.REFUSED, error="command 'kv' was not found", fault=Fault.JOB), False, 1, 0),
    ],
)
def test_the_end_of_a_store_is_counted_by_its_cause(
    end: WorkerFact, has_run: bool, own: int, node_faults: int
) -> None:
    """What was done to it is free; a store that leaves, or never came up, is the job's fault."""
    node = Node(spec(max_restarts=1))
    if has_run:
        node.report(worker(), store(P.RUNNING))
    node.report(worker(P.RUNNING if has_run else P.READY), end)
    job = node.job()
    assert (job.counts.own_faults, job.counts.node_faults) == (own, node_faults)
    assert (job.state, job.store) == (JobState.PREEMPTING, None)
    assert "its rendezvous store on n ended" in job.error
    assert job.ended.workers[STORE_INDEX].key == STORE


def test_a_store_that_its_node_took_home_is_a_preemption() -> None:
    """The node says why it stopped it, as of a worker."""
    node = Node(spec())
    node.report(worker(), store(P.RUNNING))
    node.report(worker(P.RUNNING), store(P.EXITED, exit_code=-15, reason=StopReason.PREEMPT))
    assert (node.job().counts.preemptions, node.job().counts.node_faults) == (1, 0)


def test_a_store_that_its_node_no_longer_holds_is_a_node_fault() -> None:
    """A node that has seen the order and does not report it has lost it."""
    node = Node(spec())
    node.report(worker(), store(P.RUNNING))
    node.report(worker(P.RUNNING))
    assert node.job().counts.node_faults == 1


def test_an_attempt_restarts_when_its_store_was_killed() -> None:
    """What it knew is gone, so nobody could join again: a new attempt with a store of its own."""
    harness = EngineHarness(training=3)
    job = gang(harness)
    harness.sim.nodes[NodeName("t0")].exited(STORE, -9)
    harness.wait(1.0)
    assert (state(job), job.counts.node_faults, job.attempt.number) == (JobState.PENDING, 1, 1)
    harness.start(job, "t1", "t2")
    harness.wait(1.0)
    assert (state(job), job.attempt.number) == (JobState.RUNNING, 2)
    assert job.store is not None
    assert job.store.node == "t1"


def test_a_store_lives_through_the_loss_of_a_flexible_worker() -> None:
    """It is beside worker 0, which is a base worker; a node that goes home takes no store along."""
    harness = EngineHarness(training=3)
    job = gang(harness)
    harness.sim.handle(OperatorAsked(action=OperatorAction.DRAIN, target="t2", by="a/b"))
    harness.wait(60.0)
    assert harness.sim.nodes[NodeName("t2")].keys() == []
    assert (state(job), job.attempt.number) == (JobState.RUNNING, 1)
    assert STORE in harness.sim.nodes[NodeName("t0")].keys(P.READY)


@pytest.mark.parametrize("end", ["success", "cancel"])
def test_a_store_ends_with_its_attempt(end: str) -> None:
    """Nobody is left to meet there; the job does not wait for it, and nothing stays behind."""
    harness = EngineHarness(training=3)
    job = gang(harness)
    if end == "success":
        harness.wait(1000.0)
        assert state(job) == JobState.SUCCEEDED
    else:
        harness.sim.handle(JobCancelRequested(job_id=job.job_id, by="a/b"))
        harness.wait(60.0)
        assert state(job) == JobState.CANCELLED
    harness.wait(60.0)
    assert [node.keys() for node in harness.sim.nodes.values()] == [[]] * len(harness.sim.nodes)
    assert harness.node("t0").ledger.stores == []


def test_a_coordinator_without_a_journal_finds_a_store_again() -> None:
    """It is in the node's ledger as its workers are, so it is neither stopped nor in the way."""
    harness = EngineHarness(training=3)
    gang(harness)
    harness.lose_journal()
    job = harness.engine.state.jobs[JOB]
    assert state(job) == JobState.RUNNING
    assert job.store is not None
    assert (job.store.key, job.store.node) == (STORE, "t0")
    assert harness.node("t0").ledger.unknown_workers == []
    assert harness.sim.nodes[NodeName("t0")].keys(P.READY) == [STORE]
    assert harness.engine.check() == []


def test_a_store_outlives_its_first_worker_and_not_the_last() -> None:
    """Worker 0 may end before the others do, who still meet there."""
    harness = EngineHarness(training=3)
    job = gang(harness)
    harness.sim.nodes[NodeName("t0")].exited(WorkerKey(JOB, 1, 0), 0)
    harness.wait(1.0)
    assert harness.sim.nodes[NodeName("t0")].keys(P.READY) == [STORE]
    harness.sim.nodes[NodeName("t1")].exited(WorkerKey(JOB, 1, 1), 0)
    harness.wait(60.0)
    assert state(job) == JobState.SUCCEEDED
    assert harness.sim.nodes[NodeName("t0")].keys() == []
