"""What must not leave a coordinator: the journal is first, and only one leads."""

from __future__ import annotations

import asyncio

import pytest

from common import subjects
from common.api import ApiError, ApiErrorCode, Operate, Submit, Submitted
from common.errors import Fenced, Unavailable
from common.messages import encode
from common.model import JobId, NodeName
from coordinator.engine.state.events import JobSubmitted
from coordinator.service.coordinator import Coordinator
from coordinator.service.decision_loop import JOURNAL_RETRY_S
from tests.harness.cluster.coordinator import (
    CELL,
    Cell,
    Leader,
    make_settings,
    make_spec,
    on_loan,
    submit,
)
from tests.harness.fakes import MemoryKey

SETTINGS = make_settings()


async def split(cell: Cell) -> tuple[Leader, Coordinator]:
    """(one that believes that it leads, the one that does): the first never learns of its end."""
    old = cell.launch("old")
    await cell.until(lambda: cell.agents["t0"].epoch == 1)
    old.key.is_cut = True
    old.coordinator.may_act = lambda: True  # type: ignore[method-assign]
    old.coordinator.decider._may_act = lambda: True
    old.coordinator.dispatcher._may_act = lambda: True
    cell.key.entry = None  # as if its time had long run out on every clock but its own
    new = await cell.lead("new")
    await cell.until(lambda: cell.agents["t0"].epoch == 2)
    return old, new


async def test_a_leader_that_was_replaced_cannot_append() -> None:
    """It believes that it leads; its next record is refused, it stops, and nothing left it."""
    async with Cell() as cell:
        old, _new = await split(cell)
        count = len(cell.records)
        sent = len(cell.network.sent)
        with pytest.raises(Unavailable):
            await cell.meanwhile(
                old.coordinator.decider.record(
                    JobSubmitted(job_id=JobId("jx"), spec=make_spec(), tenant="a", user="b")
                )
            )
        await cell.until(old.task.done)
        assert isinstance(old.task.exception(), Fenced)
        assert all(record.writer == "new" for _, record in cell.journal()[count:])
        subject = subjects.node_desired(CELL, "t0")
        pushed = [data for where, data in cell.network.sent[sent:] if where == subject]
        assert not any(b"jx" in data for data in pushed)


async def test_a_leader_that_was_replaced_cannot_command() -> None:
    """Agents know the higher epoch: they refuse its desired state, and it stops."""
    async with Cell() as cell:
        old, _new = await split(cell)
        agent = cell.agents["t0"]
        accepted = len(agent.desired)
        old.coordinator.dispatcher.push(old.coordinator.engine.desired(NodeName("t0")))
        await cell.until(old.task.done)
        with pytest.raises(Fenced, match="node t0 has epoch 2, ours is 1"):
            old.task.result()
        assert [desired.epoch for desired in agent.refused] == [1]
        assert {desired.epoch for desired in agent.desired[accepted:]} <= {2}


async def test_a_leader_whose_lease_ran_out_stops_by_itself() -> None:
    """It cannot reach the key: at the end of its own time it acts no more, and says why."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        leader = cell.leaders[0]
        leader.key.is_cut = True
        started_s = cell.clock.now_s()
        await cell.until(leader.task.done)
        assert isinstance(leader.task.exception(), Fenced)
        assert cell.clock.now_s() - started_s <= SETTINGS.leader_ttl_s
        assert not coordinator.may_act()


class HangingKey(MemoryKey):
    """A lease's key whose writes get no answer, neither good nor bad, while it hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()

    async def put(self, value: bytes, *, last_revision: int) -> int | None:
        """Compare-and-set, as soon as it hangs no longer."""
        await self.answers.wait()
        return await super().put(value, last_revision=last_revision)


async def test_a_leader_whose_renewal_hangs_does_nothing_past_the_end_of_its_lease() -> None:
    """Another one may lead by then, and it has not heard so: it journals nothing, pushes nothing,
    renews no lease and answers no report."""
    async with Cell(inference=1) as cell:
        cell.key = key = HangingKey()
        coordinator = await cell.lead()
        leader, agent = cell.leaders[0], cell.agents["i0"]
        await on_loan(cell, coordinator)
        assert (await agent.renew()).is_granted
        key.answers.clear()
        await cell.clock.advance(SETTINGS.leader_ttl_s)
        assert coordinator.is_leading
        records, pushes = len(cell.records), coordinator.dispatcher.pushes
        event = JobSubmitted(job_id=JobId("jx"), spec=make_spec(), tenant="a", user="b")
        recording = asyncio.ensure_future(coordinator.record(event))
        coordinator.dispatcher.push(coordinator.engine.desired(agent.name))
        with pytest.raises(Unavailable):
            await agent.renew()
        report = cell.caller.request(
            subjects.node_report(CELL, agent.name), encode(agent.make_report()), timeout_s=2.0
        )
        with pytest.raises(Unavailable):
            await cell.meanwhile(report)
        await cell.clock.advance(SETTINGS.engine.loan_period_s)
        assert (len(cell.records), coordinator.dispatcher.pushes) == (records, pushes)
        assert coordinator.renewals.unanswered == 1
        assert coordinator.is_leading
        key.answers.set()
        await cell.until(leader.task.done)
        with pytest.raises(Fenced, match="ran out"):
            leader.task.result()
        with pytest.raises(Unavailable):
            await recording
        assert len(cell.records) == records


async def test_an_append_is_not_tried_again_past_the_end_of_the_lease() -> None:
    """Its renewal hangs, so that nobody has told it that its time is over; a journal that is there
    again by then is another leader's to write."""
    async with Cell() as cell:
        cell.key = key = HangingKey()
        coordinator = await cell.lead()
        leader, count = cell.leaders[0], len(cell.records)
        key.answers.clear()
        leader.journal.is_down = True
        event = JobSubmitted(job_id=JobId("jx"), spec=make_spec(), tenant="a", user="b")
        recording = asyncio.ensure_future(coordinator.record(event))
        await cell.clock.advance(SETTINGS.leader_ttl_s)
        leader.journal.is_down = False
        await cell.clock.advance(2 * JOURNAL_RETRY_S)
        assert len(cell.records) == count
        with pytest.raises(Unavailable):
            await recording
        await cell.until(leader.task.done)
        with pytest.raises(Fenced, match="journal: "):
            leader.task.result()


async def test_a_journal_that_is_down_stops_decisions() -> None:
    """What cannot be journaled is not acknowledged and orders nothing; later it goes on."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        leader, agent = cell.leaders[0], cell.agents["t0"]
        leader.journal.is_down = True
        asking = asyncio.ensure_future(
            cell.caller.request(
                *cell.request(Submit(spec=make_spec(), request_id="r")), timeout_s=60.0
            )
        )
        generation = agent.generation
        await cell.clock.advance(SETTINGS.leader_ttl_s / 2)
        assert not asking.done()
        assert agent.generation == generation
        leader.journal.is_down = False
        await cell.until(asking.done)
        assert isinstance(cell.reply(asking.result()), Submitted)
        await cell.until(lambda: bool(agent.running()))
        assert coordinator.is_leading


async def test_what_was_not_journaled_is_not_acknowledged() -> None:
    """The journal stays away until the lease is gone: the caller hears that it did not happen."""
    async with Cell() as cell:
        await cell.lead()
        leader, agent = cell.leaders[0], cell.agents["t0"]
        generation, count = agent.generation, len(cell.records)
        leader.journal.is_down = leader.key.is_cut = True
        reply = await cell.ask(Submit(spec=make_spec(), request_id="r"))
        assert isinstance(reply, ApiError)
        assert reply.code == ApiErrorCode.UNAVAILABLE
        await cell.until(leader.task.done)
        assert isinstance(leader.task.exception(), Fenced)
        assert (agent.generation, len(cell.records)) == (generation, count)


async def test_a_record_whose_answer_was_lost_is_written_once() -> None:
    """The append is tried again with the same bytes; the job is there once and acknowledged."""
    async with Cell() as cell:
        await cell.lead()
        cell.leaders[0].journal.faults.writes = ["unanswered", "lost", ""]
        job_id = await submit(cell)
        entered = [
            entry.event
            for _, record in cell.journal()
            for entry in record.entries
            if isinstance(entry.event, JobSubmitted)
        ]
        assert [event.job_id for event in entered] == [job_id]


async def test_a_push_that_was_lost_is_repeated() -> None:
    """The node's report shows an old generation: it is told again until it shows the new one."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        agent = cell.agents["t0"]
        where = subjects.node_desired(CELL, "t0")
        cell.network.is_lost = lambda subject, _data: subject == where
        await submit(cell)
        await cell.clock.advance(10.0)
        assert not agent.running()
        pushes = [data for subject, data in cell.network.sent if subject == where]
        assert len(pushes) <= 2 + 10.0 / SETTINGS.push_retry_s
        cell.network.is_lost = lambda _subject, _data: False
        await cell.until(lambda: bool(agent.running()) and cell.is_obeyed(coordinator))


async def test_a_reclaim_that_is_pushed_again_has_less_time_left() -> None:
    """The deadline stands: what was lost on the way is not given to the node as extra time."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        await on_loan(cell, coordinator)
        agent = cell.agents["i0"]
        where = subjects.node_desired(CELL, "i0")
        cell.network.is_lost = lambda subject, _data: subject == where
        await cell.ask(Operate(action="recall"), tenant="ops")
        ordered_s = cell.clock.now_s()
        await cell.clock.advance(10.0)
        cell.network.is_lost = lambda _subject, _data: False
        await cell.until(lambda: agent.desired[-1].reclaim_in_s is not None)
        left_s = agent.desired[-1].reclaim_in_s
        assert left_s is not None
        deadline_s = SETTINGS.engine.services[0].reclaim_deadline_s
        assert left_s == pytest.approx(deadline_s - (cell.clock.now_s() - ordered_s), abs=0.5)


async def test_an_order_waits_for_its_own_record() -> None:
    """A node that obeys what the journal never had would run a worker that the next leader does not
    know: while the pass's record is not written, nothing of the pass is ordered."""
    async with Cell() as cell:
        await cell.lead()
        leader, agent = cell.leaders[0], cell.agents["t0"]
        before = agent.generation
        reply = await cell.ask(Submit(spec=make_spec(), request_id="r"))
        assert isinstance(reply, Submitted)
        assert agent.generation == before, "the submit is written, and no pass has run yet"
        count = len(cell.records)
        leader.journal.is_down = True
        await cell.clock.advance(1.0)
        node = leader.coordinator.engine.state.nodes[agent.name]
        assert node.desired.generation > before, "the pass has run"
        assert len(cell.records) == count
        assert (agent.generation, agent.running()) == (before, [])
        leader.journal.is_down = False
        await cell.until(lambda: bool(agent.running()))
        assert len(cell.records) > count
