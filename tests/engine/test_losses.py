"""What a preemption really cost: settled when the last worker is gone, told the same everywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from msgspec.structs import replace

from common.messages import WorkerPhase
from common.model import Checkpoint, JobState, NodeName, NodeRole, Progress
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.events import (
    JobCancelRequested,
    LeaderStarted,
    NodeReported,
    NodeSilent,
    OperatorAction,
    OperatorAsked,
    ProgressReported,
    WorkerFact,
)
from coordinator.engine.state import JobEntry, LoanEntry
from coordinator.policies.decisions import Loan, Placement, Preempt, Reclaim, Resize
from coordinator.sim.cluster import Delays
from tests.engine.house import CHAT, House, state
from tests.engine.test_safety import DELAYS, Op, often, perform, steps

STOP_S = 3.0
SLOW = Delays(drain_s=5.0, stop_s=STOP_S, device_free_s=1.0, warm_up_s=10.0)
RAN_S = 10.0
WHOLE = RAN_S * 8
"""GPU-seconds of one node's worker from its start to the order."""


def lend(house: House, *nodes: str) -> None:
    """Lend nodes and wait until the loans have begun."""
    loans = [Loan(node=NodeName(node), service=CHAT, reason="idle") for node in nodes]
    house.decide(*loans, lend=True)
    house.wait(6.0)


def running(house: House, *nodes: str, path: str | None = None) -> JobEntry:
    """A gang that has run for `RAN_S` on whole nodes."""
    job = house.submit(workers=(len(nodes), len(nodes)), work_s=1e6, path=path)
    house.start(job, *nodes)
    house.wait(RAN_S)
    return job


def stop(house: House, job: JobEntry, node: str | None = None) -> None:
    """Order a preemption; with a lent node, for its sake."""
    name = None if node is None else NodeName(node)
    house.decide(Preempt(job_id=job.job_id, node=name, reason="test"), lend=node is not None)


def call_home(house: House, *nodes: str) -> None:
    """Order reclaims."""
    reclaims = [
        Reclaim(node=NodeName(node), service=CHAT, deadline_s=60.0, reason="load rose")
        for node in nodes
    ]
    house.decide(*reclaims, lend=True)


def says(
    house: House, job: JobEntry, step: int, *, attempt: int = 1, is_verified: bool = True
) -> None:
    """The job says that it saved a step."""
    house.sim.handle(
        ProgressReported(
            job_id=job.job_id,
            attempt=attempt,
            progress=Progress(step=step),
            checkpoint=Checkpoint(step=step, path="/c", is_verified=is_verified),
        )
    )


def loan_of(house: House, node: str) -> LoanEntry:
    """The latest loan of a node."""
    return [loan for loan in house.engine.state.loans.values() if loan.node == node][-1]


def lost(house: House, job: JobEntry) -> float:
    """What the job lost, where the cell says the same."""
    assert house.engine.state.counters.preemption_cost_gpu_s == pytest.approx(job.lost_gpu_s)
    return job.lost_gpu_s


def test_a_job_that_saves_within_its_grace_loses_nothing() -> None:
    """The order puts all of its work at stake; the save in answer to it takes all of it back."""
    house = House(delays=SLOW)
    lend(house, "i0")
    job = running(house, "i0", path="/c")
    call_home(house, "i0")
    assert state(job) == JobState.PREEMPTING
    house.wait(STOP_S)
    assert (state(job), job.preemption_count, lost(house, job)) == (JobState.PENDING, 1, 0.0)
    loan = loan_of(house, "i0")
    assert (loan.realised_preemptions, loan.realised_cost_gpu_s) == (1, 0.0)


def test_a_job_that_does_not_save_loses_all_since_it_ran() -> None:
    """Booked when its last worker is gone and not before; its grace computed nothing."""
    house = House(delays=SLOW)
    job = running(house, "t0", "t1")
    stop(house, job)
    assert lost(house, job) == 0.0
    house.wait(STOP_S)
    assert (state(job), lost(house, job)) == (JobState.PENDING, 2 * WHOLE)


def test_an_unverified_save_saves_nothing() -> None:
    """A claim that no shim has seen is no checkpoint."""
    house = House(delays=SLOW)
    job = running(house, "t0")
    stop(house, job)
    says(house, job, 5, is_verified=False)
    house.wait(STOP_S)
    assert lost(house, job) == WHOLE


def test_what_was_saved_before_the_order_is_not_lost() -> None:
    """Only the work since the last verified checkpoint is."""
    house = House(delays=SLOW)
    job = running(house, "t0")
    says(house, job, 5)
    house.wait(4.0)
    stop(house, job)
    house.wait(STOP_S)
    assert lost(house, job) == 4.0 * 8


def test_what_the_last_worker_says_with_its_end_counts() -> None:
    """The save may be heard with the very report that the worker is gone."""
    house = House(delays=SLOW)
    job = running(house, "t0")
    stop(house, job)
    node = house.node("t0")
    gone = WorkerFact(
        key=job.workers[0].key,
        phase=WorkerPhase.EXITED,
        exit_code=0,
        checkpoint=Checkpoint(step=9, path="/c", is_verified=True),
    )
    house.sim.handle(
        NodeReported(
            node=node.name,
            boot_id=node.boot_id,
            home_pool=node.home_pool,
            role=node.role,
            epoch=node.reported_epoch,
            generation=node.generation,
            gpus=(),
            workers=(gone,),
        )
    )
    assert (state(job), lost(house, job)) == (JobState.PENDING, 0.0)


def test_what_is_computed_after_the_order_is_lost_too() -> None:
    """The order reached no node of the gang for a while, and it went on, all of it."""
    house = House(delays=SLOW)
    job = running(house, "t0", "t1")
    for name in ("t0", "t1"):
        house.toggle_deaf(NodeName(name))
    stop(house, job)
    house.wait(5.0)
    for name in ("t0", "t1"):
        house.toggle_deaf(NodeName(name))
    house.wait(STOP_S)
    assert (state(job), lost(house, job)) == (JobState.PENDING, 2 * (WHOLE + 5.0 * 8))
    assert house.sim.runtime.lost_gpu_s == lost(house, job)


def test_a_gang_computes_until_its_first_base_worker_stops() -> None:
    """One of two nodes hears the order: from then on the other one only waits for it."""
    house = House(delays=SLOW)
    job = running(house, "t0", "t1")
    house.toggle_deaf(NodeName("t0"))
    stop(house, job)
    house.wait(50.0)
    house.toggle_deaf(NodeName("t0"))
    house.wait(STOP_S)
    assert (state(job), lost(house, job)) == (JobState.PENDING, 2 * WHOLE)


def test_a_save_after_the_order_is_the_answer_to_it() -> None:
    """Nothing from before it is lost, and a job that has saved is on its way out."""
    house = House(delays=replace(SLOW, report_s=1.0))
    job = running(house, "t0", "t1")
    stop(house, job)
    house.wait(0.5)
    says(house, job, 7)
    house.wait(STOP_S + 2.0)
    assert (state(job), lost(house, job)) == (JobState.PENDING, 0.0)


def test_a_job_that_says_again_what_it_has_saved_loses_nothing() -> None:
    """It did no step since its checkpoint, so that there was nothing new to save."""
    house = House(delays=SLOW)
    job = running(house, "t0")
    says(house, job, 5)
    house.wait(4.0)
    stop(house, job)
    says(house, job, 5)
    house.wait(STOP_S)
    assert lost(house, job) == 0.0


def test_a_loan_that_came_home_before_the_job_was_gone_bears_the_cost() -> None:
    """The gang's other node holds its job up long after the lent one serves again."""
    house = House(delays=SLOW)
    lend(house, "i0")
    job = running(house, "i0", "t0")
    house.toggle_deaf(NodeName("t0"))
    call_home(house, "i0")
    house.wait(40.0)
    loan = loan_of(house, "i0")
    assert loan.returned_at_s is not None
    assert (state(job), loan.realised_cost_gpu_s) == (JobState.PREEMPTING, 0.0)
    house.toggle_deaf(NodeName("t0"))
    house.wait(STOP_S)
    assert (state(job), loan.realised_cost_gpu_s) == (JobState.PENDING, 2 * WHOLE)
    assert lost(house, job) == 2 * WHOLE


def test_the_prediction_stays_what_it_was() -> None:
    """A loan shows both: what its reclaim was thought to cost, and what it did."""
    house = House(delays=SLOW)
    lend(house, "i0")
    running(house, "i0", path="/c")
    predicted = Reclaim(
        node=NodeName("i0"),
        service=CHAT,
        deadline_s=60.0,
        reason="load rose",
        predicted_preemptions=1,
        predicted_cost_gpu_s=123.0,
    )
    house.decide(predicted, lend=True)
    house.wait(20.0)
    loan = loan_of(house, "i0")
    assert (loan.predicted_cost_gpu_s, loan.realised_cost_gpu_s) == (123.0, 0.0)


def test_a_job_that_is_cancelled_in_its_grace_has_lost_its_work() -> None:
    """The preemption was ordered first; that the job then ends for good makes it no cheaper."""
    house = House(delays=SLOW)
    job = running(house, "t0")
    stop(house, job)
    house.sim.handle(JobCancelRequested(job_id=job.job_id, by="t/u"))
    house.wait(STOP_S)
    assert (state(job), lost(house, job)) == (JobState.CANCELLED, WHOLE)


def given_up(house: House) -> JobEntry:
    """A preempted job on the lent i0, which died before it said what became of its worker."""
    lend(house, "i0")
    job = running(house, "i0")
    house.sim.nodes[NodeName("i0")].crash()
    stop(house, job, "i0")
    house.sim.handle(NodeSilent(node=NodeName("i0"), silent_s=20.0))
    dead = OperatorAsked(action=OperatorAction.CONFIRM_DEAD, by="ops/me", target="i0")
    house.sim.handle(dead)
    assert (state(job), lost(house, job)) == (JobState.PENDING, WHOLE)
    return job


def test_a_save_that_is_heard_late_takes_the_booking_back() -> None:
    """The job waits, and its next attempt will begin from there: job, loan and cell agree."""
    house = House(delays=SLOW)
    job = given_up(house)
    says(house, job, 9)
    assert (lost(house, job), loan_of(house, "i0").realised_cost_gpu_s) == (0.0, 0.0)
    says(house, job, 10)
    assert lost(house, job) == 0.0


def test_a_late_end_with_a_save_takes_the_booking_back() -> None:
    """The node was taken for dead, comes back and says how its worker ended."""
    house = House(delays=SLOW)
    job = given_up(house)
    node = house.node("i0")
    gone = WorkerFact(
        key=next(iter(job.ended_workers.values())).key,
        phase=WorkerPhase.EXITED,
        exit_code=0,
        checkpoint=Checkpoint(step=9, path="/c", is_verified=True),
    )
    house.sim.handle(
        NodeReported(
            node=node.name,
            boot_id=node.boot_id,
            home_pool=node.home_pool,
            role=NodeRole.WARMING,
            epoch=node.reported_epoch,
            generation=node.generation,
            gpus=(),
            service=CHAT,
            workers=(gone,),
        )
    )
    assert lost(house, job) == 0.0
    assert job.checkpoint is not None


def test_the_books_are_closed_when_the_next_attempt_is_placed() -> None:
    """It began without what the last one may have saved, and says nothing of it."""
    house = House(delays=SLOW)
    job = given_up(house)
    house.start(job, "t0")
    says(house, job, 9, attempt=1)
    says(house, job, 3, attempt=2)
    assert lost(house, job) == WHOLE


def test_work_at_stake_outlives_a_restart_of_the_coordinator() -> None:
    """It is in the state: a snapshot between the order and the end goes on as the original."""
    house = House(delays=SLOW)
    job = running(house, "t0")
    stop(house, job)
    copy = Engine(house.engine.settings, decode_state(house.engine.encode_state()))
    copy.policy = house.engine.policy
    house.sim.adopt_engine(copy)
    house.wait(STOP_S)
    assert copy.state.jobs[job.job_id].lost_gpu_s == WHOLE
    assert copy.state.counters.preemption_cost_gpu_s == WHOLE


def test_what_was_booked_stays_with_a_job_that_is_rebuilt_from_a_ledger() -> None:
    """The journal lost its end and a node holds a newer attempt: what was at stake is booked."""
    house = House(delays=SLOW)
    job = running(house, "t0")
    stop(house, job)
    old = decode_state(house.engine.encode_state())
    house.wait(STOP_S)
    house.start(job, "t1")
    house.wait(RAN_S)
    behind = Engine(house.engine.settings, old)
    behind.policy = house.engine.policy
    house.sim.adopt_engine(behind)
    house.sim.handle(LeaderStarted(epoch=2, holder="new"))
    for node in house.sim.nodes.values():
        node.report_soon()
    house.wait(2.0)
    found = behind.state.jobs[job.job_id]
    assert (found.attempt, state(found)) == (2, JobState.RUNNING)
    assert (found.lost_gpu_s, behind.state.counters.preemption_cost_gpu_s) == (WHOLE, WHOLE)


def test_a_flexible_worker_that_leaves_first_stops_nobody_else() -> None:
    """Its node obeys, the base's does not yet: the base computes on without it."""
    house = House(delays=SLOW)
    job = house.submit(workers=(1, 2), work_s=1e6)
    house.start(job, "t0")
    grow = (Placement(node=NodeName("t1"), worker_count=1, is_flexible=True),)
    house.decide(Resize(job_id=job.job_id, added=grow, reason="room"))
    house.wait(RAN_S)
    house.toggle_deaf(NodeName("t0"))
    stop(house, job)
    house.wait(5.0)
    house.toggle_deaf(NodeName("t0"))
    house.wait(STOP_S)
    assert lost(house, job) == 2 * WHOLE + 5.0 * 8
    assert house.sim.runtime.lost_gpu_s == lost(house, job)


@often
@given(steps(without="amnesia"), DELAYS)
def test_jobs_loans_and_the_cell_agree_on_what_was_lost(ops: list[Op], delays: Delays) -> None:
    """Whatever happens, the cell lost what its jobs lost, and loans bear a part of that."""
    house = House(delays=delays)
    for op in ops:
        perform(house, op)
        cell = house.engine.state
        whole = cell.counters.preemption_cost_gpu_s
        assert sum(job.lost_gpu_s for job in cell.jobs.values()) == pytest.approx(whole)
        borne = sum(loan.realised_cost_gpu_s for loan in cell.loans.values())
        assert -1e-6 <= borne <= whole + 1e-6
