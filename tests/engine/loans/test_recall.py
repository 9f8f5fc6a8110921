"""Nodes that come home: those that can start nothing, and those of a frozen cell."""

from __future__ import annotations

import pytest

from common.messages import WorkerPhase
from common.model import JobId, JobState, Launcher, NodeName, NodeRole, Pool, WorkerKey
from coordinator.engine.nodes.start_failures import MOST
from coordinator.engine.state.commands import Outcome
from coordinator.engine.state.events import (
    JobCancelRequested,
    LoadMeasured,
    LoanPassDue,
    OperatorAction,
    OperatorAsked,
    PassDue,
    WorkerFact,
)
from coordinator.policies.contract.decisions import Loan, Preempt, Reclaim
from tests.harness.cluster.engine import CHAT, state
from tests.harness.cluster.scripted_nodes import BROKEN, Lending, N, Reporting, facts, service

I0, I1 = NodeName("i0"), NodeName("i1")


def refused(cell: Reporting, *, times: int = 1, gpus: int = 2) -> None:
    """The node refuses the workers of so many jobs, one after the other, beside what runs there."""
    others = cell.workers
    for _ in range(times):
        job = cell.submit(f"r{len(cell.engine.state.jobs)}", gpus=gpus)
        cell.passes()
        cell.workers = (*others, *facts(job.workers.values(), WorkerPhase.READY))
        cell.report()
        [worker] = job.workers.values()
        cell.workers = (
            *others,
            BROKEN.of(worker),
        )
        cell.report()
        cell.workers = others
        cell.report()


def test_it_is_given_back_at_once_when_it_is_empty() -> None:
    """Its service would miss it, of use to nobody, until load rises."""
    cell = Reporting(Pool.INFERENCE, service())
    asks = cell.submit("asks", gpus=2)
    lease_id = cell.lend()
    cell.handle(JobCancelRequested(job_id=asks.job_id, by="t/u"))
    loan = cell.engine.state.loans[lease_id]
    refused(cell, times=MOST - 1)
    assert loan.reclaim_ordered_at_s is None
    refused(cell)
    assert loan.reclaim_reason.startswith("nothing runs on it: it refused 3 starts in a row")
    assert cell.node.desired.role == NodeRole.SERVING


@pytest.mark.parametrize("is_cordoned", [False, True])
def test_what_runs_there_runs_to_its_end_first(*, is_cordoned: bool) -> None:
    """It costs no job anything; and a node that an operator has in hand is the operator's."""
    cell = Reporting(Pool.INFERENCE, service())
    job = cell.submit("runs", gpus=1)
    cell.lend()
    cell.run(job)
    refused(cell, times=MOST, gpus=1)
    assert cell.node.failed_starts.closed_reason
    assert (state(job), cell.node.desired.role) == (JobState.RUNNING, NodeRole.ON_LOAN)
    if is_cordoned:
        cell.handle(OperatorAsked(action=OperatorAction.CORDON, by="ops/ada", target=N))
    cell.handle(JobCancelRequested(job_id=job.job_id, by="t/u"))
    [worker] = job.workers.values()
    said = WorkerFact(key=worker.key, phase=WorkerPhase.EXITED, stop_reason=worker.stop)
    cell.workers = (said,)
    cell.report()
    assert (state(job), job.counts.preemptions) == (JobState.CANCELLED, 0)
    assert (cell.node.lease is None) is not is_cordoned


def test_a_node_that_holds_only_a_rendezvous_store_is_not_given_back() -> None:
    """The gang that runs elsewhere meets there; it goes home when the gang has ended."""
    cell = Lending()
    job = cell.submit("gang", workers=2, launcher=Launcher.TORCHRUN)
    assert cell.lends() == [I0, I1]
    cell.run_all(job)
    (first, second) = (job.workers[index] for index in (0, 1))
    assert (first.node, second.node, job.store is not None) == (I0, I1, True)
    assert job.store is not None
    store = WorkerFact(key=job.store.key, phase=WorkerPhase.RUNNING, endpoint="h:2")
    done = WorkerFact(key=first.key, phase=WorkerPhase.EXITED, exit_code=0)
    cell.report(I0, NodeRole.ON_LOAN, store, done)
    for number in range(MOST):
        refused = cell.submit(f"r{number}")
        cell.handle(PassDue())
        (worker,) = refused.workers.values()
        assert worker.node == I0
        ready = WorkerFact(key=worker.key, phase=WorkerPhase.READY, endpoint="h:1")
        for fact in (ready, BROKEN.of(worker)):
            cell.report(I0, NodeRole.ON_LOAN, store, fact)
        cell.report(I0, NodeRole.ON_LOAN, store)
        cell.handle(JobCancelRequested(job_id=refused.job_id, by="t/u"))
    assert cell.node(I0).failed_starts.closed_reason
    assert (cell.node(I0).ledger.stores, cell.node(I0).lease is None) == ([job.store.key], False)
    done = WorkerFact(key=second.key, phase=WorkerPhase.EXITED, exit_code=0)
    cell.report(I1, NodeRole.ON_LOAN, done)
    assert state(job) == JobState.SUCCEEDED
    cell.report(I0, NodeRole.ON_LOAN)
    assert cell.node(I0).lease is None


def test_a_node_that_holds_workers_nobody_knows_is_not_given_back() -> None:
    """They may be a job's whose journal was lost: its ledger is read first."""
    cell = Reporting(Pool.INFERENCE, service())
    asks = cell.submit("asks", gpus=2)
    lease_id = cell.lend()
    cell.handle(JobCancelRequested(job_id=asks.job_id, by="t/u"))
    loan = cell.engine.state.loans[lease_id]
    refused(cell, times=MOST - 1)
    job = cell.submit("last")
    cell.passes()
    cell.workers = facts(job.workers.values(), WorkerPhase.READY)
    cell.report()
    [worker] = job.workers.values()
    unknown = WorkerFact(key=WorkerKey(JobId("of-before"), 1, 0), phase=WorkerPhase.RUNNING)
    cell.workers = (
        unknown,
        BROKEN.of(worker),
    )
    cell.report()
    cell.workers = (unknown,)
    cell.report()
    assert cell.node.failed_starts.closed_reason
    assert cell.node.ledger.unknown_workers == [unknown.key]
    assert loan.reclaim_ordered_at_s is None
    cell.workers = ()
    cell.report()
    assert loan.reclaim_ordered_at_s is not None


def freeze(cell: Reporting, *, off: bool = False) -> None:
    """An operator's order."""
    action = OperatorAction.THAW if off else OperatorAction.FREEZE
    cell.handle(OperatorAsked(action=action, by="ops/ada"))


def loaded(cell: Reporting, load: float) -> Outcome:
    """The loan pass after a load was measured."""
    cell.handle(LoadMeasured(service=CHAT, load=load))
    return cell.handle(LoanPassDue())


def test_a_service_gets_back_what_its_load_needs_while_the_cell_is_frozen() -> None:
    """Its node would stay away for as long as its lease is renewed; the job there is preempted."""
    cell = Reporting(Pool.INFERENCE, service())
    job = cell.submit("j")
    lease_id = cell.lend()
    cell.run(job)
    freeze(cell)
    outcome = loaded(cell, 5.0)
    assert [type(decision) for decision in outcome.decisions] == [Preempt, Reclaim]
    assert cell.node.desired.role == NodeRole.SERVING
    assert cell.engine.may_renew(cell.node.name, lease_id) == "the loan was called back"
    assert state(job) == JobState.PREEMPTING


def test_a_frozen_cell_lends_nothing_until_it_is_thawed() -> None:
    """Also what is spare and wanted."""
    cell = Reporting(Pool.INFERENCE, service())
    cell.submit("j")
    freeze(cell)
    assert cell.loan_pass().decisions == ()
    freeze(cell, off=True)
    assert [type(decision) for decision in cell.loan_pass().decisions] == [Loan]


def test_a_frozen_cell_keeps_what_its_service_does_not_need() -> None:
    """The freeze itself brings nobody home: leases are renewed as before."""
    cell = Reporting(Pool.INFERENCE, service())
    cell.submit("j")
    lease_id = cell.lend()
    freeze(cell)
    assert loaded(cell, 0.0).decisions == ()
    assert cell.engine.may_renew(cell.node.name, lease_id) == ""
