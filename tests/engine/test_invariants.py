"""Invariants of the engine: a state that breaks one is named."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from common.messages import OrderPhase
from common.model import NodeName, WorkerRange
from coordinator.engine.engine import Engine
from coordinator.engine.invariants import figure_faults, size_faults
from coordinator.engine.nodes.start_failures import MOST
from coordinator.engine.state.events import OperatorAction, OperatorAsked
from coordinator.engine.state.tables import ClusterState
from coordinator.policies.contract.decisions import Loan, Placement, Reclaim, Resize
from tests.harness.cluster.engine import CHAT, EngineHarness
from tests.harness.cluster.scripted_nodes import BlackHole
from tests.tables import each_row

T0, GONE = NodeName("t0"), NodeName("gone")


def closed_and_drained() -> Engine:
    """t0 refused too many starts, and is drained by a deadline that is to come."""
    cell = BlackHole(nodes=1)
    for number in range(MOST):
        cell.submit(f"j{number}")
        cell.passes()
    cell.handle(OperatorAsked(action=OperatorAction.DRAIN, by="ops/ada", target=T0, deadline_s=1e6))
    state = cell.engine.state
    assert state.nodes[T0].failed_starts.closed_reason
    assert set(state.closed_until_s) == set(state.drains) == {T0}
    return cell.engine


def _for_ever(state: ClusterState) -> None:
    del state.closed_until_s[T0]


def _without_reason(state: ClusterState) -> None:
    state.nodes[T0].failed_starts.closed_reason = ""


def _closed_stranger(state: ClusterState) -> None:
    state.closed_until_s[GONE] = 1e6


def _drained_stranger(state: ClusterState) -> None:
    state.drains[GONE] = state.drains[T0]


def _deadline_alone(state: ClusterState) -> None:
    state.nodes[T0].cordon.is_draining = False


@each_row(
    ("spoil", "told"),
    [
        (_for_ever, "t0 is closed for ever"),
        (_without_reason, "t0 opens again, and is not closed"),
        (_closed_stranger, "gone is closed or drained, and no node of the cell"),
        (_drained_stranger, "gone is closed or drained, and no node of the cell"),
        (_deadline_alone, "t0 has the deadline of a drain, and is not drained"),
    ],
)
def test_a_state_that_would_leave_a_node_alone_by_mistake_is_told(
    spoil: Callable[[ClusterState], None], told: str
) -> None:
    """Each half without the other, and what is left of a node that was removed."""
    engine = closed_and_drained()
    assert engine.check(are_copies_too=False) == []
    spoil(engine.state)
    [fault] = engine.check(are_copies_too=False)
    assert fault.startswith(told)


def more(count: int) -> tuple[Placement, ...]:
    """Flexible workers on a node of their own."""
    return (Placement(node=NodeName("t1"), worker_count=count, is_flexible=True),)


def test_a_growth_beyond_what_a_job_can_use_is_refused() -> None:
    """A decision of a stale picture changes nothing; up to the limit, counted with those that it
    releases, a job grows."""
    harness = EngineHarness()
    job = harness.submit(workers=(1, 3), gpus_per_worker=2)
    harness.start(job, "t0")
    harness.wait(10.0)
    too_many = Resize(job_id=job.job_id, added=more(3), reason="room")
    assert harness.refusals(too_many) == ["4 workers are more than it can use"]
    assert len(job.workers) == 1
    harness.decide(Resize(job_id=job.job_id, added=more(2), reason="room"))
    harness.wait(10.0)
    assert job.running_workers == 3
    [flexible, *_] = [index for index, worker in job.workers.items() if worker.is_flexible]
    swap = Resize(job_id=job.job_id, removed_workers=(flexible,), added=more(2), reason="room")
    assert harness.refusals(swap) == ["4 workers are more than it can use"]
    assert harness.engine.check() == []


def test_more_workers_than_a_job_can_use_are_a_fault() -> None:
    """The engine's own check tells of those that count, not of one that was told to stop."""
    harness = EngineHarness()
    job = harness.submit(workers=(1, 2), gpus_per_worker=2)
    harness.start(job, "t0", flexible=("t1",))
    harness.wait(10.0)
    assert job.running_workers == 2
    job.spec = replace(job.spec, workers=WorkerRange(min=1, max=1))
    assert size_faults(harness.engine.state) == ["job j has 2 workers, at most 1"]
    job.workers[1].order = OrderPhase.RESERVE
    assert size_faults(harness.engine.state) == []


def test_what_is_adopted_is_counted_before_its_end_is() -> None:
    """Of no more jobs than were submitted can be said that they finished, and no more nodes come
    home than were lent."""
    harness = EngineHarness()
    harness.decide(Loan(node=NodeName("i0"), service=CHAT, reason="r"), lend=True)
    harness.start(harness.submit(workers=(1, 1), work_s=60.0), "t0")
    harness.wait(10.0)
    harness.lose_journal()
    harness.wait(5.0)
    counters = harness.engine.state.counters
    assert (counters.jobs_submitted, counters.loans) == (1, 1)
    home = Reclaim(node=NodeName("i0"), service=CHAT, deadline_s=100.0, reason="r")
    harness.decide(home, lend=True)
    harness.wait(120.0)
    counters = harness.engine.state.counters
    assert (counters.jobs_submitted, counters.jobs_finished) == (1, 1)
    assert (counters.loans, counters.reclaims) == (1, 1)


def test_a_job_of_two_ledgers_is_one_job() -> None:
    """Each worker's node tells of it, and it was submitted once."""
    harness = EngineHarness()
    harness.start(harness.submit(workers=(2, 2), work_s=60.0), "t0", "t1")
    harness.wait(10.0)
    harness.lose_journal()
    harness.wait(5.0)
    assert harness.engine.state.counters.jobs_submitted == 1


def test_ends_of_what_never_began_are_a_fault() -> None:
    """The engine's own check tells of a counter that was left out."""
    harness = EngineHarness()
    harness.submit()
    state = harness.engine.state
    assert figure_faults(state) == []
    state.counters.jobs_submitted = 0
    assert "0 submitted" in figure_faults(state)[0]
    state.counters.jobs_submitted, state.counters.reclaims = 1, 1
    assert "of 0" in figure_faults(state)[0]
    assert harness.engine.check() == figure_faults(state)
