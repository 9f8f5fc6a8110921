"""Bad messages of agents on every subject: counted, dropped, and nothing changes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from common import subjects
from common.api import ApiError, ApiErrorCode, GetLogs, GetStatus, Logs, Status, Submit, Submitted
from common.bus import BusMessage
from common.errors import Unavailable
from common.log import REPEAT_PERIOD_S
from common.messages import (
    DesiredReply,
    GpuReport,
    InferenceReport,
    LedgerReply,
    LogReply,
    Message,
    NodeReport,
    RenewReply,
    RenewRequest,
    decode,
    encode,
)
from common.model import JobId, NodeName, NodeRole, WorkerKey
from coordinator.service.coordinator import Coordinator
from tests.harness.cluster.coordinator import CELL, Cell, make_spec
from tests.service.wire import Spoilt, example, spoilt
from tests.tables import each_row

TOLD: dict[Callable[..., str], type[Message]] = {
    subjects.node_report: NodeReport,
    subjects.node_renew: RenewRequest,
}
"""Subjects on which agents speak first."""
ANSWERED: dict[Callable[..., str], type[Message]] = {
    subjects.node_desired: DesiredReply,
    subjects.node_ledger: LedgerReply,
    subjects.node_logs: LogReply,
}
"""Subjects on which agents answer."""


def cases(table: dict[Callable[..., str], type[Message]]) -> list[Any]:
    """Every way to spoil every message of a table, as test parameters."""
    return [(subject, case) for subject, kind in table.items() for case in spoilt(kind)]


def state(coordinator: Coordinator) -> bytes:
    """All that the engine knows."""
    return coordinator.engine.encode_state()


def test_every_subject_of_a_node_is_covered_here() -> None:
    """A new subject between agents and coordinator must be in one of the two tables; inboxes have
    the answers to those."""
    declared = {
        function
        for name, function in inspect.getmembers(subjects, inspect.isfunction)
        if name.startswith("node_") and name not in ("node_of", "node_inbox", "node_answers")
    }
    assert declared == {*TOLD, *ANSWERED}


@each_row(("subject", "case"), cases(TOLD))
async def test_a_spoilt_message_of_an_agent_is_dropped(
    subject: Callable[..., str], case: Spoilt
) -> None:
    """It is counted, nobody answers it, nothing changes, and the next good one is taken."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        before, count = state(coordinator), len(cell.records)
        asking = asyncio.ensure_future(
            cell.caller.request(subject(CELL, "i0"), case.data, timeout_s=0.1)
        )
        await cell.clock.settle()
        assert coordinator.bad_messages == 1
        assert (state(coordinator), len(cell.records)) == (before, count)
        assert not asking.done()
        assert cell.leaders[0].bus.handler_error_count == 0
        await cell.clock.advance(2.0)
        assert coordinator.is_leading
        with pytest.raises(Unavailable):
            await asking
        assert coordinator.folder.silent_s(NodeName("i0"), now_s=cell.clock.now_s()) < 2.0


@pytest.mark.parametrize("subject", TOLD)
async def test_a_message_that_is_signed_by_another_node_is_dropped(
    subject: Callable[..., str],
) -> None:
    """NATS permissions fix the subject: a payload may not speak for somebody else."""
    async with Cell(training=2) as cell:
        coordinator = await cell.lead()
        before = state(coordinator)
        message = msgspec.convert({**example(TOLD[subject]), "node": "t0"}, TOLD[subject])
        await cell.caller.publish(subject(CELL, "t1"), encode(message))
        await cell.clock.settle()
        assert coordinator.bad_messages == 1
        assert state(coordinator) == before


def _with(report: NodeReport, **changes: object) -> NodeReport:
    return msgspec.structs.replace(report, **changes)


def _load(count: float, **changes: float) -> InferenceReport:
    counts = {"running_count": count, "waiting_count": 0.0, "success_total": 0.0, **changes}
    return InferenceReport(**counts)


GPU = GpuReport(uuid="g", index=0, gpu_type="H100", memory_total_bytes=1)  # type: ignore[arg-type]
NONSENSE: dict[str, tuple[str, Callable[[NodeReport], NodeReport]]] = {
    "a lost node that speaks": ("role", lambda r: _with(r, role=NodeRole.LOST)),
    "one GPU twice": ("gpus", lambda r: _with(r, gpus=(GPU, GPU))),
    "infinite load": ("running_count", lambda r: _with(r, inference=_load(float("inf")))),
    "infinite count": (
        "success_total",
        lambda r: _with(r, inference=_load(0.0, success_total=float("inf"))),
    ),
    "a count beyond counting": (
        "waiting_count",
        lambda r: _with(r, inference=_load(0.0, waiting_count=1e300)),
    ),
    "a worker of no attempt": (
        "workers",
        lambda r: _with(r, workers=(_worker(attempt=0, index=0),)),
    ),
    "a worker with an index below a store's": (
        "workers",
        lambda r: _with(r, workers=(_worker(attempt=1, index=-2),)),
    ),
    "a worker twice": (
        "workers",
        lambda r: _with(r, workers=(_worker(attempt=1, index=0),) * 2),
    ),
}


def _worker(*, attempt: int, index: int) -> Any:
    good = msgspec.convert(example(NodeReport), NodeReport).workers[0]
    return msgspec.structs.replace(good, key=WorkerKey(JobId("j"), attempt, index))


@pytest.mark.parametrize("why", NONSENSE)
async def test_a_report_that_makes_no_sense_is_dropped(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its types fit and yet nothing could be decided by it: it is counted, and the log names it."""
    field, spoil = NONSENSE[why]
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        before = state(coordinator)
        report = spoil(cell.agents["i0"].make_report())
        await cell.caller.publish(subjects.node_report(CELL, "i0"), encode(report))
        await cell.clock.settle()
        assert coordinator.bad_messages == 1
        assert state(coordinator) == before
        assert field in caplog.text
        await cell.clock.advance(30.0)
        assert coordinator.is_leading


@pytest.mark.parametrize(("subject", "case"), cases(ANSWERED))
async def test_a_spoilt_answer_of_an_agent_is_dropped(
    subject: Callable[..., str], case: Spoilt, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever waited for it goes on without it, and asks again when it matters; it is counted as
    the node's, and the log names it."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        agent = cell.agents["t0"]
        submitted = await cell.ask(Submit(spec=make_spec(), request_id="r"))
        assert isinstance(submitted, Submitted)
        await cell.until(lambda: bool(agent.running()))
        await cell.until(lambda: cell.is_obeyed(coordinator))
        running = agent.running()
        await agent.bus.close()

        async def answer(message: BusMessage) -> None:
            await message.respond(case.data)

        await cell.caller.subscribe(subject(CELL, "t0"), answer)
        if subject is subjects.node_desired:
            coordinator.dispatcher.push(coordinator.engine.desired(NodeName("t0")))
        elif subject is subjects.node_ledger:
            coordinator._ledgers.ask(NodeName("t0"))
        else:
            reply = await cell.ask(GetLogs(job_id=submitted.job_id))
            assert isinstance(reply, ApiError)
            assert reply.code == ApiErrorCode.UNAVAILABLE
            assert "logs of node t0" in reply.message
        await cell.clock.settle()
        assert coordinator.dispatcher.bad_messages == coordinator.bad_messages == 1
        assert "bad answers of t0: " in caplog.text
        assert coordinator.is_leading
        assert agent.running() == running


async def test_a_ledger_that_is_signed_by_another_node_is_dropped() -> None:
    """What one node holds is not believed of another."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        await cell.agents["t0"].bus.close()

        async def answer(message: BusMessage) -> None:
            await message.respond(encode(LedgerReply(node="t9", orders=())))

        await cell.caller.subscribe(subjects.node_ledger(CELL, "t0"), answer)
        coordinator._ledgers.ask(NodeName("t0"))
        await cell.clock.settle()
        assert coordinator.bad_messages == 1


async def test_bad_messages_are_in_the_status() -> None:
    """An operator sees that somebody talks nonsense, whichever way it came in."""
    async with Cell() as cell:
        await cell.lead()
        await cell.caller.publish(subjects.node_report(CELL, "t0"), b"?")
        await cell.caller.publish(subjects.node_renew(CELL, "t0"), b"?")
        await cell.ask_raw("submit", b"?")
        status = await cell.ask(GetStatus())
        assert isinstance(status, Status)
        assert status.bad_messages == 3


@pytest.mark.parametrize("subject", [*TOLD, subjects.node_desired])
async def test_a_peer_that_goes_on_being_wrong_fills_no_log(
    subject: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    """All it says is counted; the log has a line and the count each period, whatever the words."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        await cell.agents["t0"].bus.close()
        said: list[bytes] = []

        async def answer(message: BusMessage) -> None:
            said.append(of_version(len(said) + 2))
            await message.respond(said[-1])

        await cell.caller.subscribe(subjects.node_desired(CELL, "t0"), answer)

        async def be_wrong(times: int) -> None:
            for number in range(times):
                if subject is subjects.node_desired:
                    coordinator.dispatcher.push(coordinator.engine.desired(NodeName("t0")))
                else:
                    await cell.caller.publish(subject(CELL, "t0"), of_version(number + 2))
                await cell.clock.settle()

        await be_wrong(50)
        assert coordinator.bad_messages == 50
        assert [line[-3:] for line in warnings_in(caplog)] == ["(1)"]
        await cell.clock.advance(REPEAT_PERIOD_S)
        caplog.clear()
        await be_wrong(1)
        assert len([line for line in warnings_in(caplog) if line.endswith("(51)")]) == 1


async def test_a_node_that_refuses_its_orders_is_told_of_once_a_period(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is asked again every few seconds, for as long as it refuses."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        await cell.agents["t0"].bus.close()
        refusal = DesiredReply(is_accepted=False, epoch=0, generation=0, error="no room")

        async def answer(message: BusMessage) -> None:
            await message.respond(encode(refusal))

        await cell.caller.subscribe(subjects.node_desired(CELL, "t0"), answer)
        before = coordinator.dispatcher.refusals
        for _ in range(20):
            coordinator.dispatcher.push(coordinator.engine.desired(NodeName("t0")))
            await cell.clock.settle()
        assert coordinator.dispatcher.refusals == before + 20
        assert len([line for line in caplog.messages if line.endswith(": no room")]) == 1


def of_version(number: int) -> bytes:
    """A message of a version that nobody here speaks; the error says the number."""
    return msgspec.msgpack.encode({"v": number})


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of what agents sent."""
    return [line for line in caplog.messages if line.startswith(("bad ", "push to "))]


async def test_a_renewal_of_a_lease_that_is_none_is_refused() -> None:
    """A node that is heard and holds nothing is told so; the answer carries its own nonce."""
    async with Cell(inference=1) as cell:
        await cell.lead()
        request = RenewRequest(node="i0", lease_id="l9", nonce=7)
        answer = await cell.meanwhile(
            cell.caller.request(subjects.node_renew(CELL, "i0"), encode(request), timeout_s=2.0)
        )
        reply = decode(answer, RenewReply)
        assert (reply.is_granted, reply.nonce, reply.ttl_s) == (False, 7, 0.0)
        assert reply.reason


async def test_the_log_of_a_running_worker_is_fetched_from_its_node() -> None:
    """By the job's id; the answer says where it is from."""
    async with Cell() as cell:
        await cell.lead()
        submitted = await cell.ask(Submit(spec=make_spec(), request_id="r"))
        assert isinstance(submitted, Submitted)
        await cell.until(lambda: bool(cell.agents["t0"].running()))
        reply = await cell.ask(GetLogs(job_id=submitted.job_id))
        assert isinstance(reply, Logs)
        assert (reply.text, reply.node, reply.worker_index) == ("step 1\n", "t0", 0)
