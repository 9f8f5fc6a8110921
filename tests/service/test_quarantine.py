"""What breaks the engine costs itself alone, and a restart repeats little of what came before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from common.api import ApiError, ApiErrorCode, GetEvents, ListJobs, Submit, Submitted
from common.errors import Unavailable
from common.messages import Message
from common.model import JobId, JobSpec, JobState, NodeName, NodeRole, Pool
from coordinator.engine.engine import Engine
from coordinator.engine.record import Record, decode_record, encode_record
from coordinator.engine.state.commands import Outcome
from coordinator.engine.state.events import (
    Event,
    GpuFact,
    JobSubmitted,
    LeaderStarted,
    LoadMeasured,
    LoadUnknown,
    NodeReported,
    NodeSilent,
    OrdersRecovered,
    PassDue,
    RecordsLost,
)
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import ClusterState
from coordinator.service.coordinator import Coordinator
from coordinator.service.daemon import status_of
from coordinator.service.decision_loop import Decider
from coordinator.service.metrics.measures import Measures
from coordinator.service.ports import Lost
from coordinator.service.quarantine import FIRST_S, LONGEST_S, SOURCES, Quarantine
from tests.harness.cluster.coordinator import (
    CHAT,
    Cell,
    Reply,
    job,
    make_settings,
    make_spec,
    running,
    submit,
)
from tests.harness.fakes import FakeClock, Gone, MemoryJournal, MemorySnapshots


def poison(node: str) -> NodeReported:
    """Facts on which the engine breaks: no decoder lets them in, a defect might."""
    return NodeReported(
        node=NodeName(node),
        boot_id="boot",
        home_pool=Pool.TRAINING,
        role=NodeRole.TRAINING,
        epoch=1,
        generation=1,
        gpus=cast("tuple[GpuFact, ...]", (7,)),
    )


async def test_a_report_that_breaks_the_engine_costs_no_lead_and_no_other_event() -> None:
    """What came with it is written and acknowledged; the state is that of the journal."""
    async with Cell(training=2) as cell:
        coordinator = await cell.lead()
        coordinator.decider.post(poison("t1"))
        before = await submit(cell, "beside")
        after = await submit(cell, "after")
        assert {before, after} <= set(coordinator.engine.state.jobs)
        assert coordinator.decider.quarantine.count == 1
        events = [entry.event for _, record in cell.journal() for entry in record.entries]
        assert poison("t1") not in events
        assert sum(isinstance(event, JobSubmitted) for event in events) == 2
        assert coordinator.may_act()
        assert coordinator.engine.state.epoch == 1
        await cell.leaders[0].crash()
        again = await cell.lead("two")
        assert {before, after} <= set(again.engine.state.jobs)


async def test_a_node_in_quarantine_is_heard_again_when_it_is_over() -> None:
    """Its news is dropped meanwhile, and its word stands in its explanation; none is lost."""
    async with Cell(training=2) as cell:
        coordinator = await cell.lead()
        coordinator.decider.post(poison("t1"))
        await submit(cell)
        coordinator.folder.forget_node(NodeName("t1"))
        count = len(cell.journal())

        def is_heard() -> bool:
            events = [e.event for _, record in cell.journal()[count:] for e in record.entries]
            return any(isinstance(e, NodeReported) and e.node == "t1" for e in events)

        await cell.clock.advance(FIRST_S / 2)
        assert not is_heard()
        assert "made the engine fail" in coordinator.refused_reports.of("t1")
        await cell.until(is_heard)


async def test_a_request_that_breaks_the_engine_is_answered_and_not_tried_again() -> None:
    """Each of its callers hears of it; the engine meets it once."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        bad = JobSubmitted(job_id=JobId("j"), spec=cast("JobSpec", None), tenant="t", user="u")
        for _ in range(2):
            with pytest.raises(Unavailable, match="failed on this request"):
                await cell.meanwhile(coordinator.record(bad))
        assert coordinator.decider.quarantine.count == 1
        await submit(cell)


class GatedJournal(MemoryJournal):
    """A journal whose reading waits for a gate, and then may fail."""

    def __init__(self, records: list[bytes]) -> None:
        super().__init__(records)
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_unread = False
        """While set, no record can be read."""

    async def read(self, from_sequence: int) -> AsyncIterator[tuple[int, bytes] | Lost]:
        await self.gate.wait()
        if self.is_unread:
            raise Unavailable("journal: no answer")
        async for record in super().read(from_sequence):
            yield record


def asked(cell: Cell, request: Message) -> asyncio.Future[bytes]:
    """The answer of an API request, on its way."""
    subject, data = cell.request(request)
    return asyncio.ensure_future(cell.caller.request(subject, data, timeout_s=30.0))


async def poisoned(cell: Cell) -> tuple[Coordinator, GatedJournal, asyncio.Future[bytes]]:
    """A leader that broke on one event of a batch and reads its journal back, which takes until
    the gate opens; and the answer of a submission in that batch."""
    journal = GatedJournal(cell.records)
    coordinator = await cell.lead(journal=journal)
    journal.gate.clear()
    first = asked(cell, Submit(spec=make_spec("a"), request_id="r-a"))
    while not coordinator.decider._inbox:  # noqa: ASYNC110 - both are to be in one batch
        await asyncio.sleep(0)
    coordinator.decider.post(poison("t9"))
    await cell.clock.settle()
    return coordinator, journal, first


async def test_no_answer_leaves_an_engine_that_is_half_changed() -> None:
    """A retried submission and reads are unavailable; the first submission is journaled once."""
    async with Cell(training=1) as cell:
        coordinator, journal, first = await poisoned(cell)
        count = len(cell.records)
        again = asked(cell, Submit(spec=make_spec("a"), request_id="r-a"))
        reads = [asked(cell, ListJobs()), asked(cell, GetEvents())]
        await cell.clock.settle()
        assert len(cell.records) == count
        assert not any(each.done() for each in (first, again, *reads))
        journal.gate.set()
        await cell.until(first.done)
        refused = [cell.reply(await cell.meanwhile(each)) for each in (again, *reads)]
        assert [_code(reply) for reply in refused] == [ApiErrorCode.UNAVAILABLE] * 3
        done = cell.reply(await first)
        assert isinstance(done, Submitted)
        events = [entry.event for _, record in cell.journal() for entry in record.entries]
        assert sum(isinstance(event, JobSubmitted) for event in events) == 1
        await cell.leaders[0].crash()
        assert done.job_id in (await cell.lead("two")).engine.state.jobs
        assert coordinator.decider.quarantine.count == 1


def _code(reply: Reply) -> ApiErrorCode | None:
    return reply.code if isinstance(reply, ApiError) else None


async def test_a_journal_that_cannot_be_read_back_ends_the_lead_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The caller hears that the job is not taken; the exit status is that of an error."""
    async with Cell(training=1) as cell:
        _, journal, first = await poisoned(cell)
        journal.is_unread = True
        journal.gate.set()
        await cell.until(cell.leaders[0].task.done)
        error = cell.leaders[0].task.exception()
        assert error is not None
        caplog.clear()
        assert status_of(error) == 2
        assert [record.getMessage() for record in caplog.records] == ["journal: no answer"]
        first.cancel()


class Brittle(Engine):
    """An engine that breaks on the first event of a kind, after it has changed its state."""

    def __init__(
        self, settings: EngineSettings, state: ClusterState, breaks: Callable[[Event], bool]
    ) -> None:
        super().__init__(settings, state)
        self._breaks = breaks

    def handle(self, event: Event, *, now_s: float) -> Outcome:
        outcome = super().handle(event, now_s=now_s)
        if self._breaks(event):
            raise KeyError("a defect")
        return outcome


def embrittle(coordinator: Coordinator, breaks: Callable[[Event], bool]) -> None:
    """The leader's engine breaks once: the one that is read back is sound."""
    engine = coordinator.engine
    coordinator.decider.engine = Brittle(engine.settings, engine.state, breaks)


async def test_a_silence_that_broke_the_engine_comes_again() -> None:
    """A node that is silent is LOST when the quarantine of that event is over."""
    async with Cell(training=2) as cell:
        coordinator = await cell.lead()
        embrittle(coordinator, lambda event: isinstance(event, NodeSilent))
        cell.agents["t1"].is_silent = True
        await cell.until(lambda: coordinator.decider.quarantine.count == 1)
        name = NodeName("t1")
        assert coordinator.engine.state.nodes[name].role == NodeRole.TRAINING
        await cell.until(lambda: coordinator.engine.state.nodes[name].role == NodeRole.LOST)


async def test_an_end_that_broke_the_engine_comes_again() -> None:
    """A job whose worker has ended does not stay RUNNING."""
    async with Cell(training=1) as cell:
        coordinator = await cell.lead()
        job_id = await running(cell, coordinator)
        embrittle(coordinator, lambda event: isinstance(event, NodeReported))
        cell.agents["t0"].node.exited(cell.agents["t0"].running()[0], 0)
        await cell.until(lambda: coordinator.decider.quarantine.count == 1)
        assert "its events made" in coordinator.refused_reports.of("t0")
        await cell.until(lambda: job(coordinator, job_id).state == JobState.SUCCEEDED)


async def test_a_ledger_that_broke_the_engine_is_asked_for_again() -> None:
    """A job that waits for a node's ledger does not wait for ever."""
    async with Cell(training=1) as cell:
        coordinator = await cell.lead()
        job_id = await running(cell, coordinator)
        agent = cell.agents["t0"]
        agent.is_silent = True
        await cell.leaders[0].crash()
        cell.records.clear()
        again = cell.launch("two").coordinator
        await cell.until(lambda: again.is_leading)
        embrittle(again, lambda event: isinstance(event, OrdersRecovered))
        agent.is_silent = False
        await cell.until(lambda: again.decider.quarantine.count == 1)
        assert job_id not in again.engine.state.jobs
        await cell.until(lambda: job_id in again.engine.state.jobs)
        assert job(again, job_id).attempt.number == 1
        assert len(agent.started) == 1


@pytest.mark.parametrize("is_end", [False, True], ids=["begins", "ends"])
async def test_an_unknown_load_that_broke_the_engine_comes_again(*, is_end: bool) -> None:
    """That a load is unknown reaches the engine, and that it is known again."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        agent = cell.agents["i0"]
        if is_end:
            agent.page_error = "refused"
            await cell.until(lambda: "i0" in coordinator.engine.state.unknown_loads)
        embrittle(coordinator, lambda event: isinstance(event, LoadUnknown))
        agent.page_error = "" if is_end else "refused"
        await cell.until(lambda: coordinator.decider.quarantine.count == 1)
        await cell.until(lambda: ("i0" in coordinator.engine.state.unknown_loads) != is_end)
        assert coordinator.decider.quarantine.count == 1


def test_a_source_that_breaks_the_engine_again_is_kept_out_longer() -> None:
    """The time doubles up to a bound; other sources are as they were; memory is bounded."""
    quarantine, now_s = Quarantine(), 0.0
    for_s: list[float] = []
    for _ in range(8):
        for_s.append(quarantine.note(poison("a"), now_s=now_s))
        assert quarantine.holds(poison("a"), now_s=now_s)
        assert not quarantine.holds(poison("b"), now_s=now_s)
        now_s += for_s[-1]
        assert not quarantine.holds(poison("a"), now_s=now_s)
    assert for_s[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert for_s[-1] == LONGEST_S
    for number in range(SOURCES):
        quarantine.note(poison(f"n{number}"), now_s=now_s)
    assert quarantine.note(poison("a"), now_s=now_s) == FIRST_S


class CreepingClock(FakeClock):
    """Virtual time that moves at each look at it, as if all work were slow."""

    def now_s(self) -> float:
        self.jump(0.1)
        return super().now_s()


class SlowJournal(MemoryJournal):
    """A journal whose records take a second each to decide again."""

    def __init__(self, records: list[bytes], clock: FakeClock) -> None:
        super().__init__(records)
        self._clock = clock

    async def read(self, from_sequence: int) -> AsyncIterator[tuple[int, bytes] | Lost]:
        async for record in super().read(from_sequence):
            self._clock.jump(1.0)
            yield record


class Desk:
    """Deciders of one cell, one after the other."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.snapshots = MemorySnapshots()

    def decider(self, clock: FakeClock | None = None) -> Decider:
        """The next one; by default all of its work is slow."""
        clock = clock or CreepingClock()
        return Decider(
            msgspec.structs.replace(make_settings(), snapshot_decide_s=2.0, leader_ttl_s=1.0),
            holder="one",
            clock=clock,
            journal=SlowJournal(self.records, clock),
            snapshots=self.snapshots,
            may_act=lambda: True,
            let_out=lambda _: None,
            fenced=lambda _: None,
            progress=lambda: None,
            tried=lambda: None,
            measures=Measures(CollectorRegistry()),
        )

    def saved_at(self) -> int:
        """The last record in the newest snapshot; 0: there is none."""
        return 0 if self.snapshots.saved is None else self.snapshots.saved[0]


async def test_slow_records_are_followed_by_a_snapshot(caplog: pytest.LogCaptureFixture) -> None:
    """A restart repeats no more than `snapshot_decide_s` of decisions, however few the records."""
    desk = Desk()
    one = desk.decider()
    await one.rebuild()
    running = asyncio.create_task(one.run())
    for number in range(30):
        spec = make_spec(f"j{number}")
        await one.record(JobSubmitted(job_id=JobId(f"j{number}"), spec=spec, tenant="t", user="u"))
    one.stop()
    await running
    assert len(desk.records) - 10 <= desk.saved_at() < 500
    assert "s to decide" in caplog.text
    assert "JobSubmitted" in caplog.text


class SlowPasses(Engine):
    """An engine whose passes take three seconds each."""

    def __init__(self, settings: EngineSettings, clock: FakeClock) -> None:
        super().__init__(settings)
        self.passed_at_s: list[float] = []
        self._clock = clock

    def handle(self, event: Event, *, now_s: float) -> Outcome:
        if isinstance(event, PassDue):
            self.passed_at_s.append(self._clock.now_s())
            self._clock.jump(3.0)
        return super().handle(event, now_s=now_s)


async def test_slow_passes_leave_half_of_the_time_to_everything_else() -> None:
    """Jobs that come one after the other are acknowledged at once, and share a later pass."""
    clock = FakeClock()
    one = Desk().decider(clock)
    one.engine = engine = SlowPasses(make_settings().engine, clock)
    running = asyncio.create_task(one.run())
    began_s = clock.now_s()
    for number in range(200):
        job_id, spec = JobId(f"j{number}"), make_spec(f"j{number}")
        asked_s = clock.now_s()
        event = JobSubmitted(job_id=job_id, spec=spec, tenant="t", user="u")
        recording = asyncio.ensure_future(one.record(event))
        await clock.settle()
        assert recording.done()
        assert clock.now_s() <= asked_s + 3.0
        await clock.advance(0.1)
    one.stop()
    await clock.settle()
    await running
    took_s = clock.now_s() - began_s
    assert 2 < len(engine.passed_at_s) <= took_s / (2 * 3.0) + 1


async def test_losses_of_a_lead_that_broke_in_its_first_record_are_told_once() -> None:
    """The inbox has them already, behind the start of the lead."""
    desk = Desk()
    written = [
        Record(number=n, after=n - 1, epoch=1, writer="w", entries=(), decisions=())
        for n in (1, 2, 3)
    ]
    desk.records += [encode_record(record) for record in written]
    desk.records[1] = Gone()
    one = desk.decider(FakeClock())
    await one.rebuild()
    one.begin(LeaderStarted(epoch=2, holder="one", settings=make_settings().engine))
    one.post(poison("t1"))
    running = asyncio.create_task(one.run())
    spec = make_spec("j")
    await one.record(JobSubmitted(job_id=JobId("j"), spec=spec, tenant="t", user="u"))
    one.stop()
    await running
    first = decode_record(desk.records[3], sequence=4)
    kinds = [type(entry.event) for entry in first.entries]
    assert kinds[:3] == [LeaderStarted, RecordsLost, JobSubmitted]
    assert kinds.count(RecordsLost) == 1
    assert one.quarantine.count == 1


async def test_losses_that_break_the_engine_end_the_lead() -> None:
    """No leader goes on as if nothing were lost."""
    one = Desk().decider(FakeClock())
    await one.rebuild()
    one.post(RecordsLost(first=1, last=2, from_s=0.0, until_s=None, lines=cast("int", "many")))
    one.stop()
    with pytest.raises(TypeError):
        await one.run()
    assert one.quarantine.count == 0


async def test_a_rebuild_that_took_long_is_not_repeated() -> None:
    """Its snapshot is written before the new leader's first record, of which it might die."""
    desk = Desk()
    desk.records += [
        encode_record(
            Record(number=at + 1, after=at, epoch=1, writer="w", entries=(), decisions=())
        )
        for at in range(5)
    ]
    await desk.decider().rebuild()
    assert desk.saved_at() == len(desk.records)


def test_events_of_one_source_are_kept_out_together() -> None:
    """An age or a number in them is another one each time."""
    quarantine = Quarantine()
    quarantine.note(LoadMeasured(service=CHAT, load=1.0), now_s=0.0)
    assert quarantine.holds(LoadMeasured(service=CHAT, load=2.0), now_s=1.0)
