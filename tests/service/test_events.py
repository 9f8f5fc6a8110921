"""Whose events a name asks for: ids and names of jobs, nodes, services and loans."""

from __future__ import annotations

from common.api import ApiError, ApiErrorCode, Events, GetEvents, Operate, Submit, Submitted
from common.model import NodeName, NodeRole
from coordinator.service.coordinator import Coordinator
from tests.service.cell import CHAT, Cell, make_spec, on_loan, submit
from tests.tables import each_row


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
