"""Nodes whose pool or service changes while they are lent, or are to be."""

from __future__ import annotations

import pytest

from common.model import JobState, Mode, NodeRole, Pool
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.loans.lifecycle import reclaim_s
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import LoadMeasured, LoanPassDue
from coordinator.engine.state.settings import EngineSettings
from coordinator.policies.contract.decisions import Reclaim
from coordinator.service.api.rows import loan_row
from tests.harness.cluster.engine import CHAT, state
from tests.harness.cluster.scripted_nodes import CODE, N, Reporting, service

R = NodeRole


def test_a_node_that_moves_to_the_inference_pool_is_wanted_there_and_lent() -> None:
    """What was wanted of it as a training node is wanted no more."""
    cell = Reporting(Pool.TRAINING, service())
    cell.reboot(Pool.INFERENCE, R.WARMING)
    assert cell.node.desired.role == R.SERVING
    cell.role = R.SERVING
    cell.report()
    cell.submit("j")
    cell.lend()
    assert cell.node.role == R.ON_LOAN
    assert "moved: training -> inference" in cell.told()


def test_a_lent_node_that_moves_to_the_training_pool_ends_its_loan_and_trains() -> None:
    """Nobody waits for it in its old service, and it takes work as any training node."""
    cell = Reporting(Pool.INFERENCE, service())
    job = cell.submit("j")
    lease_id = cell.lend()
    cell.reboot(Pool.TRAINING, R.TRAINING)
    assert (cell.node.desired.role, cell.node.lease) == (R.TRAINING, None)
    loan = cell.engine.state.loans[lease_id]
    assert loan.returned_at_s == cell.now_s
    row = loan_row(loan, now_s=cell.now_s + 1e6)
    assert (row.state, row.is_late, row.reclaim_s) == ("ended", False, None)
    assert row.reclaim_reason == "its node moved to the training pool"
    cell.passes()
    assert state(job) == JobState.STARTING


@pytest.mark.parametrize("is_late", [False, True])
def test_a_node_on_its_way_home_that_moves_pool_is_as_late_as_it_is_then(*, is_late: bool) -> None:
    """It was called back, and will never serve again: no time after that counts."""
    cell = Reporting(Pool.INFERENCE, service())
    cell.submit("j")
    lease_id = cell.lend()
    cell.handle(LoadMeasured(service=CHAT, load=1000.0))
    cell.handle(LoanPassDue())
    loan = cell.engine.state.loans[lease_id]
    assert loan.reclaim_ordered_at_s is not None
    cell.now_s += 601.0 if is_late else 590.0
    cell.reboot(Pool.TRAINING, R.TRAINING)
    assert loan_row(loan, now_s=cell.now_s + 1e6).is_late is is_late
    assert cell.engine.state.counters.reclaims_late == is_late


def test_a_node_that_moved_without_a_reboot_takes_no_training_workers() -> None:
    """It trains on as it says, until it boots; nothing new begins where a server is to come."""
    cell = Reporting(Pool.TRAINING, service())
    ran = cell.submit("ran", gpus=1)
    cell.run(ran)
    cell.pool, cell.service = Pool.INFERENCE, CHAT
    cell.report()
    waits = cell.submit("waits", gpus=1)
    cell.passes()
    assert (state(ran), state(waits)) == (JobState.RUNNING, JobState.PENDING)


def test_a_lent_node_that_moves_pool_without_a_reboot_lets_its_jobs_go() -> None:
    """They are asked to stop, with their grace, for the node turns home by itself."""
    cell = Reporting(Pool.INFERENCE, service())
    job = cell.submit("j")
    cell.lend()
    cell.run(job)
    cell.pool, cell.service = Pool.TRAINING, None
    cell.report()
    assert state(job) == JobState.PREEMPTING
    assert job.counts.own_faults == 0


def test_a_quarantined_node_that_moves_pool_is_not_lent_from_there() -> None:
    """Its role is its own to leave; what is wanted of it is its new home."""
    cell = Reporting(Pool.TRAINING, service())
    cell.role = R.QUARANTINED
    cell.report()
    cell.reboot(Pool.INFERENCE, R.QUARANTINED)
    assert (cell.node.role, cell.node.desired.role) == (R.QUARANTINED, R.SERVING)


def test_a_lent_node_comes_home_when_its_service_is_in_no_settings_any_more() -> None:
    """Within the promise under which it was lent, with the price, whatever the load says."""
    cell = Reporting(Pool.INFERENCE, service(reclaim_deadline_s=450.0))
    job = cell.submit("j")
    lease_id = cell.lend()
    cell.run(job)
    cell.engine = Engine(cell.engine.settings, decode_state(cell.engine.encode_state()))
    job = cell.engine.state.jobs[job.job_id]
    [decision] = cell.lead().decisions
    assert isinstance(decision, Reclaim)
    assert (decision.node, decision.deadline_s) == (N, 450.0)
    assert decision.reason == "its service chat is not in the settings of this cell"
    assert decision.predicted_preemptions == 1
    assert decision.predicted_cost_gpu_s > 0
    assert state(job) == JobState.PREEMPTING
    cell.report(is_current=False)
    assert cell.engine.may_renew(N, lease_id) == "the loan was called back"
    assert cell.engine.desired(N).role == R.SERVING
    for cell.role in (R.VACATING, R.WARMING, R.SERVING):
        cell.lease_id, cell.workers = None, ()
        cell.report()
    assert cell.engine.state.loans[lease_id].returned_at_s == cell.now_s
    assert state(job) == JobState.PENDING


def test_a_service_that_is_still_there_keeps_what_it_lends() -> None:
    """A new leader with the same settings calls nobody home."""
    cell = Reporting(Pool.INFERENCE, service())
    cell.submit("j")
    cell.lend()
    assert cell.lead(service()).decisions == ()
    assert cell.node.desired.role == R.ON_LOAN


def test_a_found_lease_of_an_unknown_service_is_called_home_at_once() -> None:
    """With an empty journal a leader takes leases over; of such a service it takes none."""
    cell = Reporting(Pool.INFERENCE, service())
    cell.submit("j")
    lease_id = cell.lend()
    cell.engine = Engine(EngineSettings())
    cell.lead(service(CODE))
    [decision] = cell.report(is_current=False).decisions
    assert isinstance(decision, Reclaim)
    assert decision.deadline_s == cell.engine.settings.lease_ttl_s
    assert cell.engine.may_renew(N, lease_id)
    assert cell.engine.state.loans[lease_id].reclaim_ordered_at_s == cell.now_s


def test_a_lent_node_whose_agent_names_another_service_comes_home_first() -> None:
    """The service that lent it can no more count on it, and the other one never lent it."""
    cell = Reporting(Pool.INFERENCE, service(), service(CODE, reclaim_deadline_s=90.0))
    cell.submit("j")
    cell.lend()
    cell.service = CODE
    [decision] = cell.report().decisions
    assert isinstance(decision, Reclaim)
    assert (decision.service, decision.deadline_s) == (CHAT, 600.0)
    assert decision.reason == "its agent names service code now, and chat lent it"


@pytest.mark.parametrize("is_late", [False, True], ids=["at its first report", "when it changes"])
def test_a_node_that_names_an_unknown_service_is_told_of(*, is_late: bool) -> None:
    """Once, and at each start of a leader by service."""
    cell = Reporting(Pool.INFERENCE, *([service()] if is_late else [service(CODE)]))
    if is_late:
        assert "service chat is not in the settings" not in cell.told()
        cell.service = CODE
        cell.report()
    what = f"service {cell.service} is not in the settings"
    cell.report()
    assert cell.told().count(what) == 1
    cell.lead(service() if is_late else service(CODE))
    assert cell.told().count(what) == 2
    assert cell.engine.state.stories[-1].reason == "it is not lent; named by n"


def test_the_promise_of_a_service_is_its_last_one() -> None:
    """It outlives the service's settings; a service that never was in any has the lease's TTL."""
    cell = Reporting(Pool.INFERENCE, service(reclaim_deadline_s=450.0))
    cell.lead(service(reclaim_deadline_s=500.0))
    cell.lead()
    context = Context(cell.engine.state, cell.engine.settings, cell.now_s)
    assert (reclaim_s(context, CHAT), reclaim_s(context, CODE)) == (500.0, 30.0)


def test_a_shadow_loan_ends_with_its_service() -> None:
    """What would have been lent of a service that is gone is followed no further."""
    cell = Reporting(Pool.INFERENCE, service(mode=Mode.OBSERVE))
    cell.submit("j")
    cell.loan_pass()
    assert list(cell.engine.state.shadow_loans) == [N]
    cell.lead()
    cell.handle(LoanPassDue())
    assert cell.engine.state.shadow_loans == {}
