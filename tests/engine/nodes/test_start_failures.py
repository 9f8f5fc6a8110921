"""Nodes that cannot start workers: a job leaves such a node alone, and then everybody does."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.messages import WorkerPhase
from common.model import JobState, NodeName, NodeRole, Pool
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.nodes.start_failures import MOST
from coordinator.engine.state.events import (
    JobCancelRequested,
    OperatorAction,
    OperatorAsked,
    PassDue,
    WorkerFact,
)
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Loan
from coordinator.service.api.explain_job import reasons as explain_job
from coordinator.service.api.explain_node import reasons as explain_node
from tests.harness.cluster.engine import CHAT, state
from tests.harness.cluster.scripted_nodes import (
    BACK_OFF_S,
    BROKEN,
    FAULT,
    GPUS,
    REST_S,
    SETTINGS,
    BlackHole,
    N,
    Refusal,
    Reporting,
    facts,
    service,
)


def closed() -> BlackHole:
    """A cell whose t0 has just been closed, by as many jobs as that takes."""
    cell = BlackHole(nodes=1)
    for number in range(MOST):
        assert not cell.node("t0").failed_starts.closed_reason
        cell.submit(f"j{number}")
        cell.passes()
    assert cell.node("t0").failed_starts.closed_reason
    return cell


def test_a_job_goes_elsewhere_after_one_refusal() -> None:
    """It is not tried again on the idle node that refused it, and it is free of charge."""
    cell = BlackHole()
    job = cell.submit("j")
    cell.passes()
    assert (job.counts.node_faults, job.retry.avoid_nodes) == (1, ["t0"])
    cell.passes()
    assert (state(job), {w.node for w in job.workers.values()}) == (JobState.RUNNING, {"t1"})
    assert job.counts.own_faults == 0


def test_with_nowhere_else_to_go_it_waits_longer_each_time() -> None:
    """A node that is the only one is tried again, after a back-off that says why."""
    cell = BlackHole(nodes=1)
    job = cell.submit("j")
    cell.passes()
    assert job.retry.avoid_nodes == []
    [said] = [why for why in explain_job(cell.engine, job) if "tries again" in why]
    assert said.endswith(f"{FAULT} (t0)")
    cell.wait(BACK_OFF_S - 5.0)
    assert job.attempt.number == 1
    cell.wait(5.0)
    assert (job.attempt.number, job.counts.node_faults) == (2, 2)
    cell.wait(2.0 * BACK_OFF_S - 5.0)
    assert job.attempt.number == 2
    cell.bad = set()
    cell.wait(5.0)
    cell.wait(0.0)
    assert (job.attempt.number, state(job)) == (3, JobState.RUNNING)


def test_a_node_that_fails_a_job_that_ran_for_long_begins_the_count_anew() -> None:
    """A boot a week is no row of faults, and its only node has it again at once."""
    cell = BlackHole(nodes=1)
    cell.bad = set()
    job = cell.submit("j")
    for boot in ("b2", "b3", "b4"):
        cell.passes()
        assert state(job) == JobState.RUNNING
        cell.now_s += REST_S
        cell.boots[NodeName("t0")] = boot
        cell.report("t0")
        assert (state(job), job.retry.node_faults) == (JobState.PENDING, 1)


def test_a_node_that_boots_again_and_again_gets_its_only_job_later_each_time() -> None:
    """What runs for less than it would wait does wait."""
    cell = BlackHole(nodes=1)
    cell.bad = set()
    job = cell.submit("j")
    waits_s: list[float] = []
    for boot in ("b2", "b3", "b4"):
        cell.passes()
        assert state(job) == JobState.RUNNING
        cell.now_s += BACK_OFF_S
        cell.boots[NodeName("t0")] = boot
        cell.report("t0")
        waits_s.append(0.0 if job.retry.at_s is None else job.retry.at_s - cell.now_s)
        cell.now_s += waits_s[-1]
    assert waits_s == pytest.approx([0.0, 2.0 * BACK_OFF_S, 4.0 * BACK_OFF_S])


def test_a_job_comes_back_to_the_node_when_the_others_have_no_room() -> None:
    """Not before its back-off is over: it may only have booted, and nothing else may be free."""
    cell = BlackHole()
    job, other = cell.submit("j"), cell.submit("other")
    cell.bad = set()
    cell.passes()
    bad = next(iter(job.workers.values())).node
    cell.boots[bad] = "b2"
    cell.report(bad)
    cell.passes()
    assert (state(job), state(other)) == (JobState.PENDING, JobState.RUNNING)
    assert any("left alone" in why for why in explain_job(cell.engine, job))
    cell.wait(BACK_OFF_S)
    cell.passes()
    assert (state(job), {w.node for w in job.workers.values()}) == (JobState.RUNNING, {bad})


def test_two_nodes_that_refuse_a_job_are_both_left_alone() -> None:
    """It does not go back and forth between them while a third one is there."""
    cell = BlackHole(nodes=3)
    job = cell.submit("j")
    cell.passes()
    cell.handle(PassDue())
    [worker] = job.workers.values()
    assert worker.node == "t1"
    cell.report("t1", BROKEN.of(worker))
    cell.report("t1")
    assert job.retry.avoid_nodes == ["t0", "t1"]
    cell.passes()
    assert {w.node for w in job.workers.values()} == {"t2"}


def test_a_node_that_refuses_start_after_start_takes_nothing_new() -> None:
    """Told once, with the reason; nobody is placed there, though it is idle and a job waits."""
    cell = closed()
    assert cell.told("t0").count("takes nothing new") == 1
    waits = cell.submit("waits")
    [view] = cell.engine.snapshot().nodes
    assert (view.is_schedulable, view.takes_nothing) == (False, True)
    cell.passes()
    assert (state(waits), waits.attempt.number) == (JobState.PENDING, 0)
    [said] = [why for why in explain_node(cell.engine, cell.node("t0")) if "refused" in why]
    assert f"refused {MOST} starts in a row, the last: {BROKEN.error}" in said
    assert "aryl node uncordon t0" in said


def test_it_is_tried_again_after_a_while_and_closed_by_one_more_refusal() -> None:
    """With one job at a time, for as long as it cannot start any."""
    cell = closed()
    cell.wait(REST_S)
    assert cell.told("t0").count("takes new work again") == 1
    attempts = sum(job.attempt.number for job in cell.engine.state.live())
    cell.passes()
    assert sum(job.attempt.number for job in cell.engine.state.live()) == attempts + 1
    assert cell.told("t0").count("takes nothing new") == 2


def test_the_engine_wakes_when_it_is_to_be_tried_again() -> None:
    """Also where nothing else is going to happen."""
    cell = closed()
    for job in cell.engine.state.live():
        outcome = cell.handle(JobCancelRequested(job_id=job.job_id, by="t/u"))
    assert outcome.wake_at_s == cell.engine.state.closed_until_s[NodeName("t0")]


def test_a_job_that_runs_elsewhere_may_grow_onto_the_node_when_that_is_well() -> None:
    """It leaves it alone for the back-off, not for as long as it runs."""
    cell = BlackHole()
    job = cell.submit("j", most=2)
    cell.passes()
    cell.passes()
    assert {w.node for w in job.workers.values()} == {"t1"}
    cell.bad = set()
    cell.passes()
    assert (job.running_workers, job.retry.avoid_nodes) == (1, ["t0"])
    cell.wait(SETTINGS.resize_cooldown_s)
    cell.passes()
    assert {w.node for w in job.workers.values()} == {"t0", "t1"}


def test_a_closed_node_is_no_other_place_to_go() -> None:
    """A job that was refused waits, instead of waiting for a node that takes nothing."""
    cell = BlackHole()
    cell.operate(OperatorAction.CORDON, "t0")
    cell.bad = {"t1"}
    for number in range(MOST):
        job = cell.submit(f"j{number}")
        cell.passes()
        cell.handle(JobCancelRequested(job_id=job.job_id, by="t/u"))
    assert cell.node("t1").failed_starts.closed_reason
    cell.operate(OperatorAction.UNCORDON, "t0")
    cell.bad = {"t0"}
    job = cell.submit("j")
    cell.passes()
    assert (state(job), job.counts.node_faults) == (JobState.PENDING, 1)
    assert job.retry.avoid_nodes == []
    assert job.retry.at_s is not None


def test_a_lent_node_that_refused_its_jobs_is_not_lent_again_at_once() -> None:
    """It comes home, serves, and no policy lends it; one that does all the same is refused."""
    cell = Reporting(Pool.INFERENCE, service())
    jobs = [cell.submit(f"j{number}") for number in range(MOST)]
    cell.lend()
    for job in jobs:
        cell.passes()
        cell.workers = facts(job.workers.values(), WorkerPhase.READY)
        cell.report()
        cell.workers = tuple(map(BROKEN.of, job.workers.values()))
        cell.report()
        cell.workers = ()
        cell.report()
    assert cell.node.failed_starts.closed_reason
    cell.handle(OperatorAsked(action=OperatorAction.RECALL, by="ops/ada"))
    cell.handle(OperatorAsked(action=OperatorAction.END_RECALL, by="ops/ada"))
    cell.lease_id = None
    for cell.role in (NodeRole.VACATING, NodeRole.WARMING, NodeRole.SERVING):
        cell.report()
    assert cell.loan_pass().decisions == ()
    assert any("it takes nothing new" in why for why in cell.engine.explain.why_kept(N))
    loan = Loan(node=N, service=CHAT, reason="a policy that does not look")
    cell.engine.policy = replace(cell.engine.policy, lend=lambda snapshot: (loan,))
    [refused] = cell.loan_pass().refused
    assert f"takes nothing new: it refused {MOST} starts in a row" in refused.why


def test_a_worker_that_starts_ends_the_row() -> None:
    """Refusals with starts between them close no node."""
    cell = BlackHole(nodes=1)
    for number in range(3 * MOST):
        cell.bad = set() if number % MOST == MOST - 1 else {"t0"}
        job = cell.submit(f"j{number}")
        cell.passes()
        if not cell.bad:
            assert state(job) == JobState.RUNNING
            done = tuple(
                WorkerFact(key=w.key, phase=WorkerPhase.EXITED, exit_code=0)
                for w in job.workers.values()
            )
            cell.report("t0", *done)
            cell.report("t0")
    assert "takes nothing new" not in cell.told("t0")


@pytest.mark.parametrize("how", ["uncordon", "boot"])
def test_a_node_that_was_mended_takes_work_at_once(how: str) -> None:
    """By an operator's word, or by a boot; and the row begins anew."""
    cell = closed()
    if how == "boot":
        cell.boots[NodeName("t0")] = "b2"
        cell.report("t0")
    else:
        cell.operate(OperatorAction.UNCORDON, "t0")
    assert (cell.node("t0").failed_starts.closed_reason, cell.node("t0").failed_starts.refused) == (
        "",
        0,
    )
    cell.bad = set()
    job = cell.submit("new")
    cell.passes()
    assert state(job) == JobState.RUNNING


@pytest.mark.parametrize("most", [2, 3], ids=["gang", "elastic"])
def test_an_attempt_counts_once_however_many_workers_it_has_there(most: int) -> None:
    """One start was refused, also of a gang that would have gone on without its flexible worker."""
    cell = BlackHole(nodes=1)
    job = cell.submit("j", workers=4 - most, gpus=1, most=most)
    cell.handle(PassDue())
    cell.say(WorkerPhase.READY)
    assert len(job.workers) == 2
    refused = [cell.fact(worker, WorkerPhase.RUNNING) for worker in job.workers.values()]
    cell.report("t0", *reversed(refused))
    assert (state(job), cell.node("t0").failed_starts.refused) == (JobState.PENDING, 1)


def reserve_refused(cell: BlackHole, job: JobEntry) -> None:
    """The node cannot even reserve for a job that was placed there."""
    cell.handle(PassDue())
    cell.report(
        "t0",
        *map(Refusal("no answer").of, job.workers.values()),
    )
    cell.report("t0")


def test_jobs_whose_storage_hangs_close_no_node() -> None:
    """They are refused at their reserve, one after the other and in turns, wherever they come."""
    cell = BlackHole(nodes=1)
    jobs = [cell.submit(f"hangs{number}") for number in range(2 * MOST)]
    for job in [*jobs, *jobs]:
        cell.now_s += REST_S
        reserve_refused(cell, job)
    assert cell.node("t0").failed_starts.refused == 0
    assert "takes nothing new" not in cell.told("t0")


def test_a_job_that_every_node_refuses_waits_between_two_tries() -> None:
    """It may go back to the one that refused it first, but not at once."""
    cell = BlackHole(nodes=2)
    job = cell.submit("hangs")
    tried: list[NodeName] = []
    for _ in range(2):
        cell.handle(PassDue())
        [worker] = job.workers.values()
        tried.append(worker.node)
        cell.report(worker.node, Refusal("no answer").of(worker))
        cell.report(worker.node)
    assert sorted(tried) == ["t0", "t1"]
    assert job.retry.at_s is not None
    assert job.retry.at_s > cell.now_s
    cell.handle(PassDue())
    assert (state(job), job.attempt.number) == (JobState.PENDING, 2)


def test_a_gpu_that_is_gone_closes_no_node() -> None:
    """Jobs that were placed on it are refused; the others of the node start workers as before."""
    cell = BlackHole(nodes=1)
    jobs = [cell.submit(f"j{number}") for number in range(MOST)]
    for job in jobs:
        cell.handle(PassDue())
        cell.report("t0", *map(BROKEN.of, job.workers.values()), gpus=GPUS[:1])
        cell.report("t0")
    assert cell.node("t0").failed_starts.refused == 0


def test_what_is_known_of_a_closed_node_outlives_the_leader() -> None:
    """The next one leaves it alone as well, and wakes when it is to be tried again."""
    cell = closed()
    again = Engine(SETTINGS, decode_state(cell.engine.encode_state()))
    assert again.check() == []
    assert again.state.closed_until_s == cell.engine.state.closed_until_s
    outcome = again.handle(PassDue(), now_s=cell.now_s + REST_S)
    assert outcome.needs_pass
    assert again.state.closed_until_s == {}
