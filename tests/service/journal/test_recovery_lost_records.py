"""Records that a journal lost: what runs goes on once, what waits is kept, and no lease lapses."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from common.api import Describe, Description, Operate
from common.errors import Fenced
from common.model import JobId, JobState, NodeName, NodeRole
from coordinator.engine.engine import Engine
from coordinator.engine.record import Entry, Record, encode_record
from coordinator.engine.state.events import (
    JobSubmitted,
    LeaderStarted,
    OperatorAction,
    OperatorAsked,
    PassDue,
)
from coordinator.policies.contract.decisions import Start
from coordinator.service.coordinator import Coordinator
from coordinator.service.decision_loop import Decider
from coordinator.service.journal.recovery import Saved, rebuild
from coordinator.service.metrics.measures import Measures
from tests.harness.cluster.coordinator import (
    LEASE_TTL_S,
    Cell,
    job,
    make_settings,
    on_loan,
    running,
    submit,
)
from tests.harness.fakes import FakeClock, Gone, MemoryJournal, MemorySnapshots
from tests.service.journal.test_recovery_replay import full_life
from tests.service.test_quarantine import poison

SETTINGS = make_settings()


def lose(cell: Cell, first: int, last: int) -> None:
    """The disk loses these records, both ends included."""
    for sequence in range(first, last + 1):
        cell.records[sequence - 1] = Gone()


def submission(cell: Cell, job_id: JobId) -> int:
    """Sequence of the record that has a job's submission."""
    return next(
        sequence
        for sequence, record in cell.journal()
        for entry in record.entries
        if isinstance(entry.event, JobSubmitted) and entry.event.job_id == job_id
    )


def told(coordinator: Coordinator) -> list[tuple[str, str]]:
    """What is said of lost records."""
    lines = coordinator.engine.state.stories
    return [(line.what, line.reason) for line in lines if line.what.startswith("journal")]


async def orphaned(cell: Cell) -> tuple[JobId, Coordinator]:
    """A job runs on a node that is cut off, and the records of its start are lost with the leader;
    another node is free."""
    coordinator = await cell.lead()
    job_id = await running(cell, coordinator)
    [holder] = [agent for agent in cell.agents.values() if agent.running()]
    holder.is_silent = True
    await cell.leaders[0].crash()
    first = submission(cell, job_id) + 1
    lose(cell, first, len(cell.records))
    again = cell.launch("two").coordinator
    await cell.until(lambda: again.is_leading)
    await cell.clock.advance(60.0)
    return job_id, again


async def test_a_job_that_may_run_unseen_is_not_started_again() -> None:
    """It waits for the node that was not heard, says so, and goes on there in its first attempt."""
    async with Cell(training=2) as cell:
        job_id, coordinator = await orphaned(cell)
        [holder] = [agent for agent in cell.agents.values() if agent.is_silent]
        assert job(coordinator, job_id).state == JobState.PENDING
        [(_, reason)] = told(coordinator)
        assert "forgotten" in reason
        found = await cell.ask(Describe(kind="job", name=job_id))
        assert isinstance(found, Description)
        assert f"waits for {holder.name}" in found.why[0]
        holder.is_silent = False
        await cell.until(lambda: job(coordinator, job_id).state == JobState.RUNNING)
        assert job(coordinator, job_id).attempt.number == 1
        assert [len(agent.running()) for agent in cell.agents.values()].count(1) == 1
        assert coordinator.engine.check() == []


@pytest.mark.parametrize("nodes", [1, 2])
async def test_a_gang_that_runs_is_not_timed_out_for_a_record_that_was_lost(nodes: int) -> None:
    """It had been ready, its deadline passes while no leader hears one of its nodes: it goes on."""
    async with Cell(training=nodes + 1) as cell:
        job_id = await running(cell, await cell.lead(), workers=(nodes, nodes))
        silent = next(agent for agent in cell.agents.values() if agent.running())
        keys = {agent.name: agent.running() for agent in cell.agents.values()}
        silent.is_silent = True
        await cell.leaders[0].crash()
        started = next(
            sequence
            for sequence, record in cell.journal()
            if any(isinstance(decision, Start) for decision in record.decisions)
        )
        lose(cell, started + 1, len(cell.records))
        await cell.clock.advance(SETTINGS.engine.gang_ready_timeout_s + 10.0)
        again = cell.launch("two").coordinator
        await cell.until(lambda: again.is_leading)
        await cell.clock.advance(SETTINGS.pass_period_s + 5.0)
        assert job(again, job_id).state == JobState.STARTING
        found = await cell.ask(Describe(kind="job", name=job_id))
        assert isinstance(found, Description)
        assert any(f"waits for {silent.name}" in why for why in found.why)
        silent.is_silent = False
        await cell.until(lambda: job(again, job_id).state == JobState.RUNNING)
        await cell.clock.advance(SETTINGS.engine.gang_ready_timeout_s)
        assert job(again, job_id).attempt.number == 1
        assert {agent.name: agent.running() for agent in cell.agents.values()} == keys
        assert again.engine.check() == []


async def test_an_operator_can_vouch_for_the_node_that_is_missing() -> None:
    """A machine that is gone for good holds up no job for ever."""
    async with Cell(training=2) as cell:
        job_id, coordinator = await orphaned(cell)
        [holder] = [agent for agent in cell.agents.values() if agent.is_silent]
        request = Operate(action="confirm_dead", target=holder.name)
        await cell.ask(request, tenant="ops")
        await cell.until(lambda: job(coordinator, job_id).state == JobState.RUNNING)
        assert [worker.node for worker in job(coordinator, job_id).workers.values()] != [
            holder.name
        ]


async def test_a_job_that_came_later_does_not_wait() -> None:
    """Only what was there when records were lost may run unseen."""
    async with Cell(training=2) as cell:
        old, coordinator = await orphaned(cell)
        new = await running(cell, coordinator, "new")
        assert job(coordinator, new).attempt.number == 1
        assert job(coordinator, old).state == JobState.PENDING


async def test_the_end_of_the_journal_is_missed_by_the_leaders_lease() -> None:
    """A cut leaves no trace in the stream itself; the lease names a record that was written."""
    async with Cell(training=1) as cell:
        await cell.lead()
        waiting = await submit(cell, "waiting", workers=(2, 2))
        await cell.clock.advance(SETTINGS.leader_ttl_s)
        await cell.leaders[0].crash()
        first, last = submission(cell, waiting), len(cell.records)
        del cell.records[first - 1 :]
        for name in ("two", "three"):
            again = await cell.lead(name)
            await cell.clock.advance(SETTINGS.pass_period_s)
            assert waiting not in again.engine.state.jobs
            [(what, _)] = told(again)
            assert what == f"journal records {first} to {last} lost"
            await cell.leaders[-1].crash()


@pytest.mark.parametrize("left", [0, 3])
async def test_a_live_leader_keeps_loans_and_jobs_through_a_wound(left: int) -> None:
    """It stays the leader in its epoch, renews, stops nothing; the next one has all of it."""
    async with Cell(training=1, inference=1) as cell:
        coordinator = await cell.lead()
        one, two = await on_loan(cell, coordinator)
        waiting = await submit(cell, "waiting")
        keys = [key for agent in cell.agents.values() for key in agent.running()]
        del cell.records[left:]
        later = await submit(cell, "later")
        await cell.clock.advance(2 * LEASE_TTL_S)
        assert coordinator.is_leading
        assert (await cell.agents["i0"].renew()).is_granted
        [(_, reason)] = told(coordinator)
        assert "no job or order is lost" in reason
        await cell.leaders[0].crash()
        again = await cell.lead("two")
        await cell.clock.advance(2 * LEASE_TTL_S)
        assert [key for agent in cell.agents.values() for key in agent.running()] == keys
        assert {job(again, job_id).state for job_id in (one, two)} == {JobState.RUNNING}
        assert {job(again, job_id).state for job_id in (waiting, later)} == {JobState.PENDING}
        assert again.engine.state.nodes[NodeName("i0")].role == NodeRole.ON_LOAN
        assert not any(d.stops for agent in cell.agents.values() for d in agent.desired)
        assert len(told(again)) == 1


async def test_a_wound_does_not_hide_another_leader() -> None:
    """A later epoch in what is left of the journal fences the leader that would mend it."""
    async with Cell(training=1) as cell:
        old = await cell.lead()
        waiting = await submit(cell, "waiting", workers=(2, 2))
        leader = cell.leaders[0]
        leader.key.is_cut = True
        old.decider._may_act = lambda: True
        cell.key.entry = None
        leader.journal.is_down = True
        del cell.records[1:]
        new = await cell.lead("new")
        await cell.clock.advance(SETTINGS.pass_period_s)
        while len(cell.records) < old.decider._numbers.known:
            await submit(cell, f"more-{len(cell.records)}", workers=(2, 2))
        leader.journal.is_down = False
        await cell.until(leader.task.done)
        assert new.is_leading
        assert waiting not in new.engine.state.jobs
        assert {record.writer for _, record in cell.journal()[1:]} == {"new"}


async def test_a_wound_that_cannot_be_mended_ends_the_lead_within_a_ttl() -> None:
    """No snapshot can be saved: a leader that cannot write anything leaves it to the standby."""
    async with Cell(training=1) as cell:
        await cell.lead()
        leader = cell.leaders[0]
        cell.snapshots.is_down = True
        cell.records.clear()
        started_s = cell.clock.now_s()
        await cell.until(leader.task.done)
        assert cell.clock.now_s() - started_s <= SETTINGS.pass_period_s + 2 * SETTINGS.leader_ttl_s


async def test_losses_found_in_mid_lead_run_no_job_twice() -> None:
    """The nodes count as heard, so the leader steps down; the next one hears all of them again."""
    async with Cell(training=2) as cell:
        coordinator = await cell.lead()
        job_id = await running(cell, coordinator)
        lose(cell, submission(cell, job_id) + 1, len(cell.records))
        [holder] = [agent.name for agent in cell.agents.values() if agent.running()]
        coordinator.decider.post(poison("t9"))
        # A pass over the state without the losses would start the job on the other node.
        order = OperatorAsked(action=OperatorAction.CORDON, by="ops/me", target=holder)
        coordinator.decider.post(order)
        await cell.until(cell.leaders[0].task.done)
        assert isinstance(cell.leaders[0].task.exception(), Fenced)
        again = await cell.lead("two")
        await cell.until(lambda: job(again, job_id).state == JobState.RUNNING)
        await cell.clock.advance(2 * SETTINGS.pass_period_s)
        assert sum(len(agent.started) for agent in cell.agents.values()) == 1
        assert job(again, job_id).attempt.number == 1
        assert len(told(again)) == 1


async def test_a_leader_without_its_lease_saves_no_state() -> None:
    """The lease may run out while a wounded journal looks for its end."""
    clock, snapshots, is_held = FakeClock(), MemorySnapshots(), [True]

    class SlowEnd(MemoryJournal):
        async def mend(self) -> None:
            await super().mend()
            is_held[0] = False

    fenced: list[Fenced] = []
    records: list[bytes] = []
    one = Decider(
        SETTINGS,
        holder="one",
        clock=clock,
        journal=SlowEnd(records),
        snapshots=snapshots,
        may_act=lambda: is_held[0],
        let_out=lambda _: None,
        fenced=fenced.append,
        progress=lambda: None,
        tried=lambda: None,
        measures=Measures(CollectorRegistry()),
    )
    await one.rebuild()
    deciding = asyncio.create_task(one.run())
    one.begin(LeaderStarted(epoch=1, holder="one", settings=SETTINGS.engine))
    await clock.advance_until(lambda: bool(records), limit_s=60.0)
    records.clear()
    one.post(OperatorAsked(action=OperatorAction.CORDON, by="ops/me", target="t0"))
    await clock.advance_until(deciding.done, limit_s=60.0)
    assert "lease ran out" in str(fenced)
    assert snapshots.saved is None


async def test_a_hole_before_what_a_snapshot_has_is_no_loss() -> None:
    """The snapshot of a journal that was made again has the effect of all records up to its own."""
    records: list[bytes] = [Gone()]
    for number in (2, 3, 4):
        entries = (Entry(float(number), PassDue()),)
        record = Record(
            number=number, after=number - 1, epoch=1, writer="w", entries=entries, decisions=()
        )
        records.append(encode_record(record))
    state = Engine(SETTINGS.engine)
    state.state.now_s = 3.0
    saved = Saved(
        settings=SETTINGS.engine,
        state=msgspec.Raw(state.encode_state()),
        journal="another",
        number=3,
    )
    snapshots = MemorySnapshots()
    await snapshots.save(9, msgspec.msgpack.encode(saved))
    journal = MemoryJournal(records)
    await journal.open()
    rebuilt = await rebuild(journal, snapshots, progress=lambda: None)
    assert rebuilt.losses == ()
    assert (rebuilt.number, rebuilt.records) == (4, 1)


async def test_a_new_run_of_the_server_is_followed_by_a_snapshot() -> None:
    """It may have lost records that no append will miss; the leader has their effect."""
    async with Cell(training=1) as cell:
        await cell.lead()
        waiting = await submit(cell, "waiting", workers=(2, 2))
        assert cell.snapshots.saved is None
        lose(cell, submission(cell, waiting), submission(cell, waiting))
        cell.leaders[0].journal.server_run = "server-2"
        await submit(cell, "next", workers=(2, 2))
        await cell.until(lambda: cell.snapshots.saved is not None)
        await cell.leaders[0].crash()
        again = await cell.lead("two")
        assert waiting in again.engine.state.jobs
        assert told(again) == []


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_whatever_is_lost_a_start_finds_a_sound_state(data: st.DataObject) -> None:
    """Any records of a full life may be gone: the rest is replayed, no invariant breaks, and every
    job whose submission is left is there."""
    records = list(_records())
    count = len(records)
    gone = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count // 2))
    for index in gone:
        records[index] = Gone()

    async def check() -> None:
        journal = MemoryJournal(records)
        await journal.open()
        rebuilt = await rebuild(
            journal, MemorySnapshots(), progress=lambda: None, last_number=count
        )
        assert rebuilt.losses
        engine, now_s = rebuilt.engine, rebuilt.engine.state.now_s
        started = LeaderStarted(epoch=99, holder="again", settings=SETTINGS.engine)
        engine.handle(started, now_s=now_s)
        for lost in rebuilt.losses:
            engine.handle(lost, now_s=now_s)
        assert engine.check() == []

    asyncio.run(check())


_LIFE: list[bytes] = []


def _records() -> list[bytes]:
    """The journal of a full life, lived once."""
    if not _LIFE:

        async def live() -> None:
            async with Cell(training=2, inference=2) as cell:
                await full_life(cell)
                _LIFE.extend(cell.records)

        asyncio.run(live())
    return _LIFE
