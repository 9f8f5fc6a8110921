"""Loans in the engine: begun, reclaimed, lapsed, recalled; silence and lost journals."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.messages import WorkerPhase
from common.model import JobState, NodeName, NodeRole, StopReason
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.state.accounting import ReclaimTimes, figures
from coordinator.engine.state.events import (
    LeaderStarted,
    NodeReported,
    NodeSilent,
    OperatorAction,
    OperatorAsked,
    OrdersRecovered,
    WorkerFact,
)
from coordinator.engine.state.tables import LoanEntry
from coordinator.policies.contract.decisions import (
    Loan,
    Placement,
    Preempt,
    Reclaim,
    Resize,
)
from coordinator.policies.contract.index import nodes_of
from coordinator.service.api.rows import node_row
from coordinator.service.nodes.report_folding import Folder
from coordinator.sim.run.cluster import Delays
from tests.harness.cluster.engine import CHAT, EngineHarness, state

SLOW = Delays(drain_s=5.0, stop_s=3.0, device_free_s=1.0, warm_up_s=10.0)


def lend(harness: EngineHarness, node: str = "i0") -> None:
    """Lend a node and wait until the loan has begun."""
    harness.decide(Loan(node=NodeName(node), service=CHAT, reason="idle"), lend=True)
    harness.wait(6.0)


def take_back(harness: EngineHarness, node: str = "i0", *, deadline_s: float = 60.0) -> None:
    """Reclaim a node."""
    harness.decide(replace(reclaim_of(node), deadline_s=deadline_s), lend=True)


def loan_of(harness: EngineHarness, node: str) -> LoanEntry:
    """The latest loan of a node."""
    return [loan for loan in harness.engine.state.loans.values() if loan.node == node][-1]


def reclaim_of(node: str) -> Reclaim:
    """A reclaim as a policy would write it."""
    return Reclaim(node=NodeName(node), service=CHAT, deadline_s=60.0, reason="load rose")


def says(
    harness: EngineHarness,
    name: str,
    role: NodeRole,
    *,
    workers: tuple[WorkerFact, ...] = (),
    stage_durations_s: dict[str, float] | None = None,
) -> NodeReported:
    """A report that shows the latest order and no lease, of a node that acts by itself."""
    told = stage_durations_s or {}
    return replace(harness.report(name, role), workers=workers, stage_durations_s=told)


def test_a_node_whose_server_is_down_is_not_one_to_spare() -> None:
    """A dead server measures as no load: its node neither counts as ready nor is lent, and the
    last one that serves is not lent for it."""
    harness, folder = (
        EngineHarness(),
        Folder(lost_after_s=9.0, load_period_s=9.0, progress_period_s=9.0),
    )
    assert harness.node("i0").serving_since_s is not None
    down = replace(says(harness, "i0", NodeRole.SERVING), is_server_down=True)
    outcome = harness.engine.handle(down, now_s=harness.engine.state.now_s)
    assert harness.node("i0").serving_since_s is None
    assert outcome.needs_loan_pass
    seen = harness.engine.snapshot()
    [view] = [node for node in seen.nodes if node.name == "i0"]
    assert view.serving_since_s is None
    assert "i0" not in [node.name for node in nodes_of(seen, CHAT).ready]
    assert any(line.what == "server down" for line in harness.engine.state.stories)
    assert node_row(harness.node("i0"), folder, boot_now_s=0.0).is_server_down
    harness.engine.handle(down, now_s=harness.engine.state.now_s + 1.0)
    harness.engine.handle(says(harness, "i0", NodeRole.SERVING), now_s=harness.engine.state.now_s)
    assert harness.node("i0").serving_since_s == harness.engine.state.now_s
    told = [line.what for line in harness.engine.state.stories if line.what.startswith("server")]
    assert told == ["server down", "server up again"]
    assert not node_row(harness.node("i0"), folder, boot_now_s=0.0).is_server_down


def test_a_loan_begins_when_the_node_is_drained() -> None:
    """Until then nothing may be placed there."""
    harness = EngineHarness(delays=SLOW)
    harness.decide(Loan(node=NodeName("i0"), service=CHAT, reason="idle"), lend=True)
    assert harness.node("i0").role == NodeRole.DRAINING
    job = harness.submit()
    harness.start(job, "i0")
    assert state(job) == JobState.PENDING
    harness.wait(6.0)
    assert harness.node("i0").role == NodeRole.ON_LOAN
    harness.start(job, "i0")
    harness.wait(1.0)
    assert state(job) == JobState.RUNNING


def test_a_reclaim_preempts_the_base_gang_and_brings_the_node_home() -> None:
    """The inelastic job queues again with attempt + 1 and finishes elsewhere."""
    harness = EngineHarness(delays=SLOW)
    lend(harness)
    job = harness.submit(work_s=100.0)
    harness.start(job, "i0")
    harness.wait(10.0)
    take_back(harness)
    harness.wait(20.0)
    assert (harness.node("i0").role, state(job)) == (NodeRole.SERVING, JobState.PENDING)
    counters = harness.engine.state.counters
    assert (counters.reclaims, counters.reclaims_late, counters.preemptions) == (1, 0, 1)
    assert counters.reclaim_s == [14.0]  # stop 3 + device free 1 + warm-up 10
    harness.start(job, "t0")
    harness.wait(200.0)
    assert (state(job), job.attempt.number) == (JobState.SUCCEEDED, 2)


def test_a_preemption_is_borne_by_the_loan_that_ends_for_it() -> None:
    """A gang on two lent nodes that both go home counts once, on the loan that its Preempt names,
    with the work that was really lost."""
    harness = EngineHarness(delays=SLOW)
    lend(harness, "i0")
    lend(harness, "i1")
    job = harness.submit(workers=(2, 2))
    harness.start(job, "i0", "i1")
    harness.wait(10.0)
    why = Preempt(job_id=job.job_id, node=NodeName("i1"), reason="both go home")
    harness.decide(why, reclaim_of("i0"), reclaim_of("i1"), lend=True)
    harness.wait(3.0)
    first, second = loan_of(harness, "i0"), loan_of(harness, "i1")
    assert (first.realised_preemptions, first.realised_cost_gpu_s) == (0, 0.0)
    assert (second.realised_preemptions, second.realised_cost_gpu_s) == (1, 208.0)
    counters = harness.engine.state.counters
    assert (counters.preemptions, counters.preemption_cost_gpu_s) == (1, 208.0)


def test_a_reclaim_bears_what_its_policy_overlooked() -> None:
    """A base gang that no Preempt named stops all the same, and the loan of its node bears it."""
    harness = EngineHarness(delays=SLOW)
    lend(harness)
    job = harness.submit()
    harness.start(job, "i0")
    harness.wait(10.0)
    take_back(harness)
    harness.wait(3.0)
    loan = loan_of(harness, "i0")
    assert (loan.realised_preemptions, loan.realised_cost_gpu_s) == (1, 104.0)


def test_a_gang_that_has_not_run_costs_its_loan_nothing() -> None:
    """Nothing is lost where nothing has run: neither the job nor the loan counts a preemption."""
    harness = EngineHarness(delays=Delays(ready_s=60.0))
    lend(harness)
    job = harness.submit()
    harness.start(job, "i0")
    why = Preempt(job_id=job.job_id, node=NodeName("i0"), reason="it goes home")
    harness.decide(why, reclaim_of("i0"), lend=True)
    assert (state(job), job.counts.preemptions) == (JobState.PENDING, 0)
    assert loan_of(harness, "i0").realised_preemptions == 0


def test_a_preemption_for_no_lent_node_is_borne_by_no_loan() -> None:
    """A Preempt without a node, or for one that is not lent, leaves every loan as it was."""
    harness = EngineHarness(delays=SLOW)
    lend(harness)
    for name, node in (("a", None), ("b", NodeName("t0")), ("c", NodeName("nowhere"))):
        job = harness.submit(name)
        harness.start(job, "i0")
        harness.wait(5.0)
        harness.decide(Preempt(job_id=job.job_id, node=node, reason="somebody else's need"))
        harness.wait(5.0)
        assert job.counts.preemptions == 1
    assert loan_of(harness, "i0").realised_preemptions == 0


def test_a_node_that_goes_home_by_itself_charges_its_loan() -> None:
    """The TTL ended and the agent stopped the gang: the loan lapsed and bears the preemption."""
    harness = EngineHarness(delays=SLOW)
    lend(harness)
    job = harness.submit()
    harness.start(job, "i0")
    harness.wait(10.0)
    gone = WorkerFact(
        key=job.workers[0].key, phase=WorkerPhase.EXITED, stop_reason=StopReason.PREEMPT
    )
    harness.sim.handle(says(harness, "i0", NodeRole.WARMING, workers=(gone,)))
    loan = loan_of(harness, "i0")
    assert (loan.is_lapsed, loan.realised_preemptions, loan.realised_cost_gpu_s) == (True, 1, 80.0)
    assert (state(job), job.counts.preemptions) == (JobState.PENDING, 1)


def test_the_way_home_after_a_lapse_is_timed_and_is_no_reclaim() -> None:
    """From the first word of it to serving again, in the loan's record and in the figures."""
    harness = EngineHarness(delays=SLOW)
    lend(harness)
    harness.wait(4.0)
    harness.sim.handle(says(harness, "i0", NodeRole.VACATING))
    harness.wait(20.0)
    loan = loan_of(harness, "i0")
    assert (harness.node("i0").role, loan.is_lapsed, loan.lapse_s) == (NodeRole.SERVING, True, 11.0)
    found = figures(harness.engine.state)
    assert (found.lapse_s, found.reclaim_s) == (ReclaimTimes(p50=11.0, max=11.0), ReclaimTimes())
    assert (found.leases_lapsed, found.lapses_late) == (1, 0)
    assert (found.reclaims, found.reclaims_late) == (0, 0)


def test_a_lapse_that_is_heard_when_it_is_over_took_what_the_node_has_measured() -> None:
    """Nobody led while the node went home: its own stages are all that is known."""
    harness = EngineHarness(delays=SLOW)
    lend(harness)
    stages_s = {"vacate": 3.0, "device_free": 1.0, "server_ready": 10.0}
    harness.sim.handle(says(harness, "i0", NodeRole.SERVING, stage_durations_s=stages_s))
    assert loan_of(harness, "i0").lapse_s == 14.0
    assert harness.engine.state.counters.lapse_s == [14.0]


def test_a_node_that_turned_back_while_draining_has_ended_its_loan() -> None:
    """It serves, knows our latest order and holds no lease: the loan ended before it began."""
    harness = EngineHarness(delays=SLOW)
    harness.decide(Loan(node=NodeName("i0"), service=CHAT, reason="idle"), lend=True)
    harness.sim.handle(says(harness, "i0", NodeRole.SERVING))
    assert loan_of(harness, "i0").is_lapsed
    assert (harness.node("i0").lease, harness.node("i0").desired.role) == (None, NodeRole.SERVING)
    assert harness.engine.state.counters.leases_lapsed == 1
    assert (loan_of(harness, "i0").lapse_s, harness.engine.state.counters.lapse_s) == (None, [])


@pytest.mark.parametrize("what", ["older order", "earlier leader", "holds the lease"])
def test_a_serving_node_that_has_not_let_go_keeps_its_loan(what: str) -> None:
    """A report older than the order, of an earlier leader, or with the lease proves nothing."""
    harness = EngineHarness(delays=SLOW)
    harness.decide(Loan(node=NodeName("i0"), service=CHAT, reason="idle"), lend=True)
    lease = harness.node("i0").lease
    assert lease is not None
    report = says(harness, "i0", NodeRole.SERVING)
    if what == "older order":
        report = replace(report, generation=report.generation - 1)
    elif what == "earlier leader":
        report = replace(report, epoch=report.epoch - 1)
    else:
        report = replace(report, lease_id=lease.lease_id)
    harness.sim.handle(report)
    assert harness.node("i0").lease == lease
    assert not loan_of(harness, "i0").is_lapsed


def test_flexible_workers_leave_a_reclaimed_node_without_preemption() -> None:
    """The job shrinks and goes on."""
    harness = EngineHarness(delays=SLOW)
    lend(harness)
    job = harness.submit(workers=(1, 2))
    harness.start(job, "t0")
    added = (Placement(node=NodeName("i0"), worker_count=1, is_flexible=True),)
    harness.decide(Resize(job_id=job.job_id, added=added, reason="room"))
    harness.wait(1.0)
    assert job.running_workers == 2
    take_back(harness)
    harness.wait(20.0)
    assert (state(job), job.running_workers, job.counts.preemptions) == (JobState.RUNNING, 1, 0)
    assert harness.engine.state.counters.flexible_workers_released == 1
    assert harness.node("i0").role == NodeRole.SERVING


def test_a_late_return_is_counted_and_told() -> None:
    """A reclaim that takes longer than its deadline is late, whatever the cause."""
    harness = EngineHarness(delays=SLOW)
    lend(harness)
    take_back(harness, deadline_s=5.0)
    harness.wait(30.0)
    assert harness.engine.state.counters.reclaims_late == 1


def test_a_loan_that_was_called_back_before_it_began_is_no_reclaim() -> None:
    """DRAINING goes back to SERVING at once."""
    harness = EngineHarness(delays=SLOW)
    harness.decide(Loan(node=NodeName("i0"), service=CHAT, reason="idle"), lend=True)
    take_back(harness)
    harness.settle()
    assert harness.node("i0").role == NodeRole.SERVING
    counters = harness.engine.state.counters
    assert (counters.loans_cancelled, counters.reclaims) == (1, 0)


def test_a_refused_renewal_carries_the_reclaim() -> None:
    """A lease is renewable while it stands and never after the reclaim."""
    harness = EngineHarness(delays=SLOW)
    lend(harness)
    lease = harness.node("i0").lease
    assert lease is not None
    assert harness.engine.may_renew(NodeName("i0"), lease.lease_id) == ""
    assert harness.engine.may_renew(NodeName("i1"), lease.lease_id) != ""
    take_back(harness)
    assert harness.engine.may_renew(NodeName("i0"), lease.lease_id) == "the loan was called back"


def test_recall_takes_every_lent_node_back_even_when_frozen() -> None:
    """Freeze stops decisions; a recall is an order."""
    harness = EngineHarness(delays=SLOW)
    lend(harness)
    for action in (OperatorAction.FREEZE, OperatorAction.RECALL):
        harness.sim.handle(OperatorAsked(action=action, by="ops/me"))
    harness.wait(30.0)
    assert harness.node("i0").role == NodeRole.SERVING
    assert harness.engine.state.services[CHAT].is_recalled


def test_silence_proves_nothing() -> None:
    """A LOST node's job stays RUNNING; only its new boot id or confirm-dead ends the attempt."""
    harness = EngineHarness()
    job = harness.submit()
    harness.start(job, "t0")
    harness.sim.handle(NodeSilent(node=NodeName("t0"), silent_s=20.0))
    harness.wait(1000.0 - 1.0)
    assert (harness.node("t0").role, state(job)) == (NodeRole.LOST, JobState.RUNNING)
    dead = OperatorAsked(action=OperatorAction.CONFIRM_DEAD, by="ops/me", target="t0")
    harness.sim.handle(dead)
    assert (state(job), job.counts.node_faults) == (JobState.PENDING, 1)


def test_a_node_that_is_heard_again_goes_on_where_it_was() -> None:
    """Reconciliation: the report of a LOST node restores its role and its workers."""
    harness = EngineHarness()
    job = harness.submit()
    harness.start(job, "t0")
    harness.sim.handle(NodeSilent(node=NodeName("t0"), silent_s=20.0))
    harness.sim.nodes[NodeName("t0")].report_soon()
    harness.settle()
    assert (harness.node("t0").role, state(job)) == (NodeRole.TRAINING, JobState.RUNNING)


def test_an_empty_journal_stops_nothing() -> None:
    """A new engine that hears running workers asks for ledgers, adopts jobs and leases."""
    harness = EngineHarness(delays=SLOW)
    lend(harness)
    job = harness.submit(workers=(1, 2), work_s=5000.0)
    harness.start(job, "t0")
    added = (Placement(node=NodeName("i0"), worker_count=1, is_flexible=True),)
    harness.decide(Resize(job_id=job.job_id, added=added, reason="room"))
    harness.wait(5.0)
    keys = {worker.key for worker in job.workers.values()}

    fresh = Engine(harness.engine.settings)
    fresh.policy = harness.engine.policy
    harness.sim.engine = fresh
    harness.sim.handle(LeaderStarted(epoch=7, holder="new"))
    for node in harness.sim.nodes.values():
        node.report_soon()
    harness.wait(5.0)
    found = fresh.state.jobs[job.job_id]
    assert {worker.key for worker in found.workers.values()} == keys
    assert (found.state, found.running_workers) == (JobState.RUNNING, 2)
    assert fresh.state.nodes[NodeName("i0")].lease is not None
    harness.wait(5000.0)
    assert state(found) == JobState.SUCCEEDED


def test_orders_of_an_unknown_node_change_nothing() -> None:
    """A ledger of nobody is dropped."""
    harness = EngineHarness()
    before = harness.engine.encode_state()
    harness.engine.handle(OrdersRecovered(node=NodeName("ghost"), orders=()), now_s=0.0)
    assert harness.engine.encode_state() == before


def test_a_snapshot_goes_on_exactly_like_the_original() -> None:
    """Encode, decode, go on: the same bytes at the end."""
    harness = EngineHarness(delays=SLOW)
    lend(harness)
    job = harness.submit(work_s=50.0)
    harness.start(job, "i0")
    harness.wait(1.0)
    copy = Engine(harness.engine.settings, decode_state(harness.engine.encode_state()))
    assert copy.encode_state() == harness.engine.encode_state()
    event = OperatorAsked(action=OperatorAction.RECALL, by="ops/me")
    first = harness.engine.handle(event, now_s=100.0)
    second = copy.handle(event, now_s=100.0)
    assert first == second
    assert copy.encode_state() == harness.engine.encode_state()
