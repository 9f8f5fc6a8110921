"""Requests side by side: none waits for another one, none is acknowledged before its append."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from common import subjects
from common.api import (
    ApiError,
    ApiErrorCode,
    Cancel,
    Describe,
    Done,
    GetLogs,
    Jobs,
    ListJobs,
    Operate,
    Submit,
    Submitted,
)
from common.bus import BusMessage
from common.errors import Fenced
from common.messages import Message, decode
from coordinator.engine.record import decode_record
from coordinator.engine.state.events import JobSubmitted, PassDue
from coordinator.service.request_tasks import FINISH_S, MAX_IN_FLIGHT, Requests
from tests.harness.cluster.coordinator import Cell, Reply, make_settings, make_spec, running
from tests.harness.fakes import FakeClock, FakeMessage, MemoryJournal

SETTINGS = make_settings()


class GatedJournal(MemoryJournal):
    """Takes a record when the test lets it; `waiting` holds the one that is on its way."""

    def __init__(self, records: list[bytes]) -> None:
        super().__init__(records)
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting: bytes | None = None

    async def append(self, record: bytes) -> int:
        self.waiting = record
        await self.gate.wait()
        self.waiting = None
        return await super().append(record)


def submit(name: str) -> Submit:
    """A request for a job of this name."""
    return Submit(spec=make_spec(name), request_id=f"r-{name}")


class Callers:
    """Requests under way, in the order in which they were sent."""

    def __init__(self, cell: Cell, *, tenant: str = "team") -> None:
        self._cell = cell
        self._tenant = tenant
        self.asking: list[asyncio.Task[bytes]] = []

    async def ask(self, *requests: Message) -> None:
        """Send these at once and let everything run that needs no time to pass."""
        self.asking += [
            asyncio.ensure_future(
                self._cell.caller.request(
                    *self._cell.request(request, tenant=self._tenant), timeout_s=600.0
                )
            )
            for request in requests
        ]
        await self._cell.clock.settle()

    @property
    def answered(self) -> int:
        """How many have their answer."""
        return sum(task.done() for task in self.asking)

    async def answers(self) -> list[Reply]:
        """All of them, while time passes."""
        done = await self._cell.meanwhile(asyncio.gather(*self.asking))
        return [self._cell.reply(data) for data in done]


def names_in(record: bytes) -> list[str]:
    """The jobs whose submission a record holds."""
    entries = decode_record(record, sequence=0).entries
    return [e.event.spec.name for e in entries if isinstance(e.event, JobSubmitted)]


def submits(cell: Cell) -> list[list[str]]:
    """Names of the jobs that each record took, for records that took any."""
    return [names for record in cell.records if (names := names_in(record))]


def passes(records: Sequence[bytes]) -> int:
    """Scheduling passes that these records hold."""
    found = [decode_record(data, sequence=0).entries for data in records]
    return sum(isinstance(entry.event, PassDue) for entries in found for entry in entries)


async def test_a_submit_is_answered_without_waiting_for_the_pass() -> None:
    """It is appended at once: no time passes between the request and its answer."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        callers = Callers(cell)
        before_s = cell.clock.now_s()
        for number in range(5):
            await callers.ask(submit(f"j{number}"))
            assert callers.answered == number + 1
        assert cell.clock.now_s() == before_s
        assert submits(cell) == [[f"j{number}"] for number in range(5)]
        assert not any(job.workers for job in coordinator.engine.state.jobs.values())


async def test_submits_in_a_row_share_a_pass() -> None:
    """The pass waits `coalesce_s` from the first of them on, and sees them all."""
    async with Cell() as cell:
        await cell.lead()
        await cell.clock.advance(1.0)
        callers, before = Callers(cell), len(cell.records)
        for number in range(4):
            await callers.ask(submit(f"j{number}"))
            await cell.clock.advance(SETTINGS.coalesce_s / 5)
        assert passes(cell.records[before:]) == 0
        await cell.clock.advance(SETTINGS.coalesce_s / 4)
        assert passes(cell.records[before:]) == 1


async def test_a_stream_of_submits_does_not_put_off_the_pass() -> None:
    """However many follow the first one, the pass comes when its time is over."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        await cell.clock.advance(1.0)
        callers, before = Callers(cell), len(cell.records)
        for number in range(20):
            await callers.ask(submit(f"j{number}"))
            await cell.clock.advance(SETTINGS.coalesce_s / 10)
        assert passes(cell.records[before:]) in (1, 2)
        assert any(job.workers for job in coordinator.engine.state.jobs.values())


async def test_requests_that_come_during_an_append_share_the_next_record() -> None:
    """In the order in which they came; none is acknowledged before its own record is written."""
    async with Cell() as cell:
        journal = GatedJournal(cell.records)
        await cell.lead(journal=journal)
        callers = Callers(cell)
        journal.gate.clear()
        await callers.ask(submit("first"))
        names = [f"j{number}" for number in range(31)]
        await callers.ask(*(submit(name) for name in names))
        assert callers.answered == 0
        assert journal.waiting is not None
        assert names_in(journal.waiting) == ["first"]
        journal.gate.set()
        answers = await callers.answers()
        assert submits(cell) == [["first"], names]
        assert all(isinstance(answer, Submitted) for answer in answers)


async def test_two_submits_at_once_with_one_request_id_are_one_job() -> None:
    """Both hear of the same id, and neither before the record with the job is written; another
    job under that id is a conflict."""
    async with Cell() as cell:
        journal = GatedJournal(cell.records)
        coordinator = await cell.lead(journal=journal)
        callers = Callers(cell)
        journal.gate.clear()
        await callers.ask(submit("j"), submit("j"))
        await callers.ask(submit("j"), Submit(spec=make_spec("other"), request_id="r-j"))
        assert callers.answered == 0
        journal.gate.set()
        *same, other = await callers.answers()
        ids = {answer.job_id for answer in same if isinstance(answer, Submitted)}
        assert ids == set(coordinator.engine.state.jobs)
        assert (len(same), len(ids)) == (3, 1)
        assert isinstance(other, ApiError)
        assert (other.code, other.field) == (ApiErrorCode.CONFLICT, "request_id")


async def test_who_looks_during_an_append_hears_of_it_when_it_is_written() -> None:
    """A list, a description and a refusal that know of a job that is not in the journal yet."""
    async with Cell() as cell:
        journal = GatedJournal(cell.records)
        coordinator = await cell.lead(journal=journal)
        callers = Callers(cell)
        journal.gate.clear()
        await callers.ask(submit("j"))
        (job_id,) = coordinator.engine.state.jobs
        unknown = Describe(kind="job", name="unknown")
        await callers.ask(ListJobs(), Describe(kind="job", name=job_id), unknown)
        assert callers.answered == 0
        journal.gate.set()
        _, jobs, _, refusal = await callers.answers()
        assert isinstance(jobs, Jobs)
        assert [row.job_id for row in jobs.rows] == [job_id]
        assert isinstance(refusal, ApiError)


async def test_who_looks_between_appends_does_not_wait() -> None:
    """A cell whose journal has nothing to take answers at once, also when it could not take it."""
    async with Cell() as cell:
        journal = GatedJournal(cell.records)
        await cell.lead(journal=journal)
        await cell.clock.advance(1.0)
        journal.gate.clear()
        callers = Callers(cell)
        await callers.ask(ListJobs())
        assert callers.answered == 1


async def test_a_node_that_sends_no_log_holds_up_nobody() -> None:
    """Other requests are answered while one waits for a node."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        job_id = await running(cell, coordinator)
        cell.network.is_lost = lambda subject, _data: subject.endswith(".logs")
        callers = Callers(cell)
        await callers.ask(GetLogs(job_id=job_id))
        await callers.ask(submit("another"), Cancel(job_id=job_id))
        assert not callers.asking[0].done()
        assert callers.answered == 2
        logs, another, cancelled = await callers.answers()
        assert isinstance(logs, ApiError)
        assert logs.code == ApiErrorCode.UNAVAILABLE
        assert isinstance(another, Submitted)
        assert isinstance(cancelled, Done)


async def test_a_coordinator_that_stops_answers_those_in_flight() -> None:
    """What is in the record that is being written is acknowledged; what came after it hears that
    it was too late, and is not in the journal."""
    async with Cell() as cell:
        journal = GatedJournal(cell.records)
        await cell.lead(journal=journal)
        leader, callers = cell.leaders[0], Callers(cell)
        journal.gate.clear()
        await callers.ask(submit("in-time"))
        await callers.ask(submit("late"))
        leader.coordinator.stop()
        await cell.clock.settle()
        journal.gate.set()
        await cell.until(leader.task.done)
        in_time, late = await callers.answers()
        assert isinstance(in_time, Submitted)
        assert isinstance(late, ApiError)
        assert late.code == ApiErrorCode.UNAVAILABLE
        assert submits(cell) == [["in-time"]]


async def test_a_fenced_leader_answers_none_of_them_as_done() -> None:
    """Somebody else wrote in its place: every request in flight is told that it failed."""
    async with Cell() as cell:
        journal = GatedJournal(cell.records)
        await cell.lead(journal=journal)
        callers = Callers(cell)
        journal.gate.clear()
        await callers.ask(*(submit(f"j{number}") for number in range(8)))
        await callers.ask(submit("j0"), submit("late"), ListJobs())
        cell.records.append(cell.records[-1])  # by another writer
        journal.gate.set()
        await cell.until(cell.leaders[0].task.done)
        assert isinstance(cell.leaders[0].task.exception(), Fenced)
        for answer in await callers.answers():
            assert isinstance(answer, ApiError), answer
            assert answer.code == ApiErrorCode.UNAVAILABLE


# --- the block of requests --------------------------------------------------------------------


class Desk:
    """A handler that answers when it is told to, and messages for it."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.answered: list[str] = []
        self.refused: list[ApiError] = []
        self.go = asyncio.Event()
        self.clock = FakeClock()

    async def answer(self, message: BusMessage) -> None:
        """One that breaks, one that is done at once, or one that waits."""
        _, _, verb = subjects.api_caller(message.subject)
        self.begun.append(verb)
        if verb == "broken":
            raise ZeroDivisionError
        if verb != "quick":
            await self.go.wait()
        self.answered.append(verb)

    def message(self, verb: str, *, tenant: str = "team") -> FakeMessage:
        """A request whose answer, if it is one of `Requests` itself, is kept."""
        subject = subjects.api("cell", tenant, "ann", verb)
        return FakeMessage(subject, b"", lambda data: self.refused.append(decode(data, ApiError)))


async def test_one_more_than_the_limit_is_refused_at_once() -> None:
    """The error says how many there are; when one is answered there is room again."""
    desk = Desk()
    async with Requests(desk.answer, clock=desk.clock, limit=2) as requests:
        for name in ("a", "b", "c"):
            await requests.take(desk.message(name))
        (refused,) = desk.refused
        assert refused.code == ApiErrorCode.UNAVAILABLE
        assert "2 reads" in refused.message
        desk.go.set()
        await desk.clock.settle()
        await requests.take(desk.message("d"))
    assert desk.answered == ["a", "b", "d"]


async def test_no_flood_of_changes_refuses_an_order_of_an_operator() -> None:
    """Changes of others wait for the journal, as many as the limit: cancel and orders of `ops` are
    taken beyond it, up to a limit of their own; a submit of `ops` is a change as others are."""
    desk = Desk()
    async with Requests(desk.answer, clock=desk.clock, limit=2) as requests:
        for tenant, verb in (*[("team", "submit")] * 3, ("team", "cancel"), ("ops", "submit")):
            await requests.take(desk.message(verb, tenant=tenant))
        assert len(desk.refused) == 3
        for verb in ("cancel", "operate", "cancel"):
            await requests.take(desk.message(verb, tenant="ops"))
        assert [one.message.split(" are")[0] for one in desk.refused] == [
            *["2 requests"] * 3,
            "2 orders",
        ]
        await desk.clock.settle()
        assert desk.begun == ["submit", "submit", "cancel", "operate"]
        desk.go.set()
    assert desk.answered == desk.begun


async def test_an_operator_is_answered_after_a_slow_append_that_256_submits_wait_for() -> None:
    """Freeze and cancel are in the next record; the submits of one tenant fill their own limit."""
    async with Cell() as cell:
        journal = GatedJournal(cell.records)
        coordinator = await cell.lead(journal=journal)
        job_id = await running(cell, coordinator)
        journal.gate.clear()
        callers = Callers(cell)
        await callers.ask(*(submit(f"j{number}") for number in range(MAX_IN_FLIGHT + 1)))
        assert callers.answered == 1
        orders = Callers(cell, tenant="ops")
        await orders.ask(Operate(action="freeze"), Cancel(job_id=job_id))
        assert orders.answered == 0
        journal.gate.set()
        assert all(isinstance(answer, Done) for answer in await orders.answers())
        await callers.answers()


async def test_requests_begin_in_the_order_of_arrival() -> None:
    """Each as far as its first wait, and one that waits does not stop the next."""
    desk = Desk()
    async with Requests(desk.answer, clock=desk.clock) as requests:
        for name in ("a", "quick", "b"):
            await requests.take(desk.message(name))
        await desk.clock.settle()
        assert (desk.begun, desk.answered) == (["a", "quick", "b"], ["quick"])
        desk.go.set()


async def test_a_handler_that_breaks_is_counted_and_answered() -> None:
    """The caller need not wait for its timeout, and the others are answered as ever."""
    desk = Desk()
    async with Requests(desk.answer, clock=desk.clock) as requests:
        for name in ("broken", "quick"):
            await requests.take(desk.message(name))
        await desk.clock.settle()
        assert (requests.failures, desk.answered) == (1, ["quick"])
    (refused,) = desk.refused
    assert refused.code == ApiErrorCode.UNAVAILABLE


async def test_the_end_of_the_block_waits_for_answers_but_not_for_ever() -> None:
    """After `FINISH_S` whoever still waits is cancelled; nobody new is taken meanwhile."""
    desk = Desk()
    requests = Requests(desk.answer, clock=desk.clock)
    async with requests:
        await requests.take(desk.message("a"))
        leaving = asyncio.ensure_future(requests.__aexit__(None, None, None))
        await desk.clock.advance(FINISH_S / 2)
        assert not leaving.done()
        await requests.take(desk.message("late"))
        await desk.clock.advance(FINISH_S)
        assert leaving.done()
    assert (desk.begun, desk.answered, len(desk.refused)) == (["a"], [], 1)


async def test_a_block_that_breaks_cancels_what_is_in_flight() -> None:
    """It leaves at once, and nothing of it goes on."""
    desk = Desk()
    with pytest.raises(KeyError):
        async with Requests(desk.answer, clock=desk.clock) as requests:
            await requests.take(desk.message("a"))
            await desk.clock.settle()
            raise KeyError
    desk.go.set()
    await desk.clock.settle()
    assert (desk.begun, desk.answered) == (["a"], [])
