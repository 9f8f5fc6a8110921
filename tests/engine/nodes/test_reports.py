"""What the engine makes of a node's report: its role, its workers, its ledger, its services."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from msgspec.structs import replace

from common.history import TOLD
from common.messages import GpuHealth, WorkerPhase
from common.model import JobId, JobState, NodeName, NodeRole, Pool, ServiceName, WorkerKey
from coordinator.engine.engine import Engine
from coordinator.engine.state.commands import Outcome
from coordinator.engine.state.events import (
    GpuFact,
    LeaderStarted,
    LoadMeasured,
    LoanPassDue,
    NodeReported,
    NodeSilent,
    WorkerFact,
)
from coordinator.engine.state.settings import EngineSettings
from coordinator.policies.contract.decisions import Loan
from tests.harness.cluster.engine import CHAT, EngineHarness, start, state
from tests.harness.cluster.scripted_nodes import CODE, Reporting, service
from tests.tables import each_row

R = NodeRole
HOME_LIFE = (R.SERVING, R.DRAINING, R.ON_LOAN, R.VACATING, R.WARMING, R.SERVING)


class Lone:
    """An engine that hears one inference node."""

    def __init__(self) -> None:
        self.engine = Engine(EngineSettings(policy="fifo"))
        self.engine.handle(LeaderStarted(epoch=1, holder="test"), now_s=0.0)
        self.now_s = 0.0

    def report(
        self,
        role: NodeRole,
        *,
        boot: str = "b1",
        pool: Pool = Pool.INFERENCE,
        health: GpuHealth = GpuHealth.OK,
    ) -> list[str]:
        """The node says its role and how its GPU is; what is told of it."""
        self.now_s += 1.0
        told = len(self.engine.state.stories)
        event = NodeReported(
            node=NodeName("n"),
            boot_id=boot,
            home_pool=pool,
            role=role,
            epoch=1,
            generation=0,
            gpus=(GpuFact("GPU-1", "H100", health),),  # type: ignore[arg-type]  # a plain name will do
            service=CHAT,
        )
        self.engine.handle(event, now_s=self.now_s)
        assert self.engine.state.nodes[NodeName("n")].role == role
        return [line.what for line in self.engine.state.stories[told:] if line.kind in TOLD]


def test_a_node_that_goes_step_by_step_is_told_step_by_step() -> None:
    """Every single step of the table is taken as it is."""
    lone = Lone()
    lone.report(HOME_LIFE[0])
    for old, new in pairwise(HOME_LIFE):
        assert lone.report(new) == [f"{old} -> {new}"]


def test_a_gpu_that_falls_ill_is_seen_each_time() -> None:
    """A node says the same of its GPUs again and again, until it does not."""
    lone = Lone()
    seen: list[int] = []
    for health in (GpuHealth.OK, GpuHealth.OK, GpuHealth.FAULTY, GpuHealth.FAULTY, GpuHealth.OK):
        lone.report(R.SERVING, health=health)
        seen.append(lone.engine.snapshot().nodes[0].free_gpus)
    assert seen == [1, 1, 0, 0, 1]


def test_gpus_that_change_all_together_are_told_in_one_line() -> None:
    """A driver that answers for none of them for a while is one thing that happened. Of some of
    them, or where each becomes another thing, it is one line each."""
    cell = Reporting(Pool.TRAINING)
    cell.gpus = ("GPU-0", "GPU-1", "GPU-2")
    cell.report()

    def told(**health: GpuHealth) -> list[tuple[str, str]]:
        known = len(cell.engine.state.stories)
        cell.health = dict(zip(cell.gpus, health.values(), strict=True))
        cell.report()
        return [(line.what, line.reason) for line in cell.engine.state.stories[known:]]

    ok, gone, lost = GpuHealth.OK, GpuHealth.UNRESPONSIVE, GpuHealth.LOST
    assert told(a=gone, b=gone, c=gone) == [("all 3 GPUs are unresponsive", "were ok")]
    assert cell.engine.snapshot().nodes[0].free_gpus == 0
    assert told(a=gone, b=gone, c=gone) == []
    assert told(a=ok, b=ok, c=ok) == [("all 3 GPUs are ok", "were unresponsive")]
    assert told(a=ok, b=lost, c=ok) == [("GPU GPU-1 is lost", "was ok")]
    each = [("GPU GPU-0 is lost", "was ok"), ("GPU GPU-1 is ok", "was lost")]
    assert told(a=lost, b=ok, c=ok) == each
    assert told(a=ok, b=gone, c=gone)[0] == ("GPU GPU-0 is ok", "was lost")
    alike = [("GPU GPU-1 is ok", "was unresponsive"), ("GPU GPU-2 is ok", "was unresponsive")]
    assert told(a=ok, b=ok, c=ok) == alike


def test_of_one_gpu_there_is_no_all() -> None:
    """It has a name, which whoever looks for it needs."""
    lone = Lone()
    lone.report(R.SERVING)
    assert lone.report(R.SERVING, health=GpuHealth.LOST) == ["GPU GPU-1 is lost"]


@each_row(
    ("old", "new", "told"),
    [
        (R.SERVING, R.ON_LOAN, "serving -> on_loan without draining"),
        (R.ON_LOAN, R.SERVING, "on_loan -> serving without vacating, warming"),
        (R.SERVING, R.WARMING, "serving -> warming without draining, vacating"),
        (R.SERVING, R.TRAINING, "serving -> training without"),
        (R.TRAINING, R.SERVING, "training -> serving without a known transition"),
    ],
)
def test_a_jump_is_taken_as_heard_and_told_as_a_jump(
    old: NodeRole, new: NodeRole, told: str
) -> None:
    """A node is where it says it is, but nobody can miss that the table does not lead there."""
    lone = Lone()
    lone.report(old)
    [what] = lone.report(new)
    assert what.startswith(told)


def test_a_fault_is_one_step_from_anywhere() -> None:
    """Quarantine needs no story of its own."""
    for role in HOME_LIFE:
        lone = Lone()
        lone.report(role)
        assert lone.report(R.QUARANTINED) == [f"{role} -> quarantined"]


def test_a_reboot_begins_with_warming() -> None:
    """A new boot id explains every way to WARMING, and what follows is judged from there."""
    lone = Lone()
    lone.report(R.ON_LOAN)
    assert lone.report(R.SERVING, boot="b2") == [
        "rebooted: on_loan -> warming",
        "warming -> serving",
    ]
    assert lone.report(R.ON_LOAN, boot="b3") == [
        "rebooted: serving -> warming",
        "warming -> on_loan without serving, draining",
    ]


def test_a_training_node_reboots_into_training() -> None:
    """There is no server to warm up."""
    lone = Lone()
    lone.report(R.QUARANTINED, pool=Pool.TRAINING)
    assert lone.report(R.TRAINING, boot="b2", pool=Pool.TRAINING) == [
        "rebooted: quarantined -> training"
    ]


def test_a_node_that_was_lost_may_come_back_anywhere() -> None:
    """Silence explains what was not seen: no jump is told."""
    lone = Lone()
    lone.report(R.SERVING)
    lone.engine.handle(NodeSilent(node=NodeName("n"), silent_s=20.0), now_s=50.0)
    lone.now_s = 50.0
    assert lone.report(R.ON_LOAN) == ["heard again -> on_loan"]


def claim(harness: EngineHarness, name: str, *facts: WorkerFact) -> None:
    """A node's report with workers that it was not given."""
    entry = harness.node(name)
    event = NodeReported(
        node=entry.name,
        boot_id=entry.boot_id,
        home_pool=entry.home_pool,
        role=entry.role,
        epoch=entry.contact.epoch,
        generation=entry.contact.generation,
        gpus=tuple(GpuFact(slot.uuid, slot.gpu_type) for slot in entry.gpus),
        workers=facts,
    )
    harness.engine.handle(event, now_s=harness.sim.loop.now_s)
    assert harness.engine.check() == []


@each_row("phase", list(WorkerPhase))
def test_a_node_has_no_say_in_the_worker_of_another(phase: WorkerPhase) -> None:
    """Whatever it says of it, the job and the true holder stay as they are; it is told to stop."""
    harness = EngineHarness()
    job = harness.submit("j")
    harness.start(job, "t0")
    harness.wait(5.0)
    key = WorkerKey(JobId("j"), 1, 0)
    before = msgspec.msgpack.encode(job)
    claim(harness, "t1", WorkerFact(key=key, phase=phase, exit_code=1, error="own fault"))
    assert msgspec.msgpack.encode(job) == before
    other = harness.node("t1")
    is_over = phase in (WorkerPhase.EXITED, WorkerPhase.REFUSED)
    assert other.ledger.acknowledged == ([key] if is_over else [])
    assert other.ledger.stale_stops == ([] if is_over else [key])
    told = [line for line in harness.engine.state.stories if line.what == f"stale worker {key}"]
    assert [(line.subject, line.reason) for line in told] == (
        [] if is_over else [("t1", "it was given to t0")]
    )


@pytest.mark.parametrize(
    ("epoch", "generation", "is_lost"), [(0, 0, True), (-1, 99, False), (0, -9, False)]
)
def test_only_a_node_that_knows_the_order_proves_that_it_lost_the_worker(
    epoch: int, generation: int, is_lost: bool
) -> None:
    """Generations are counted by each leader: one of an earlier epoch, however high, is another
    leader's, whose last orders this one may never have read."""
    harness = EngineHarness()
    harness.lose_journal()
    job = harness.submit("j")
    harness.start(job, "t0")
    assert state(job) == JobState.RUNNING
    entry = harness.node("t0")
    event = NodeReported(
        node=entry.name,
        boot_id=entry.boot_id,
        home_pool=entry.home_pool,
        role=entry.role,
        epoch=entry.contact.epoch + epoch,
        generation=entry.contact.generation + generation,
        gpus=tuple(GpuFact(slot.uuid, slot.gpu_type) for slot in entry.gpus),
    )
    harness.engine.handle(event, now_s=harness.sim.loop.now_s)
    assert harness.engine.check() == []
    assert (job.counts.node_faults, state(job) == JobState.RUNNING) == (int(is_lost), not is_lost)


FULL = "ledger /state/ledger: No space left on device"


def report(harness: EngineHarness, name: str, ledger_error: str) -> Outcome:
    """What a node says that stays as it was ordered, and whose disk is so."""
    node = harness.node(name)
    event = NodeReported(
        node=node.name,
        boot_id=node.boot_id,
        home_pool=node.home_pool,
        role=node.role,
        epoch=harness.engine.state.epoch,
        generation=node.desired.generation,
        gpus=tuple(GpuFact(slot.uuid, slot.gpu_type) for slot in node.gpus),
        service=node.service,
        detail=ledger_error,
        ledger_error=ledger_error,
    )
    return harness.engine.handle(event, now_s=harness.engine.state.now_s)


def told(harness: EngineHarness) -> list[tuple[str, str]]:
    """What is told of disks, and why."""
    lines = [(line.what, line.reason) for line in harness.engine.state.stories]
    return [(what, why) for what, why in lines if what.startswith("takes ")]


def test_it_is_told_once_when_a_disk_fills_up_and_once_when_it_has_room() -> None:
    """However often the node says it; both times somebody may want to act on it."""
    harness = EngineHarness()
    first, again = report(harness, "t0", FULL), report(harness, "t0", FULL)
    assert (first.needs_pass, first.needs_loan_pass) == (True, True)
    assert (again.needs_pass, again.needs_loan_pass) == (False, False)
    assert report(harness, "t0", "").needs_pass
    assert told(harness) == [("takes nothing new", FULL), ("takes new work again", "")]


def test_no_worker_is_placed_on_it() -> None:
    """Policies see that it takes none, and what one decides all the same is refused."""
    harness = EngineHarness()
    job = harness.submit()
    report(harness, "t0", FULL)
    [seen] = [node for node in harness.engine.snapshot().nodes if node.name == "t0"]
    assert not seen.is_schedulable
    (why,) = harness.refusals(start(job, "t0"))
    assert "t0" in why
    assert state(job) == JobState.PENDING
    report(harness, "t0", "")
    harness.start(job, "t0")
    harness.wait(1.0)
    assert state(job) == JobState.RUNNING


def test_it_is_not_lent_and_serves_on() -> None:
    """Its service counts on it as before; what a policy decides all the same is refused."""
    harness = EngineHarness()
    since_s = harness.node("i0").serving_since_s
    report(harness, "i0", FULL)
    loan = Loan(node=NodeName("i0"), service=CHAT, reason="idle")
    harness.decide(loan, lend=True)
    assert harness.node("i0").lease is None
    assert harness.engine.state.loans == {}
    assert harness.node("i0").role == NodeRole.SERVING
    assert harness.node("i0").serving_since_s == since_s
    report(harness, "i0", "")
    harness.decide(loan, lend=True)
    harness.wait(1.0)
    assert harness.node("i0").role == NodeRole.ON_LOAN


def test_what_runs_there_and_what_is_lent_stays() -> None:
    """A full disk ends neither a worker nor a loan."""
    harness = EngineHarness()
    harness.decide(Loan(node=NodeName("i0"), service=CHAT, reason="idle"), lend=True)
    harness.wait(1.0)
    job = harness.submit(work_s=1000.0)
    harness.start(job, "t0")
    harness.wait(1.0)
    for name in ("i0", "t0"):
        harness.node(name).ledger.error = FULL
    harness.engine.handle(LoanPassDue(), now_s=harness.engine.state.now_s)
    harness.wait(10.0)
    assert state(job) == JobState.RUNNING
    assert harness.node("i0").role == NodeRole.ON_LOAN


@pytest.mark.parametrize("is_present", [True, False])
def test_workers_of_a_node_are_those_of_present_attempts(*, is_present: bool) -> None:
    """A key that an earlier attempt left on a GPU is of nobody, though a worker of the same number
    runs elsewhere."""
    harness = EngineHarness()
    job = harness.submit()
    harness.start(job, "t1")
    harness.wait(5.0)
    [worker] = job.workers.values()
    assert harness.workers_on(worker.node) == [(job, worker)]
    left = replace(worker.key, attempt=job.attempt.number - (0 if is_present else 1))
    harness.node("t0").gpus[0].holder = left
    assert harness.workers_on(harness.node("t0").name) == ([(job, worker)] if is_present else [])


@pytest.mark.parametrize(("asked", "is_short"), [(CHAT, True), (CODE, False)])
def test_a_service_that_lends_nothing_can_take_nothing_back(
    asked: ServiceName, *, is_short: bool
) -> None:
    """More load than its nodes carry asks for a loan pass where one of them is lent, and not where
    another service's is."""
    cell = Reporting(Pool.INFERENCE, service(), service(CODE))
    cell.submit("j")
    cell.lend()
    outcome = cell.handle(LoadMeasured(service=asked, load=1000.0))
    assert outcome.needs_loan_pass is is_short
