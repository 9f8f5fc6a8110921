"""MQTT behind the bus: crashes, refusals, rights, TLS and what a broker keeps."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiomqtt
import msgspec
import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from common import permissions, subjects
from common.access import AccessError, Cause
from common.bus import Bus, connect_nats
from common.clock import SystemClock
from common.errors import ConfigError, Unavailable
from common.model import NatsAccess
from common.mqttbus import MqttBus, connect_mqtt
from common.mqttpeers import MqttPeers
from common.mqttrules import servers_of
from common.permissions import Login
from coordinator.demo.nats_server import NatsServer, find_binary
from tests.harness.fakes import matches
from tests.harness.inbox import ECHO, PATIENCE_S, Inbox, asked, echo
from tests.harness.servers import client_url, held_up, running_nats
from tests.tables import each_row

CELL = "c"
TOKENS = st.from_regex(r"\A[A-Za-z0-9_-]{1,8}\Z")
ASKED = st.one_of(
    st.builds(subjects.node_report, TOKENS, TOKENS),
    st.builds(subjects.node_renew, TOKENS, TOKENS),
    st.builds(subjects.node_desired, TOKENS, TOKENS),
    st.builds(subjects.node_ledger, TOKENS, TOKENS),
    st.builds(subjects.node_logs, TOKENS, TOKENS),
    st.builds(subjects.api, TOKENS, TOKENS, TOKENS, TOKENS),
)


@given(subject=ASKED, inbox=TOKENS, token=TOKENS)
def test_a_subject_with_the_place_of_its_answer_says_both(
    subject: str, inbox: str, token: str
) -> None:
    """What is put together comes apart again, and the answer is in the sender's own inbox."""
    head, reply = subjects.split_reply(subjects.with_reply(subject, inbox, token))
    wants_none = (inbox, token) == (subjects.NO_ANSWER, subjects.NO_ANSWER)
    assert (head, reply is None) == (subject, wants_none)
    own = subjects.reply_inbox(subject)
    assert reply is None or reply.startswith(f"{own}.")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A nats-server with an MQTT listener."""
    async with running_nats(tmp_path / "nats", has_mqtt=True) as running:
        yield running


@contextlib.asynccontextmanager
async def on_mqtt(server: NatsServer, identity: str = "agent") -> AsyncIterator[MqttBus]:
    """A bus over MQTT."""
    bus = await connect_mqtt(server.mqtt_url, identity=identity, clock=SystemClock())
    try:
        yield bus
    finally:
        await bus.close()


async def until(holds: Callable[[], bool]) -> None:
    """Return once it holds."""
    clock = SystemClock()
    async with clock.timeout(PATIENCE_S):
        while not holds():
            await clock.sleep(0.01)


@pytest.mark.nats
async def test_subscriptions_and_requests_outlive_a_server_crash(server: NatsServer) -> None:
    """After kill -9 and a restart the same subscriptions answer, the inbox of answers too."""
    async with on_mqtt(server, "a") as asker, on_mqtt(server, "b") as answerer:
        await answerer.subscribe(ECHO, echo)
        assert await asker.request(ECHO, b"1", timeout_s=PATIENCE_S) == b"re:1"
        await server.kill()
        await until(lambda: not (asker.is_connected or answerer.is_connected))
        with pytest.raises(Unavailable, match="not connected"):
            await asker.publish("s", b"")
        await server.start()
        await until(lambda: answerer.is_connected)
        assert await asker.request(ECHO, b"2", timeout_s=PATIENCE_S) == b"re:2"
        assert asker.counters.reconnect_count == 1


@pytest.mark.nats
async def test_what_is_subscribed_while_the_bus_connects_is_heard(server: NatsServer) -> None:
    """An agent subscribes while its bus connects in the background, at any moment of that."""
    port = int(server.mqtt_url.rpartition(":")[2])
    async with held_up(port, b"early") as held, asyncio.timeout(2 * PATIENCE_S):
        url = f"mqtt://127.0.0.1:{held.port}"
        bus = await connect_mqtt(url, identity="n", clock=SystemClock(), timeout_s=None)
        await bus.subscribe(asked("early"), echo)
        await held.said.wait()
        await bus.subscribe(ECHO, echo)
        held.go.set()
        assert await bus.request(ECHO, b"1", timeout_s=PATIENCE_S) == b"re:1"
        await bus.close()


@pytest.mark.nats
async def test_what_a_broker_keeps_is_of_another_time(server: NatsServer) -> None:
    """A retained message is heard by nobody: a desired state must not come back from the past."""
    async with on_mqtt(server) as bus:
        port = int(server.mqtt_url.rpartition(":")[2])
        async with aiomqtt.Client("127.0.0.1", port, protocol=aiomqtt.ProtocolVersion.V311) as any:
            await any.publish("old", b"1", qos=1, retain=True)
        inbox = Inbox()
        await bus.subscribe("old", inbox)
        await bus.publish("old", b"2")
        assert await inbox.take(1) == [("old", b"2")]


@pytest.mark.nats
async def test_two_clients_of_one_name_do_not_end_each_other(server: NatsServer) -> None:
    """Which of two agents speaks for a node is the coordinator's choice, and no server's."""
    async with on_mqtt(server, "same") as one, on_mqtt(server, "same") as other:
        inbox = Inbox()
        await one.subscribe("s", inbox)
        await other.publish("s", b"1")
        assert await inbox.take(1) == [("s", b"1")]
        assert one.counters.error_count == other.counters.error_count == 0


@pytest.mark.nats
async def test_a_peer_that_changes_its_protocol_is_found_again(server: NatsServer) -> None:
    """A coordinator asks a node on MQTT, then on NATS, then on MQTT, each with one request."""
    subject = subjects.node_desired(CELL, "n1")
    peers = MqttPeers(await connect_nats(server.url, identity="c", clock=SystemClock()))
    try:
        for is_on_mqtt in (True, False, True):
            bus: Bus = (
                await connect_mqtt(server.mqtt_url, identity="n1", clock=SystemClock())
                if is_on_mqtt
                else await connect_nats(server.url, identity="n1", clock=SystemClock())
            )
            await bus.subscribe(subject, echo)
            for word in (b"1", b"2"):
                assert await peers.request(subject, word, timeout_s=PATIENCE_S) == b"re:" + word
            await bus.close()
    finally:
        await peers.close()


@pytest.mark.nats
async def test_subscriptions_that_overlap_are_refused(server: NatsServer) -> None:
    """A server may deliver twice what two filters match, so no two of one bus do."""
    async with on_mqtt(server) as bus:
        inbox = Inbox()
        await bus.subscribe("a.*", inbox)
        for other in ("a.b", "a.>", ">", "*.b"):
            with pytest.raises(ValueError, match="hears some of it"):
                await bus.subscribe(other, inbox)
        await bus.subscribe("a.*.c", inbox)
        await bus.publish("a.b", b"1")
        await bus.publish("a.b.c", b"2")
        assert sorted(await inbox.take(2)) == [("a.b", b"1"), ("a.b.c", b"2")]


# --- who may what -------------------------------------------------------------------------------

NODES = {name: permissions.of_mqtt_node(CELL, name) for name in ("n1", "n2")}
RIGHTS = {"coordinator": permissions.of_coordinator(CELL, has_mqtt_agents=True), **NODES}


class Site(msgspec.Struct):
    """A guarded nats-server: every identity with its rights, and TLS on both listeners."""

    url: str
    mqtt: str
    access: NatsAccess

    def mqtt_url(self, name: str, password: str | None = None) -> str:
        """Where this identity connects over MQTT."""
        return self.mqtt.replace("://", f"://{name}:{password or name}@")


async def _mqtt_port(directory: Path) -> int:
    """What the server's own page says."""
    [ports] = [json.loads(path.read_text()) for path in directory.glob("*.ports")]  # noqa: ASYNC240
    host, port = ports["monitoring"][0].removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /varz HTTP/1.0\r\n\r\n")
    page = await reader.read()
    writer.close()
    found: int = json.loads(page.partition(b"\r\n\r\n")[2])["mqtt"]["port"]
    return found


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """As docs/install.md sets one up."""
    authority = trustme.CA()
    mine = authority.issue_cert("127.0.0.1")
    ca, cert, key = (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(ca)
    mine.cert_chain_pems[0].write_to_path(cert)
    mine.private_key_pem.write_to_path(key)
    tls = f'tls {{ cert_file: "{cert}", key_file: "{key}" }}'
    logins = [Login(name=k, password=k, permissions=v) for k, v in RIGHTS.items()]
    config = tmp_path / "nats.conf"
    config.write_text(
        f'listen: "127.0.0.1:-1"\nhttp: "127.0.0.1:-1"\nserver_name: t\n'
        f'ports_file_dir: "{tmp_path}"\njetstream {{ store_dir: "{tmp_path}" }}\n{tls}\n'
        f'mqtt {{ listen: "127.0.0.1:-1", {tls} }}\n{permissions.users_file(logins)}\n'
    )
    process = await asyncio.create_subprocess_exec(
        str(find_binary()), "-c", str(config), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        url = await client_url(tmp_path)
        port = await _mqtt_port(tmp_path)
        yield Site(
            url=f"tls://coordinator:coordinator@{url.partition('://')[2]}",
            mqtt=f"mqtts://127.0.0.1:{port}",
            access=NatsAccess(tls_ca_path=str(ca)),
        )
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.nats
@pytest.mark.slow
async def test_a_node_on_mqtt_says_and_hears_its_own_and_nothing_else(site: Site) -> None:
    """Over TLS, with generated rights: asked and asking as a node, refused as another one."""
    clock = SystemClock()
    coordinator = MqttPeers(
        await connect_nats(
            site.url,
            identity="coordinator",
            clock=clock,
            access=site.access,
            inbox=subjects.coordinator_inbox(CELL),
        )
    )
    node, thief = [
        await connect_mqtt(site.mqtt_url(name), identity=name, clock=clock, access=site.access)
        for name in NODES
    ]
    try:
        reports = Inbox()
        await coordinator.subscribe(subjects.node_report(CELL), reports)
        await coordinator.subscribe(subjects.node_renew(CELL), echo)
        for build in (subjects.node_desired, subjects.node_ledger, subjects.node_logs):
            await node.subscribe(build(CELL, "n1"), echo)
            asked = build(CELL, "n1")
            assert await coordinator.request(asked, b"1", timeout_s=PATIENCE_S) == b"re:1"
            with pytest.raises(AccessError, match="no permission to subscribe") as denied:
                await thief.subscribe(build(CELL, "n1"), echo)
            assert denied.value.cause == Cause.PERMISSION
        for pattern in ("aryl.>", ">", f"aryl.v1.{CELL}.inbox.>", "$SYS.>", "$MQTT.>"):
            with pytest.raises(AccessError, match="no permission to subscribe"):
                await thief.subscribe(pattern, echo)

        renew = subjects.node_renew(CELL, "n1")
        assert await node.request(renew, b"2", timeout_s=PATIENCE_S) == b"re:2"
        with pytest.raises(AccessError, match="no permission to subscribe"):
            await thief.request(renew, b"", timeout_s=PATIENCE_S)  # its answer is n1's to hear

        for forged in (
            subjects.with_reply(subjects.node_report(CELL, "n1")),
            subjects.node_report(CELL, "n1"),
            f"{subjects.node_answers(CELL, 'n1')}.a.b",
            f"{subjects.coordinator_inbox(CELL)}.a.b",
            f"{subjects.node_inbox(CELL, 'n1')}.a.b",
            subjects.with_reply(subjects.node_desired(CELL, "n1")),
            subjects.journal(CELL),
        ):
            await thief.send(forged, b"forged")
        await thief.publish(subjects.node_report(CELL, "n2"), b"own")
        assert await reports.take(1) == [(subjects.node_report(CELL, "n2"), b"own")]
        assert reports.queue.empty()
    finally:
        await asyncio.gather(coordinator.close(), node.close(), thief.close())


@pytest.mark.nats
@pytest.mark.slow
# paho-mqtt leaves the socket of a handshake that failed to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")
@pytest.mark.parametrize(
    ("user", "has_ca", "cause"),
    [("n1:wrong", True, Cause.CREDENTIALS), ("n1:n1", False, Cause.TLS)],
)
async def test_a_refusal_says_what_it_is(site: Site, user: str, has_ca: bool, cause: Cause) -> None:
    """A wrong password and a server that nobody vouches for have each a cause and advice."""
    name, password = user.split(":")
    with pytest.raises(AccessError) as refused:
        await connect_mqtt(
            site.mqtt_url(name, password),
            identity="n1",
            clock=SystemClock(),
            access=site.access if has_ca else None,
            timeout_s=PATIENCE_S,
        )
    assert refused.value.cause == cause
    assert f":{password}" not in str(refused.value)


# --- the URL ------------------------------------------------------------------------------------


@each_row(
    ("url", "access", "named"),
    [
        ("nats://127.0.0.1:1883", NatsAccess(), "mqtt://host:port"),
        ("mqtt://", NatsAccess(), "mqtt://host:port"),
        ("mqtt://127.0.0.1:x", NatsAccess(), "not a URL"),
        ("mqtt://a..b:1883", NatsAccess(), "not a URL"),
        ("mqtt://192.0.2.1:1883", NatsAccess(), "plain text"),
        ("mqtt://127.0.0.1", NatsAccess(nkey_seed_path="seed"), "nkey_seed_path"),
        ("mqtts://192.0.2.1", NatsAccess(tls_ca_path="/nowhere"), "tls_ca_path"),
    ],
)
def test_a_url_that_does_not_fit_is_refused_by_its_field(
    url: str, access: NatsAccess, named: str
) -> None:
    """Before anything connects."""
    with pytest.raises(ConfigError, match=named):
        servers_of(url, access=access, insecure=False)


def test_a_password_is_not_shown() -> None:
    """What messages name of a server is scheme, host and port; a port has its usual default."""
    [server] = servers_of("mqtts://ada:se%40cret@h.example", access=NatsAccess(), insecure=False)
    assert (server.user, server.password, str(server)) == (
        "ada",
        "se@cret",
        "mqtts://h.example:8883",
    )


@given(
    pattern=st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=3),
    has_tail=st.booleans(),
    subject=st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=4),
)
def test_a_subject_goes_to_whom_nats_would_send_it(
    pattern: list[str], has_tail: bool, subject: list[str]
) -> None:
    """By NATS's rule: MQTT's own wildcard for the rest matches the parent as well."""
    from common.mqttbus import _matches  # pyright: ignore[reportPrivateUsage]

    text = ".".join([*pattern, *([">"] if has_tail else [])])
    assert _matches(text, ".".join(subject)) == matches(text, ".".join(subject))
