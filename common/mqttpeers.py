"""The coordinator's bus where some agents speak MQTT: the reply address is part of the subject.

MQTT 3.1.1 has no field for a reply address. nats-server itself speaks MQTT for the coordinator.
"""

from __future__ import annotations

from common import subjects
from common.bus import BusMessage, Handler, NatsBus, Subscription
from common.errors import NobodyListens, Unavailable
from common.natsrules import BusCounters

Peer = str
"""A subject without its last token: a node, whatever the request."""


class MqttPeers:
    """`Bus` over a `NatsBus` whose peers are on NATS or on nats-server's MQTT listener.

    It listens to both forms of a subject. A request uses the form in which its peer answered last,
    and the other form where the first has no listener.
    """

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self._on_mqtt: set[Peer] = set()

    @property
    def counters(self) -> BusCounters:
        """The errors since the start."""
        return self._bus.counters

    @property
    def is_connected(self) -> bool:
        """True if messages sent now have somewhere to go."""
        return self._bus.is_connected

    async def publish(self, subject: str, data: bytes) -> None:
        """Send and forget, to peers on NATS and, where they may answer on it, on MQTT."""
        await self._bus.publish(subject, data)
        if subjects.is_asked(subject):
            await self._bus.publish(subjects.with_reply(subject), data)

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """Call `handler` for each message, in either form."""
        plain = await self._bus.subscribe(subject, handler)
        if not subjects.is_asked(subject):
            return plain

        async def unfold(message: BusMessage) -> None:
            await handler(_Unfolded(self._bus, message))

        try:
            by_topic = await self._bus.subscribe(subjects.with_reply(subject, "*", "*"), unfold)
        except Unavailable:
            await plain.unsubscribe()
            raise
        return _Both(plain, by_topic)

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Send and wait for one answer."""
        peer = subject.rpartition(".")[0]
        is_on_mqtt = peer in self._on_mqtt
        try:
            return await self._ask(subject, data, timeout_s, by_topic=is_on_mqtt)
        except NobodyListens:
            self._on_mqtt.discard(peer)
        answer = await self._ask(subject, data, timeout_s, by_topic=not is_on_mqtt)
        if not is_on_mqtt:
            self._on_mqtt.add(peer)
        return answer

    async def _ask(self, subject: str, data: bytes, timeout_s: float, *, by_topic: bool) -> bytes:
        if by_topic:
            return await self._bus.request_by_topic(subject, data, timeout_s=timeout_s)
        return await self._bus.request(subject, data, timeout_s=timeout_s)

    async def close(self) -> None:
        """Send what can still be sent and leave."""
        await self._bus.close()


class _Both:
    """Two subscriptions as one."""

    def __init__(self, *parts: Subscription) -> None:
        self._parts = parts

    async def unsubscribe(self) -> None:
        """Stop delivery."""
        for part in self._parts:
            await part.unsubscribe()


class _Unfolded:
    """A message whose subject contains its reply address."""

    def __init__(self, bus: NatsBus, message: BusMessage) -> None:
        self.subject, self._reply = subjects.split_reply(message.subject)
        self.data = message.data
        self._bus = bus

    async def respond(self, data: bytes) -> None:
        """Answer to the address in the subject."""
        if self._reply is not None:
            await self._bus.publish(self._reply, data)
