"""What a coordinator remembers: journal, snapshot, and what its agents hold."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.errors import ConfigError, ProtocolError
from common.model import Checkpoint, JobState, NodeName, NodeRole
from coordinator.engine.record import RECORD_VERSION, Record, encode_record
from coordinator.policies import registry
from coordinator.policies.registry import POLICIES, Added
from tests.harness.cluster.coordinator import (
    LEASE_TTL_S,
    Cell,
    job,
    make_settings,
    on_loan,
    running,
    submit,
)
from tests.harness.fakes import Foreign
from tests.tables import each_row

SETTINGS = make_settings()


@pytest.mark.parametrize("snapshot_records", [2, 500])
async def test_a_restart_replays_to_the_same_state(snapshot_records: int) -> None:
    """Crash, start again: the state before the new leader's first record is the old one's."""
    settings = make_settings(snapshot_records=snapshot_records)
    async with Cell(training=2, inference=1) as cell:
        coordinator = await cell.lead(settings=settings)
        await on_loan(cell, coordinator)
        await submit(cell, workers=(1, 2))
        await cell.leaders[0].crash()
        before = coordinator.engine.encode_state()
        assert (cell.snapshots.saved is not None) == (snapshot_records == 2)
        again = cell.launch("two", settings).coordinator
        await again.decider.rebuild()
        assert again.engine.encode_state() == before


async def test_records_count_toward_a_snapshot_across_restarts() -> None:
    """A coordinator that dies before it has written enough of them itself saves one nevertheless,
    and then begins to count anew."""
    often = make_settings(snapshot_records=20)
    saved_at: list[int] = []
    async with Cell(training=1) as cell:
        for number in range(3 * often.snapshot_records):
            before = len(cell.records)
            await cell.lead(f"leader-{number}", often)
            await submit(cell, f"job-{number}")
            await cell.leaders[-1].crash()
            assert len(cell.records) - before < often.snapshot_records
            if cell.snapshots.saved is not None and cell.snapshots.saved[0] not in saved_at:
                saved_at.append(cell.snapshots.saved[0])
            if len(saved_at) == 2:
                break
    assert saved_at[0] >= often.snapshot_records
    assert saved_at[1] - saved_at[0] >= often.snapshot_records


async def test_a_restart_with_other_settings_replays_by_the_old_ones() -> None:
    """What was decided under the old file is not decided again under the new one."""
    old = make_settings(policy="fifo", snapshot_records=2)
    async with Cell(training=2) as cell:
        coordinator = await cell.lead(settings=old)
        await running(cell, coordinator, workers=(1, 2))
        await cell.leaders[0].crash()
        before = coordinator.engine.encode_state()
        again = cell.launch("two", make_settings(policy="aryl")).coordinator
        await again.decider.rebuild()
        assert again.engine.encode_state() == before
        assert again.engine.settings == old.engine


async def test_a_snapshot_that_cannot_be_read_is_not_needed() -> None:
    """The journal forgets nothing: a garbage snapshot costs time."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        job_id = await running(cell, coordinator)
        await cell.leaders[0].crash()
        cell.snapshots.saved = (1, b"\xc1 garbage")
        again = await cell.lead("two")
        assert job(again, job_id).state == JobState.RUNNING


async def test_a_snapshot_outlives_its_journal() -> None:
    """The stream of the journal alone is gone: what waits is still there, what runs goes on, and
    the leader after that finds the same."""
    async with Cell() as cell:
        coordinator = await cell.lead(settings=make_settings(snapshot_records=1))
        job_id = await running(cell, coordinator)
        waiting = await submit(cell, "waiting")
        keys = [key for agent in cell.agents.values() for key in agent.running()]
        await cell.leaders[0].crash()
        cell.records = []
        for name in ("two", "three"):
            again = await cell.lead(name)
            await cell.clock.advance(20.0)
            assert job(again, job_id).state == JobState.RUNNING
            assert job(again, waiting).state == JobState.PENDING
            assert [key for agent in cell.agents.values() for key in agent.running()] == keys
            assert not again.engine.check()
            await cell.leaders[-1].crash()


async def test_a_lost_journal_forgets_no_save_that_is_told_before_the_ledger() -> None:
    """The new leader hears of the save when it does not know the job yet."""
    saved = Checkpoint(path="/saves/1", step=7, is_verified=True)
    async with Cell() as cell:
        (agent,) = cell.agents.values()
        job_id = await running(cell, await cell.lead())
        agent.checkpoint = saved
        await cell.clock.advance(10.0)
        await cell.leaders[0].crash()
        cell.records.clear()
        cell.key.entry = None
        agent.may_tell_ledger.clear()
        again = await cell.lead("two")
        await cell.clock.advance(10.0)
        assert job_id not in again.engine.state.jobs
        agent.may_tell_ledger.set()
        await cell.until(lambda: job_id in again.engine.state.jobs)
        await cell.clock.advance(10.0)
        assert job(again, job_id).saves.checkpoint == saved


async def test_a_snapshot_of_another_history_is_left_aside(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The journal was made again, counts from 1, and is later than the snapshot."""
    async with Cell() as cell:
        coordinator = await cell.lead(settings=make_settings(snapshot_records=1))
        job_id = await running(cell, coordinator)
        waiting = await submit(cell, "waiting")
        await cell.leaders[0].crash()
        saved = cell.snapshots.saved
        assert saved is not None
        cell.records, cell.snapshots.saved = [], None
        second = await cell.lead("two")
        await cell.until(lambda: job_id in second.engine.state.jobs)
        await cell.leaders[1].crash()
        for number, (_, record) in enumerate(cell.journal()):
            cell.records[number] = encode_record(replace(record, number=number + 1, after=number))
        cell.snapshots.saved = (len(cell.records) + 1, saved[1])
        third = await cell.lead("three")
        assert "not used" in caplog.text
        assert job(third, job_id).state == JobState.RUNNING
        assert waiting not in third.engine.state.jobs
        assert not third.engine.check()


async def test_a_snapshot_that_cannot_be_written_stops_nothing() -> None:
    """A full snapshot stream is no reason to stop leading."""
    async with Cell() as cell:
        coordinator = await cell.lead(settings=make_settings(snapshot_records=1))
        cell.snapshots.is_down = True
        await running(cell, coordinator)
        assert coordinator.is_leading


@pytest.mark.parametrize("is_changed", [False, True])
async def test_a_journal_that_is_decided_otherwise_now_is_warned_of(
    is_changed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What happened was decided by other code: whoever looks for the reason finds the record."""
    async with Cell(training=2) as cell:
        coordinator = await cell.lead()
        await running(cell, coordinator, "one")
        await running(cell, coordinator, "two")
        await cell.leaders[0].crash()
        deciding = [(number, record) for number, record in cell.journal() if record.decisions]
        for number, record in deciding[-2:] if is_changed else ():
            cell.records[number - 1] = encode_record(replace(record, decisions=()))
        again = cell.launch("two").coordinator
        caplog.clear()
        await again.decider.rebuild()
        told = [one for one in caplog.records if "lead to other decisions" in one.message]
        assert [one.levelname for one in told] == ["WARNING"] * is_changed
        changed = deciding[-2:]
        for one in told:
            assert one.message.startswith(f"{len(changed)} of these records")
            assert f"journal record {changed[0][0]} first" in one.message


NEWER = encode_record(
    Record(
        version=RECORD_VERSION + 1, number=1, after=0, epoch=1, writer="w", entries=(), decisions=()
    )
)


@pytest.mark.parametrize("garbage", [b"", b"\xc1", NEWER], ids=["empty", "garbage", "newer"])
async def test_a_record_that_cannot_be_read_stops_the_start(garbage: bytes) -> None:
    """Skipping it might lose a job: the error names its sequence, and the lease is free again."""
    async with Cell() as cell:
        await cell.lead()
        await cell.leaders[0].crash()
        cell.records.append(garbage)
        leader = cell.launch("two")
        await cell.until(leader.task.done)
        assert isinstance(leader.task.exception(), ProtocolError)
        assert f"record {len(cell.records)}" in str(leader.task.exception())
        assert not leader.coordinator.is_leading


async def test_a_foreign_message_in_the_journal_stops_no_start() -> None:
    """What no coordinator wrote holds no job: it is counted as a bad message and passed over."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        job_id = await running(cell, coordinator)
        cell.records.append(Foreign(b"garbage"))
        second = await submit(cell, "second")
        assert coordinator.is_leading
        await cell.leaders[0].crash()
        cell.records.append(Foreign(b""))
        again = await cell.lead("two")
        assert job(again, job_id).state == JobState.RUNNING
        assert second in again.engine.state.jobs
        assert again.bad_messages == 2


async def test_a_restarted_leader_goes_on_with_running_jobs() -> None:
    """Workers of a job in the journal are neither stopped nor started twice."""
    async with Cell(training=2) as cell:
        coordinator = await cell.lead()
        job_id = await running(cell, coordinator, workers=(2, 2))
        keys = [key for agent in cell.agents.values() for key in agent.running()]
        await cell.leaders[0].crash()
        again = await cell.lead("two")
        await cell.clock.advance(30.0)
        assert [key for agent in cell.agents.values() for key in agent.running()] == keys
        assert job(again, job_id).attempt.number == 1
        assert not any(d.stops for agent in cell.agents.values() for d in agent.desired)


async def test_an_empty_journal_stops_nothing() -> None:
    """All of JetStream is lost: what agents hold is adopted, loans too, and runs to its end."""
    async with Cell(training=1, inference=1) as cell:
        coordinator = await cell.lead()
        one, two = await on_loan(cell, coordinator)
        keys = [key for agent in cell.agents.values() for key in agent.running()]
        await cell.leaders[0].crash()
        cell.records.clear()
        cell.key.entry = None
        again = await cell.lead("two")
        await cell.until(lambda: {one, two} <= set(again.engine.state.jobs))
        await cell.clock.advance(LEASE_TTL_S)
        assert [key for agent in cell.agents.values() for key in agent.running()] == keys
        assert {job(again, job_id).state for job_id in (one, two)} == {JobState.RUNNING}
        assert again.engine.state.nodes[NodeName("i0")].role == NodeRole.ON_LOAN
        assert (await cell.agents["i0"].renew()).is_granted
        assert again.engine.check() == []
        assert not any(d.stops for agent in cell.agents.values() for d in agent.desired)


@each_row("step_s", [0.0, -250.0, 250.0])
async def test_a_lost_journal_gives_a_job_no_second_time_limit(step_s: float) -> None:
    """Its agents report how long its workers have run, whatever the new leader's wall clock."""
    async with Cell(training=2) as cell:
        first = await cell.lead()
        job_id = await running(cell, first, workers=(2, 2), time_limit_s=300.0)
        began_s = cell.clock.now_s()
        await cell.clock.advance(200.0)
        await cell.leaders[0].crash()
        cell.records.clear()
        cell.key.entry = None
        cell.clock.step_wall(step_s)
        again = await cell.lead("two")
        await cell.until(lambda: job_id in again.engine.state.jobs)
        await cell.until(lambda: job(again, job_id).state == JobState.FAILED)
        assert job(again, job_id).error == "ran into its time_limit_s of 300 s"
        assert cell.clock.now_s() - began_s == pytest.approx(300.0, abs=5.0)
        assert again.engine.check() == []


async def test_a_node_that_died_while_nobody_led_is_lost() -> None:
    """It will never report to the new leader, and yet it must be declared lost."""
    async with Cell(training=2) as cell:
        await cell.lead()
        cell.agents["t1"].is_silent = True
        await cell.leaders[0].crash()
        again = await cell.lead("two")
        node = again.engine.state.nodes[NodeName("t1")]
        await cell.until(lambda: node.role == NodeRole.LOST)


async def test_a_standby_does_not_take_old_news_for_new() -> None:
    """A node that fell silent while another led is not heard when this one takes over."""
    async with Cell(training=2) as cell:
        await cell.lead("one")
        standby = cell.launch("two").coordinator
        await cell.clock.advance(5.0)
        cell.agents["t1"].is_silent = True
        await cell.clock.advance(2 * SETTINGS.lost_after_s)
        await cell.leaders[0].crash()
        await cell.until(lambda: standby.is_leading)
        await cell.clock.advance(SETTINGS.coalesce_s)
        nodes = standby.engine.state.nodes
        assert nodes[NodeName("t0")].contact.is_heard
        assert not nodes[NodeName("t1")].contact.is_heard


@pytest.mark.parametrize("snapshot_records", [2, 500], ids=["snapshot", "records"])
async def test_a_journal_of_a_policy_that_is_gone_says_so(snapshot_records: int) -> None:
    """The settings name one that is here, so the error must name the journal, and what to do."""
    gone = replace(POLICIES["fifo"], name="gone")
    registry.add([Added(name="gone", origin="acme 1.0", made=gone)])
    try:
        settings = make_settings(policy="gone", snapshot_records=snapshot_records)
        async with Cell(training=1) as cell:
            coordinator = await cell.lead(settings=settings)
            await running(cell, coordinator)
            await cell.leaders[0].crash()
            registry.add(())
            again = cell.launch("two", make_settings(policy="fifo")).coordinator
            what = "snapshot" if snapshot_records == 2 else "journal record"
            with pytest.raises(ConfigError, match=f"{what} .*'gone' is not one of.*install it"):
                await again.decider.rebuild()
            registry.add([Added(name="gone", origin="acme 1.0", made=gone)])
            await again.decider.rebuild()
    finally:
        registry.add(())
