"""Whatever happens to a cell, its figures, its jobs, its loans and its history add up alike."""

from __future__ import annotations

import pytest
from hypothesis import given

from coordinator.engine.state.accounting import queueing_s
from coordinator.engine.state.events import OperatorAction, OperatorAsked
from coordinator.engine.state.tables import JobEntry
from coordinator.service.history.usage_sum import Totals
from coordinator.sim.run.cluster import Delays
from tests.draws import whole
from tests.engine.state.test_usage import amounts, total
from tests.harness.cluster.engine import EngineHarness
from tests.properties.test_engine_safety import DELAYS, Op, often, perform, steps

BEGUN = ("gang_ready -> ",)
OVER = ("vacated -> ", "succeed -> ", "fail -> ", "cancel -> ")


def jobs_loans_and_the_cell_agree_on_what_was_lost(harness: EngineHarness) -> None:
    """The cell lost what its jobs lost, and loans bear a part of that."""
    cell = harness.engine.state
    whole_s = cell.counters.preemption_cost_gpu_s
    assert sum(job.lost_gpu_s for job in cell.jobs.values()) == pytest.approx(whole_s)
    borne = sum(loan.realised_cost_gpu_s for loan in cell.loans.values())
    assert -1e-6 <= borne <= whole_s + 1e-6


def ran_s(harness: EngineHarness, job: JobEntry) -> float:
    """How long its attempts ran, each until its last worker was gone, by its story."""
    total_s, since_s = 0.0, None
    for line in harness.engine.state.stories:
        if line.subject != job.job_id:
            continue
        if line.what.startswith(BEGUN):
            since_s = line.at_s
        elif line.what.startswith(OVER) and since_s is not None:
            total_s, since_s = total_s + line.at_s - since_s, None
    return total_s if since_s is None else total_s + harness.sim.loop.now_s - since_s


def a_job_waits_or_runs_at_every_instant(harness: EngineHarness) -> None:
    """From submission to its end, or to now: queueing and the attempts that ran, and nothing
    twice."""
    now_s = harness.sim.loop.now_s
    for job in harness.engine.state.jobs.values():
        end_s = now_s if job.finished_at_s is None else job.finished_at_s
        waited_s, computed_s = queueing_s(job, now_s), ran_s(harness, job)
        assert waited_s + computed_s == pytest.approx(end_s - job.submitted_at_s)
        assert min(waited_s, computed_s) >= 0.0


def values(row: Totals) -> list[float]:
    """The amounts of a row."""
    return [
        row.training_gpu_s,
        row.on_loan_gpu_s,
        row.lent_gpu_s,
        row.lost_gpu_s,
        row.waited_s,
        row.waited_gpu_s,
    ]


def the_intervals_add_up_to_the_counters_of_the_cell(harness: EngineHarness, share: int) -> None:
    """GPUs held, lent and lost, and the time in the queue, are those of the figures; and a report
    of two spans is as much as one of both."""
    harness.engine.handle(
        OperatorAsked(action=OperatorAction.THAW, by="o/o"), now_s=harness.sim.loop.now_s
    )
    found, end_s = amounts(harness), harness.sim.loop.now_s
    whole_s = total(found, 0.0, end_s + 1.0)
    cell = harness.engine.state.counters
    assert whole_s.training_gpu_s == pytest.approx(cell.training_held_gpu_s)
    assert whole_s.on_loan_gpu_s == pytest.approx(cell.on_loan_held_gpu_s)
    assert whole_s.lent_gpu_s == pytest.approx(cell.on_loan_gpu_s)
    costs = (cell.preemption_cost_gpu_s, cell.resize_cost_gpu_s, cell.migration_cost_gpu_s)
    assert whole_s.lost_gpu_s == pytest.approx(sum(costs))
    waits = [queueing_s(job, end_s) for job in harness.engine.state.jobs.values()]
    assert whole_s.waited_s == pytest.approx(sum(waits))
    cut_s = end_s * share / 100
    parts = (total(found, 0.0, cut_s), total(found, cut_s, end_s + 1.0))
    assert [sum(pair) for pair in zip(*map(values, parts), strict=True)] == pytest.approx(
        values(whole_s)
    )


@often
@given(steps(without="amnesia"), DELAYS, whole(0, 100))
def test_every_account_of_a_cell_adds_up(ops: list[Op], delays: Delays, share: int) -> None:
    """Losses agree after each step; at the end each job waited or ran all the time, and the
    intervals of the history are the counters of the cell."""
    harness = EngineHarness(delays=delays)
    for op in ops:
        perform(harness, op)
        jobs_loans_and_the_cell_agree_on_what_was_lost(harness)
    a_job_waits_or_runs_at_every_instant(harness)
    the_intervals_add_up_to_the_counters_of_the_cell(harness, share)
