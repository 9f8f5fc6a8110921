"""The bus: one contract, for NATS and for the fake that other tests use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.bus import Bus, BusMessage, connect_nats
from common.clock import SystemClock
from common.errors import Unavailable
from common.mqttbus import MqttBus, connect_mqtt
from common.mqttpeers import MqttPeers
from coordinator.demo.nats_server import NatsServer
from tests.harness.fakes import FakeBus, FakeNetwork
from tests.harness.inbox import ECHO, PATIENCE_S, Inbox, asked, echo
from tests.harness.servers import running_nats

Pair = tuple[Bus, Bus]
MQTT = ("mqtt", "nats to mqtt", "mqtt to nats")
"""Two agents on MQTT; and a coordinator on NATS with an agent on MQTT, both ways."""
KINDS = ("fake", *(pytest.param(kind, marks=pytest.mark.nats) for kind in ("nats", *MQTT)))


@pytest.fixture(params=KINDS)
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    """Two buses that hear each other."""
    kind: str = request.param
    if kind == "fake":
        network = FakeNetwork()
        buses: Pair = FakeBus(network), FakeBus(network)
        yield buses
        await asyncio.gather(*(bus.close() for bus in buses))
        return
    async with running_nats(tmp_path / "nats", has_mqtt=kind in MQTT) as server:
        buses = await _bus(server, kind, "a"), await _bus(server, kind, "b")
        yield buses
        await asyncio.gather(*(bus.close() for bus in buses))


async def _bus(server: NatsServer, kind: str, identity: str) -> Bus:
    is_on_nats = {"nats": "ab", "mqtt": "", "nats to mqtt": "a", "mqtt to nats": "b"}[kind]
    if identity not in is_on_nats:
        return await connect_mqtt(server.mqtt_url, identity=identity, clock=SystemClock())
    bus = await connect_nats(server.url, identity=identity, clock=SystemClock())
    return MqttPeers(bus) if kind in MQTT else bus


async def test_messages_arrive_in_order(pair: Pair) -> None:
    """What one sender publishes arrives in its order, with its subject."""
    a, b = pair
    inbox = Inbox()
    await b.subscribe("x.*.y", inbox)
    for i in range(50):
        await a.publish(f"x.{i}.y", b"%d" % i)
    assert await inbox.take(50) == [(f"x.{i}.y", b"%d" % i) for i in range(50)]


@pytest.mark.parametrize(
    ("pattern", "heard"),
    [("a.b", {"a.b"}), ("a.*", {"a.b", "a.c"}), ("a.>", {"a.b", "a.c", "a.b.c"}), ("b.>", set())],
)
async def test_wildcards_match_tokens(pair: Pair, pattern: str, heard: set[str]) -> None:
    """`*` is one token, `>` is one or more."""
    a, b = pair
    inbox, end = Inbox(), Inbox()
    await b.subscribe(pattern, inbox)
    await b.subscribe("end", end)
    for subject in ("a", "a.b", "a.c", "a.b.c", "end"):
        await a.publish(subject, b"")
    await end.take(1)
    got = await inbox.take(len(heard))
    assert {subject for subject, _ in got} == heard
    assert inbox.queue.empty()


async def test_every_subscriber_hears(pair: Pair) -> None:
    """Two subscriptions to one subject both get the message, on the sender's bus too."""
    a, b = pair
    first, second = Inbox(), Inbox()
    await a.subscribe("s", first)
    await b.subscribe("s", second)
    await a.publish("s", b"1")
    assert await first.take(1) == await second.take(1) == [("s", b"1")]


async def test_a_request_is_answered(pair: Pair) -> None:
    """The answer comes back to the asker; many at once do not mix."""
    a, b = pair
    await b.subscribe(ECHO, echo)
    answers = await asyncio.gather(
        *(a.request(ECHO, b"%d" % i, timeout_s=PATIENCE_S) for i in range(50))
    )
    assert answers == [b"re:%d" % i for i in range(50)]


async def test_a_request_that_nobody_hears_fails_at_once(pair: Pair) -> None:
    """No subscriber is known at once, long before the timeout; only MQTT cannot tell."""
    is_told = not isinstance(pair[0], MqttBus)
    with pytest.raises(Unavailable, match="no listener" if is_told else "no answer in time"):
        await pair[0].request(asked("nobody"), b"", timeout_s=3600.0 if is_told else 0.01)


async def test_a_request_without_an_answer_times_out(pair: Pair) -> None:
    """A listener that does not answer is `Unavailable` after the timeout."""
    a, b = pair
    await b.subscribe(asked("mute"), Inbox())
    with pytest.raises(Unavailable, match="no answer"):
        await a.request(asked("mute"), b"", timeout_s=0.01)


async def test_answering_a_message_that_did_not_ask_does_nothing(pair: Pair) -> None:
    """`respond` on a plain message is silent, and the handler goes on."""
    a, b = pair
    inbox = Inbox()

    async def handler(message: BusMessage) -> None:
        await message.respond(b"x")
        await inbox(message)

    await b.subscribe("s", handler)
    await a.publish("s", b"1")
    assert await inbox.take(1) == [("s", b"1")]


async def test_a_handler_that_fails_gets_the_next_message(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception is logged with its subject and ends nothing."""
    a, b = pair
    inbox = Inbox()

    async def handler(message: BusMessage) -> None:
        if message.data == b"bad":
            raise ValueError("broken handler")
        await inbox(message)

    await b.subscribe("s", handler)
    await a.publish("s", b"bad")
    await a.publish("s", b"good")
    assert await inbox.take(1) == [("s", b"good")]
    assert "handler of s failed" in caplog.text
    assert "broken handler" in caplog.text
    source = getattr(b, "counters", b)
    assert getattr(source, "handler_error_count", None) == 1


async def test_a_slow_handler_blocks_nobody_else(pair: Pair) -> None:
    """While one handler waits, other subscriptions and requests go on."""
    a, b = pair
    gate, inbox = asyncio.Event(), Inbox()

    async def slow(message: BusMessage) -> None:
        await gate.wait()
        await inbox(message)

    await b.subscribe("slow", slow)
    await b.subscribe(ECHO, echo)
    await a.publish("slow", b"1")
    await a.publish("slow", b"2")
    assert await a.request(ECHO, b"x", timeout_s=PATIENCE_S) == b"re:x"
    assert inbox.queue.empty()
    gate.set()
    assert await inbox.take(2) == [("slow", b"1"), ("slow", b"2")]


async def test_nothing_comes_after_unsubscribe(pair: Pair) -> None:
    """Once `unsubscribe` has returned, the handler is not called again."""
    a, b = pair
    inbox = Inbox()
    subscription = await b.subscribe("s", inbox)
    await b.subscribe(ECHO, echo)
    await subscription.unsubscribe()
    await a.publish("s", b"1")
    await a.request(ECHO, b"", timeout_s=PATIENCE_S)
    assert inbox.queue.empty()
    await subscription.unsubscribe()


async def test_a_closed_bus_says_so(pair: Pair) -> None:
    """After `close` nothing can be sent, and closing twice is fine."""
    a, _ = pair
    before = a.is_connected
    await a.close()
    await a.close()
    assert (before, a.is_connected) == (True, False)
    with pytest.raises(Unavailable):
        await a.publish("s", b"")
