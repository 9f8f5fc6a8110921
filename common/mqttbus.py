"""The bus over MQTT 3.1.1, for agents of sites that allow nothing else; the server is NATS's own.

An edge: the only module that uses `aiomqtt`, imported only where a `mqtt_url` is set.
docs/decisions/0005-mqtt-through-aiomqtt.md lists the limits of MQTT.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import ssl

import aiomqtt

from common import natsrules, subjects
from common.access import ADVICE, AccessError, Cause
from common.bus import MAX_PENDING_MESSAGES, Handler
from common.clock import Clock
from common.errors import Unavailable
from common.log import Throttle
from common.model import NatsAccess
from common.mqttrules import MqttServer, servers_of
from common.natscalls import heeded_cancellation
from common.natsrules import BusCounters

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
"""Limit of one call to a server that does not answer: connecting, subscribing, handing a message
over."""
DENIED = 0x80
"""The SUBACK code for a subscription that the server refuses: MQTT 3.1.1, section 3.9.3."""
_REFUSALS = ("not authorized", "not authorised", "bad user name")
_TOKEN_BYTES = 8


async def connect_mqtt(
    urls: str,
    *,
    identity: str,
    clock: Clock,
    insecure: bool = False,
    access: NatsAccess | None = None,
    timeout_s: float | None = 10.0,
) -> MqttBus:
    """A bus on MQTT that stays: it reconnects for ever.

    Args:
        urls: `mqtt://host:port` or `mqtts://host:port`, several with commas between.
        identity: who connects. The MQTT client id is this name and a random part, because a server
            ends the older of two clients with one id. The server must not choose which of two
            agents speaks for a node.
        insecure, access: as `servers_of`.
        timeout_s: longest wait for the first connection; None returns at once.

    Raises:
        ConfigError: a URL or a file is invalid.
        AccessError: no server took the connection within `timeout_s`.
    """
    servers = servers_of(urls, access=access or NatsAccess(), insecure=insecure)
    bus = MqttBus(servers, identity=identity, clock=clock)
    await bus.open(timeout_s)
    return bus


class MqttMessage:
    """A message, and the topic that its answer goes to."""

    __slots__ = ("_bus", "_reply", "data", "subject")

    def __init__(self, bus: MqttBus, subject: str, data: bytes, reply: str | None) -> None:
        self._bus = bus
        self.subject = subject
        self.data = data
        self._reply = reply

    async def respond(self, data: bytes) -> None:
        """Answer a request; a message without a reply address gets no answer."""
        if self._reply is not None:
            await self._bus.send(self._reply, data)


class MqttSubscription:
    """One subject and its handler, with a queue of its own: a slow one delays no other."""

    def __init__(self, bus: MqttBus, subject: str, handler: Handler) -> None:
        self.subject = subject
        self.is_asked = subjects.is_asked(subject)
        self.heard = subjects.with_reply(subject, "*", "*") if self.is_asked else subject
        """The subject that it listens to; one that may need an answer has the reply address in two
        more tokens."""
        self._bus = bus
        self._handler = handler
        self._queue: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(MAX_PENDING_MESSAGES)
        self._task = asyncio.create_task(self._run(), name=f"mqtt {subject}")

    def offer(self, subject: str, data: bytes) -> None:
        """Queue a message; one that finds no room is dropped and counted."""
        try:
            self._queue.put_nowait((subject, data))
        except asyncio.QueueFull:
            self._bus.counters.dropped_message_count += 1

    async def unsubscribe(self) -> None:
        """Stop delivery."""
        await self._bus.forget(self)
        await self.end()

    async def end(self) -> None:
        """Stop calling the handler."""
        if self._task is not asyncio.current_task():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            subject, data = await self._queue.get()
            reply: str | None = None
            if self.is_asked:
                try:
                    subject, reply = subjects.split_reply(subject)
                except ValueError:
                    self._bus.counters.foreign_reply_count += 1
                    continue
            try:
                await self._handler(MqttMessage(self._bus, subject, data, reply))
            except Exception:
                self._bus.counters.handler_error_count += 1
                log.exception("handler of %s failed", subject)


class MqttBus:
    """`Bus` on aiomqtt, at QoS 0 in a clean session; made by `connect_mqtt`.

    A message that may need an answer has the reply address in its subject (`subjects.with_reply`),
    since MQTT 3.1.1 has no other place for it. Subscriptions of one bus must be the same or
    disjoint: a server may send a message that matches two of them twice.
    """

    def __init__(self, servers: tuple[MqttServer, ...], *, identity: str, clock: Clock) -> None:
        self.counters = BusCounters()
        self._servers = servers
        self._identity = f"{identity}-{secrets.token_hex(_TOKEN_BYTES)}"
        self._clock = clock
        self._client: aiomqtt.Client | None = None
        self._connected = asyncio.Event()
        self._subscriptions: list[MqttSubscription] = []
        self._asked: dict[str, asyncio.Future[bytes]] = {}
        """By the subject of the answer."""
        self._inboxes: dict[str, str] = {}
        self._opening = asyncio.Lock()
        self._why_not = natsrules.WhyNot()
        self._warn = Throttle(clock)
        self._random = random.Random()  # jitter only: it decides when to try again
        self._task: asyncio.Task[None] | None = None
        self._was_connected = False

    @property
    def is_connected(self) -> bool:
        """True if messages sent now have somewhere to go."""
        return self._client is not None

    async def open(self, timeout_s: float | None) -> None:
        """Connect and stay connected.

        Raises:
            AccessError: no connection within `timeout_s`; None does not wait for it.
        """
        self._task = asyncio.create_task(self._stay_connected(), name="mqtt")
        if timeout_s is None:
            return
        try:
            async with self._clock.timeout(timeout_s):
                await self._connected.wait()
        except TimeoutError:
            await self.close()
            where = ", ".join(map(str, self._servers))
            raise AccessError(
                f"no MQTT connection to {where}: {self._why_not}",
                self._why_not.cause or Cause.SERVER,
            ) from None

    async def publish(self, subject: str, data: bytes) -> None:
        """Send and forget; without a connection it is `Unavailable` at once."""
        await self.send(
            subjects.with_reply(subject) if subjects.is_asked(subject) else subject, data
        )

    async def subscribe(self, subject: str, handler: Handler) -> MqttSubscription:
        """Call `handler` for each message, one at a time; kept across reconnects.

        Raises:
            AccessError: the server gives this user no right to listen.
            Unavailable: the server does not confirm or refuse the right.
            ValueError: another subscription of this bus overlaps this one.
        """
        subscription = MqttSubscription(self, subject, handler)
        self._subscriptions.append(subscription)
        try:
            self._refuse_overlap(subscription)
            if self._client is not None:
                await self._attach(self._client, subscription.heard)
        except BaseException:
            await subscription.unsubscribe()
            raise
        return subscription

    def _refuse_overlap(self, new: MqttSubscription) -> None:
        for one in self._subscriptions:
            if one.heard != new.heard and _overlap(one.heard, new.heard):
                raise ValueError(f"{new.subject}: this bus hears some of it as {one.subject}")

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Send and wait for one answer; waits for the connection, never sends late.

        MQTT does not report a missing listener: the answer then does not come in time.
        """
        inbox = subjects.answers_inbox(subject)
        token = secrets.token_hex(_TOKEN_BYTES)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        reply = ""
        try:
            async with self._clock.timeout(timeout_s):
                while not self.is_connected:
                    await self._connected.wait()
                prefix = await self._inbox(inbox)
                reply = f"{inbox}.{prefix}.{token}"
                self._asked[reply] = answer
                await self.send(subjects.with_reply(subject, prefix, token), data)
                return await answer
        except TimeoutError as error:
            raise Unavailable(f"{subject}: no answer in time") from error
        finally:
            self._asked.pop(reply, None)

    async def send(self, subject: str, data: bytes) -> None:
        """One message on exactly this subject.

        Raises:
            Unavailable: not connected, or the server refuses it.
        """
        client = self._client
        if client is None:
            raise Unavailable(f"{subject}: not connected to MQTT")
        try:
            with heeded_cancellation():
                await client.publish(_topic(subject), data, timeout=CALL_TIMEOUT_S)
        except aiomqtt.MqttError as error:
            raise Unavailable(f"{subject}: {error}") from error

    async def close(self) -> None:
        """Disconnect in good order."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for subscription in self._subscriptions:
            await subscription.end()
        self._subscriptions = []

    async def forget(self, subscription: MqttSubscription) -> None:
        """Drop this subject, unless another subscription uses the same."""
        self._subscriptions = [one for one in self._subscriptions if one is not subscription]
        is_wanted = any(one.heard == subscription.heard for one in self._subscriptions)
        if self._client is not None and not is_wanted:
            # On a lost connection there is nothing to unsubscribe.
            with contextlib.suppress(aiomqtt.MqttError), heeded_cancellation():
                await self._client.unsubscribe(_topic(subscription.heard), timeout=CALL_TIMEOUT_S)

    async def _inbox(self, inbox: str) -> str:
        """The token below `inbox` where this bus receives answers."""
        async with self._opening:
            if inbox not in self._inboxes:
                prefix = secrets.token_hex(_TOKEN_BYTES)
                await self.subscribe(f"{inbox}.{prefix}.*", _ignore)
                self._inboxes[inbox] = prefix
        return self._inboxes[inbox]

    def _hear(self, message: aiomqtt.Message) -> None:
        if message.retain:
            return  # an old message: Aryl retains none on a server
        subject, data = str(message.topic).replace("/", "."), bytes(message.payload)  # pyright: ignore[reportArgumentType]
        answer = self._asked.get(subject)
        if answer is not None:
            if not answer.done():
                answer.set_result(data)
            return
        for subscription in self._subscriptions:
            if _matches(subscription.heard, subject):
                subscription.offer(subject, data)

    # --- the connection -------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        attempt = 0
        while True:
            for server in self._servers:
                with heeded_cancellation():
                    is_lost = await self._use(server)
                attempt = 0 if is_lost else attempt + 1
                await self._clock.sleep(natsrules.wait_s(attempt, self._random))

    async def _use(self, server: MqttServer) -> bool:
        """Connect and receive messages until the connection is lost; True if there was one."""
        is_up = False
        try:
            async with self._new_client(server) as client:
                await self._attach_all(client)
                is_up = True
                self._came_up(client, server)
                async for message in client.messages:
                    self._hear(message)
        except (aiomqtt.MqttError, Unavailable, OSError) as error:
            self._note(f"{server}: {error}", _cause_of(error))
        finally:
            self._client = None
            self._connected.clear()
        return is_up

    def _new_client(self, server: MqttServer) -> aiomqtt.Client:
        return aiomqtt.Client(
            server.host,
            server.port,
            username=server.user,
            password=server.password,
            identifier=self._identity,
            protocol=aiomqtt.ProtocolVersion.V311,
            clean_session=True,
            timeout=CALL_TIMEOUT_S,
            keepalive=natsrules.PING_PERIOD_S,
            tls_context=server.tls,
            max_queued_incoming_messages=MAX_PENDING_MESSAGES,
            logger=_quiet,
        )

    def _came_up(self, client: aiomqtt.Client, server: MqttServer) -> None:
        self.counters.reconnect_count += self._was_connected
        self._was_connected = True
        log.info("MQTT: connected to %s", server)
        self._client = client
        self._connected.set()

    async def _attach_all(self, client: aiomqtt.Client) -> None:
        """Subscribe on a new client, for callers of `subscribe` in the meantime too.

        Nothing else would: until this client is in use, `subscribe` leaves that to it.
        """
        attached: set[str] = set()
        while new := {one.heard for one in self._subscriptions} - attached:
            for heard in new:
                try:
                    await self._attach(client, heard)
                except AccessError as error:
                    self._note(str(error), error.cause)
            attached |= new

    async def _attach(self, client: aiomqtt.Client, heard: str) -> None:
        try:
            with heeded_cancellation():
                codes = await client.subscribe(_topic(heard), qos=0, timeout=CALL_TIMEOUT_S)
        except aiomqtt.MqttError as error:
            raise Unavailable(f"{heard}: {error}") from error
        if any(getattr(code, "value", code) >= DENIED for code in codes):
            raise AccessError(
                f"{self._identity} has no permission to subscribe to {heard}", Cause.PERMISSION
            )

    def _note(self, error: str, cause: Cause | None) -> None:
        self.counters.error_count += 1
        self._why_not.note(error, cause)
        if self._warn.is_due(error):
            advice = f"; {ADVICE[cause]}" if cause is not None else ""
            log.warning("MQTT: %s (error %d)%s", error, self.counters.error_count, advice)


async def _ignore(message: object) -> None:
    """Ignore an answer that came after its caller gave up."""


def _cause_of(error: Exception) -> Cause:
    said = str(error).lower()
    if isinstance(error, AccessError):
        return error.cause
    if any(words in said for words in _REFUSALS):
        return Cause.CREDENTIALS
    if isinstance(error, ssl.SSLError) or "certificate" in said or "ssl" in said:
        return Cause.TLS
    return Cause.SERVER


def _topic(subject: str) -> str:
    """The MQTT topic or filter of a subject: nats-server maps them one to one."""
    tokens = subject.split(".")
    return "/".join({"*": "+", ">": "#"}.get(token, token) for token in tokens)


def _matches(pattern: str, subject: str) -> bool:
    """NATS's rule: `>` is one token or more. MQTT's `#` matches the parent as well."""
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        if len(given) < len(wanted):
            return False
        wanted, given = wanted[:-1], given[: len(wanted) - 1]
    return len(wanted) == len(given) and all(
        w in ("*", g) for w, g in zip(wanted, given, strict=True)
    )


def _overlap(one: str, other: str) -> bool:
    """True if some subject matches both patterns."""
    ones, others = one.split("."), other.split(".")
    for a, b in zip(ones, others, strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(ones) == len(others)


_quiet = logging.getLogger("aiomqtt")
_quiet.setLevel(logging.ERROR)
