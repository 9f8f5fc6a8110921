"""The bus: a protocol that drivers take as an argument, and NATS behind it.

An edge. With `common.natscalls`, `common.natsclient`, and the coordinator's journal and leader key,
it is the only code that uses `nats`, which `common.natslib` imports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from common import natsrules, subjects
from common.access import ADVICE, IS_LASTING, AccessError, Cause
from common.clock import Clock
from common.errors import Unavailable
from common.log import Throttle
from common.model import NatsAccess
from common.natscalls import as_unavailable, cause_of, heeded_cancellation, round_trip, text
from common.natsclient import NatsClient
from common.natslib import JetStreamContext, Msg, Server
from common.natslib import Subscription as LiveSubscription
from common.natslib import errors as nats_errors
from common.natsrules import BusCounters

log = logging.getLogger(__name__)


class BusMessage(Protocol):
    """One message as it arrived."""

    @property
    def subject(self) -> str:
        """The subject that it was sent to."""
        ...

    @property
    def data(self) -> bytes:
        """Its payload."""
        ...

    async def respond(self, data: bytes) -> None:
        """Answer a request; without a reply subject this does nothing.

        An answer goes to the inbox of the identity that the subject names, and nowhere else: the
        bus drops and counts a message that asks for another way (`common.subjects.may_answer`).
        """
        ...


Handler = Callable[[BusMessage], Awaitable[None]]


class Subscription(Protocol):
    """The result of `subscribe`."""

    async def unsubscribe(self) -> None:
        """Stop delivery."""
        ...


class Bus(Protocol):
    """Publish, subscribe, request: at most once, in order per sender."""

    @property
    def is_connected(self) -> bool:
        """True if messages sent now have somewhere to go."""
        ...

    async def publish(self, subject: str, data: bytes) -> None:
        """Send and forget.

        Raises:
            Unavailable: not connected and nothing more can be buffered.
        """
        ...

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """Call `handler` for each message; an exception in it is logged and counted."""
        ...

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Send and wait for one answer.

        Raises:
            Unavailable: no listener, or no answer in time.
            AccessError: the server gives this user no right to ask here.
        """
        ...

    async def close(self) -> None:
        """Send what can still be sent and leave."""
        ...


MAX_PENDING_MESSAGES = 65_536
MAX_PENDING_BYTES = 64 * 1024 * 1024
GOODBYE_S = 1.0
"""A NATS server that hangs ends no connection; one that is well needs a round trip."""


async def leave(bus: Bus, *, clock: Clock) -> None:
    """Close the bus within `GOODBYE_S`.

    Messages that a hanging server has not taken by then are dropped.
    """
    with contextlib.suppress(TimeoutError):
        async with clock.timeout(GOODBYE_S):
            await bus.close()


async def connect_nats(
    url: str,
    *,
    identity: str,
    clock: Clock,
    insecure: bool = False,
    access: NatsAccess | None = None,
    timeout_s: float | None = 10.0,
    inbox: str = "_INBOX",
) -> NatsBus:
    """A bus on NATS that stays: it reconnects for ever, after a refusal too.

    Args:
        url: `nats://host:port` or `tls://host:port`, several with commas between.
        identity: who connects, for error messages and the server's own pages.
        insecure: allow a plain-text URL off loopback.
        access: keys and certificates; with `tls_ca_path` a plain URL is TLS as well.
        timeout_s: longest wait for the first connection; None returns at once and connects in the
            background, for a caller that must work without a bus.
        inbox: prefix of JetStream's answers; those of peers come to `subjects.reply_inbox`.

    Raises:
        ConfigError: the URL or a file is invalid, or the server is too old.
        AccessError: no server took the connection within `timeout_s`, or each refuses it for good.
    """
    options = natsrules.client_options(
        url,
        name=identity,
        inbox_prefix=inbox,
        access=access or NatsAccess(),
        insecure=insecure,
    )
    bus = NatsBus(options, clock=clock)
    await bus.open(timeout_s)
    return bus


class NatsMessage:
    __slots__ = ("_message",)

    def __init__(self, message: Msg) -> None:
        self._message = message

    @property
    def subject(self) -> str:
        return self._message.subject

    @property
    def data(self) -> bytes:
        return self._message.data

    async def respond(self, data: bytes) -> None:
        if self._message.reply:
            with as_unavailable(self._message.subject):
                await self._message.respond(data)


class NatsSubscription:
    """One subject and its handler; outlives the connection that it was made on."""

    def __init__(self, bus: NatsBus, subject: str, handler: Handler) -> None:
        self._bus = bus
        self._subject = subject
        self._handler = handler
        self._live: LiveSubscription | None = None

    @property
    def subject(self) -> str:
        """The subject that it listens to."""
        return self._subject

    async def attach(self, client: NatsClient) -> None:
        """Subscribe on a (new) connection; each subscription has its own queue and task there."""
        self._live = await client.subscribe(  # pyright: ignore[reportUnknownMemberType]
            self._subject,
            cb=self._deliver,
            pending_msgs_limit=MAX_PENDING_MESSAGES,
            pending_bytes_limit=MAX_PENDING_BYTES,
        )

    async def unsubscribe(self) -> None:
        """Stop delivery."""
        self._bus.forget(self)
        live, self._live = self._live, None
        if live is not None:
            # On a lost connection there is nothing to unsubscribe.
            with contextlib.suppress(nats_errors.Error):
                await live.unsubscribe()

    async def _deliver(self, message: Msg) -> None:
        if message.reply and not subjects.may_answer(message.subject, message.reply):
            self._bus.drop(message.subject, message.reply)
            return
        try:
            await self._handler(NatsMessage(message))
        except Exception:
            self._bus.counters.handler_error_count += 1
            log.exception("handler of %s failed", message.subject)


class NatsBus:
    """`Bus` on nats-py; made by `connect_nats`.

    nats-py gives up for good when the server refuses a connection (a revoked user, too many
    clients); this class then opens a new one and subscribes again, with growing waits.
    """

    def __init__(self, options: dict[str, Any], *, clock: Clock) -> None:
        self.counters = BusCounters()
        self._options = options
        self._urls = ", ".join(natsrules.redacted(url) for url in options["servers"])
        self._clock = clock
        self._client: NatsClient | None = None
        self._connected = asyncio.Event()
        self._cut = asyncio.Event()
        self._subscriptions: list[NatsSubscription] = []
        self._reopening: asyncio.Task[None] | None = None
        self._is_closing = False
        self._is_opening = False
        self._refused_count = 0
        """Attempts in a row that failed for good; once there are as many as servers, all of them
        refuse."""
        self._why_not = natsrules.WhyNot()
        self._warn = Throttle(clock)
        self._random = random.Random()  # jitter only: it decides when to try again

    @property
    def is_connected(self) -> bool:
        """True if messages sent now have somewhere to go."""
        return self._client is not None and self._client.is_connected

    @property
    def max_payload_bytes(self) -> int:
        """The largest message that the server takes.

        Raises:
            Unavailable: not connected.
        """
        if self._client is None:
            raise Unavailable("not connected to NATS")
        return self._client.max_payload

    @property
    def server_id(self) -> str:
        """Names the run of the connected or last connected server; empty: there was none."""
        return "" if self._client is None else self._client.server_id

    def jetstream(self, *, timeout_s: float) -> JetStreamContext:
        """JetStream on the present connection, for the coordinator's journal and leader key alone.

        Raises:
            Unavailable: not connected.
        """
        if self._client is None or not self._client.is_connected:
            raise Unavailable("not connected to NATS")
        return self._client.jetstream(timeout=timeout_s)  # pyright: ignore[reportUnknownMemberType]

    async def cut_off(self) -> None:
        """Return when the present connection is lost: no answer comes on it any more."""
        await self._cut.wait()

    async def open(self, timeout_s: float | None) -> None:
        if timeout_s is None:
            self._reopen()
            return
        self._is_opening = True
        try:
            async with self._clock.timeout(timeout_s):
                await self._connect()
        except TimeoutError:
            raise self._no_access() from None
        except (nats_errors.Error, OSError) as error:
            self._why_not.note(text(error), cause_of(error))
            raise self._no_access() from error
        finally:
            self._is_opening = False

    def _no_access(self) -> AccessError:
        """Why there is no connection, by the errors so far."""
        cause = self._why_not.cause or Cause.SERVER
        who = natsrules.nats_user(self._options)
        what = {
            Cause.SERVER: f"no NATS server answers at {self._urls}",
            Cause.TLS: f"NATS at {self._urls} speaks no TLS that can be trusted",
            Cause.CREDENTIALS: f"NATS at {self._urls} refuses {who}",
            Cause.PERMISSION: f"NATS at {self._urls} gives {who} no permission",
        }[cause]
        return AccessError(f"{what}: {self._why_not}", cause)

    def drop(self, subject: str, reply: str) -> None:
        """Count a message that asks for an answer on another identity's subject; it is not
        handled.
        """
        self.counters.foreign_reply_count += 1
        if self._warn.is_due(f"reply {subjects.reply_inbox(subject)}"):
            log.warning(
                "message on %s dropped: its sender may not receive answers at %.200r (%d)",
                subject, reply, self.counters.foreign_reply_count,
            )  # fmt: skip

    async def publish(self, subject: str, data: bytes) -> None:
        """Send and forget; buffered for a while when the connection is down."""
        if self._client is None:
            raise Unavailable(f"{subject}: not connected to NATS")
        with as_unavailable(subject):
            await self._client.publish(subject, data)

    async def subscribe(self, subject: str, handler: Handler) -> NatsSubscription:
        """Call `handler` for each message, one at a time; kept across reconnects."""
        subscription = NatsSubscription(self, subject, handler)
        self._subscriptions.append(subscription)
        client = self._client
        if client is None or client.is_closed:
            return subscription  # made with the connection
        try:
            with as_unavailable(subject):
                await subscription.attach(client)
                if client.is_connected:
                    await round_trip(client)  # the server knows of it before the caller goes on
                    if client.is_denied(subject):
                        raise client.denied("subscribe", subject)
        except Unavailable:
            self.forget(subscription)
            raise
        return subscription

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Send and wait for one answer; waits for the connection, never sends late."""
        if subjects.reply_inbox(subject) is None:
            raise ValueError(f"{subject}: no permission to answer on this subject")
        with as_unavailable(subject):
            async with self._clock.timeout(timeout_s):
                client = await self._live_client()
                # The clock's timeout decides. nats-py's runs on another clock; it is for the case
                # where nats-py swallows the cancellation: while more is buffered than it keeps.
                answer = await client.request(subject, data, timeout=timeout_s + 5.0)
        return answer.data

    async def request_by_topic(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """The same, with the reply address in the subject, for a peer on MQTT."""
        with as_unavailable(subject):
            async with self._clock.timeout(timeout_s):
                client = await self._live_client()
                answer = await client.request_by_topic(subject, data, timeout=timeout_s + 5.0)
        return answer.data

    async def close(self) -> None:
        """Send what can still be sent and leave."""
        self._is_closing = True
        if self._reopening is not None:
            self._reopening.cancel()
            await asyncio.gather(self._reopening, return_exceptions=True)
        client, self._client = self._client, None
        self._connected.clear()
        if client is None or client.is_closed:
            return
        if client.is_connected:
            with contextlib.suppress(nats_errors.Error, OSError):
                await round_trip(client)
        await client.close()

    def forget(self, subscription: NatsSubscription) -> None:
        """Do not make this subscription again on a new connection."""
        self._subscriptions = [one for one in self._subscriptions if one is not subscription]

    async def _live_client(self) -> NatsClient:
        while self._client is None or not self._client.is_connected:
            # The client knows that it lost its connection before it calls back.
            self._connected.clear()
            await self._connected.wait()
        return self._client

    async def _connect(self) -> None:
        """Return a new client that works, or raise and leave none."""
        client = NatsClient()
        try:
            with heeded_cancellation():
                await client.connect(
                    **self._options,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnected,
                    reconnected_cb=self._on_reconnected,
                    closed_cb=self._on_closed,
                    reconnect_to_server_handler=self._next_server,
                )
            version = client.connected_server_version
            natsrules.check_version((version.major, version.minor, version.patch))
            await self._attach_all(client)
            if client.is_closed:
                raise nats_errors.ConnectionClosedError  # noqa: TRY301 - undone below like the rest
        except BaseException:
            with contextlib.suppress(nats_errors.Error, OSError):
                await client.close()
            raise
        self._client = client
        self._connected.set()

    async def _attach_all(self, client: NatsClient) -> None:
        """Subscribe on a new client, for callers of `subscribe` in the meantime too.

        Nothing else would: until this client is in use, `subscribe` leaves that to it.
        """
        attached: set[NatsSubscription] = set()
        while True:
            new = set(self._subscriptions) - attached
            for subscription in [one for one in self._subscriptions if one in new]:
                await subscription.attach(client)
            attached |= new  # and none that came while these were attached
            await round_trip(client)
            if attached.issuperset(self._subscriptions):
                return

    def _reopen(self) -> None:
        if self._is_closing or (self._reopening is not None and not self._reopening.done()):
            return
        self._reopening = asyncio.create_task(self._connect_until_done(), name="nats-reopen")

    async def _connect_until_done(self) -> None:
        attempt = 0
        while True:
            try:
                await self._connect()
            except Exception as error:
                # Whatever the error was, a bus that stays away for good is worse.
                await self._on_error(error)
                await self._clock.sleep(natsrules.wait_s(attempt, self._random))
                attempt += 1
            else:
                return

    def _next_server(
        self, servers: list[Server], _info: dict[str, Any]
    ) -> tuple[Server | None, float]:
        """The server with the fewest attempts comes first."""
        fewest = min(server.reconnects for server in servers)
        choice = self._random.choice([s for s in servers if s.reconnects == fewest])
        return choice, natsrules.wait_s(fewest, self._random)

    async def _on_error(self, error: Exception) -> None:
        self.counters.error_count += 1
        if isinstance(error, nats_errors.SlowConsumerError):
            self.counters.dropped_message_count += 1
        cause = cause_of(error)
        self._why_not.note(text(error), cause)
        if self._warn.is_due(text(error)):
            advice = f"; {ADVICE[cause]}" if cause is not None else ""
            log.warning("NATS: %s (error %d)%s", text(error), self.counters.error_count, advice)
        self._refused_count = self._refused_count + 1 if cause in IS_LASTING else 0
        if self._is_opening and self._refused_count >= len(self._options["servers"]):
            raise self._no_access()

    async def _on_disconnected(self) -> None:
        self._connected.clear()
        self._cut.set()  # present waiters wake up; later ones wait for the next time
        self._cut.clear()
        if not self._is_closing:
            log.warning("NATS: disconnected from %s", self._urls)

    async def _on_reconnected(self) -> None:
        self.counters.reconnect_count += 1
        self._connected.set()
        log.info("NATS: reconnected (%d times so far)", self.counters.reconnect_count)

    async def _on_closed(self) -> None:
        self._connected.clear()
        if self._client is not None and self._client.is_closed:
            self._client = None
            self._reopen()
