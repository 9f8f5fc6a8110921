"""A job that nodes cannot start, maybe for its own storage, has no further node lent for it yet."""

from __future__ import annotations

import pytest

from common.faults import Fault
from common.messages import WorkerPhase
from common.model import JobState, NodeRole
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.state.events import JobCancelRequested, PassDue, WorkerFact
from coordinator.service.api.explain_job import reasons as explain_job
from tests.harness.cluster.engine import state
from tests.harness.cluster.scripted_nodes import BACK_OFF_S, Lending, Refusal

HUNG = Refusal("workdir or checkpoint.path: the storage did not answer in 10 s", Fault.STORAGE)
MISSING = Refusal("workdir: no such directory: /data/x", Fault.JOB, "workdir")


@pytest.mark.parametrize("why", [HUNG, MISSING])
def test_a_job_that_was_refused_has_no_further_node_lent_for_it_in_its_back_off(
    why: Refusal,
) -> None:
    """It would take one node after the other from the service, and start on none."""
    cell = Lending()
    job = cell.submit("hangs")
    [first] = cell.lends()
    assert cell.refuse(job, why) == first
    assert (state(job), job.retry.avoid_nodes) == (JobState.PENDING, [first])
    assert cell.lends() == []
    until_s = cell.held_until_s(job)
    assert until_s == pytest.approx(cell.now_s + BACK_OFF_S, abs=1.0)
    assert f"no node is lent for it for {until_s - cell.now_s:.0f} s" in explain_job(
        cell.engine, job
    )
    cell.now_s = until_s
    assert cell.handle(PassDue()).needs_loan_pass
    assert job.retry.no_loan_until_s is None
    assert cell.refuse(job, why) == first  # which is lent and free, and left alone no longer


def test_a_gang_that_was_not_ready_has_no_further_node_lent_for_it_in_its_back_off() -> None:
    """What its node waits for may be the job's own storage."""
    cell = Lending()
    job = cell.submit("hangs")
    [first] = cell.lends()
    cell.handle(PassDue())
    cell.says(job, WorkerPhase.RESERVING)
    cell.quiet(cell.settings.gang_ready_timeout_s + 0.2)
    cell.report(first, NodeRole.ON_LOAN)
    assert (state(job), job.retry.avoid_nodes) == (JobState.PENDING, [first])
    assert cell.lends() == []


def test_others_have_nodes_lent_for_them_meanwhile() -> None:
    """Also those of the same shape: what hangs is one job's."""
    cell = Lending()
    job = cell.submit("hangs")
    [first] = cell.lends()
    cell.refuse(job, HUNG)
    for number in range(2):
        cell.submit(f"other{number}")
    assert len(cell.lends()) == 1  # beside the first, which is free
    assert cell.node(first).lease is not None
    assert cell.seen(job)


def test_what_is_lent_already_it_may_have() -> None:
    """A node that came for another job, which was cancelled, may be well for this one."""
    cell = Lending()
    job, other = cell.submit("hangs"), cell.submit("other")
    assert len(cell.lends()) == 2
    cell.handle(JobCancelRequested(job_id=other.job_id, by="t/u"))
    first = cell.refuse(job, HUNG)
    assert cell.run(job) != first
    assert state(job) == JobState.RUNNING


def test_a_node_that_failed_a_job_which_ran_there_keeps_no_other_from_being_lent() -> None:
    """It booted: the job is well, and wants the next node now."""
    cell = Lending()
    job = cell.submit("runs")
    [first] = cell.lends()
    assert cell.run(job) == first
    cell.says(job, WorkerPhase.EXITED, "the worker and its supervisor are gone", Fault.NODE)
    assert (state(job), job.retry.avoid_nodes) == (JobState.PENDING, [first])
    assert job.retry.no_loan_until_s is None
    assert len(cell.lends()) == 1


@pytest.mark.parametrize("why", [HUNG, MISSING])
def test_a_job_that_was_refused_a_further_worker_has_no_node_lent_to_grow(why: Refusal) -> None:
    """It computes on with what it has, and leaves the node that refused it alone."""
    cell = Lending(nodes=4)
    job = cell.submit("grows", most=3)
    assert len(cell.lends()) == 3
    cell.handle(PassDue())
    for phase in (WorkerPhase.READY, WorkerPhase.RUNNING):
        for worker in list(job.workers.values()):
            is_refused = worker.is_flexible and phase == WorkerPhase.RUNNING
            said = WorkerFact(key=worker.key, phase=phase, endpoint="h:1")
            cell.report(worker.node, NodeRole.ON_LOAN, why.of(worker) if is_refused else said)
    (base,) = job.workers.values()
    for name in job.retry.avoid_nodes:
        cell.report(name, NodeRole.ON_LOAN)
    assert state(job) == JobState.RUNNING
    assert job.retry.avoid_nodes == [name for name in cell.names[:3] if name != base.node]
    assert cell.seen(job)
    assert any("no node is lent for it" in line for line in explain_job(cell.engine, job))
    cell.quiet(20.0)
    assert cell.lends() == []
    assert len(job.workers) == 1
    if why == MISSING:  # for which the nodes themselves are left alone for longer
        until_s = cell.held_until_s(job)
        cell.now_s = until_s - 1.0
        assert cell.handle(PassDue()).wake_at_s == until_s
        cell.now_s = until_s
        assert cell.handle(PassDue()).needs_loan_pass
        assert not cell.seen(job)


def test_what_keeps_nodes_from_being_lent_outlives_the_leader() -> None:
    """The next one lends none either, and wakes when it may."""
    cell = Lending()
    job = cell.submit("hangs")
    cell.lends()
    cell.refuse(job, HUNG)
    until_s = cell.held_until_s(job)
    cell.engine = Engine(cell.settings, decode_state(cell.engine.encode_state()))
    job = cell.engine.state.jobs[job.job_id]
    assert job.retry.no_loan_until_s == until_s
    assert cell.lends() == []
