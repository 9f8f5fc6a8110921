"""NATS behind the bus: crashes, refusals, floods, old servers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvloop

from common import bus as bus_module
from common import subjects
from common.bus import BusMessage, NatsBus, connect_nats
from common.clock import SystemClock
from common.errors import ConfigError, Unavailable
from common.natscalls import round_trip
from common.natsclient import NatsClient
from coordinator.cli.session import is_timeout
from coordinator.demo.nats_server import NatsServer
from tests.harness.inbox import ECHO, PATIENCE_S, Inbox, asked, echo
from tests.harness.servers import held_up, scripted_nats


@pytest.mark.nats
async def test_subscriptions_outlive_a_server_crash(
    nats_server: NatsServer, nats_bus: NatsBus
) -> None:
    """After kill -9 and a restart the same subscription answers, without anybody's help."""
    await nats_bus.subscribe(ECHO, echo)
    await nats_server.kill()
    await nats_server.start()
    assert await nats_bus.request(ECHO, b"1", timeout_s=PATIENCE_S) == b"re:1"
    assert nats_bus.counters.reconnect_count == 1


@pytest.mark.nats
async def test_what_is_subscribed_while_the_bus_connects_is_heard(nats_server: NatsServer) -> None:
    """An agent subscribes while its bus connects in the background, at any moment of that."""
    port = urlsplit(nats_server.url).port or 0
    async with held_up(port, b"early") as held, asyncio.timeout(PATIENCE_S):
        url = f"nats://127.0.0.1:{held.port}"
        bus = await connect_nats(url, identity="n", clock=SystemClock(), timeout_s=None)
        await bus.subscribe(asked("early"), echo)
        await held.said.wait()
        await bus.subscribe(ECHO, echo)
        held.go.set()
        assert await bus.request(ECHO, b"1", timeout_s=PATIENCE_S) == b"re:1"
        await bus.close()


@pytest.mark.nats
async def test_a_request_that_was_heard_and_not_answered_is_a_timeout(nats_bus: NatsBus) -> None:
    """Who asked must know that it may still happen; where nobody listens it cannot."""
    never = asyncio.Event()

    async def deaf(message: BusMessage) -> None:
        await never.wait()

    await nats_bus.subscribe(asked("deaf"), deaf)
    with pytest.raises(Unavailable, match="no answer in time") as heard:
        await nats_bus.request(asked("deaf"), b"", timeout_s=0.2)
    with pytest.raises(Unavailable) as unheard:
        await nats_bus.request(asked("nobody"), b"", timeout_s=PATIENCE_S)
    assert (is_timeout(heard.value), is_timeout(unheard.value)) == (True, False)
    never.set()


@pytest.mark.nats
async def test_a_request_without_a_connection_is_never_sent_late(
    nats_server: NatsServer, nats_bus: NatsBus
) -> None:
    """What timed out while the server was away does not reach a handler afterwards."""
    inbox = Inbox()
    await nats_bus.subscribe(asked("order"), inbox)
    await nats_bus.subscribe(ECHO, echo)
    await nats_server.kill()
    while nats_bus.is_connected:
        with contextlib.suppress(Unavailable):
            await nats_bus.request(ECHO, b"", timeout_s=0.01)
    with pytest.raises(Unavailable):
        await nats_bus.request(asked("order"), b"old", timeout_s=0.01)
    await nats_server.start()
    await nats_bus.request(ECHO, b"", timeout_s=PATIENCE_S)
    assert inbox.queue.empty()


@pytest.mark.nats
async def test_overflow_is_counted_and_the_connection_lives(
    nats_bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that does not keep up loses messages; each one lost is counted."""
    monkeypatch.setattr(bus_module, "MAX_PENDING_MESSAGES", 2)
    gate, inbox = asyncio.Event(), Inbox()

    async def slow(message: BusMessage) -> None:
        await gate.wait()
        await inbox(message)

    await nats_bus.subscribe("slow", slow)
    await nats_bus.subscribe(ECHO, echo)
    for i in range(10):
        await nats_bus.publish("slow", b"%d" % i)
    await nats_bus.request(ECHO, b"", timeout_s=PATIENCE_S)
    gate.set()
    kept = 10 - nats_bus.counters.dropped_message_count
    assert 0 < kept < 10
    await inbox.take(kept)
    assert inbox.queue.empty()


@pytest.mark.nats
async def test_a_bus_can_begin_without_a_server(tmp_path: Path) -> None:
    """With no timeout the caller goes on; the subscription is made when the server comes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    url = f"nats://127.0.0.1:{port}"
    bus = await connect_nats(url, identity="a", clock=SystemClock(), timeout_s=None)
    await bus.subscribe(ECHO, echo)
    assert not bus.is_connected
    with pytest.raises(Unavailable):
        await bus.publish("s", b"")
    server = NatsServer(tmp_path / "nats", clock=SystemClock(), port=port)
    try:
        assert await server.start() == url
        assert await bus.request(ECHO, b"1", timeout_s=PATIENCE_S) == b"re:1"
    finally:
        await bus.close()
        await server.stop()


async def test_no_server_is_unavailable() -> None:
    """A first connection that does not come about names the URL and the reason."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but it does not listen
        url = f"nats://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1.*refused|Connect call failed"):
            await connect_nats(url, identity="a", clock=SystemClock(), timeout_s=0.3)


@pytest.mark.nats
def test_the_bus_works_on_uvloop(tmp_path: Path) -> None:
    """The coordinator's loop is uvloop: server, request and close run on it."""

    async def run() -> bytes:
        server = NatsServer(tmp_path / "nats", clock=SystemClock())
        bus = await connect_nats(await server.start(), identity="a", clock=SystemClock())
        try:
            await bus.subscribe(ECHO, echo)
            return await bus.request(ECHO, b"1", timeout_s=PATIENCE_S)
        finally:
            await bus.close()
            await server.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(run()) == b"re:1"


async def nothing(_number: int, _writer: asyncio.StreamWriter) -> None:
    """A connection that just stays."""


@pytest.mark.parametrize("version", ["2.9.10", "2.14.4"])
async def test_an_old_server_is_refused(version: str) -> None:
    """A server that loses acknowledged writes is a configuration error, named by version."""
    async with scripted_nats(version, nothing) as url:
        with pytest.raises(ConfigError, match=rf"{version}.*2\.14\.5"):
            await connect_nats(url, identity="a", clock=SystemClock())


async def test_a_refused_connection_is_opened_again() -> None:
    """A server that throws the client out (a revoked user) sees it come back."""
    writers: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def keep(_number: int, writer: asyncio.StreamWriter) -> None:
        writers.put_nowait(writer)

    async with scripted_nats("2.15.1", keep) as url, asyncio.timeout(PATIENCE_S):
        bus = await connect_nats(url, identity="a", clock=SystemClock())
        first = await writers.get()
        first.write(b"-ERR 'User Authentication Revoked'\r\n")
        assert await writers.get() is not first
        await bus.close()


async def test_the_server_knows_a_subscription_before_its_caller_goes_on() -> None:
    """A message sent after `subscribe` has returned is never missed: its PING came behind it."""
    lines: list[str] = []
    async with scripted_nats("2.15.1", nothing, lines) as url, asyncio.timeout(PATIENCE_S):
        bus = await connect_nats(url, identity="a", clock=SystemClock())
        for number in range(1, 20):
            await bus.subscribe(f"s{number}", echo)
            assert lines[-1] == "PING"
            assert f"SUB s{number}  {number}" in lines
        await bus.close()


@pytest.mark.nats
async def test_a_message_that_wants_its_answer_elsewhere_is_dropped_and_counted(
    nats_server: NatsServer, nats_bus: NatsBus
) -> None:
    """A receiver publishes nothing on a subject that a sender chose, but below its own inbox."""
    journal, heard, kept = subjects.journal("c"), Inbox(), Inbox()

    async def answer(message: BusMessage) -> None:
        await kept(message)
        await message.respond(b"by the receiver's rights")

    await nats_bus.subscribe(ECHO, answer)
    await nats_bus.subscribe(journal, heard)
    stranger = NatsClient()
    await stranger.connect(nats_server.url)
    inbox = str(subjects.reply_inbox(ECHO))
    for reply in (journal, "$KV.leader_c.leader", "_INBOX.x", inbox, f"{inbox}2.x"):
        await stranger.publish(ECHO, b"hostile", reply=reply)
    await stranger.publish(ECHO, b"honest")
    await round_trip(stranger)
    await stranger.close()
    assert await nats_bus.request(ECHO, b"", timeout_s=PATIENCE_S) == b"by the receiver's rights"
    assert await kept.take(2) == [(ECHO, b"honest"), (ECHO, b"")]
    assert (nats_bus.counters.foreign_reply_count, heard.queue.empty()) == (5, True)
