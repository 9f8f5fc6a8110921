"""Calls of nats-py: translates their errors for the caller, and never loses a cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Generator

from common.access import AccessError, Cause
from common.errors import NobodyListens, Unavailable
from common.natsclient import NatsClient, NoTls, PermissionDenied
from common.natslib import errors as nats_errors
from common.natslib import js_errors


@contextlib.contextmanager
def heeded_cancellation() -> Generator[None]:
    """Leave this block with the cancellation that came while it ran, whatever its outcome.

    On Python 3.11 `asyncio.wait_for` returns a result that arrives in the same turn of the loop as
    a cancellation, and the cancellation is lost: a cancelled loop would go on for ever. Libraries
    use it to wait. A timeout of the block's own that is over when the block is left has taken its
    cancellation back, and does not count.

    Raises:
        asyncio.CancelledError: the task was cancelled inside, and no exception shows it yet.
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


async def round_trip(client: NatsClient) -> None:
    """Wait until the server has read all earlier commands.

    nats-py writes the PING of a flush past commands that still wait for its writer task. The first
    answer therefore only shows that the writer has run; the second one is behind all commands.
    """
    with heeded_cancellation():
        for _ in range(2):
            await client.flush(timeout=2)


@contextlib.contextmanager
def as_unavailable(subject: str) -> Generator[None]:
    """Translate nats-py's errors for the caller, and lose no cancellation."""
    try:
        with heeded_cancellation():
            yield
    except nats_errors.NoRespondersError:
        raise NobodyListens(f"{subject}: no listener") from None
    except PermissionDenied as error:
        raise AccessError(str(error), Cause.PERMISSION) from None
    except TimeoutError as error:
        # With its cause: a caller must distinguish a request that may have arrived from one that
        # did not.
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
    except PermissionDenied as error:
        raise AccessError(f"{what}: {error}", Cause.PERMISSION) from None
    except TimeoutError:
        raise Unavailable(f"{what}: no answer in time") from None
    except (nats_errors.Error, OSError) as error:
        raise Unavailable(f"{what}: {text(error)}") from error


def text(error: Exception) -> str:
    """An error's text; its kind where it has none."""
    return str(error) or type(error).__name__


def cause_of(error: Exception) -> Cause | None:
    """The cause that an error of a connection shows for access to NATS.

    None for any other error.
    """
    said = str(error).lower()
    if isinstance(error, PermissionDenied):
        return Cause.PERMISSION
    if isinstance(error, nats_errors.AuthorizationError) or _is_any_of(_REFUSALS, said):
        return Cause.CREDENTIALS
    if isinstance(error, (NoTls, ssl.SSLError)) or "tls required" in said:
        return Cause.TLS
    if isinstance(error, OSError) or "expecting info message" in said:  # TimeoutError is one too
        return Cause.SERVER
    return None


def _is_any_of(words: tuple[str, ...], said: str) -> bool:
    return any(word in said for word in words)


_REFUSALS = ("authorization violation", "authentication")
"""In a server's last message before it hangs up on a user that it does not know, or no longer."""
