"""The journal of a live run, replayed in the simulator, gives identical decisions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.api import Cancel, Operate, Submit
from common.bus import connect_nats
from common.clock import SystemClock
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.record import Entry, Record, decision_bytes, decode_record
from coordinator.engine.state.events import PassDue
from coordinator.policies.contract.decisions import Decision, Loan, Reclaim, Start
from coordinator.service.journal.journal_stream import Journal
from coordinator.sim.run.replay import Replay, replay
from tests.harness.cluster.coordinator import CELL, CHAT, Agent, Cell, make_settings, make_spec
from tests.harness.fakes import MemoryJournal
from tests.harness.servers import running_nats
from tests.service import places


class Op(NamedTuple):
    """One step of a life: what happens, and numbers that it uses as it likes."""

    what: str
    a: int
    b: int


WHATS = ["submit", "submit", "submit", "wait", "wait", "load", "end", "fail", "cancel"]
WHATS += ["crash", "boot", "silent", "speak", "freeze", "thaw", "recall", "end_recall", "restart"]
OPS = st.lists(
    st.builds(Op, st.sampled_from(WHATS), st.integers(0, 7), st.integers(0, 7)),
    min_size=5,
    max_size=25,
)


def _happen(agent: Agent, op: Op) -> None:
    """Something on a node that no coordinator asked for."""
    match op.what:
        case "load":
            agent.load_per_s = float(3 * op.b)
        case "crash":
            agent.node.crash()
        case "boot":
            agent.node.boot()
        case "silent" | "speak":
            agent.is_silent = op.what == "silent"
        case _:
            for key in agent.running()[:1]:
                agent.node.exited(key, 0 if op.what == "end" else 1)


class Life:
    """Carries out steps on a cell whose coordinator may be killed at any of them."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._jobs = 0
        self.leaders = 1

    async def step(self, op: Op) -> None:
        """One step, and a moment after it."""
        cell = self._cell
        agents = list(cell.agents.values())
        agent = agents[op.a % len(agents)]
        match op.what:
            case "submit":
                await self._submit(op)
            case "cancel":
                await cell.ask(Cancel(job_id=f"job{op.b}"))
            case "load" | "end" | "fail" | "crash" | "boot" | "silent" | "speak":
                _happen(agent, op)
            case "restart":
                await self._restart()
            case "wait":
                await cell.clock.advance(4.0 * op.a)
            case _:
                target = CHAT if "recall" in op.what and op.b % 2 else ""
                await cell.ask(Operate(action=op.what, target=target), tenant="ops")
        await cell.clock.advance(0.5 + op.b / 3)

    async def _submit(self, op: Op) -> None:
        least = 1 + op.a % 2
        spec = make_spec(
            f"job{self._jobs}",
            workers=(least, least + op.b % 3),
            gpus_per_worker=(2, 4, 8)[op.a % 3],
        )
        self._jobs += 1
        await self._cell.ask(Submit(spec=spec, request_id=f"r{self._jobs}"))

    async def _restart(self) -> None:
        await self._cell.leaders[-1].crash()
        self.leaders += 1
        again = self._cell.launch(f"c{self.leaders}", make_settings(snapshot_records=7)).coordinator
        await self._cell.until(lambda: again.is_leading)
        await self._cell.clock.advance(2.0)


def recorded(journal: Sequence[tuple[int, Record]]) -> bytes:
    """All decisions of a journal."""
    return decision_bytes(tuple(d for _, record in journal for d in record.decisions))


@given(ops=OPS)
@settings(max_examples=25, deadline=None)
def test_a_replayed_journal_decides_byte_for_byte_the_same(ops: list[Op]) -> None:
    """Any life, killed coordinators included: same decisions, same state, no difference."""

    async def live() -> None:
        async with Cell(training=2, inference=2) as cell:
            await cell.lead("c1", make_settings(snapshot_records=7))
            life = Life(cell)
            for op in ops:
                await life.step(op)
            coordinator = cell.leaders[-1].coordinator
            await cell.leaders[-1].crash()
            journal = cell.journal()
            run = Replay()
            for sequence, record in journal:
                run.take(sequence, record)
            result = run.result()
            assert result.differences == ()
            assert decision_bytes(result.decisions) == recorded(journal)
            assert run.engine.encode_state() == coordinator.engine.encode_state()
            assert result.records == len(journal)
            assert sum(record.writer == f"c{life.leaders}" for _, record in journal) > 0

    asyncio.run(live())


async def full_life(cell: Cell) -> None:
    """A life in which everything happens at least once: starts, a loan, its reclaim, a restart."""
    await cell.lead("c1", make_settings(snapshot_records=7))
    life = Life(cell)
    for op in (
        *(Op("submit", 2, 0) for _ in range(3)),
        Op("wait", 5, 0),
        Op("restart", 0, 0),
        *(Op("load", agent, 7) for agent in range(4)),
        Op("recall", 0, 0),
        Op("wait", 7, 0),
        Op("end", 0, 0),
    ):
        await life.step(op)


async def test_a_full_life_is_replayed() -> None:
    """The property above is not about empty journals: starts, loans and reclaims are in there."""
    async with Cell(training=2, inference=2) as cell:
        await full_life(cell)
        journal = cell.journal()
        result = replay(journal)
        kinds: set[type[Decision]] = {type(decision) for decision in result.decisions}
        assert {Start, Loan, Reclaim} <= kinds
        assert result.differences == ()
        assert result.figures.loans > 0
        assert result.events == sum(len(record.entries) for _, record in journal)


async def test_a_replay_may_begin_at_a_snapshot() -> None:
    """The state after a record and the records behind it decide as the whole journal did."""
    async with Cell(training=2, inference=2) as cell:
        await full_life(cell)
        journal = cell.journal()
        half = len(journal) // 2
        first, whole = Replay(), Replay()
        for sequence, record in journal[:half]:
            first.take(sequence, record)
        for sequence, record in journal:
            whole.take(sequence, record)
        at_half = Engine(first.engine.settings, decode_state(first.engine.encode_state()))
        second = Replay(at_half)
        for sequence, record in journal[half:]:
            second.take(sequence, record)
        assert second.result().differences == ()
        assert second.engine.encode_state() == whole.engine.encode_state()


async def test_a_difference_names_its_record() -> None:
    """A record that says that something else was decided is found, with both sides of it."""
    async with Cell(training=2, inference=2) as cell:
        await full_life(cell)
        journal = list(cell.journal())
        index = next(i for i, (_, record) in enumerate(journal) if record.decisions)
        sequence, record = journal[index]
        journal[index] = sequence, msgspec.structs.replace(record, decisions=())
        [found] = replay(journal).differences
        assert (found.sequence, found.recorded) == (sequence, ())
        assert found.decided == record.decisions
        assert found.at_s == record.entries[-1].now_s


async def test_a_fact_that_is_taken_out_makes_a_difference() -> None:
    """Everything that mattered is in the journal: without its reports nothing would be started."""
    async with Cell(training=1) as cell:
        await full_life(cell)
        journal = [
            (
                sequence,
                msgspec.structs.replace(
                    record, entries=tuple(e for e in record.entries if isinstance(e.event, PassDue))
                ),
            )
            for sequence, record in cell.journal()
        ]
        result = replay(journal)
        assert result.decisions == ()
        assert result.differences


def test_an_empty_journal_replays_to_nothing() -> None:
    """No records, no decisions, no differences."""
    result = replay([])
    assert (result.records, result.events, result.decisions) == (0, 0, ())


def test_events_of_one_instant_keep_their_order() -> None:
    """Time is not what orders a record: its entries are."""
    run = Replay()
    passes = tuple(Entry(5.0, PassDue()) for _ in range(3))
    run.take(1, Record(number=1, after=0, epoch=1, writer="w", entries=passes, decisions=()))
    run.take(
        2,
        Record(
            number=2, after=1, epoch=1, writer="w", entries=(Entry(5.0, PassDue()),), decisions=()
        ),
    )
    assert run.engine.state.pass_id == 4
    assert run.loop.now_s == 5.0


@pytest.mark.nats
async def test_a_journal_that_went_through_jetstream_is_replayed(tmp_path: Path) -> None:
    """The same life, its records written to a real stream and read back from it."""

    async def records(journal: Journal) -> AsyncIterator[tuple[int, Record]]:
        for sequence, data in await places.records(journal):
            yield sequence, decode_record(data, sequence=sequence)

    async with Cell(training=2, inference=2) as cell:
        await full_life(cell)
        async with running_nats(tmp_path / "nats") as server, AsyncExitStack() as stack:
            bus = await connect_nats(server.url, identity="c", clock=SystemClock())
            stack.push_async_callback(bus.close)
            journal = Journal(bus, cell=CELL, writer="w", clock=SystemClock())
            await journal.open()
            memory = MemoryJournal(cell.records)
            for _, data in await places.records(memory):
                await journal.append(data)
            result = replay([found async for found in records(journal)])
            assert result.differences == ()
            assert decision_bytes(result.decisions) == recorded(cell.journal())
