"""A coordinator that dies at one exact point of a submit: no job is lost and none starts twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from common import subjects
from common.api import ApiError, ApiErrorCode, ListJobs, Submit, Submitted
from common.errors import Fenced, Unavailable
from common.messages import DesiredState, Message, OrderPhase, decode
from common.model import JobId, JobState, NodeName
from coordinator.engine.record import decode_record
from coordinator.engine.state.events import JobSubmitted
from coordinator.policies.contract.decisions import Start
from tests.harness.cluster.agents import LIMIT_S
from tests.harness.cluster.coordinator import CELL, Cell, decisions, job, make_spec
from tests.harness.fakes import MemoryJournal

SUBMIT = Submit(spec=make_spec(), request_id="r")
NODE = NodeName("t0")


class FatalJournal(MemoryJournal):
    """Its owner dies while it appends a job: the call never returns.

    Args:
        is_written: whether the record is in the journal by then.
    """

    def __init__(self, records: list[bytes], *, is_written: bool) -> None:
        super().__init__(records)
        self.is_reached = False
        self._is_written = is_written

    async def append(self, record: bytes) -> int:
        entries = decode_record(record, sequence=0).entries
        if not any(isinstance(entry.event, JobSubmitted) for entry in entries):
            return await super().append(record)
        if self._is_written:
            await super().append(record)
        self.is_reached = True
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


def submitted(cell: Cell) -> list[JobId]:
    """The jobs that the journal holds, once for each time that one entered."""
    events = [entry.event for _, record in cell.journal() for entry in record.entries]
    return [event.job_id for event in events if isinstance(event, JobSubmitted)]


async def insist(cell: Cell) -> JobId:
    """What a submitter does that heard nothing: the same request again until it is answered."""
    end_s = cell.clock.now_s() + LIMIT_S
    while cell.clock.now_s() < end_s:
        try:
            answer = await cell.meanwhile(cell.caller.request(*cell.request(SUBMIT), timeout_s=2.0))
        except Unavailable:
            await cell.clock.advance(1.0)
            continue
        reply = cell.reply(answer)
        assert isinstance(reply, Submitted), reply
        return JobId(reply.job_id)
    raise AssertionError("nobody took the job")


async def takes_over(cell: Cell, expected: JobId | None) -> None:
    """A new coordinator leads and the submitter insists: the job is there and runs, once."""
    new = cell.launch("two").coordinator
    job_id = await insist(cell)
    assert expected in (None, job_id)
    agent = cell.agents[NODE]
    await cell.until(lambda: job(new, job_id).state == JobState.RUNNING)
    assert await insist(cell) == job_id
    await cell.clock.advance(30.0)
    assert submitted(cell) == [job_id]
    assert list(new.engine.state.jobs) == [job_id]
    started = [d for d in decisions(cell) if isinstance(d, Start)]
    assert [start.job_id for start in started] == [job_id]
    assert [(key.job_id, key.attempt) for key in agent.started] == [(job_id, 1)]
    assert agent.running() == agent.started


@pytest.mark.parametrize("is_written", [False, True], ids=["before append", "after append"])
async def test_death_before_the_acknowledgement(is_written: bool) -> None:
    """Nobody was told and nothing was ordered; what the journal holds is gone on with."""
    async with Cell() as cell:
        journal = FatalJournal(cell.records, is_written=is_written)
        await cell.lead(journal=journal)
        generation = cell.agents[NODE].generation
        asking = asyncio.ensure_future(cell.caller.request(*cell.request(SUBMIT), timeout_s=2.0))
        await cell.until(lambda: journal.is_reached)
        await cell.leaders[0].crash()
        with pytest.raises(Unavailable, match="no answer"):
            await cell.meanwhile(asking)
        written = submitted(cell)
        assert len(written) == int(is_written)
        assert (cell.agents[NODE].generation, cell.agents[NODE].started) == (generation, [])
        await takes_over(cell, written[0] if written else None)


def is_any_order(desired: DesiredState) -> bool:
    """It holds the job's worker in any phase."""
    return bool(desired.workers)


def is_order_to_run(desired: DesiredState) -> bool:
    """It holds the job's worker and says that it may run."""
    return any(order.phase == OrderPhase.RUN for order in desired.workers)


@pytest.mark.parametrize("is_held_back", [is_any_order, is_order_to_run])
async def test_death_after_the_acknowledgement(
    is_held_back: Callable[[DesiredState], bool],
) -> None:
    """The job is acknowledged and its node was not told, or told to make room and not to run."""
    async with Cell() as cell:
        await cell.lead()
        agent, where = cell.agents[NODE], subjects.node_desired(CELL, NODE)

        def is_lost(subject: str, data: bytes) -> bool:
            return subject == where and is_held_back(decode(data, DesiredState))

        cell.network.is_lost = is_lost
        job_id = await insist(cell)
        wanted = [] if is_held_back is is_any_order else [OrderPhase.RESERVE]
        await cell.until(lambda: [order.phase for order in agent.node.orders()] == wanted)
        await cell.until(lambda: any(is_lost(*message) for message in cell.network.sent))
        await cell.leaders[0].crash()
        assert agent.started == []
        cell.network.is_lost = lambda _subject, _data: False
        await takes_over(cell, job_id)


async def test_a_repeated_submit_is_not_acknowledged_before_the_first_one_is_written() -> None:
    """The engine knows the job while its record is on the way; that is not yet a promise."""
    async with Cell() as cell:
        journal = FatalJournal(cell.records, is_written=False)
        await cell.lead(journal=journal)
        first = asyncio.ensure_future(cell.caller.request(*cell.request(SUBMIT), timeout_s=2.0))
        await cell.until(lambda: journal.is_reached)
        again = asyncio.ensure_future(cell.caller.request(*cell.request(SUBMIT), timeout_s=2.0))
        await cell.clock.advance(1.0)
        await cell.leaders[0].crash()
        for asking in (first, again):
            with pytest.raises(Unavailable, match="no answer"):
                await cell.meanwhile(asking)
        await takes_over(cell, None)


async def test_a_leader_that_is_fenced_does_not_acknowledge_a_repeated_submit() -> None:
    """Its engine has taken the job and its journal has not: no answer may speak of it, whether the
    question came before or after the engine took it."""
    async with Cell() as cell:
        await cell.lead()
        leader = cell.leaders[0]
        leader.journal.is_down = leader.key.is_cut = True

        def ask(request: Message) -> asyncio.Future[bytes]:
            return asyncio.ensure_future(
                cell.caller.request(*cell.request(request), timeout_s=60.0)
            )

        asking = [ask(SUBMIT), ask(SUBMIT)]
        await cell.until(lambda: bool(leader.coordinator.engine.state.jobs))
        asking += [ask(SUBMIT), ask(ListJobs())]
        await cell.until(leader.task.done)
        assert isinstance(leader.task.exception(), Fenced)
        answers = await cell.meanwhile(asyncio.gather(*asking, return_exceptions=True))
        for answer in answers:
            if isinstance(answer, bytes):
                reply = cell.reply(answer)
                assert isinstance(reply, ApiError), reply
                assert reply.code == ApiErrorCode.UNAVAILABLE
            else:
                assert isinstance(answer, Unavailable)
        assert submitted(cell) == []
