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
from tests.harness.node.agent import AgentHarness
from tests.harness.node.life import key, lease, order

R, P = NodeRole, WorkerPhase


# --- reports ----------------------------------------------------------------------------------


async def test_the_first_report_says_what_the_node_is_and_comes_without_being_asked() -> None:
    """A coordinator that knows nothing learns the node, its GPUs and that it wants nothing yet."""
    async with AgentHarness(rack="r7") as harness:
        await harness.until(lambda: bool(harness.reports))
        report = harness.report
        assert (report.node, report.boot_id, report.rack) == ("n1", "boot-1", "r7")
        assert (report.role, report.epoch, report.generation) == (R.TRAINING, 0, 0)
        assert [gpu.uuid for gpu in report.gpus] == ["GPU-0", "GPU-1"]


async def test_a_report_has_the_labels_of_the_settings_and_none_without_any() -> None:
    """An old coordinator refuses a report with any."""
    for labels, expected in (({"nvlink": ""}, {"nvlink": ""}), ({}, UNSET)):
        async with AgentHarness(labels=labels) as harness:
            await harness.until(partial(bool, harness.reports))
            assert harness.report.labels == expected


async def test_the_first_report_waits_some_seconds_for_the_first_answer_of_nvml() -> None:
    """A driver that is slow to open is no alarm."""
    blind = AgentHarness()
    blind.machine.is_blind = True
    async with blind as harness:
        await harness.clock.advance(FIRST_START_S - 1.0)
        assert harness.reports == []
        harness.machine.is_blind = False
        await harness.until(lambda: bool(harness.reports))
        assert len(harness.report.gpus) == 2


async def test_reports_come_every_period_and_never_fall_behind() -> None:
    """Sequence numbers grow, for the agent after a restart too: the latest wins."""
    async with AgentHarness() as harness:
        await harness.clock.advance(10.0)
        assert 9 <= len(harness.reports) <= 12
        sequences = [report.sequence for report in harness.reports]
        assert sequences == sorted(set(sequences))
        await harness.die()
        async with AgentHarness(before=harness) as again:
            await again.clock.advance(1.5)
            assert again.reports[0].sequence > sequences[-1]


async def test_news_are_reported_at_once_and_not_with_the_next_period() -> None:
    """A gang waits for what its slowest node has to say."""
    async with AgentHarness(report_period_s=60.0, step_period_s=0.25) as harness:
        await harness.clock.advance(1.0)
        before_s = harness.clock.now_s()
        await harness.want(R.TRAINING, order(phase=OrderPhase.RESERVE))
        await harness.until_phase(key(), P.READY)
        assert harness.clock.now_s() - before_s < 2.0


async def test_a_cut_bus_stops_nothing_and_the_next_report_says_all_of_it() -> None:
    """Fail static: losing the coordinator does not end training on a training node."""
    async with AgentHarness() as harness:
        await harness.want(R.TRAINING, order())
        await harness.until_phase(key(), P.RUNNING)
        harness.bus.cut()
        await harness.clock.advance(600.0)
        assert harness.runner.stops == []
        harness.runner.end(key(), exit_code=3)
        await harness.clock.advance(2.0)
        harness.bus.heal()
        await harness.until_phase(key(), P.EXITED)
        worker = harness.worker(key())
        assert worker is not None
        assert worker.exit_code == 3


async def test_an_unwell_gpu_is_reported_and_ends_nothing() -> None:
    """One bad sensor is data: the coordinator hears of it, the worker goes on."""
    async with AgentHarness() as harness:
        await harness.want(R.TRAINING, order())
        await harness.until_phase(key(), P.RUNNING)
        harness.machine.health = GpuHealth.UNRESPONSIVE
        await harness.until(lambda: harness.report.gpus[0].health == GpuHealth.UNRESPONSIVE)
        assert (harness.phase(key()), harness.runner.stops) == (P.RUNNING, [])


async def test_an_xid_is_told_by_one_report_however_often_the_agent_looks() -> None:
    """Looks between two reports lose none, and two reports of one look do not tell it twice."""
    async with AgentHarness() as harness:
        await harness.until(lambda: bool(harness.reports))

        async def look(*xids: int) -> None:
            harness.machine.xids = xids
            await harness.node.sample()

        def told() -> list[int]:
            return [code for report in harness.reports for code in report.gpus[0].xids]

        await look(79)
        await look(31)
        await look()
        await harness.until(lambda: len(told()) == 2)
        await harness.clock.advance(5.0)
        assert told() == [79, 31]


async def test_an_xid_of_a_time_without_a_bus_is_told_when_it_is_back() -> None:
    """Only what had somewhere to go was told."""
    async with AgentHarness() as harness:
        await harness.until(lambda: bool(harness.reports))
        harness.bus.cut()
        harness.machine.xids = (79,)
        await harness.node.sample()
        harness.machine.xids = ()
        await harness.clock.advance(5.0)
        before = len(harness.reports)
        harness.bus.heal()
        await harness.until(lambda: len(harness.reports) > before + 2)
        told = [code for report in harness.reports for code in report.gpus[0].xids]
        assert told == [79]


# --- desired states ---------------------------------------------------------------------------


async def test_a_desired_state_is_on_disk_before_it_is_acknowledged_and_then_carried_out() -> None:
    """What the coordinator was told holds through a crash right after the answer."""
    async with AgentHarness() as harness:
        reply = await harness.want(R.TRAINING, order(), epoch=4)
        saved = harness.ledger.load()
        assert saved is not None
        assert (reply.is_accepted, reply.epoch, reply.generation) == (True, 4, 1)
        assert (saved.epoch, saved.generation, list(saved.workers)) == (4, 1, ["j1.1.0"])
        await harness.until_phase(key(), P.RUNNING)
        assert [call for call in harness.runner.calls if call[0] == "start"] == [("start", key())]
        assert (harness.report.epoch, harness.report.generation) == (4, 1)


async def test_a_desired_state_that_cannot_be_written_down_is_refused() -> None:
    """An acknowledgement that a crash could undo would be a lie."""
    async with AgentHarness() as harness:
        harness.ledger.is_full = True
        reply = await harness.want(R.TRAINING, order())
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
    async with AgentHarness() as harness:
        await harness.want(R.TRAINING, epoch=3, generation=5)
        saved = harness.ledger.saved
        reply = await harness.want(
            R.TRAINING, order(), node=node, epoch=epoch, generation=generation
        )
        await harness.clock.advance(3.0)
        assert not reply.is_accepted
        assert reply.error.startswith(f"{field}:")
        assert (reply.epoch, reply.generation) == (3, 5)
        assert harness.ledger.saved == saved
        assert harness.report.workers == ()


async def test_an_ended_worker_stays_in_the_report_until_it_is_acknowledged() -> None:
    """Then its files go and it is never started again, whoever orders it."""
    async with AgentHarness() as harness:
        await harness.want(R.TRAINING, order())
        await harness.until_phase(key(), P.RUNNING)
        harness.runner.end(key(), exit_code=7)
        await harness.until_phase(key(), P.EXITED)
        await harness.clock.advance(60.0)
        assert harness.phase(key()) == P.EXITED
        await harness.want(R.TRAINING, acknowledged=(key(),))
        await harness.until_phase(key(), None)
        assert harness.runner.calls[-1] == ("forget", key())
        await harness.want(R.TRAINING, order())
        await harness.clock.advance(5.0)
        assert [call[0] for call in harness.runner.calls].count("start") == 1


async def test_a_new_agent_goes_on_with_what_the_dead_one_had_accepted() -> None:
    """Worker, epoch and generation are as before, and nothing is started a second time."""
    async with AgentHarness() as harness:
        await harness.want(R.TRAINING, order(), epoch=2)
        await harness.until_phase(key(), P.RUNNING)
        await harness.die()
        async with AgentHarness(before=harness) as again:
            await again.until_phase(key(), P.RUNNING)
            assert (again.report.epoch, again.report.generation) == (2, 1)
            assert [call[0] for call in again.runner.calls].count("start") == 1
            again.runner.end(key(), exit_code=0)
            await again.until_phase(key(), P.EXITED)


async def test_what_is_left_of_a_forgotten_worker_is_removed_by_the_next_agent() -> None:
    """A node must not fill up with the files of workers that nobody asks for any more."""
    async with AgentHarness() as harness:
        await harness.want(R.TRAINING, order())
        await harness.until_phase(key(), P.RUNNING)
        harness.runner.end(key())
        await harness.until_phase(key(), P.EXITED)
        harness.runner.failures.append(Unavailable("killed here"))
        await harness.want(R.TRAINING, acknowledged=(key(),))
        await harness.die()
        assert key() in harness.runner.known
        async with AgentHarness(before=harness) as again:
            await again.until(lambda: key() not in again.runner.known)


# --- the lease --------------------------------------------------------------------------------


async def test_a_lent_node_asks_three_times_per_ttl_and_stays_while_it_is_answered() -> None:
    """Each request carries its lease and a nonce of its own."""
    async with AgentHarness(inference=True) as harness:
        await harness.lend()
        harness.renewals.clear()
        await harness.clock.advance(90.0)
        assert 8 <= len(harness.renewals) <= 10
        assert {request.lease_id for request in harness.renewals} == {"l1-1"}
        assert len({request.nonce for request in harness.renewals}) == len(harness.renewals)
        assert harness.report.role == R.ON_LOAN


async def test_a_lent_node_that_nobody_answers_goes_home_by_itself_when_its_ttl_ends() -> None:
    """Its workers get their grace, its server is started, and only then it is routed again."""
    async with AgentHarness(inference=True) as harness:
        await harness.lend()
        await harness.want(R.ON_LOAN, order(grace_s=7.0), lease=lease())
        await harness.until_phase(key(), P.RUNNING)
        harness.machine.commands.clear()
        last_s = harness.clock.now_s()
        harness.renewal = lambda _: None
        await harness.until(lambda: harness.report.role != R.ON_LOAN)
        assert harness.clock.now_s() - last_s <= 30.0 + 1.0
        await harness.until_role(R.SERVING)
        assert harness.runner.stops == [(key(), StopReason.PREEMPT, 7.0)]
        assert harness.machine.commands == ["start", "route"]
        assert harness.report.lease is None


async def test_a_refused_renewal_sends_the_node_home_at_once() -> None:
    """A refusal carries the reclaim; its reason is what the node reports."""

    def refuse(request: RenewRequest) -> RenewReply:
        return RenewReply(
            lease_id=request.lease_id, nonce=request.nonce, is_granted=False, epoch=1,
            reason="load rises",
        )  # fmt: skip

    async with AgentHarness(inference=True) as harness:
        await harness.lend()
        harness.renewal = refuse
        await harness.until(
            lambda: any("load rises" in report.detail for report in harness.reports)
        )
        await harness.until_role(R.SERVING)
        assert harness.report.lease is None


async def test_a_drain_whose_lease_is_never_confirmed_ends_where_it_began() -> None:
    """A coordinator that dies right after it lent a node must not keep it out of the routing."""
    async with AgentHarness(inference=True) as harness:
        harness.renewal = lambda _: None
        await harness.until_role(R.SERVING)
        await harness.want(R.ON_LOAN, lease=lease(ttl_s=30.0))
        await harness.until(lambda: "stop" in harness.machine.commands)
        harness.machine.commands.clear()
        await harness.until_role(R.SERVING)
        assert harness.machine.commands == ["start", "route"]


async def test_the_last_resort_is_armed_when_a_node_leaves_and_disarmed_at_home() -> None:
    """From the first moment of a drain, whatever the coordinator answers."""
    async with AgentHarness(inference=True) as harness:
        harness.renewal = lambda _: None
        await harness.until_role(R.SERVING)
        assert not harness.last_resort.is_armed()
        await harness.want(R.ON_LOAN, lease=lease(ttl_s=30.0))
        await harness.until_role(R.DRAINING)
        assert harness.last_resort.is_armed()
        await harness.until_role(R.SERVING)
        await harness.until(lambda: not harness.last_resort.is_armed())
        assert harness.last_resort.fired_count == 0


async def test_an_agent_that_is_started_again_on_loan_keeps_the_lease_and_renews_it() -> None:
    """A restart of the agent is no reason to end a loan."""
    async with AgentHarness(inference=True) as harness:
        await harness.lend()
        await harness.die()
        async with AgentHarness(inference=True, before=harness) as again:
            await again.clock.advance(40.0)
            assert again.report.role == R.ON_LOAN
            assert again.renewals


# --- what the coordinator asks ----------------------------------------------------------------


async def test_the_ledger_has_every_order_in_full() -> None:
    """A coordinator without its journal rebuilds jobs from it, ended ones included."""
    async with AgentHarness() as harness:
        first, second = order(key(0), gpus=(0,)), order(key(1), gpus=(1,))
        await harness.want(R.TRAINING, first, second)
        await harness.until_phase(key(1), P.RUNNING)
        harness.runner.end(key(1))
        await harness.until_phase(key(1), P.EXITED)
        subject = subjects.node_ledger("c1", "n1")
        reply = decode(await harness.ask(subject, encode(LedgerRequest(node="n1"))), LedgerReply)
        assert reply.orders == (first, second)


async def test_a_log_is_answered_and_a_missing_one_is_an_error_in_words() -> None:
    """Undecodable bytes are replaced; an unknown worker, or a key that is none, is no crash."""
    async with AgentHarness() as harness:
        harness.runner.kept_logs[key()] = b"step 1\n\xff step 2\n"

        async def log(worker: WorkerKey) -> LogReply:
            request = LogRequest(node="n1", key=worker, max_bytes=9)
            return decode(
                await harness.ask(subjects.node_logs("c1", "n1"), encode(request)), LogReply
            )

        assert await log(key()) == LogReply(text="� step 2\n")
        assert "j9.1.0" in (await log(key(job="j9"))).error
        assert "token" in (await log(WorkerKey(JobId("../../etc"), 1, 0))).error
