"""nats-py's client with Aryl's rules: TLS or no connection, an inbox per subject, refusals at once.

An edge. `common.bus` keeps the connection.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import Any, NamedTuple

from common import subjects
from common.natslib import Client, Msg, Subscription
from common.natslib import errors as nats_errors

_NO_RESPONDERS = "503"
_TOKEN_BYTES = 8
"""Length of the random part of a reply subject. An agent sees its own, and cannot guess another
request's."""
_VIOLATION = re.compile(
    r'permissions violation for (?P<kind>publish|subscription) to "(?P<subject>[^"]+)"'
)


class NoTls(nats_errors.Error):
    """The server demands no TLS, although the client requires it."""


class PermissionDenied(nats_errors.Error):
    """The server gives this user no right to this subject."""


class _Asked(NamedTuple):
    """A request that waits for its answer."""

    subject: str
    prefix: str
    answer: asyncio.Future[Msg]


class _Question(NamedTuple):
    """A request before it is sent."""

    subject: str
    inbox: str
    payload: bytes
    headers: dict[str, Any] | None
    is_by_topic: bool = False


class NatsClient(Client):
    """One connection, made and made again by nats-py."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: dict[str, _Asked] = {}
        """By the subject of the answer."""
        self._prefixes: dict[str, str] = {}
        """By inbox: the prefix below it where this connection receives answers."""
        self._subscriptions: dict[str, Subscription] = {}
        """By prefix."""
        self._denied_subscriptions: set[str] = set()
        """Subjects in lower case, because nats-py lowers a server's errors."""

    @property
    def server_id(self) -> str:
        """Names one run of one server; empty before the first connection."""
        return str(self._server_info.get("server_id", ""))

    @property
    def who(self) -> str:
        """This client's name, to itself and to the server."""
        name = self.options.get("name") or "this program"
        server = self._current_server
        user = server.uri.username if server is not None else None
        return f"{name} (NATS user {user})" if user else f"{name}"

    def is_denied(self, subject: str) -> bool:
        """True if the server has refused a subscription to this subject."""
        return subject.lower() in self._denied_subscriptions

    def denied(self, verb: str, subject: str) -> PermissionDenied:
        """The error of a refusal; `verb` is `publish` or `subscribe`."""
        return PermissionDenied(f"{self.who} has no permission to {verb} to {subject}")

    # --- requests -----------------------------------------------------------------------------

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,  # noqa: ASYNC109 - nats-py's own calls come here too
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """One answer, in the inbox of the identity that the subject names.

        A subject of another kind, such as JetStream's, is answered in the client's own inbox.

        Raises:
            PermissionDenied: the server lets this user not ask here, or not hear the answer.
            NoRespondersError: no listener.
            TimeoutError: no answer in time.
        """
        inbox = subjects.reply_inbox(subject) or self._inbox_prefix.decode()
        return await self._answered(_Question(subject, inbox, payload, headers), timeout)

    async def request_by_topic(self, subject: str, payload: bytes, *, timeout: float) -> Msg:  # noqa: ASYNC109
        """One answer to a request whose own subject contains the reply address.

        Raises:
            PermissionDenied, NoRespondersError, TimeoutError: as `request`.
        """
        # One subscription for the answers of all nodes.
        inbox = subjects.answers_inbox(subject, of_all_nodes=True)
        question = _Question(subject, inbox, payload, None, is_by_topic=True)
        return await self._answered(question, timeout)

    async def _answered(self, question: _Question, timeout_s: float) -> Msg:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._ask(question)
        except nats_errors.TimeoutError:
            raise
        except TimeoutError:
            raise nats_errors.TimeoutError from None
        if answer.headers and answer.headers.get("Status") == _NO_RESPONDERS:
            raise nats_errors.NoRespondersError
        return answer

    async def _ask(self, question: _Question) -> Msg:
        inbox, subject = question.inbox, question.subject
        prefix = self._prefixes.get(inbox) or await self._open_inbox(inbox)
        token = secrets.token_hex(_TOKEN_BYTES)
        reply = f"{prefix}.{token}"
        if question.is_by_topic:
            place = prefix.rpartition(".")[2]
            reply = f"{subjects.answers_inbox(subject)}.{place}.{token}"
            subject = subjects.with_reply(subject, place, token)
        answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._asked[reply] = _Asked(subject, prefix, answer)
        try:
            await self.publish(subject, question.payload, reply=reply, headers=question.headers)
            return await answer
        finally:
            del self._asked[reply]

    async def _open_inbox(self, inbox: str) -> str:
        prefix = self._prefixes[inbox] = f"{inbox}.{secrets.token_hex(_TOKEN_BYTES)}"
        try:
            opened = await self.subscribe(f"{prefix}.*", cb=self._take_answer)  # pyright: ignore[reportUnknownMemberType]
        except BaseException:
            del self._prefixes[inbox]
            raise
        self._subscriptions[prefix] = opened
        return prefix

    async def _take_answer(self, message: Msg) -> None:
        asked = self._asked.get(message.subject)
        if asked is not None and not asked.answer.done():
            asked.answer.set_result(message)

    # --- messages of the server ---------------------------------------------------------------

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Handle a server's first message on a connection, before the client sends anything.

        nats-py begins TLS when the server's INFO demands it, and only then. Even to `tls://` it
        would send its credentials in plain text, where a server, or one in between, does not demand
        TLS.
        """
        server = self._current_server
        is_tls = (server is not None and server.uri.scheme == "tls") or "tls" in self.options
        if initial_connection and is_tls and not info.get("tls_required"):
            # An error of its own kind: the client goes on with the next server, or tries again.
            raise NoTls("nats: this server demands no TLS, and was to be spoken to in it")
        if initial_connection:
            self._denied_subscriptions.clear()
        await super()._process_info(info, initial_connection)

    async def _process_err(self, err_msg: str) -> None:
        """End the requests that wait for a refused subject; nats-py would let them time out."""
        found = _VIOLATION.search(err_msg)
        if found is None:
            await super()._process_err(err_msg)
            return
        is_publish, said = found["kind"] == "publish", found["subject"]
        verb, subject = ("publish" if is_publish else "subscribe"), said
        for asked in list(self._asked.values()):
            needed = asked.subject if is_publish else f"{asked.prefix}.*"
            if needed.lower() == said and not asked.answer.done():
                subject = needed
                asked.answer.set_exception(self.denied(verb, needed))
        if not is_publish:
            self._denied_subscriptions.add(said)
            await self._forget_inbox(said)
        self._err = self.denied(verb, subject)
        await self._error_cb(self._err)

    async def _forget_inbox(self, denied: str) -> None:
        """Open this inbox again for the next request: by then it may be allowed."""
        for inbox, prefix in list(self._prefixes.items()):
            if f"{prefix}.*".lower() == denied:
                del self._prefixes[inbox]
                opened = self._subscriptions.pop(prefix, None)
                if opened is not None:
                    await opened.unsubscribe()
