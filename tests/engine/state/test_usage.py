"""Accounts of GPU time: intervals that add up to the cell's own counters, however they are cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.api import RequestRow
from common.history import (
    AttemptRecord,
    HistoryLine,
    JobRecord,
    LoanRecord,
    LossRecord,
    StoryKind,
)
from common.model import JobState, NodeName
from coordinator.engine.state.accounting import queueing_s
from coordinator.engine.state.events import (
    JobCancelRequested,
    JobsHeld,
    JobsReleased,
    JobsRequeued,
)
from coordinator.policies.contract.decisions import Loan, Preempt, Reclaim, Resize
from coordinator.policies.contract.decisions import Placement as At
from coordinator.service.api.history_reads import open_facts
from coordinator.service.api.rows import history_lines, job_row
from coordinator.service.history.facts import Fact, facts
from coordinator.service.history.usage_sum import Sums, Totals
from tests.engine.state.test_accounting import I0, T0
from tests.harness.cluster.engine import CHAT, EngineHarness, state


def lines_of(harness: EngineHarness) -> tuple[HistoryLine, ...]:
    """All lines of a cell, as the history gets them."""
    found = harness.engine.state
    assert found.stories_dropped == 0
    return history_lines(found, found.stories, 0)


def amounts(harness: EngineHarness) -> list[Fact]:
    """What a report is made of now."""
    found = [fact for line in lines_of(harness) for fact in facts(line)]
    return [*found, *open_facts(harness.engine.state, harness.sim.loop.now_s)]


def total(found: Sequence[Fact], since_s: float, until_s: float) -> Totals:
    """A report of one row."""
    sums = Sums((), since_s=since_s, until_s=until_s)
    sums.add_facts(found)
    return sums.rows.get((), Totals())


def records(harness: EngineHarness, kind: StoryKind) -> list[object]:
    """The records of one kind."""
    return [line.detail for line in lines_of(harness) if line.kind == kind]


def test_a_job_has_an_account_of_its_attempts_and_of_its_whole_life() -> None:
    """Where and for how long each attempt held GPUs, in which pool, and what became of the job."""
    harness = EngineHarness()
    harness.decide(Loan(node=I0, service=CHAT, reason="test"), lend=True)
    harness.wait(30.0)
    job = harness.submit(work_s=1e6)
    harness.wait(10.0)
    harness.start(job, "i0")
    harness.wait(100.0)
    harness.decide(Reclaim(node=I0, service=CHAT, deadline_s=60.0, reason="load"), lend=True)
    harness.wait(60.0)
    harness.start(job, "t0")
    harness.wait(50.0)
    harness.sim.handle(JobCancelRequested(job_id=job.job_id, by="trace/ann"))
    harness.wait(40.0)
    assert state(job) == JobState.CANCELLED
    attempts = [
        one for one in records(harness, StoryKind.ATTEMPT) if isinstance(one, AttemptRecord)
    ]
    found = [
        (one.attempt, use.node, use.pool, use.service, use.gpus)
        for one in attempts
        for use in one.uses
    ]
    assert found == [(1, "i0", "loan", CHAT, 8.0), (2, "t0", "training", "", 8.0)]
    [account] = records(harness, StoryKind.JOB)
    assert isinstance(account, JobRecord)
    assert (account.state, account.attempts, account.preemptions) == ("cancelled", 2, 1)
    assert account.nodes == ("t0",)
    assert account.waited_s == queueing_s(job, harness.sim.loop.now_s)
    end_s = harness.sim.loop.now_s + 1.0
    assert total(amounts(harness), 0.0, end_s).waited_s == pytest.approx(account.waited_s)
    assert set(account.held_gpu_s) == {"loan/H100", "training/H100"}
    assert account.lost_gpu_s == {"reclaim": pytest.approx(job.lost_gpu_s)}
    [loan] = records(harness, StoryKind.LOAN)
    assert isinstance(loan, LoanRecord)
    assert (loan.service, loan.outcome, loan.preemptions) == (CHAT, "returned", 1)


def test_an_elastic_job_has_its_largest_gang_and_the_time_of_its_workers() -> None:
    """Workers that came and went one after the other were never there together."""
    harness = EngineHarness()
    job = harness.submit(workers=(1, 2), work_s=1e6)
    harness.start(job, "t0")
    harness.wait(50.0)
    more = At(node=NodeName("t1"), worker_count=1)
    for _ in range(3):
        harness.decide(Resize(job_id=job.job_id, added=(more,), reason="room"))
        harness.wait(50.0)
        last = max(job.workers)
        harness.decide(Resize(job_id=job.job_id, removed_workers=(last,), reason="need"))
        harness.wait(100.0)
    ran_at_s = job.attempt.ran_at_s or 0.0
    lived_s = harness.sim.loop.now_s - ran_at_s
    harness.sim.handle(JobCancelRequested(job_id=job.job_id, by="trace/ann"))
    harness.wait(40.0)
    [account] = records(harness, StoryKind.JOB)
    assert isinstance(account, JobRecord)
    assert account.workers == 2
    assert lived_s + 150.0 * 0.5 < account.worker_s <= sum(account.held_gpu_s.values()) / 8
    row = job_row(harness.engine, job, now_s=harness.sim.loop.now_s, in_full=True)
    assert isinstance(row.request, RequestRow)
    assert (row.request.most_workers, row.request.worker_s) == (2, account.worker_s)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_time_behind_a_shut_gate_is_no_wait(is_cancelled: bool) -> None:
    """The report has the time before a hold and after the release, as the job itself has it; also
    while the job is held, and of one that is cancelled there."""
    harness = EngineHarness()
    job = harness.submit(work_s=1e6)
    harness.wait(10.0)
    before_s = queueing_s(job, harness.sim.loop.now_s)
    assert before_s >= 10.0
    harness.sim.handle(JobsHeld(job_ids=(job.job_id,), by="trace/ann"))
    harness.wait(500.0)
    waited_s = total(amounts(harness), 0.0, harness.sim.loop.now_s + 1.0).waited_s
    assert waited_s == pytest.approx(before_s)
    if is_cancelled:
        harness.sim.handle(JobCancelRequested(job_id=job.job_id, by="trace/ann"))
    else:
        harness.sim.handle(JobsReleased(job_ids=(job.job_id,), by="trace/ann"))
        harness.wait(20.0)
        harness.start(job, "t0")
    harness.wait(100.0)
    waits_s = queueing_s(job, harness.sim.loop.now_s)
    assert waits_s < 100.0
    assert total(amounts(harness), 0.0, harness.sim.loop.now_s + 1.0).waited_s == pytest.approx(
        waits_s
    )
    accounts = [one for one in records(harness, StoryKind.JOB) if isinstance(one, JobRecord)]
    assert [one.waited_s for one in accounts] == [pytest.approx(waits_s)] * is_cancelled


def test_work_that_a_requeue_loses_has_the_cause_order() -> None:
    """Neither a node nor the policy is to blame for what a person ordered."""
    harness = EngineHarness()
    job = harness.submit(work_s=1e6)
    harness.start(job, "t0")
    harness.wait(100.0)
    harness.sim.handle(JobsRequeued(job_ids=(job.job_id,), by="trace/ann"))
    harness.wait(60.0)
    causes = [one.cause for one in records(harness, StoryKind.LOSS) if isinstance(one, LossRecord)]
    assert causes == ["order"]


def test_each_decision_is_a_line_of_its_kind_with_its_reason() -> None:
    """Starts, resizes, preemptions, loans and reclaims; what follows from them is an event."""
    harness = EngineHarness()
    job = harness.submit(workers=(1, 2), work_s=1e6)
    harness.start(job, "t0")
    harness.wait(10.0)
    grow = Resize(
        job_id=job.job_id, added=(At(node=harness.node("t1").name, worker_count=1),), reason="room"
    )
    harness.decide(grow)
    harness.wait(10.0)
    harness.decide(Preempt(job_id=job.job_id, reason="its turn is over"))
    harness.decide(Loan(node=I0, service=CHAT, reason="idle"), lend=True)
    harness.wait(30.0)
    harness.decide(Reclaim(node=I0, service=CHAT, deadline_s=60.0, reason="load"), lend=True)
    harness.wait(60.0)
    told = [
        (line.subject, line.what.partition(" ")[0], line.reason)
        for line in lines_of(harness)
        if line.kind == StoryKind.DECISION
    ]
    assert told == [
        (job.job_id, "start", "the test says so"),
        (job.job_id, "resize", "room"),
        (job.job_id, "preempt", "its turn is over"),
        ("i0", "lend", "idle"),
        ("i0", "reclaim", "load"),
    ]
    assert T0 not in {line.subject for line in lines_of(harness) if line.kind == StoryKind.DECISION}
