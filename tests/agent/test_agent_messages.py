"""What an agent does with a message that does not fit: counted, dropped, and nothing changes."""

from __future__ import annotations

import asyncio

import msgpack
import msgspec
import pytest

from common import subjects
from common.errors import Unavailable
from common.messages import (
    MAX_MESSAGE_BYTES,
    AgentReport,
    DesiredReply,
    DesiredState,
    LedgerRequest,
    LogRequest,
    Message,
    RenewReply,
    RenewRequest,
    StopOrder,
    WorkerPhase,
    decode,
    encode,
)
from common.model import NodeRole, StopReason
from tests.harness.node.agent import AgentHarness, grant
from tests.harness.node.life import key, order
from tests.tables import each_row

R, P = NodeRole, WorkerPhase


def _good() -> dict[str, Message]:
    desired = DesiredState(
        node="n1", epoch=9, generation=9, role=R.TRAINING, workers=(order(),),
        stops=(StopOrder(key=key(5), reason=StopReason.CANCEL, grace_s=1.0),),
    )  # fmt: skip
    return {
        subjects.node_desired("c1", "n1"): desired,
        subjects.node_ledger("c1", "n1"): LedgerRequest(node="n1"),
        subjects.node_logs("c1", "n1"): LogRequest(node="n1", key=key(5), max_bytes=10),
    }


def _spoiled(message: Message, how: str) -> bytes:
    whole = encode(message)
    fields = msgpack.unpackb(whole)
    match how:
        case "garbage":
            return b"\xc1\x00not a message"
        case "empty":
            return b""
        case "truncated":
            return whole[:-3]
        case "oversized":
            return whole + bytes(MAX_MESSAGE_BYTES)
        case "wrong version":
            return bytes(msgpack.packb(fields | {"v": 2}))
        case "unknown field":
            return bytes(msgpack.packb(fields | {"colour": "red"}))
        case "wrong type":
            return bytes(msgpack.packb(fields | {"node": 7}))
        case "wrong kind":
            return encode(RenewRequest(node="n1", lease_id="l1", nonce=1))
        case _:
            return bytes(msgpack.packb(fields | {"node": "n2"}))


SPOILINGS = (
    "garbage", "empty", "truncated", "oversized", "wrong version", "unknown field", "wrong type",
    "wrong kind",
)  # fmt: skip


@each_row("how", SPOILINGS)
@each_row("subject", list(_good()), ids=["desired", "ledger", "logs"])
async def test_a_bad_message_is_counted_and_dropped_and_changes_nothing(
    subject: str, how: str
) -> None:
    """On every subject that an agent listens to; the agent goes on as if it had not come."""
    async with AgentHarness() as harness:
        held = order(key(5), gpus=(1,))
        await harness.want(R.TRAINING, held)
        await harness.until_phase(key(5), P.RUNNING)
        saved, calls = harness.ledger.saved, list(harness.runner.calls)
        await harness.peer.publish(subject, _spoiled(_good()[subject], how))
        await harness.clock.advance(3.0)
        assert harness.agent.bad_messages == 1
        assert harness.bus.handler_error_count == 0
        assert (harness.ledger.saved, harness.runner.calls) == (saved, calls)
        assert harness.phase(key(5)) == P.RUNNING
        assert harness.report.agent == AgentReport(bad_messages=1)
        await harness.want(R.TRAINING, held)
        await harness.until(lambda: harness.report.generation == harness.generation)


async def test_a_peer_that_goes_on_being_wrong_fills_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All it says is counted and reported; the log has a line each period and subject."""
    async with AgentHarness() as harness:
        for number in range(50):
            for subject in _good():
                data = msgpack.packb({"v": number + 2})  # each error has other words
                await harness.peer.publish(subject, bytes(data))
        await harness.clock.advance(3.0)
        assert harness.report.agent == AgentReport(bad_messages=150)
        dropped = [line for line in caplog.messages if " dropped: " in line]
        assert [line.split()[2].rpartition(".")[2] for line in dropped] == [
            "desired",
            "ledger",
            "logs",
        ]


async def test_every_subject_that_an_agent_listens_to_is_tried_with_bad_messages() -> None:
    """A new subject without such a test fails here."""
    async with AgentHarness() as harness:
        heard = {s.subject for s in harness.network.subscriptions if s.bus is harness.bus}
        assert heard == set(_good())


async def test_a_bad_desired_state_is_answered_with_the_field_that_is_wrong() -> None:
    """Whoever asked learns what it did wrong and what counts here."""
    async with AgentHarness() as harness:
        await harness.want(R.TRAINING, epoch=3)
        subject = subjects.node_desired("c1", "n1")
        data = _spoiled(_good()[subject], "wrong type")
        reply = decode(await harness.ask(subject, data), DesiredReply)
        assert not reply.is_accepted
        assert "$.node" in reply.error
        assert (reply.epoch, reply.generation) == (3, 1)


@pytest.mark.parametrize("kind", ["ledger", "logs"])
async def test_a_question_to_another_node_is_not_answered(kind: str) -> None:
    """What came to the wrong node is a mistake of its sender, counted here."""
    async with AgentHarness() as harness:
        subject = f"aryl.v1.c1.node.n1.{kind}"
        data = _spoiled(_good()[subject], "other node")
        asking = asyncio.create_task(harness.peer.request(subject, data, timeout_s=1.0))
        await harness.clock.advance(2.0)
        with pytest.raises(Unavailable, match="no answer"):
            await asking
        assert harness.agent.bad_messages == 1


@each_row("how", ["garbage", "wrong nonce", "other lease", "oversized", "version"])
async def test_a_bad_answer_to_a_renewal_prolongs_nothing(how: str) -> None:
    """The TTL runs on as if nobody had answered, and the node goes home."""

    def spoiled(request: RenewRequest) -> RenewReply | bytes:
        good = grant(request)
        match how:
            case "garbage":
                return b"\xc1"
            case "wrong nonce":
                return msgspec.structs.replace(good, nonce=request.nonce + 1)
            case "other lease":
                return msgspec.structs.replace(good, lease_id="l9-9")
            case "oversized":
                return encode(good) + bytes(MAX_MESSAGE_BYTES)
            case _:
                return encode(msgspec.structs.replace(good, v=2))

    async with AgentHarness(inference=True) as harness:
        await harness.lend()
        harness.renewal = spoiled
        await harness.until(lambda: "ran out" in harness.report.detail)
        await harness.until_role(R.SERVING)
