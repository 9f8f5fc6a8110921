"""Names in requests: a job's number, and whose events a name asks for."""

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
    Events,
    GetEvents,
    Jobs,
    ListJobs,
    ListNodes,
    Nodes,
    Operate,
    Submit,
    Submitted,
)
from common.model import ArraySpec, Dependency, DependencyKind, JobId, JobSpec, NodeName, NodeRole
from coordinator.service.coordinator import Coordinator
from tests.harness.cluster.coordinator import CHAT, Cell, make_spec, on_loan, running, submit
from tests.tables import each_row


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


async def events(cell: Cell, subject: str, *, after: int = 0) -> Events:
    """The answer that is none of a refusal."""
    reply = await cell.ask(GetEvents(subject=subject, after=after))
    assert isinstance(reply, Events), reply
    return reply


async def refused(cell: Cell, subject: str) -> ApiError:
    """The refusal."""
    reply = await cell.ask(GetEvents(subject=subject))
    assert isinstance(reply, ApiError), reply
    return reply


def subjects(found: Events) -> set[str]:
    """Whom the lines are of."""
    return {row.subject for row in found.rows}


async def test_a_job_is_known_by_its_id_and_by_its_name() -> None:
    """Both ask for the same lines, and both answers name the id."""
    async with Cell() as cell:
        await cell.lead()
        job_id = await submit(cell, "train")
        await submit(cell, "other")
        answers = [await events(cell, name) for name in (job_id, "train", "job/train")]
        assert {answer.subject for answer in answers} == {f"job/{job_id}"}
        assert answers[0].rows == answers[1].rows == answers[2].rows
        assert subjects(answers[0]) == {job_id}


async def test_a_service_stands_for_itself_and_its_nodes() -> None:
    """An order to the service and what its nodes do, and nothing of a training node."""
    async with Cell(inference=2) as cell:
        await cell.lead()
        await cell.ask(Operate(action="set_mode", target=CHAT, value="observe"), tenant="ops")
        found = await events(cell, CHAT)
        assert found.subject == f"service/{CHAT}"
        assert subjects(found) == {CHAT, "i0", "i1"}


async def test_a_loan_is_its_node_while_it_was_lent() -> None:
    """What the node did before and after the loan is no event of the loan."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        await on_loan(cell, coordinator)
        [lease_id] = coordinator.engine.state.loans
        await bring_home(cell, coordinator)
        await cell.clock.advance(1.0)
        await cell.ask(Operate(action="cordon", target="i0"), tenant="ops")
        mine, all_of_node = await events(cell, lease_id), await events(cell, "i0")
        assert mine.subject == f"loan/{lease_id}"
        assert mine.rows[0].what.startswith("lend ")
        assert mine.rows[-1].what.startswith("home again")
        assert set(mine.rows) < set(all_of_node.rows)
        assert (await events(cell, "loan/i0")).rows == mine.rows


async def bring_home(cell: Cell, coordinator: Coordinator) -> None:
    """Recall the service until its node serves."""
    await cell.ask(Operate(action="recall", target=CHAT), tenant="ops")
    node = coordinator.engine.state.nodes[NodeName("i0")]
    await cell.until(lambda: node.role == NodeRole.SERVING and node.homecoming.lease_id is None)


async def test_the_cell_has_events_of_its_own() -> None:
    """Who leads it, for example."""
    async with Cell() as cell:
        await cell.lead()
        assert subjects(await events(cell, "cell")) == {"cell"}


@each_row("name", ["nope", "node/nope", "service/t0", "loan/t0", "job/t0", "job/"])
async def test_what_is_unknown_is_refused(name: str) -> None:
    """An empty answer would look like peace."""
    async with Cell(inference=1) as cell:
        await cell.lead()
        assert (await refused(cell, name)).code == ApiErrorCode.NOT_FOUND


async def test_a_kind_that_is_none_is_refused_with_those_that_are() -> None:
    """The caller reads what can stand before the slash."""
    async with Cell() as cell:
        await cell.lead()
        error = await refused(cell, "pod/t0")
        assert error.code == ApiErrorCode.USAGE
        assert "job/, node/, service/, loan/" in error.message


async def test_a_name_of_two_things_is_refused_until_its_kind_is_said() -> None:
    """A job that is named like a node; two jobs of one name."""
    async with Cell() as cell:
        await cell.lead()
        job_id = await submit(cell, "t0")
        error = await refused(cell, "t0")
        assert error.code == ApiErrorCode.CONFLICT
        assert f"job/{job_id} and node/t0" in error.message
        assert subjects(await events(cell, "job/t0")) == {job_id}
        assert subjects(await events(cell, "node/t0")) == {"t0"}
        for request in ("a", "b"):
            await submit_as(cell, request)
        assert (await refused(cell, "twin")).code == ApiErrorCode.CONFLICT


async def submit_as(cell: Cell, request_id: str) -> None:
    """One more job named `twin`."""
    reply = await cell.ask(Submit(spec=make_spec("twin"), request_id=request_id))
    assert isinstance(reply, Submitted)


async def test_a_forgotten_job_is_known_as_long_as_its_lines_are() -> None:
    """Jobs are forgotten sooner than what happened to them."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        job_id = await submit(cell, "gone")
        state = coordinator.engine.state
        await cell.ask(Operate(action="freeze"), tenant="ops")
        lines = (await events(cell, job_id)).rows
        assert lines
        # As the engine prunes it, without the thousand jobs that it waits for.
        del state.jobs[job_id]
        state.live_jobs.pop(job_id, None)
        assert (await events(cell, job_id)).rows == lines
