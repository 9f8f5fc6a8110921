"""Handles requests side by side: one task each, begun in the order of arrival.

A request that waits, for the journal or for a node, delays no other one; a request that fails is
answered and counted. Reads, changes and orders of operators have limits of their own: a flood of
reads refuses no submission, and no flood of submissions refuses an order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from types import TracebackType

from common import subjects
from common.api import CHANGES, JOB_ORDERS, OPERATORS, ApiError, ApiErrorCode, Operate
from common.bus import BusMessage, Handler
from common.clock import Clock
from common.errors import Unavailable
from common.messages import encode

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 256
"""Far more than fit into one journal record's wait; each holds one message in memory. It holds for
reads, for changes and for orders alike."""
ORDERS = frozenset(str(kind.__struct_config__.tag) for kind in (*JOB_ORDERS, Operate))
"""Verbs of operators that no rate and no flood of other requests refuses."""
FINISH_S = 1.5
"""Requests in flight at a stop are answered within this: longer than a healthy node takes to send a
log, and less than a coordinator has for its end."""


def is_order(tenant: str, verb: str) -> bool:
    """True if an operator gives an order, about a job or the cell."""
    return tenant == OPERATORS and verb in ORDERS


class Requests:
    """A block in which requests are answered; no request outlives it.

    At the end of the block no more are taken and those in flight are answered; a block that ends by
    an exception cancels them.

    Args:
        answer: answers one request; an exception from it is this coordinator's fault.
        limit: of reads in flight, of changes, and of orders of operators. A request beyond it is
            refused at once.
    """

    def __init__(self, answer: Handler, *, clock: Clock, limit: int = MAX_IN_FLIGHT) -> None:
        self.failures = 0
        """Requests whose handler broke."""
        self._answer = answer
        self._clock = clock
        self._limit = limit
        self._is_closed = False
        self._reads: set[asyncio.Task[None]] = set()
        self._changes: set[asyncio.Task[None]] = set()
        self._orders: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Requests:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_closed = True
        try:
            if error is None and (running := self._running):
                with contextlib.suppress(TimeoutError):
                    async with self._clock.timeout(FINISH_S):
                        await asyncio.wait(running)
        finally:
            left = self._running
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    @property
    def _running(self) -> set[asyncio.Task[None]]:
        return self._reads | self._changes | self._orders

    async def take(self, message: BusMessage) -> None:
        """Begin to answer one request; the bus's handler."""
        tasks, what = self._kind(*subjects.api_caller(message.subject))
        if self._is_closed:
            await _refuse(message, "this coordinator does not lead")
        elif len(tasks) >= self._limit:
            await _refuse(message, f"{self._limit} {what} are being answered; ask again")
        else:
            task = asyncio.create_task(self._run(message), name=f"request {message.subject}")
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    def _kind(self, tenant: str, _user: str, verb: str) -> tuple[set[asyncio.Task[None]], str]:
        """The requests in flight that share a limit with this one, and their name in a refusal."""
        if is_order(tenant, verb):
            return self._orders, "orders"
        return (self._changes, "requests") if verb in CHANGES else (self._reads, "reads")

    async def _run(self, message: BusMessage) -> None:
        try:
            await self._answer(message)
        except Unavailable as error:
            log.warning("answer to %s not sent: %s", message.subject, error)
        except Exception:
            self.failures += 1
            log.exception("request %s failed", message.subject)
            await _refuse(message, "the coordinator failed on this request; see its log")


async def _refuse(message: BusMessage, why: str) -> None:
    with contextlib.suppress(Unavailable):  # then there is no caller left
        await message.respond(encode(ApiError(code=ApiErrorCode.UNAVAILABLE, message=why)))
