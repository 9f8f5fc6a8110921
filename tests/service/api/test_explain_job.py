"""What is said of a job whose workers were told to stop, and of what ended its latest try."""

from __future__ import annotations

import pytest

from common.api import Cancel, Describe, Description, Jobs, ListJobs
from common.faults import Fault
from common.messages import DesiredState, WorkerPhase
from common.model import JobState, NodeName, StopReason
from coordinator import plain_text
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.state.events import JobCancelRequested, OperatorAction, PassDue, WorkerFact
from coordinator.engine.state.tables import AfterVacating, JobEntry
from coordinator.policies.contract.decisions import Preempt
from coordinator.service.api import explain_job, rows
from tests.harness.cluster.coordinator import Cell, job, running
from tests.harness.cluster.engine import EngineHarness, state
from tests.harness.cluster.scripted_nodes import BACK_OFF_S, SETTINGS, BlackHole, Refusal


async def described(cell: Cell, job_id: str) -> Description:
    """The job in full."""
    answer = await cell.ask(Describe(kind="job", name=job_id))
    assert isinstance(answer, Description), answer
    return answer


async def test_a_job_that_is_being_cancelled_says_so_until_it_has_ended() -> None:
    """By whom, and how long its worker may take; in the list as well."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        job_id = await running(cell, coordinator)
        pretend = cell.agents["t0"].node
        obey = pretend.obey
        orders: list[DesiredState] = []

        def keep(desired: DesiredState) -> None:
            orders.append(desired)

        pretend.obey = keep  # type: ignore[method-assign]  # a worker that takes its time
        await cell.ask(Cancel(job_id=job_id))
        await cell.clock.advance(2.0)
        found = await described(cell, job_id)
        assert found.why[0] == "cancelled by team/ann: it ends when its workers have left t0"
        assert found.why[1].startswith("worker 0 on t0 was ordered to stop ")
        assert found.why[1].endswith(" of its grace of 5 s left")
        left_s = int(found.why[1].split(" and has ")[1].split()[0])
        assert 0 < left_s <= 3
        answer = await cell.ask(ListJobs())
        assert isinstance(answer, Jobs)
        assert plain_text.why(answer.rows[0]).startswith("cancelled by team/ann")
        await cell.clock.advance(10.0)
        assert "is past its grace of 5 s" in (await described(cell, job_id)).why[1]
        pretend.obey = obey  # type: ignore[method-assign]
        obey(orders[-1])
        await cell.until(lambda: job(coordinator, job_id).state == JobState.CANCELLED)
        assert (await described(cell, job_id)).why == ("cancelled by team/ann",)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (AfterVacating.REQUEUE, "it waits again when its workers have left t0"),
        (AfterVacating.SUCCEED, "its work is done: it ends when its workers have left t0"),
        (
            AfterVacating.FAIL,
            "it failed (exit code 3) and is not tried again: it ends when its workers have left t0",
        ),
    ],
)
def test_what_becomes_of_a_job_is_said_by_what_will(after: AfterVacating, said: str) -> None:
    """All of them stop their workers, and only some wait again."""
    harness = EngineHarness()
    entry = harness.submit()
    harness.start(entry, "t0")
    harness.wait(10.0)
    assert explain_job.stopping_reasons(entry, now_s=harness.sim.loop.now_s) == ()
    entry.after_vacating, entry.exit_code = after, 3
    assert explain_job.stopping_reasons(entry, now_s=harness.sim.loop.now_s) == (said,)


def test_a_job_that_was_cancelled_while_it_was_preempted_does_not_wait_again() -> None:
    """Its state is still that of a preemption."""
    harness = EngineHarness()
    entry = harness.submit()
    harness.start(entry, "t0")
    harness.wait(10.0)
    harness.toggle_deaf(NodeName("t0"))
    harness.decide(Preempt(job_id=entry.job_id, reason="the test says so"))
    harness.sim.handle(JobCancelRequested(job_id=entry.job_id, by="ops/ada"))
    assert state(entry) == JobState.PREEMPTING
    [what, _] = explain_job.reasons(harness.engine, entry)
    assert what == "cancelled by ops/ada: it ends when its workers have left t0"
    harness.sim.handle(JobCancelRequested(job_id=entry.job_id, by="ops/bob"))
    assert explain_job.reasons(harness.engine, entry)[0] == what


SILENT = Refusal("workdir or checkpoint.path: the storage did not answer in 10 s", Fault.STORAGE)
HUNG = SILENT.told
EARLIER = "its latest try ended: "


def on_two_nodes() -> tuple[BlackHole, JobEntry]:
    """A cell of well nodes, with a job whose storage hung on t0 while somebody else has t1."""
    cell = BlackHole(nodes=2)
    cell.bad = set()
    other = cell.submit("other")
    cell.handle(PassDue())
    [worker] = other.workers.values()
    is_other_first = worker.node == "t0"
    cell.say(WorkerPhase.READY)
    job = cell.submit("j")
    cell.handle(PassDue())
    hangs(cell, job)
    assert job.state == JobState.PENDING
    assert list(job.retry.avoided) == [NodeName("t1" if is_other_first else "t0")]
    return cell, job


def hangs(cell: BlackHole, job: JobEntry) -> None:
    """The node of a job's only worker refuses it."""
    [worker] = job.workers.values()
    cell.report(worker.node, SILENT.of(worker))


def shown(cell: BlackHole, job: JobEntry) -> str:
    """What `job list` has in its column."""
    return plain_text.why(rows.job_row(cell.engine, job, now_s=cell.now_s))


def test_a_node_left_alone_is_named_with_what_went_wrong_there() -> None:
    """Before how many GPUs are free elsewhere, in the list as in what explains a job."""
    cell, job = on_two_nodes()
    [name] = job.retry.avoid_nodes
    left_s = job.retry.avoided[name].until_s - cell.engine.state.now_s
    said = f"tries {name} again in {left_s:.0f} s, others at once: {HUNG}"
    assert 0 < left_s <= BACK_OFF_S
    assert shown(cell, job).startswith(said)
    reasons = explain_job.reasons(cell.engine, job)
    assert reasons[0] == shown(cell, job)
    assert any("left alone for now" in reason for reason in reasons[1:])


def test_a_job_that_fits_nowhere_else_names_the_node_that_it_waits_for() -> None:
    """Its storage hung on the only one."""
    cell = BlackHole(nodes=1)
    job = cell.submit("j")
    cell.handle(PassDue())
    hangs(cell, job)
    said = f"tries again in {BACK_OFF_S:.0f} s: {HUNG} (t0)"
    assert explain_job.reasons(cell.engine, job)[0] == shown(cell, job) == said


def test_what_its_node_says_of_it_is_not_told_twice() -> None:
    """The words of a gang that was not ready name their nodes already."""
    cell = BlackHole(nodes=2)
    cell.submit("other")
    cell.handle(PassDue())
    cell.say(WorkerPhase.READY)
    job = cell.submit("j")
    cell.handle(PassDue())
    [worker] = job.workers.values()
    fact = WorkerFact(key=worker.key, phase=WorkerPhase.RESERVING, error="storage is slow")
    cell.report(worker.node, fact)
    cell.now_s += SETTINGS.gang_ready_timeout_s
    cell.handle(PassDue())
    stopped = WorkerFact(
        key=worker.key, phase=WorkerPhase.EXITED, stop_reason=StopReason.GANG_TIMEOUT
    )
    cell.report(worker.node, stopped)
    assert job.state == JobState.PENDING
    assert shown(cell, job).endswith(f": not ready: {worker.node} (storage is slow)")


def test_once_the_node_may_be_tried_again_the_fault_is_the_last_word() -> None:
    """What is missing now is what it waits for; why it lost its place is still told."""
    cell = BlackHole(nodes=1)
    job = cell.submit("j")
    cell.handle(PassDue())
    hangs(cell, job)
    cell.operate(OperatorAction.CORDON, "t0")
    cell.wait(BACK_OFF_S)
    reasons = explain_job.reasons(cell.engine, job)
    assert f"{EARLIER}{HUNG} (t0)" in reasons[1:]
    assert HUNG not in shown(cell, job)


def test_a_try_that_went_well_makes_an_end_of_it() -> None:
    """A job that ran since and was sent away has no fault to tell."""
    cell, job = on_two_nodes()
    cell.wait(BACK_OFF_S)
    cell.wait(0.0)
    assert job.state == JobState.RUNNING
    assert job.retry.failed_on == []
    assert not any(HUNG in reason for reason in explain_job.reasons(cell.engine, job))


def test_a_new_leader_knows_it_as_well() -> None:
    """It is part of the state that a leader begins with."""
    cell, job = on_two_nodes()
    new = Engine(SETTINGS, decode_state(cell.engine.encode_state()))
    assert new.explain.blockers(job.job_id)[0] == cell.engine.explain.blockers(job.job_id)[0]
