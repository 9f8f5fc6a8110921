"""Orders about jobs over the API: who may give one, and that a refused one changes nothing."""

from __future__ import annotations

from msgspec.structs import replace

from common.api import (
    ApiError,
    ApiErrorCode,
    Change,
    Describe,
    Description,
    Done,
    GetStatus,
    Hold,
    Release,
    Requeue,
    Status,
    Submit,
    Submitted,
)
from common.messages import Message
from common.model import Dependency, DependencyKind, Gate, JobId, JobState, WorkerRange
from coordinator.service.coordinator import Coordinator
from tests.harness.cluster.coordinator import Cell, make_spec
from tests.tables import each_row

OK = DependencyKind.OK


async def _submit(cell: Cell, name: str, **fields: object) -> str:
    reply = await cell.ask(Submit(spec=replace(make_spec(name), **fields), request_id=name))
    assert isinstance(reply, Submitted), reply
    return reply.job_id


def _state(coordinator: Coordinator) -> dict[str, tuple[JobState, str, int]]:
    jobs = coordinator.engine.state.jobs.values()
    return {job.spec.name: (job.state, job.gate.held_by, job.spec.priority) for job in jobs}


async def _refused(cell: Cell, request: Message, *words: str, tenant: str = "team") -> ApiErrorCode:
    """The code of a refusal that has these words; nothing changed."""
    coordinator = cell.leaders[0].coordinator
    before = _state(coordinator)
    reply = await cell.ask(request, tenant=tenant)
    assert isinstance(reply, ApiError), reply
    assert all(word in reply.message for word in words), reply.message
    assert _state(coordinator) == before
    return reply.code


async def test_orders_are_for_the_tenant_of_a_job_and_for_operators() -> None:
    """A hold by an operator ends by an operator."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        job = await _submit(cell, "a", is_held=True)
        ids = (job,)
        for request in (
            Hold(job_ids=ids), Release(job_ids=ids), Requeue(job_ids=ids),
            Change(job_id=job, priority=3),
        ):  # fmt: skip
            code = await _refused(cell, request, "belongs to team", tenant="other")
            assert code == ApiErrorCode.DENIED
        assert isinstance(await cell.ask(Hold(job_ids=ids), tenant="ops"), Done)
        code = await _refused(cell, Release(job_ids=ids), "held by ops/ann", "operator")
        assert code == ApiErrorCode.DENIED
        await _refused(cell, Hold(job_ids=ids), "held by ops/ann")
        assert isinstance(await cell.ask(Change(job_id=job, priority=3)), Done)
        assert isinstance(await cell.ask(Release(job_ids=ids), tenant="ops"), Done)
        assert coordinator.engine.state.jobs[JobId(job)].spec.priority == 3


async def test_an_order_to_several_jobs_is_given_to_all_or_none() -> None:
    """One that does not fit keeps it from the others, and the answer names that one."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        running = await _submit(cell, "runs")
        await cell.until(lambda: _state(coordinator)["runs"][0] == JobState.RUNNING)
        waiting = [await _submit(cell, name) for name in ("b", "c", "d", "e")]
        code = await _refused(
            cell, Hold(job_ids=(*waiting, running)), f"job {running}", "aryl job requeue"
        )
        assert code == ApiErrorCode.CONFLICT
        done = await cell.ask(Hold(job_ids=(*waiting, waiting[0])))
        assert isinstance(done, Done) and done.detail == "4 jobs are held"
        await _refused(cell, Requeue(job_ids=(running, waiting[0])), waiting[0], "waits already")
        status = await cell.ask(GetStatus())
        assert isinstance(status, Status) and (status.pending_jobs, status.held_jobs) == (4, 4)


SPEC = make_spec("train")
BAD: dict[str, tuple[Message, str]] = {
    "no such job": (Submit(
        spec=replace(SPEC, depends_on=(Dependency(job="nowhere", when=OK),)), request_id="r"
    ), "depends_on"),
    "too many": (Submit(
        spec=replace(SPEC, depends_on=(Dependency(job="first", when=OK),) * 257), request_id="r"
    ), "depends_on"),
    "nothing to change": (Change(job_id="first"), ""),
    "not so many GPUs": (Change(job_id="first", workers=WorkerRange(min=3, max=2)), "workers"),
    "waits for itself": (
        Change(job_id="first", depends_on=(Dependency(job="FIRST", when=OK),)), "depends_on"
    ),
}  # fmt: skip


@each_row("why", BAD)
async def test_what_does_not_fit_is_refused_by_its_field(why: str) -> None:
    """At submission and later alike."""
    request, field = BAD[why]
    async with Cell() as cell:
        await cell.lead()
        job = await _submit(cell, "first", is_held=True)
        if isinstance(request, Change) and request.depends_on:
            request = replace(request, depends_on=(Dependency(job=job, when=OK),))
        reply = await cell.ask(request)
        assert isinstance(reply, ApiError)
        assert (reply.code, reply.field) == (ApiErrorCode.USAGE, field), reply


async def test_a_changed_job_is_still_the_one_of_its_request() -> None:
    """A submitter that asks again gets its job, and another job of that request is refused."""
    async with Cell() as cell:
        await cell.lead()
        first = await _submit(cell, "first", is_held=True)
        reply = await cell.ask(Change(job_id=first, priority=9, time_limit_s=60.0, deadline_s=None))
        assert isinstance(reply, Done)
        assert reply.detail.endswith(
            "priority 0 -> 9, time_limit_s none -> 60, deadline_s none -> none"
        )
        assert await _submit(cell, "first", is_held=True) == first
        other = replace(make_spec("first"), is_held=True, priority=9)
        refused = await cell.ask(Submit(spec=other, request_id="first"))
        assert isinstance(refused, ApiError) and refused.code == ApiErrorCode.CONFLICT


async def test_a_change_to_labels_that_no_node_has_warns() -> None:
    """The order is carried out: a node may get the label."""
    async with Cell() as cell:
        await cell.lead()
        job = await _submit(cell, "first", is_held=True)
        reply = await cell.ask(Change(job_id=job, require=("nvlink",)))
        assert isinstance(reply, Done)
        assert reply.detail.endswith(
            "; warning: can never run here: no node has nvlink, which it requires"
        )
        reply = await cell.ask(Change(job_id=job, priority=3))
        assert isinstance(reply, Done) and "warning" not in reply.detail


async def test_a_description_says_what_a_job_waits_for() -> None:
    """In its row by a word, in its reasons by a sentence; a submitter hears it at once."""
    async with Cell() as cell:
        await cell.lead()
        first = await _submit(cell, "first", is_held=True)
        after = (Dependency(job=first, when=OK),)
        reply = await cell.ask(
            Submit(spec=replace(make_spec("second"), depends_on=after), request_id="second")
        )
        assert isinstance(reply, Submitted)
        assert reply.gate == f"it waits for {first} to succeed (first is pending)"
        found = await cell.ask(Describe(kind="job", name="second"))
        assert isinstance(found, Description) and found.job is not None
        assert (found.job.gate, found.job.blockers[0]) == (Gate.DEPENDENCY, reply.gate)
        assert found.why[0] == reply.gate
        held = await cell.ask(Describe(kind="job", name="first"))
        assert isinstance(held, Description) and held.job is not None
        assert held.job.blockers == (f"held by team/ann: aryl job release {first}",)
