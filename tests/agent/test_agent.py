"""An agent in conversation with its coordinator: reports, desired states, leases, questions."""

from __future__ import annotations

from functools import partial

import pytest
from msgspec import UNSET

from agent.driver import FIRST_START_S
from common import subjects
from common.errors import Unavailable
from common.messages import (
    GpuHealth,
    LedgerReply,
    LedgerRequest,
    LogReply,
    LogRequest,
    OrderPhase,
    RenewReply,
    RenewRequest,
    WorkerPhase,
    decode,
    encode,
)
from common.model import JobId, NodeRole, StopReason, WorkerKey
from tests.agent.agent_house import AgentHouse
from tests.agent.bench import key, lease, order

R, P = NodeRole, WorkerPhase


# --- reports ----------------------------------------------------------------------------------


async def test_the_first_report_says_what_the_node_is_and_comes_without_being_asked() -> None:
    """A coordinator that knows nothing learns the node, its GPUs and that it wants nothing yet."""
    async with AgentHouse(rack="r7") as house:
        await house.until(lambda: bool(house.reports))
        report = house.report
        assert (report.node, report.boot_id, report.rack) == ("n1", "boot-1", "r7")
        assert (report.role, report.epoch, report.generation) == (R.TRAINING, 0, 0)
        assert [gpu.uuid for gpu in report.gpus] == ["GPU-0", "GPU-1"]


async def test_a_report_has_the_labels_of_the_settings_and_none_without_any() -> None:
    """An old coordinator refuses a report with any."""
    for labels, expected in (({"nvlink": ""}, {"nvlink": ""}), ({}, UNSET)):
        async with AgentHouse(labels=labels) as house:
            await house.until(partial(bool, house.reports))
            assert house.report.labels == expected


async def test_the_first_report_waits_some_seconds_for_the_first_answer_of_nvml() -> None:
    """A driver that is slow to open is no alarm."""
    blind = AgentHouse()
    blind.machine.is_blind = True
    async with blind as house:
        await house.clock.advance(FIRST_START_S - 1.0)
        assert house.reports == []
        house.machine.is_blind = False
        await house.until(lambda: bool(house.reports))
        assert len(house.report.gpus) == 2


async def test_reports_come_every_period_and_never_fall_behind() -> None:
    """Sequence numbers grow, for the agent after a restart too: the latest wins."""
    async with AgentHouse() as house:
        await house.clock.advance(10.0)
        assert 9 <= len(house.reports) <= 12
        sequences = [report.sequence for report in house.reports]
        assert sequences == sorted(set(sequences))
        await house.die()
        async with AgentHouse(before=house) as again:
            await again.clock.advance(1.5)
            assert again.reports[0].sequence > sequences[-1]


async def test_news_are_reported_at_once_and_not_with_the_next_period() -> None:
    """A gang waits for what its slowest node has to say."""
    async with AgentHouse(report_period_s=60.0, step_period_s=0.25) as house:
        await house.clock.advance(1.0)
        before_s = house.clock.now_s()
        await house.want(R.TRAINING, order(phase=OrderPhase.RESERVE))
        await house.until_phase(key(), P.READY)
        assert house.clock.now_s() - before_s < 2.0


async def test_a_cut_bus_stops_nothing_and_the_next_report_says_all_of_it() -> None:
    """Fail static: losing the coordinator does not end training on a training node."""
    async with AgentHouse() as house:
        await house.want(R.TRAINING, order())
        await house.until_phase(key(), P.RUNNING)
        house.bus.cut()
        await house.clock.advance(600.0)
        assert house.runner.stops == []
        house.runner.end(key(), exit_code=3)
        await house.clock.advance(2.0)
        house.bus.heal()
        await house.until_phase(key(), P.EXITED)
        worker = house.worker(key())
        assert worker is not None
        assert worker.exit_code == 3


async def test_an_unwell_gpu_is_reported_and_ends_nothing() -> None:
    """One bad sensor is data: the coordinator hears of it, the worker goes on."""
    async with AgentHouse() as house:
        await house.want(R.TRAINING, order())
        await house.until_phase(key(), P.RUNNING)
        house.machine.health = GpuHealth.UNRESPONSIVE
        await house.until(lambda: house.report.gpus[0].health == GpuHealth.UNRESPONSIVE)
        assert (house.phase(key()), house.runner.stops) == (P.RUNNING, [])


async def test_an_xid_is_told_by_one_report_however_often_the_agent_looks() -> None:
    """Looks between two reports lose none, and two reports of one look do not tell it twice."""
    async with AgentHouse() as house:
        await house.until(lambda: bool(house.reports))

        async def look(*xids: int) -> None:
            house.machine.xids = xids
            await house.node.sample()

        def told() -> list[int]:
            return [code for report in house.reports for code in report.gpus[0].xids]

        await look(79)
        await look(31)
        await look()
        await house.until(lambda: len(told()) == 2)
        await house.clock.advance(5.0)
        assert told() == [79, 31]


async def test_an_xid_of_a_time_without_a_bus_is_told_when_it_is_back() -> None:
    """Only what had somewhere to go was told."""
    async with AgentHouse() as house:
        await house.until(lambda: bool(house.reports))
        house.bus.cut()
        house.machine.xids = (79,)
        await house.node.sample()
        house.machine.xids = ()
        await house.clock.advance(5.0)
        before = len(house.reports)
        house.bus.heal()
        await house.until(lambda: len(house.reports) > before + 2)
        told = [code for report in house.reports for code in report.gpus[0].xids]
        assert told == [79]


# --- desired states ---------------------------------------------------------------------------


async def test_a_desired_state_is_on_disk_before_it_is_acknowledged_and_then_carried_out() -> None:
    """What the coordinator was told holds through a crash right after the answer."""
    async with AgentHouse() as house:
        reply = await house.want(R.TRAINING, order(), epoch=4)
        saved = house.ledger.load()
        assert saved is not None
        assert (reply.is_accepted, reply.epoch, reply.generation) == (True, 4, 1)
        assert (saved.epoch, saved.generation, list(saved.workers)) == (4, 1, ["j1.1.0"])
        await house.until_phase(key(), P.RUNNING)
        assert [call for call in house.runner.calls if call[0] == "start"] == [("start", key())]
        assert (house.report.epoch, house.report.generation) == (4, 1)


async def test_a_desired_state_that_cannot_be_written_down_is_refused() -> None:
    """An acknowledgement that a crash could undo would be a lie."""
    async with AgentHouse() as house:
        house.ledger.is_full = True
        reply = await house.want(R.TRAINING, order())
        assert not reply.is_accepted
        assert "no space left" in reply.error


@pytest.mark.parametrize(
    ("node", "epoch", "generation", "field"),
    [("n2", 9, 9, "node"), ("n1", 2, 9, "epoch"), ("n1", 3, 4, "generation")],
)
async def test_a_state_of_another_node_or_an_older_leader_is_refused_and_changes_nothing(
    node: str, epoch: int, generation: int, field: str
) -> None:
    """The refusal names the field and says what counts here."""
    async with AgentHouse() as house:
        await house.want(R.TRAINING, epoch=3, generation=5)
        saved = house.ledger.saved
        reply = await house.want(R.TRAINING, order(), node=node, epoch=epoch, generation=generation)
        await house.clock.advance(3.0)
        assert not reply.is_accepted
        assert reply.error.startswith(f"{field}:")
        assert (reply.epoch, reply.generation) == (3, 5)
        assert house.ledger.saved == saved
        assert house.report.workers == ()


async def test_an_ended_worker_stays_in_the_report_until_it_is_acknowledged() -> None:
    """Then its files go and it is never started again, whoever orders it."""
    async with AgentHouse() as house:
        await house.want(R.TRAINING, order())
        await house.until_phase(key(), P.RUNNING)
        house.runner.end(key(), exit_code=7)
        await house.until_phase(key(), P.EXITED)
        await house.clock.advance(60.0)
        assert house.phase(key()) == P.EXITED
        await house.want(R.TRAINING, acknowledged=(key(),))
        await house.until_phase(key(), None)
        assert house.runner.calls[-1] == ("forget", key())
        await house.want(R.TRAINING, order())
        await house.clock.advance(5.0)
        assert [call[0] for call in house.runner.calls].count("start") == 1


async def test_a_new_agent_goes_on_with_what_the_dead_one_had_accepted() -> None:
    """Worker, epoch and generation are as before, and nothing is started a second time."""
    async with AgentHouse() as house:
        await house.want(R.TRAINING, order(), epoch=2)
        await house.until_phase(key(), P.RUNNING)
        await house.die()
        async with AgentHouse(before=house) as again:
            await again.until_phase(key(), P.RUNNING)
            assert (again.report.epoch, again.report.generation) == (2, 1)
            assert [call[0] for call in again.runner.calls].count("start") == 1
            again.runner.end(key(), exit_code=0)
            await again.until_phase(key(), P.EXITED)


async def test_what_is_left_of_a_forgotten_worker_is_removed_by_the_next_agent() -> None:
    """A node must not fill up with the files of workers that nobody asks for any more."""
    async with AgentHouse() as house:
        await house.want(R.TRAINING, order())
        await house.until_phase(key(), P.RUNNING)
        house.runner.end(key())
        await house.until_phase(key(), P.EXITED)
        house.runner.failures.append(Unavailable("killed here"))
        await house.want(R.TRAINING, acknowledged=(key(),))
        await house.die()
        assert key() in house.runner.known
        async with AgentHouse(before=house) as again:
            await again.until(lambda: key() not in again.runner.known)


# --- the lease --------------------------------------------------------------------------------


async def test_a_lent_node_asks_three_times_per_ttl_and_stays_while_it_is_answered() -> None:
    """Each request carries its lease and a nonce of its own."""
    async with AgentHouse(inference=True) as house:
        await house.lend()
        house.renewals.clear()
        await house.clock.advance(90.0)
        assert 8 <= len(house.renewals) <= 10
        assert {request.lease_id for request in house.renewals} == {"l1-1"}
        assert len({request.nonce for request in house.renewals}) == len(house.renewals)
        assert house.report.role == R.ON_LOAN


async def test_a_lent_node_that_nobody_answers_goes_home_by_itself_when_its_ttl_ends() -> None:
    """Its workers get their grace, its server is started, and only then it is routed again."""
    async with AgentHouse(inference=True) as house:
        await house.lend()
        await house.want(R.ON_LOAN, order(grace_s=7.0), lease=lease())
        await house.until_phase(key(), P.RUNNING)
        house.machine.commands.clear()
        last_s = house.clock.now_s()
        house.renewal = lambda _: None
        await house.until(lambda: house.report.role != R.ON_LOAN)
        assert house.clock.now_s() - last_s <= 30.0 + 1.0
        await house.until_role(R.SERVING)
        assert house.runner.stops == [(key(), StopReason.PREEMPT, 7.0)]
        assert house.machine.commands == ["start", "route"]
        assert house.report.lease is None


async def test_a_refused_renewal_sends_the_node_home_at_once() -> None:
    """A refusal carries the reclaim; its reason is what the node reports."""

    def refuse(request: RenewRequest) -> RenewReply:
        return RenewReply(
            lease_id=request.lease_id, nonce=request.nonce, is_granted=False, epoch=1,
            reason="load rises",
        )  # fmt: skip

    async with AgentHouse(inference=True) as house:
        await house.lend()
        house.renewal = refuse
        await house.until(lambda: any("load rises" in report.detail for report in house.reports))
        await house.until_role(R.SERVING)
        assert house.report.lease is None


async def test_a_drain_whose_lease_is_never_confirmed_ends_where_it_began() -> None:
    """A coordinator that dies right after it lent a node must not keep it out of the routing."""
    async with AgentHouse(inference=True) as house:
        house.renewal = lambda _: None
        await house.until_role(R.SERVING)
        await house.want(R.ON_LOAN, lease=lease(ttl_s=30.0))
        await house.until(lambda: "stop" in house.machine.commands)
        house.machine.commands.clear()
        await house.until_role(R.SERVING)
        assert house.machine.commands == ["start", "route"]


async def test_the_last_resort_is_armed_when_a_node_leaves_and_disarmed_at_home() -> None:
    """From the first moment of a drain, whatever the coordinator answers."""
    async with AgentHouse(inference=True) as house:
        house.renewal = lambda _: None
        await house.until_role(R.SERVING)
        assert not house.last_resort.is_armed()
        await house.want(R.ON_LOAN, lease=lease(ttl_s=30.0))
        await house.until_role(R.DRAINING)
        assert house.last_resort.is_armed()
        await house.until_role(R.SERVING)
        await house.until(lambda: not house.last_resort.is_armed())
        assert house.last_resort.fired_count == 0


async def test_an_agent_that_is_started_again_on_loan_keeps_the_lease_and_renews_it() -> None:
    """A restart of the agent is no reason to end a loan."""
    async with AgentHouse(inference=True) as house:
        await house.lend()
        await house.die()
        async with AgentHouse(inference=True, before=house) as again:
            await again.clock.advance(40.0)
            assert again.report.role == R.ON_LOAN
            assert again.renewals


# --- what the coordinator asks ----------------------------------------------------------------


async def test_the_ledger_has_every_order_in_full() -> None:
    """A coordinator without its journal rebuilds jobs from it, ended ones included."""
    async with AgentHouse() as house:
        first, second = order(key(0), gpus=(0,)), order(key(1), gpus=(1,))
        await house.want(R.TRAINING, first, second)
        await house.until_phase(key(1), P.RUNNING)
        house.runner.end(key(1))
        await house.until_phase(key(1), P.EXITED)
        subject = subjects.node_ledger("c1", "n1")
        reply = decode(await house.ask(subject, encode(LedgerRequest(node="n1"))), LedgerReply)
        assert reply.orders == (first, second)


async def test_a_log_is_answered_and_a_missing_one_is_an_error_in_words() -> None:
    """Undecodable bytes are replaced; an unknown worker, or a key that is none, is no crash."""
    async with AgentHouse() as house:
        house.runner.kept_logs[key()] = b"step 1\n\xff step 2\n"

        async def log(worker: WorkerKey) -> LogReply:
            request = LogRequest(node="n1", key=worker, max_bytes=9)
            return decode(
                await house.ask(subjects.node_logs("c1", "n1"), encode(request)), LogReply
            )

        assert await log(key()) == LogReply(text="� step 2\n")
        assert "j9.1.0" in (await log(key(job="j9"))).error
        assert "token" in (await log(WorkerKey(JobId("../../etc"), 1, 0))).error
