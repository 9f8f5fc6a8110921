"""A caller of the API: one request, one typed answer."""

from __future__ import annotations

import socket
from functools import cache
from typing import TYPE_CHECKING, TypeVar, cast

from msgspec import UNSET, structs

from common import subjects
from common.access import AccessError
from common.api import (
    OPERATORS,
    ApiError,
    ApiErrorCode,
    EndedJobs,
    Events,
    Jobs,
    Loans,
    Nodes,
    Order,
)
from common.errors import ArylError, Unavailable
from common.messages import Message, decode, encode
from common.plans import Plan, Planned
from common.version import version

if TYPE_CHECKING:  # a command that only prints help loads no NATS client
    from common.bus import Bus

M = TypeVar("M", bound=Message)
Paged = Jobs | Nodes | Loans | Events | EndedJobs
ROW_NAMES: dict[type[Message], str] = {
    Jobs: "job_id",
    Nodes: "node",
    Loans: "lease_id",
    Events: "number",
    EndedJobs: "number",
}
"""What names a row, and so where the next page begins."""
PLAN_RATIO = 0.5
"""Share of the time for an answer in which the coordinator plays; the rest is for the turn."""
MAX_PLAN_S = 60.0
PLAN_PATIENCE_S = 20.0
"""Beyond the time for an answer: the process that plays has to start, and gives way to all others
on its machine."""


class ApiRefused(ArylError):  # noqa: N818 - an answer, not a mistake of ours
    """The coordinator refused; `error` has the reason and the field."""

    def __init__(self, error: ApiError) -> None:
        where = f"field {error.field}: " if error.field else ""
        super().__init__(f"{where}{error.message}")
        self.error = error


class ApiAway(ApiRefused, Unavailable):
    """A coordinator answered that it cannot serve now, such as one that is stopping.

    A caller that waits for one goes on as if none had answered.
    """


class NoCoordinator(Unavailable):
    """NATS takes the request, and no coordinator answers it."""


class Client:
    """Speaks for one person: the subject says who.

    Args:
        timeout_s: how long one answer may take.
    """

    def __init__(
        self, bus: Bus, *, cell: str, tenant: str, user: str, timeout_s: float = 10.0
    ) -> None:
        self._bus = bus
        self._cell = cell
        self._tenant = subjects.token(tenant, what="tenant")
        self._user = subjects.token(user, what="user")
        self._timeout_s = timeout_s

    @property
    def is_operator(self) -> bool:
        """Whether it may order the cell; a coordinator refuses it from any other tenant."""
        return self._tenant == OPERATORS

    def of(self, tenant: str) -> Client:
        """The same person, who speaks for another tenant."""
        return Client(
            self._bus, cell=self._cell, tenant=tenant, user=self._user, timeout_s=self._timeout_s
        )

    def patient(self, timeout_s: float) -> Client:
        """The same person, who waits this long for an answer."""
        return Client(
            self._bus, cell=self._cell, tenant=self._tenant, user=self._user, timeout_s=timeout_s
        )

    async def ask(self, request: Message, kind: type[M]) -> M:
        """Send a request; its answer, of a list all pages.

        A page is of its own instant: of a change between two of them the later state counts.

        Raises:
            ApiRefused: the coordinator refused it; nothing changed.
            AccessError: NATS lets this person not ask it; nothing changed.
            NoCoordinator: no coordinator answers.
            Unavailable: one answers that cannot do it now (`ApiAway`), or NATS is away.
            ProtocolError: the answer does not fit this version.
        """
        answer = await self._ask(request, kind)
        if not isinstance(answer, Paged) or not answer.has_more:
            return answer
        name = ROW_NAMES[type(answer)]
        rows = {getattr(row, name): row for row in answer.rows}
        last: Paged = answer
        while last.has_more:
            # A page of events may have no rows: it ends at a number all the same.
            after = last.last if isinstance(last, Events) else getattr(last.rows[-1], name)
            request = structs.replace(request, after=after)
            last = cast("Paged", await self._ask(request, kind))
            rows |= {getattr(row, name): row for row in last.rows}
        return cast("M", structs.replace(last, rows=tuple(rows.values())))

    async def plan(self, request: Plan) -> Planned:
        """What a change would lead to; the coordinator plays for half of the time for an answer.

        Errors are those of `ask`.
        """
        limit_s = min(MAX_PLAN_S, PLAN_RATIO * self._timeout_s)
        patient = self.patient(self._timeout_s + PLAN_PATIENCE_S)
        return await patient.ask(structs.replace(request, limit_s=limit_s), Planned)

    async def _ask(self, request: Message, kind: type[M]) -> M:
        if isinstance(request, Order) and request.client is UNSET:
            request = structs.replace(request, client=_here())
        verb = str(request.__struct_config__.tag)
        subject = subjects.api(self._cell, self._tenant, self._user, verb)
        try:
            answer = await self._bus.request(subject, encode(request), timeout_s=self._timeout_s)
        except AccessError:
            raise  # it was not asked
        except Unavailable as error:
            raise NoCoordinator(
                f"no coordinator of cell {self._cell} answers ({error}); "
                "none leads now, or the cell has another name"
            ) from error
        refused = _refusal(answer)
        if refused is not None:
            is_away = refused.code == ApiErrorCode.UNAVAILABLE
            raise ApiAway(refused) if is_away else ApiRefused(refused)
        return decode(answer, kind)


@cache
def _here() -> str:
    """This machine and version, for the audit."""
    return f"{socket.gethostname()[:128]}, aryl {version() or 'from source'}"


def _refusal(answer: bytes) -> ApiError | None:
    try:
        return decode(answer, ApiError)
    except ArylError:
        return None


EXIT_CODES: dict[ApiErrorCode, int] = {
    ApiErrorCode.USAGE: 2,
    ApiErrorCode.NOT_FOUND: 3,
    ApiErrorCode.CONFLICT: 4,
    ApiErrorCode.DENIED: 5,
    ApiErrorCode.UNAVAILABLE: 6,
}
"""Exit codes of the CLI (docs/cli.md)."""
