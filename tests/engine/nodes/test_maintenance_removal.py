"""Taking a node out of the cell: when it is refused, what is left of it, and how it comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.messages import WorkerPhase
from common.model import JobId, JobState, Launcher, NodeName, NodeRole, Pool, WorkerKey
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.nodes.maintenance import REMOVED, why_not
from coordinator.engine.state.commands import PushDesired
from coordinator.engine.state.events import (
    Event,
    LeaderStarted,
    NodeSilent,
    OperatorAction,
    OperatorAsked,
    RecordsLost,
    WorkerFact,
)
from tests.harness.cluster.engine import EngineHarness
from tests.harness.cluster.engine import state as state_of
from tests.harness.cluster.scripted_nodes import N, Reporting, service
from tests.tables import each_row

A = OperatorAction
STRANGER = WorkerKey(JobId("stranger"), 1, 0)


def ask(cell: Reporting, action: OperatorAction) -> None:
    """An operator's order about the node."""
    cell.handle(OperatorAsked(action=action, by="ops/ada", target=N, reason="sold"))


def lost(pool: Pool = Pool.TRAINING) -> Reporting:
    """A node that nobody hears any more and that holds nothing."""
    cell = Reporting(pool, service())
    cell.handle(NodeSilent(node=N, silent_s=20.0))
    return cell


def running_and_lost() -> Reporting:
    """Its worker may still compute."""
    cell = Reporting(Pool.TRAINING, service())
    cell.run(cell.submit("j"))
    cell.handle(NodeSilent(node=N, silent_s=20.0))
    return cell


def lent_and_lost() -> Reporting:
    """Its loan is open."""
    cell = Reporting(Pool.INFERENCE, service())
    cell.submit("j")
    cell.lend()
    cell.handle(NodeSilent(node=N, silent_s=20.0))
    return cell


def called_home_and_lost() -> Reporting:
    """It has no lease any more, and is not home."""
    cell = Reporting(Pool.INFERENCE, service())
    cell.submit("j")
    cell.lend()
    cell.handle(OperatorAsked(action=A.RECALL, by="ops/ada"))
    cell.handle(NodeSilent(node=N, silent_s=20.0))
    return cell


def unread_and_lost() -> Reporting:
    """It holds work that the journal does not know, and its ledger was never read."""
    cell = Reporting(Pool.TRAINING, service())
    cell.workers = (WorkerFact(key=STRANGER, phase=WorkerPhase.RUNNING, endpoint="h:1"),)
    cell.report()
    cell.handle(NodeSilent(node=N, silent_s=20.0))
    return cell


def awaited_and_lost() -> Reporting:
    """A gang that was rebuilt from the ledgers of others waits for its word."""
    cell = lost()
    cell.submit("j").attempt.awaited_nodes = [N]
    return cell


def doubted_and_lost() -> Reporting:
    """Records were lost, and it fell silent before it said what it runs."""
    cell = Reporting(Pool.TRAINING, service())
    cell.submit("j")
    cell.handle(LeaderStarted(epoch=2, holder="two"))
    cell.handle(RecordsLost(first=9, last=9, from_s=0.0))
    cell.handle(NodeSilent(node=N, silent_s=20.0))
    return cell


def is_there(cell: Reporting) -> bool:
    """Whether the cell knows the node."""
    return N in cell.engine.state.nodes


@pytest.mark.parametrize("pool", list(Pool))
def test_a_lost_node_that_holds_nothing_is_gone_from_everything(pool: Pool) -> None:
    """From the state, from what policies see, and from the GPUs that are counted; told by whom."""
    cell = lost(pool)
    assert [view.name for view in cell.engine.snapshot().nodes] == [N]
    ask(cell, A.REMOVE)
    assert not is_there(cell)
    assert cell.engine.snapshot().nodes == ()
    assert cell.engine.gpu_counts == (0, 0, 0, 0)
    last = cell.engine.state.stories[-1]
    assert (last.subject, last.what, last.reason) == (N, REMOVED, "by ops/ada: sold")


def test_one_that_is_heard_stays() -> None:
    """It would only join again; what to do first is told."""
    cell = Reporting(Pool.TRAINING, service())
    ask(cell, A.REMOVE)
    assert is_there(cell)
    last = cell.engine.state.stories[-1]
    assert last.what == "not removed"
    assert "aryl node drain n" in last.reason
    assert "stop its agent" in last.reason


@each_row(
    ("make", "why"),
    [
        (running_and_lost, "it may still run j"),
        (lent_and_lost, "its loan l1-1 is open"),
        (called_home_and_lost, "its loan l1-1 is open"),
        (unread_and_lost, "only its ledger knows what it runs of stranger"),
        (doubted_and_lost, "journal records were lost, and it has not shown since what it runs"),
        (awaited_and_lost, "only its ledger knows what it runs of j"),
    ],
)
def test_what_is_open_of_it_must_be_ended_first(make: Callable[[], Reporting], why: str) -> None:
    """The order changes nothing and names what hangs on the node; a word for its death ends that,
    and then it goes."""
    cell = make()
    before = cell.engine.state.nodes[N]
    ask(cell, A.REMOVE)
    assert cell.engine.state.nodes[N] is before
    last = cell.engine.state.stories[-1]
    assert last.reason == f"node n: {why}; if it is certainly off: aryl node confirm-dead n"
    ask(cell, A.CONFIRM_DEAD)
    ask(cell, A.REMOVE)
    assert not is_there(cell)


def test_a_rendezvous_store_is_something_that_it_runs() -> None:
    """It has no GPU that would name it, and its whole gang speaks through it."""
    harness = EngineHarness(training=2, inference=0)
    job = harness.submit("j", workers=(2, 3), launcher=Launcher.TORCHRUN)
    harness.start(job, "t0", "t1")
    harness.wait(5.0)
    assert job.store is not None
    node = harness.node(job.store.node)
    for slot in node.gpus:
        slot.holder = None
    job.workers.clear()
    node.role = NodeRole.LOST
    assert "it may still run j" in why_not(harness.engine.state, node)


def test_gpus_that_are_held_for_a_job_to_come_are_something_that_it_holds() -> None:
    """A job that migrates has its workers elsewhere, and is to go on here."""
    cell = lost()
    cell.node.gpus[0].holder = STRANGER
    assert "it may still run stranger" in why_not(cell.engine.state, cell.node)


def test_many_jobs_are_counted() -> None:
    """The refusal stays a line."""
    cell = Reporting(Pool.TRAINING, service())
    keys = [WorkerKey(JobId(f"s{number}"), 1, 0) for number in range(6)]
    cell.workers = tuple(
        WorkerFact(key=key, phase=WorkerPhase.RUNNING, endpoint="h:1") for key in keys
    )
    cell.report()
    cell.handle(NodeSilent(node=N, silent_s=20.0))
    assert "s0, s1, s2, s3 and 2 more;" in why_not(cell.engine.state, cell.node)


def test_nothing_that_was_ordered_of_it_is_left() -> None:
    """Neither a drain with a deadline nor a time for which it was to be left alone: both would
    come due for a node that is not there."""
    cell = lost()
    ordered = OperatorAsked(action=A.DRAIN, by="ops/ada", target=N, deadline_s=50.0)
    cell.handle(ordered)
    cell.node.failed_starts.closed_reason = "it refused 3 starts"
    cell.engine.state.closed_until_s[N] = cell.now_s + 50.0
    ask(cell, A.REMOVE)
    state = cell.engine.state
    assert not (state.drains or state.closed_until_s)
    cell.now_s += 100.0
    assert cell.passes().wake_at_s is None


def test_one_that_reports_again_joins_anew_and_is_ordered_what_it_obeys() -> None:
    """It was the network: it holds a generation of this epoch, and obeys nothing that is older;
    what was known of it is not taken up again."""
    cell = Reporting(Pool.TRAINING, service())
    for action in (A.CORDON, A.UNCORDON, A.CORDON):
        ask(cell, action)
    known = cell.node.desired.generation
    cell.handle(NodeSilent(node=N, silent_s=20.0))
    ask(cell, A.REMOVE)
    outcome = cell.report(is_current=False)
    assert PushDesired(N) in outcome.commands
    assert cell.engine.desired(N).generation > known
    assert not cell.node.cordon.is_cordoned
    assert cell.told().count("node joined") == 2
    job = cell.submit("j")
    cell.run(job)
    assert state_of(job) == JobState.RUNNING


def test_the_others_go_on_as_they_were() -> None:
    """One between two others goes: who runs on these runs on, and the next job finds its place."""
    harness = EngineHarness(training=3, inference=1)
    first = harness.submit("first", workers=(1, 2))
    harness.start(first, "t0", flexible=("t2",))
    harness.wait(5.0)
    harness.sim.nodes[NodeName("t1")].crash()
    harness.sim.handle(NodeSilent(node=NodeName("t1"), silent_s=20.0))
    harness.sim.handle(OperatorAsked(action=A.REMOVE, by="ops/ada", target="t1"))
    assert harness.engine.check() == []
    assert [view.name for view in harness.engine.snapshot().nodes] == ["i0", "t0", "t2"]
    assert first.running_workers == 2
    second = harness.submit("second")
    harness.start(second, "t2")
    assert state_of(second) == JobState.PENDING, "t2 is full"
    harness.sim.nodes[NodeName("t1")].boot()
    harness.wait(5.0)
    harness.start(second, "t1")
    harness.wait(5.0)
    assert state_of(second) == JobState.RUNNING
    assert harness.engine.check() == []


def test_it_replays_to_the_same_state() -> None:
    """The order is an event: whoever rebuilds from a snapshot of before forgets the same node."""
    cell = running_and_lost()
    again = Engine(cell.engine.settings, decode_state(cell.engine.encode_state()))
    tail: list[Event] = [
        OperatorAsked(action=action, by="ops/ada", target=N)
        for action in (A.REMOVE, A.CONFIRM_DEAD, A.REMOVE)
    ]
    for event in tail:
        cell.handle(event)
    now_s = cell.now_s - len(tail)
    for event in tail:
        now_s += 1.0
        again.handle(event, now_s=now_s)
    assert not is_there(cell)
    assert again.encode_state() == cell.engine.encode_state()
    assert again.check() == []
