"""Lists that one message does not carry come in pages, and callers see none of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.api import Events, GetEvents, Jobs, ListJobs, ListLoans, ListNodes, Loans, Nodes
from common.messages import MAX_MESSAGE_BYTES, encode
from common.model import JobId
from coordinator.client import Client
from coordinator.engine.state.events import JobCancelRequested, JobSubmitted
from coordinator.engine.state.tables import StoryLine
from coordinator.service.api import queries as api_queries
from coordinator.service.coordinator import Coordinator
from tests.harness.cluster.coordinator import CELL, Cell, make_spec

JOBS = 4000
"""At some 420 bytes a row more than one message carries."""


@given(st.integers(0, 30), st.integers(0, 30), st.booleans())
def test_what_is_behind_a_name_is_all_that_follows_it(count: int, at: int, is_gone: bool) -> None:
    """And all there is where the name is gone: some twice, none missing."""
    entries = {f"n{number}": number for number in range(count)}
    name = "gone" if is_gone or at >= count else f"n{at}"
    wanted = list(range(count)) if name == "gone" else list(range(at + 1, count))
    assert list(api_queries.after(entries, name)) == wanted


def test_a_page_is_as_many_rows_as_fit_and_never_none() -> None:
    """A row that alone is too large is a page, else nobody would ever get behind it."""
    row, large = "x" * 1000, "x" * api_queries.PAGE_BYTES * 2
    rows, has_more = api_queries.page([row] * 1000)
    assert has_more
    assert (
        api_queries.PAGE_BYTES - 1010
        < len(rows) * 1003
        <= api_queries.PAGE_BYTES
        < MAX_MESSAGE_BYTES
    )
    assert api_queries.page([large, row]) == ((large,), True)
    assert api_queries.page([row, large]) == ((row,), True)
    assert api_queries.page([row]) == ((row,), False)
    assert api_queries.page([]) == ((), False)


async def submitted(coordinator: Coordinator, cell: Cell, count: int) -> list[JobId]:
    """So many jobs in the journal."""
    spec = make_spec("j", gpus_per_worker=1)
    ids = [JobId(f"job-{number:05}") for number in range(count)]
    for job_id in ids:
        coordinator.decider.post(JobSubmitted(job_id=job_id, spec=spec, tenant="team", user="ann"))
    await cell.until(lambda: len(coordinator.engine.state.jobs) == count)
    return ids


async def test_all_jobs_of_a_large_cell_are_listed() -> None:
    """In the order of their submission, each once; the ended ones only where they are wanted."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        ids = await submitted(coordinator, cell, JOBS)
        client = Client(cell.caller, cell=CELL, tenant="team", user="ann")
        found = await cell.meanwhile(client.ask(ListJobs(), Jobs))
        assert [row.job_id for row in found.rows] == ids
        assert not found.has_more
        assert len(encode(found)) > MAX_MESSAGE_BYTES
        ended = [job_id for job_id in ids[10:] if not coordinator.engine.state.jobs[job_id].workers]
        for job_id in ended[::2]:
            coordinator.decider.post(JobCancelRequested(job_id=job_id, by="ann"))
        await cell.until(lambda: len(coordinator.engine.state.live_jobs) == JOBS - len(ended[::2]))
        live = await cell.meanwhile(client.ask(ListJobs(is_live_only=True), Jobs))
        gone = set(ended[::2])
        assert [row.job_id for row in live.rows] == [one for one in ids if one not in gone]


async def test_a_page_follows_the_one_before_it() -> None:
    """Whoever asks by hand says what came last; nodes, loans and events go the same way."""
    async with Cell(training=3) as cell:
        coordinator = await cell.lead()
        ids = await submitted(coordinator, cell, 3)
        reply = await cell.ask(ListJobs(after=ids[1]))
        assert isinstance(reply, Jobs)
        assert [row.job_id for row in reply.rows] == [ids[2]]
        nodes = await cell.ask(ListNodes(after="t0"))
        assert isinstance(nodes, Nodes)
        assert [row.node for row in nodes.rows] == ["t1", "t2"]
        loans = await cell.ask(ListLoans(after="l1-1"))
        assert isinstance(loans, Loans)
        assert (loans.rows, loans.has_more) == ((), False)


async def test_all_events_are_told_in_pages() -> None:
    """Five thousand lines with their reasons, each once and in order."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        await submitted(coordinator, cell, 10)
        state = coordinator.engine.state
        line = state.stories[-1]
        state.stories += [StoryLine(line.at_s, line.subject, "x" * 300, "why") for _ in range(4000)]
        client = Client(cell.caller, cell=CELL, tenant="team", user="ann")
        first = await cell.ask(GetEvents())
        assert isinstance(first, Events)
        assert first.has_more
        assert first.last == first.rows[-1].number
        found = await cell.meanwhile(client.ask(GetEvents(), Events))
        numbers = [row.number for row in found.rows]
        assert numbers == list(range(1, len(state.stories) + 1))
        assert found.last == numbers[-1]
