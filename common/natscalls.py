"""Calls of nats-py: their errors as what they mean to a caller, no cancellation lost in them.

Must not know what is sent, nor keep a connection: `common.bus` does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import Any

from common.errors import Unavailable
from common.natslib import Client, js_errors
from common.natslib import errors as nats_errors


class TlsClient(Client):
    """A client that was told of TLS and speaks nothing without it, least of all its password.

    nats-py begins TLS when the server's INFO demands it, and only then: to `tls://` too it would
    say who it is in plain text, where a server, or somebody in between, does not demand it.
    """

    @property
    def server_id(self) -> str:
        """Names one run of one server; empty before the first connection."""
        return str(self._server_info.get("server_id", ""))

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """What a server says first, on each connection, and before it is told anything."""
        server = self._current_server
        is_tls = (server is not None and server.uri.scheme == "tls") or "tls" in self.options
        if initial_connection and is_tls and not info.get("tls_required"):
            # An error of its own kind: the client goes on with the next server, or tries again.
            raise nats_errors.Error(
                "nats: this server demands no TLS, and was to be spoken to in it"
            )
        await super()._process_info(info, initial_connection)


@contextlib.contextmanager
def heeded_cancellation() -> Generator[None]:
    """Leave this block with the cancellation that came while it ran, whatever the block made of it.

    On Python 3.11 `asyncio.wait_for` returns a result that arrives in the same turn of the loop as
    a cancellation, and the cancellation is gone: a loop that was told to end would go on for ever.
    Libraries wait by it. A timeout of the block's own that is over when the block is left has taken
    its cancellation back, and is none.

    Raises:
        asyncio.CancelledError: the task was cancelled inside, and no exception says so yet.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    except Exception as error:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError from error
        raise
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError


async def round_trip(client: Client) -> None:
    """Until the server has read everything that was sent before.

    nats-py writes the PING of a flush past commands that still wait for its writer task, so the
    first answer only says that the writer has run; the second one is behind them all.
    """
    with heeded_cancellation():
        for _ in range(2):
            await client.flush(timeout=2)


@contextlib.contextmanager
def as_unavailable(subject: str) -> Generator[None]:
    """nats-py's errors as what they mean to a caller, and no cancellation lost in it."""
    try:
        with heeded_cancellation():
            yield
    except nats_errors.NoRespondersError:
        raise Unavailable(f"{subject}: nobody listens") from None
    except TimeoutError as error:
        # With its cause: a caller that was perhaps heard must know it from one that was not.
        raise Unavailable(f"{subject}: no answer in time") from error
    except (nats_errors.Error, OSError) as error:
        raise Unavailable(f"{subject}: {text(error)}") from error


@contextlib.contextmanager
def jetstream_as_unavailable(what: str, *, are_api_errors_too: bool = False) -> Generator[None]:
    """The same for calls of JetStream; its own errors pass unless `are_api_errors_too`."""
    try:
        with heeded_cancellation():
            yield
    except js_errors.ServiceUnavailableError as error:
        why = f": {error.description}" if error.description else ""
        raise Unavailable(f"{what}: JetStream does not answer{why}") from error
    except js_errors.APIError as error:
        if not are_api_errors_too:
            raise
        raise Unavailable(f"{what}: {error.description or type(error).__name__}") from error
    except TimeoutError:
        raise Unavailable(f"{what}: no answer in time") from None
    except (nats_errors.Error, OSError) as error:
        raise Unavailable(f"{what}: {text(error)}") from error


def text(error: Exception) -> str:
    """What it says; its kind where it says nothing."""
    return str(error) or type(error).__name__
