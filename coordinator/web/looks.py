"""The requests of one poll: the whole cell, or one job, node, service or loan."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from msgspec import Struct

from common.api import (
    ApiErrorCode,
    Describe,
    Description,
    Events,
    GetEvents,
    GetLogs,
    GetStatus,
    JobRow,
    Jobs,
    ListJobs,
    ListLoans,
    ListNodes,
    ListServices,
    LoanRow,
    Loans,
    Logs,
    NodeRow,
    Nodes,
    ServiceRow,
    Services,
    Status,
    StoryRow,
)
from coordinator import plain_text
from coordinator.client import ApiRefused, Client
from coordinator.web.board import Frame
from coordinator.web.pages import Pages

EVENTS_SHOWN = 200
"""The newest events of the cell."""
RETURNED_SHOWN = 12
"""The latest loans that came home."""
LOG_BYTES = 16_384
"""The end of a job's log."""
_END = 2**62
"""Behind every event: an answer without rows that has the number of the last one."""


class CellView(Struct, frozen=True, kw_only=True):
    """The contents of the page of the cell. returned: loans that came home, the latest first."""

    status: Status
    nodes: tuple[NodeRow, ...]
    jobs: tuple[JobRow, ...]
    services: tuple[ServiceRow, ...]
    loans: tuple[LoanRow, ...]
    returned: tuple[LoanRow, ...]
    events: tuple[StoryRow, ...]
    now_s: float


class CellLook:
    """Asks for the cell, and adds events and ended loans since the last look to known ones."""

    def __init__(self, client: Client, pages: Pages) -> None:
        self._client = client
        self._pages = pages
        self._events: deque[StoryRow] = deque(maxlen=EVENTS_SHOWN)
        self._last: int | None = None
        self._live: frozenset[str] | None = None
        self._returned: dict[str, LoanRow] = {}

    async def look(self, *, now_s: float) -> Frame:
        """The page of this instant; errors as `Client.ask`."""
        ask = self._client.ask
        status = await ask(GetStatus(), Status)
        nodes = (await ask(ListNodes(), Nodes)).rows
        services = (await ask(ListServices(), Services)).rows
        jobs = (await ask(ListJobs(is_live_only=True), Jobs)).rows
        loans = (await ask(ListLoans(is_live_only=True), Loans)).rows
        await self._follow_loans(loans, services)
        await self._follow_events()
        view = CellView(
            status=status,
            nodes=nodes,
            services=services,
            jobs=tuple(plain_text.in_order(plain_text.without_tasks(jobs, waiting_only=True))),
            loans=loans,
            returned=tuple(reversed(self._returned.values())),
            events=tuple(self._events),
            now_s=now_s,
        )
        return self._pages.cell(view)

    async def _follow_loans(
        self, loans: tuple[LoanRow, ...], services: tuple[ServiceRow, ...]
    ) -> None:
        """Keep the latest loans that came home: at first those that their services remember."""
        live = frozenset(row.lease_id for row in loans)
        ended: list[LoanRow] = []
        if self._live is None:
            for service in services:
                found = await self._describe("service", service.service)
                ended += [] if found is None else found.loans
        else:
            for lease_id in sorted(self._live - live)[-RETURNED_SHOWN:]:
                found = await self._describe("loan", lease_id)
                ended += [] if found is None or found.loan is None else [found.loan]
        self._live = live
        ended = [row for row in ended if row.returned_at_s is not None]
        ended += self._returned.values()
        ended.sort(key=lambda row: row.returned_at_s or 0.0)
        self._returned = {row.lease_id: row for row in ended[-RETURNED_SHOWN:]}

    async def _describe(self, kind: str, name: str) -> Description | None:
        """None if the coordinator has forgotten it, such as a withdrawn recommendation."""
        with suppress(ApiRefused):
            return await self._client.ask(Describe(kind=kind, name=name), Description)
        return None

    async def _follow_events(self) -> None:
        """Add the events since the last look; after a long pause only the newest of them."""
        end = (await self._client.ask(GetEvents(after=_END), Events)).last
        if self._last is not None and end < self._last:  # the cell began again
            self._events.clear()
            self._last = None
        after = max(self._last or 0, end - EVENTS_SHOWN)
        if after < end:
            found = await self._client.ask(GetEvents(after=after), Events)
            self._events.extend(found.rows[-EVENTS_SHOWN:])
            end = found.last
        self._last = end


class ThingView(Struct, frozen=True, kw_only=True):
    """One thing in full. log: the end of a job's log; None of anything else."""

    found: Description
    log: Logs | None
    log_absent: str
    now_s: float


class ThingLook:
    """Asks for one job, node, service or loan, and for the end of a job's log."""

    def __init__(self, client: Client, pages: Pages, *, kind: str, name: str) -> None:
        self._client = client
        self._pages = pages
        self._kind = kind
        self._name = name

    async def look(self, *, now_s: float) -> Frame:
        """The page of this instant; errors as `Client.ask`."""
        found = await self._client.ask(Describe(kind=self._kind, name=self._name), Description)
        self._name = found.name  # by its id from now on: its name may pass to another one
        log, absent = (None, "")
        if found.job is not None:
            log, absent = await self._log()
        view = ThingView(found=found, log=log, log_absent=absent, now_s=now_s)
        return self._pages.thing(view)

    async def _log(self) -> tuple[Logs | None, str]:
        request = GetLogs(job_id=self._name, max_bytes=LOG_BYTES)
        try:
            return await self._client.ask(request, Logs), ""
        except ApiRefused as refused:  # no worker yet, or its node does not answer now
            if refused.error.code not in (ApiErrorCode.NOT_FOUND, ApiErrorCode.UNAVAILABLE):
                raise
            return None, refused.error.message
