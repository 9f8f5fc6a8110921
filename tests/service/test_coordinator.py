"""The live driver: who leads, what a request does, and when time brings a pass."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from msgspec.structs import replace

from common.api import (
    ApiError,
    ApiErrorCode,
    Cancel,
    Done,
    GetStatus,
    ListJobs,
    Status,
    Submit,
    Submitted,
)
from common.model import MAX_INT, JobId, JobState
from coordinator.engine.state.events import LeaderStarted
from coordinator.engine.state.settings import TenantSettings
from tests.harness.cluster.coordinator import (
    Cell,
    Leader,
    job,
    make_settings,
    make_spec,
    running,
    starts,
    submit,
)

SETTINGS = make_settings()


# --- leading ---------------------------------------------------------------------------------


async def test_a_job_runs_from_submit_to_success() -> None:
    """Submit -> journal -> desired state -> worker -> report -> succeeded."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        job_id = await running(cell, coordinator)
        cell.agents["t0"].node.exited(cell.agents["t0"].running()[0], 0)
        await cell.until(lambda: job(coordinator, job_id).state == JobState.SUCCEEDED)
        assert coordinator.bad_messages == 0


async def test_it_listens_before_it_takes_its_epoch() -> None:
    """After a loss of JetStream the epoch must be above what agents know: they are heard first."""
    async with Cell() as cell:
        agent = cell.agents["t0"]
        agent.epoch = 41
        leader = cell.launch()
        await cell.clock.advance(SETTINGS.rebuild_wait_s * 0.9)
        assert not leader.coordinator.is_leading
        await cell.until(lambda: agent.epoch == 42)
        assert [start.epoch for start in starts(cell)] == [42]


@pytest.mark.parametrize("epoch", [MAX_INT, MAX_INT - 1])
async def test_an_epoch_that_nobody_can_have_given_keeps_nobody_from_leading(epoch: int) -> None:
    """There is none above it: with one such report no cell would have a leader again."""
    async with Cell(training=2) as cell:
        honest, odd = cell.agents["t0"], cell.agents["t1"]
        honest.epoch, odd.epoch = 41, epoch
        leader = cell.launch()
        await cell.until(lambda: honest.epoch == 42)
        assert leader.coordinator.is_leading
        assert odd.epoch == epoch


async def test_leadership_is_in_the_journal_first() -> None:
    """The first record begins with who leads, by which epoch, settings and clock."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        first = cell.journal()[0][1]
        clock = coordinator.decider.time.mark()
        assert first.entries[0].event == LeaderStarted(
            epoch=1, holder="one", settings=SETTINGS.engine, clock=clock
        )
        assert (first.epoch, first.writer) == (1, "one")


async def test_a_standby_serves_nobody_and_takes_over() -> None:
    """One leads; when it is gone without a word the other leads with the next epoch."""
    async with Cell() as cell:
        await cell.lead("one")
        standby = cell.launch("two").coordinator
        await cell.clock.advance(3 * SETTINGS.leader_ttl_s)
        assert not standby.is_leading
        assert not standby.leading.is_set()
        await cell.leaders[0].crash()
        await cell.until(lambda: standby.is_leading)
        await cell.until(lambda: cell.agents["t0"].epoch == 2)


async def test_it_listens_while_the_ttl_of_the_last_leader_runs_out() -> None:
    """One that is started after a crash waits for the longer of the two, not for both."""
    async with Cell() as cell:
        await cell.lead("one")
        await cell.leaders[0].crash()
        started_s = cell.clock.now_s()
        new = cell.launch("two").coordinator
        await cell.until(lambda: new.is_leading)
        waited_s = cell.clock.now_s() - started_s
        assert SETTINGS.leader_ttl_s <= waited_s < SETTINGS.leader_ttl_s + SETTINGS.rebuild_wait_s


async def test_a_planned_takeover_waits_for_no_ttl() -> None:
    """A coordinator that is told to stop gives its lease up."""
    async with Cell() as cell:
        await cell.lead("one")
        standby = cell.launch("two").coordinator
        await cell.clock.advance(SETTINGS.rebuild_wait_s + 1.0)
        cell.leaders[0].coordinator.stop()
        stopped_s = cell.clock.now_s()
        await cell.until(lambda: standby.is_leading)
        assert cell.clock.now_s() - stopped_s < SETTINGS.leader_ttl_s / 4
        assert cell.leaders[0].task.done()
        assert cell.leaders[0].task.exception() is None


async def test_a_standby_can_be_stopped() -> None:
    """It waits for the lease, perhaps for days, and yet ends when it is told to."""
    async with Cell() as cell:
        await cell.lead("one")
        standby = cell.launch("two")
        await cell.clock.advance(10.0)
        standby.coordinator.stop()
        await cell.until(standby.task.done)
        assert standby.task.exception() is None


class SlowJournal:
    """A journal each of whose records takes its time, and how long that is."""

    def __init__(self, cell: Cell, leader: Leader, record_s: float) -> None:
        read = leader.journal.read

        async def slow(from_sequence: int):  # type: ignore[no-untyped-def]
            async for record in read(from_sequence):
                await cell.clock.sleep(record_s)
                yield record

        leader.journal.read = slow  # type: ignore[method-assign]


async def test_the_lease_is_kept_during_a_long_rebuild() -> None:
    """A rebuild longer than the TTL must not let a standby in, which would have to rebuild too."""
    async with Cell() as cell:
        await cell.lead("one")
        await cell.clock.advance(3 * SETTINGS.pass_period_s)
        await cell.leaders[0].crash()
        assert len(cell.records) > 2
        slow, standby = cell.launch("slow"), cell.launch("standby")
        SlowJournal(cell, slow, 1.5 * SETTINGS.leader_ttl_s)
        SlowJournal(cell, standby, 1.5 * SETTINGS.leader_ttl_s)
        await cell.until(lambda: slow.coordinator.is_leading or standby.coordinator.is_leading)
        assert len(starts(cell)) == 1
        await cell.clock.advance(5.0)
        assert [start.epoch for start in starts(cell)] == [1, 2]
        assert not any(leader.task.done() for leader in (slow, standby))


# --- requests --------------------------------------------------------------------------------


async def test_a_submit_is_idempotent() -> None:
    """The same request id is the same job, at once, later, and after a restart."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        request = Submit(spec=make_spec(), request_id="once")
        first, second = await asyncio.gather(cell.ask(request), cell.ask(request))
        assert first == second
        await cell.leaders[0].crash()
        coordinator = await cell.lead("two")
        assert await cell.ask(request) == first
        assert len(coordinator.engine.state.jobs) == 1


async def test_a_request_id_belongs_to_who_used_it() -> None:
    """Two people may choose the same one; that makes two jobs."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        request = Submit(spec=make_spec(), request_id="r")
        ann, bob = await cell.ask(request), await cell.ask(request, user="bob")
        assert isinstance(ann, Submitted)
        assert isinstance(bob, Submitted)
        assert ann.job_id != bob.job_id
        assert len(coordinator.engine.state.jobs) == 2


async def test_a_request_id_is_used_for_one_spec() -> None:
    """Another job under a used id would be lost without a word: it is refused."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        await cell.ask(Submit(spec=make_spec("first"), request_id="r"))
        reply = await cell.ask(Submit(spec=make_spec("second"), request_id="r"))
        assert isinstance(reply, ApiError)
        assert (reply.code, reply.field) == (ApiErrorCode.CONFLICT, "request_id")
        assert [j.spec.name for j in coordinator.engine.state.jobs.values()] == ["first"]


async def test_only_its_tenant_or_an_operator_cancels_a_job() -> None:
    """Who you are is the subject; another tenant is denied, an operator is not."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        job_id = await running(cell, coordinator)
        denied = await cell.ask(Cancel(job_id=job_id), tenant="others")
        assert isinstance(denied, ApiError)
        assert denied.code == ApiErrorCode.DENIED
        assert job(coordinator, job_id).state == JobState.RUNNING
        assert isinstance(await cell.ask(Cancel(job_id=job_id), tenant="ops"), Done)
        await cell.until(lambda: job(coordinator, job_id).state == JobState.CANCELLED)
        again = await cell.ask(Cancel(job_id=job_id))
        assert isinstance(again, ApiError)
        assert again.code == ApiErrorCode.CONFLICT


async def test_a_name_means_the_one_live_job_that_has_it() -> None:
    """Ended jobs of the same name do not make it ambiguous."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        old = await running(cell, coordinator, "train")
        await cell.ask(Cancel(job_id=old))
        await cell.until(lambda: job(coordinator, old).state == JobState.CANCELLED)
        reply = await cell.ask(Submit(spec=make_spec("train"), request_id="another"))
        assert isinstance(reply, Submitted)
        assert isinstance(await cell.ask(Cancel(job_id="train")), Done)
        await cell.until(lambda: job(coordinator, JobId(reply.job_id)).state == JobState.CANCELLED)


# --- time ------------------------------------------------------------------------------------


async def test_a_gang_that_is_not_ready_times_out_at_its_own_instant() -> None:
    """Nothing else happens meanwhile: the deadline itself brings the pass, not the next period."""
    settings = msgspec.structs.replace(make_settings(), pass_period_s=500.0)
    async with Cell() as cell:
        coordinator = await cell.lead(settings=settings)
        cell.agents["t0"].node._make_ready = lambda key: None  # type: ignore[method-assign]
        job_id = await submit(cell)
        await cell.until(lambda: job(coordinator, job_id).state == JobState.STARTING)
        deadline_s = job(coordinator, job_id).attempt.gang_deadline_s
        assert deadline_s is not None
        await cell.until(lambda: coordinator.engine.state.counters.gang_timeouts == 1)
        assert 0.0 <= cell.clock.wall_s() - deadline_s < 2.0


async def test_the_list_of_jobs_is_what_the_journal_holds() -> None:
    """A job that is listed was acknowledged; order is that of submission."""
    async with Cell(training=0) as cell:
        await cell.lead()
        ids = [await submit(cell, f"j{n}") for n in range(3)]
        reply = await cell.ask(ListJobs())
        assert [row.job_id for row in reply.rows] == ids  # type: ignore[union-attr]


async def test_the_epoch_of_a_standby_is_above_all_that_was_reported_while_it_waited() -> None:
    """All of JetStream is lost hours later: agents refuse nothing of it, and it stays leader."""
    async with Cell() as cell:
        cell.launch("one")
        standby = cell.launch("two").coordinator  # asks for the lease before any agent has an epoch
        await cell.until(lambda: cell.leaders[0].coordinator.is_leading)
        await running(cell, cell.leaders[0].coordinator)
        await cell.leaders[0].crash()
        cell.records.clear()
        cell.key.entry = cell.snapshots.saved = None
        await cell.until(lambda: standby.is_leading)
        await submit(cell, "after")
        assert [start.epoch for start in starts(cell)] == [2]
        agent = cell.agents["t0"]
        await cell.until(lambda: agent.epoch == 2)
        assert not agent.refused
        assert not cell.leaders[1].task.done()


async def test_a_new_leader_answers_from_its_own_lead() -> None:
    """Before its first record is written, the state has the epoch and the policy of the last."""
    async with Cell() as cell:
        await cell.lead()
        await cell.leaders[0].crash()
        second = cell.launch("two", make_settings(policy="tetris"))
        await cell.until(lambda: second.coordinator.is_leading)
        assert second.coordinator.engine.state.epoch == 1, "it has not begun"
        reply = await cell.ask(GetStatus())
        assert isinstance(reply, Status)
        assert (reply.epoch, reply.policy) == (2, "tetris")


SAID = (
    "tenants: {} GPUs are guaranteed, and the training nodes have 8: "
    "not all guarantees can be kept at a time"
)


@pytest.mark.parametrize(("gpus", "is_said"), [(9, True), (8, False)])
async def test_the_next_leader_says_that_guarantees_are_too_many(
    gpus: int, *, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Only roots count, as children have part of theirs; a new cell knows no node and says nothing.

    What a service may lend is not counted: nobody may count on it.
    """
    tenants = (
        TenantSettings(name="division", guarantee_gpus=gpus),
        TenantSettings(name="team", parent="division", guarantee_gpus=gpus),
    )
    made = make_settings()
    settings = replace(made, engine=replace(made.engine, tenants=tenants))
    async with Cell(training=1, inference=1) as cell:
        await cell.lead("one", settings)
        assert "are guaranteed" not in caplog.text
        await cell.leaders[0].crash()
        await cell.lead("two", settings)
    assert (SAID.format(gpus) in caplog.text) == is_said
