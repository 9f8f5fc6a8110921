"""A job's number: accepted wherever an id is, and shown to callers that ask for rows in full."""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import replace

from common.api import (
    ApiError,
    ApiErrorCode,
    Cancel,
    Change,
    Describe,
    Description,
    Done,
    GetEvents,
    Jobs,
    ListJobs,
    ListNodes,
    Nodes,
    Submit,
    Submitted,
)
from common.model import ArraySpec, Dependency, DependencyKind, JobId, JobSpec
from coordinator.service.coordinator import Coordinator
from tests.service.cell import Cell, make_spec, running, submit


async def test_a_number_stands_for_its_job_in_every_request() -> None:
    """People type it, and Slurm's clients know nothing else."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        await submit(cell, "a")
        job_id = await submit(cell, "b")
        found = await cell.ask(Describe(kind="job", name="2", in_full=True))
        assert isinstance(found, Description)
        assert found.job is not None
        assert (found.name, found.job.number) == (job_id, 2)
        events = await cell.ask(GetEvents(subject="2"))
        assert getattr(events, "subject", "") == f"job/{job_id}"
        assert isinstance(await cell.ask(Cancel(job_id="2")), Done)
        assert list(coordinator.engine.state.live_jobs) == ids(coordinator)[:1]


async def test_a_dependency_on_a_number_is_one_on_the_job_that_has_it() -> None:
    """At submission, again by the same request even once that job is forgotten, and later."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        first = await submit(cell, "a")
        array = await cell.ask(
            Submit(spec=replace(make_spec("b"), array=ArraySpec(indices="4-5")), request_id="b")
        )
        assert isinstance(array, Submitted)
        asked = (_ok("1"), _ok("2_5"))
        request = Submit(spec=replace(make_spec("c"), depends_on=asked), request_id="c")
        made = await cell.ask(request)
        assert isinstance(made, Submitted), made
        job = coordinator.engine.state.jobs[JobId(made.job_id)]
        assert job.spec.depends_on == (_ok(first), _ok(f"{array.job_id}_5"))
        shown = await cell.ask(Describe(kind="job", name=made.job_id, in_full=True))
        assert isinstance(shown, Description)
        assert shown.job and shown.job.request and shown.job.request.waits_for == asked
        assert await cell.ask(request) == made
        forgotten = coordinator.engine.state.jobs.pop(JobId(first))
        again = await cell.ask(request)
        assert isinstance(again, Submitted) and again.job_id == made.job_id
        coordinator.engine.state.jobs[forgotten.job_id] = forgotten
        other = replace(request, spec=replace(request.spec, depends_on=(_ok("1"), _ok("2"))))
        refused = await cell.ask(other)
        assert isinstance(refused, ApiError) and refused.code == ApiErrorCode.CONFLICT
        changed = await cell.ask(Change(job_id=made.job_id, depends_on=(_ok("2"),)))
        assert isinstance(changed, Done), changed
        shown = await cell.ask(Describe(kind="job", name=made.job_id))
        assert isinstance(shown, Description)
        assert shown.spec and shown.spec.depends_on == (_ok(array.job_id),)
        for number in ("77", "2_9"):
            reply = await cell.ask(Change(job_id=made.job_id, depends_on=(_ok(number),)))
            assert isinstance(reply, ApiError) and reply.field == "depends_on"
            assert repr(number) in reply.message


def _ok(job: str) -> Dependency:
    return Dependency(job=job, when=DependencyKind.OK)


def ids(coordinator: Coordinator) -> list[str]:
    """The ids of all jobs, in order of submission."""
    return [str(job_id) for job_id in coordinator.engine.state.jobs]


async def test_a_number_that_is_also_the_name_of_another_job_is_refused() -> None:
    """A cancel must not end the wrong one of them."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        await submit(cell, "a")
        await submit(cell, "1")
        reply = await cell.ask(Cancel(job_id="1"))
        assert isinstance(reply, ApiError)
        assert reply.code == ApiErrorCode.CONFLICT
        assert all(one in reply.message for one in ids(coordinator))
        assert len(coordinator.engine.state.live_jobs) == 2


async def test_a_name_of_digits_still_stands_for_its_job_where_no_job_has_the_number() -> None:
    """As it did before there were numbers."""
    async with Cell() as cell:
        await cell.lead()
        job_id = await submit(cell, "77")
        found = await cell.ask(Describe(kind="job", name="77"))
        assert getattr(found, "name", None) == job_id


async def test_rows_have_numbers_and_requests_only_for_callers_that_ask_for_them() -> None:
    """A caller of an older version refuses a field that it does not know."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        await running(cell, coordinator, "a")
        plain = await cell.ask(ListJobs())
        assert isinstance(plain, Jobs)
        assert {(row.number, row.request) for row in plain.rows} == {(UNSET, UNSET)}
        full = await cell.ask(ListJobs(in_full=True))
        assert isinstance(full, Jobs)
        [row] = full.rows
        assert row.number == 1
        assert row.request
        assert row.request.ran_on == row.nodes
        assert (row.request.grace_s, row.request.ran_workers) == (5.0, 1)
        nodes = await cell.ask(ListNodes())
        assert isinstance(nodes, Nodes)
        assert {node.cpus for node in nodes.rows} == {UNSET}
        nodes = await cell.ask(ListNodes(in_full=True))
        assert isinstance(nodes, Nodes)
        assert all(isinstance(node.cpus, int) for node in nodes.rows)


async def test_title_and_comment_are_those_of_the_batch_script() -> None:
    """A name has rules, and the title of a batch job has none."""
    async with Cell() as cell:
        await cell.lead()
        spec: JobSpec = make_spec("job_sh")
        env = {"SLURM_JOB_NAME": "job.sh", "SLURM_JOB_COMMENT": "why not"}
        await cell.ask(Submit(spec=replace(spec, env=env), request_id="r"))
        full = await cell.ask(ListJobs(in_full=True))
        assert isinstance(full, Jobs)
        [row] = full.rows
        assert row.request
        assert (row.request.title, row.request.comment) == ("job.sh", "why not")
