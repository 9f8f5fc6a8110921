"""The bus: a protocol that drivers take as an argument, and NATS behind it.

An edge: with `coordinator.service.store` the only importer of `nats`. Must not know what a
message means.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol


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
        """Answer a request; without a reply subject this does nothing."""
        ...


Handler = Callable[[BusMessage], Awaitable[None]]


class Subscription(Protocol):
    """What `subscribe` returns."""

    async def unsubscribe(self) -> None:
        """Stop delivery."""
        ...


class Bus(Protocol):
    """Publish, subscribe, request: at most once, in order per sender."""

    @property
    def is_connected(self) -> bool:
        """Whether messages sent now have somewhere to go."""
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
            Unavailable: nobody listens, or no answer in time.
        """
        ...

    async def close(self) -> None:
        """Flush what can be flushed and leave."""
        ...
