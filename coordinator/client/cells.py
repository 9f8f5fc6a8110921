"""A cell for scripts on asyncio: one method for each question and order.

`blocking` has the same methods for scripts without asyncio.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

from msgspec import UNSET, structs

from common.api import (
    Cancel,
    Change,
    Describe,
    Description,
    Done,
    Events,
    GetEvents,
    GetLogs,
    GetStatus,
    Hold,
    JobRow,
    Jobs,
    ListJobs,
    ListLoans,
    ListNodes,
    ListServices,
    ListTenants,
    LoanRow,
    Loans,
    Logs,
    NodeRow,
    Nodes,
    Operate,
    Release,
    Requeue,
    ServiceRow,
    Services,
    Status,
    StoryRow,
    Submit,
    Submitted,
    TenantRow,
    Tenants,
    Throttle,
)
from common.clock import Clock, SystemClock
from common.errors import ConfigError
from common.jobspec import misfit, parse
from common.messages import Message
from common.model import FINAL_JOB_STATES, JobChange, JobSpec
from coordinator.client import registry, target
from coordinator.client.requests import Client
from coordinator.client.target import Choice

M = TypeVar("M", bound=Message)
POLL_S = 1.0


def job_spec(values: Mapping[str, object]) -> JobSpec:
    """The job of a mapping with the fields of a job file.

    Raises:
        ConfigError: a field is unknown, missing or invalid; the text names it.
    """
    return parse(values, source="the job")


class AsyncCell:
    """A cell, asked by one person.

    All methods raise:
        ApiRefused: the cell refused the request, and nothing changed; `error.field` is the field.
        AccessError: NATS does not let this person ask; `cause` gives the reason.
        Unavailable: no coordinator answers now.
    """

    def __init__(self, client: Client, *, clock: Clock) -> None:
        self._client = client
        self._clock = clock

    async def ask(self, request: Message, kind: type[M]) -> M:
        """The answer to any request of the protocol, all pages of a list in one."""
        return await self._client.ask(request, kind)

    # --- jobs ---------------------------------------------------------------------------------

    async def submit(self, spec: JobSpec, *, request_id: str | None = None) -> Submitted:
        """Queue a job.

        request_id: a repeated one means the same job; None makes one. A script that may run twice
            gives its own.

        Raises:
            ConfigError: no node could run the job; the text names the field.
        """
        found = misfit(spec)
        if found is not None:
            raise ConfigError(f"the job: field {found.field}: {found.what}")
        request = Submit(spec=spec, request_id=request_id or uuid.uuid4().hex)
        return await self.ask(request, Submitted)

    async def cancel(self, job_id: str) -> None:
        """End a job."""
        await self.ask(Cancel(job_id=job_id), Done)

    async def hold(self, *job_ids: str) -> str:
        """Keep waiting jobs out of the queue until their release; what was done, in words."""
        return await self._order(Hold(job_ids=job_ids))

    async def release(self, *job_ids: str) -> str:
        """End the hold of jobs; what was done, in words."""
        return await self._order(Release(job_ids=job_ids))

    async def requeue(self, *job_ids: str, is_held: bool = False) -> str:
        """Stop running jobs with their grace; they wait again, or are held. Answers in words."""
        return await self._order(Requeue(job_ids=job_ids, is_held=is_held))

    async def change(self, job_id: str, change: JobChange) -> str:
        """Change the fields of a job that `change` sets; the old and the new values, in words."""
        return await self._order(Change(job_id=job_id, **structs.asdict(change)))

    async def throttle(self, job_id: str, throttle: int | None) -> str:
        """Change the most tasks of an array at once, None: no bound; what was done, in words."""
        return await self._order(Throttle(job_id=job_id, throttle=throttle))

    async def _order(self, request: Message) -> str:
        return (await self.ask(request, Done)).detail

    async def job(self, job_id: str) -> JobRow:
        """One job as it is now."""
        found = await self.describe("job", job_id)
        assert found.job is not None, "a job's description has its row"
        return found.job

    async def wait(self, job_id: str, *, timeout_s: float | None = None) -> JobRow:
        """The job once it has ended.

        Raises:
            TimeoutError: it has not in `timeout_s`; the job goes on.
        """
        try:
            async with self._clock.timeout(timeout_s):
                while True:
                    row = await self.job(job_id)
                    if row.state in FINAL_JOB_STATES:
                        return row
                    await self._clock.sleep(POLL_S)
        except TimeoutError:
            why = f"job {job_id} has not ended in {timeout_s or 0.0:g} s, and goes on"
            raise TimeoutError(why) from None

    async def logs(
        self,
        job_id: str,
        *,
        worker_index: int | None = None,
        attempt: int | None = None,
        max_bytes: int = 65_536,
    ) -> Logs:
        """The end of a worker's log; without a worker, of the lowest one that runs or ran."""
        request = GetLogs(
            job_id=job_id, worker_index=worker_index, attempt=attempt, max_bytes=max_bytes
        )
        return await self.ask(request, Logs)

    # --- lists --------------------------------------------------------------------------------

    async def jobs(self, *, is_live_only: bool = False) -> tuple[JobRow, ...]:
        """All jobs that the person may see, newest last."""
        return (await self.ask(ListJobs(is_live_only=is_live_only), Jobs)).rows

    async def nodes(self) -> tuple[NodeRow, ...]:
        """All nodes."""
        return (await self.ask(ListNodes(in_full=True), Nodes)).rows

    async def services(self) -> tuple[ServiceRow, ...]:
        """All services."""
        return (await self.ask(ListServices(), Services)).rows

    async def tenants(self) -> tuple[TenantRow, ...]:
        """All tenants."""
        return (await self.ask(ListTenants(), Tenants)).rows

    async def loans(self, *, is_live_only: bool = True) -> tuple[LoanRow, ...]:
        """All loans that are out; with the returned ones unless `is_live_only`."""
        return (await self.ask(ListLoans(is_live_only=is_live_only), Loans)).rows

    # --- the cell -----------------------------------------------------------------------------

    async def status(self) -> Status:
        """The cell at a glance."""
        return await self.ask(GetStatus(), Status)

    async def describe(self, kind: str, name: str) -> Description:
        """One thing in full; `kind` is job, node, service or loan. `why` gives the reasons."""
        request = Describe(kind=kind, name=name, in_full=kind in ("job", "node"))
        return await self.ask(request, Description)

    async def events(self, *, after: int = 0, subject: str = "") -> Events:
        """The event lines after a number, of the whole cell or of one id or name."""
        return await self.ask(GetEvents(after=after, subject=subject), Events)

    async def follow_events(self, *, after: int = 0, subject: str = "") -> AsyncIterator[StoryRow]:
        """The event lines after a number, and each new one as it comes; it never ends."""
        while True:
            found = await self.events(after=after, subject=subject)
            for row in found.rows:
                yield row
            after = max(after, found.last)
            subject = found.subject or subject
            await self._clock.sleep(POLL_S)

    async def operate(
        self,
        action: str,
        target: str = "",
        *,
        value: str = "",
        reason: str = "",
        deadline_s: float | None = None,
        in_s: float | None = None,
    ) -> str:
        """Give an order of an operator; the detail of what was done.

        action: a verb of the protocol page: `drain`, `uncordon`, `freeze`, `recall` and others.
        """
        request = Operate(
            action=action,
            target=target,
            value=value,
            reason=reason,
            deadline_s=deadline_s,
            in_s=UNSET if in_s is None else in_s,
        )
        return await self._order(request)

    async def drain(
        self,
        node: str,
        *,
        at_s: float | None = None,
        deadline_s: float | None = None,
        reason: str = "",
    ) -> str:
        """Drain a node; what was done, in words.

        at_s: when, in seconds since 1970 by the clock of this machine: until then only jobs whose
            time limit ends by then start there, and a loan of the node ends before. None: now.
        deadline_s: how long running jobs may go on after that; None: not at all.

        Raises:
            ConfigError: `at_s` is past.
        """
        if at_s is None:
            return await self.operate("drain", node, deadline_s=deadline_s, reason=reason)
        in_s = at_s - self._clock.wall_s()
        if in_s <= 0:
            raise ConfigError(f"at_s: {at_s:g} is {-in_s:.0f} s ago, expected an instant to come")
        return await self.operate("drain_at", node, deadline_s=deadline_s, reason=reason, in_s=in_s)

    async def undrain(self, node: str, *, reason: str = "") -> str:
        """Use a node again: ends a drain, or cancels one that has not begun; what was done."""
        return await self.operate("uncordon", node, reason=reason)


@asynccontextmanager
async def connect_async(
    *,
    nats_url: str | None = None,
    cell: str | None = None,
    tenant: str | None = None,
    user: str | None = None,
    insecure: bool | None = None,
    timeout_s: float = 10.0,
) -> AsyncGenerator[AsyncCell]:
    """A connection to a cell for the block.

    Each argument wins over its variable, as `ARYL_NATS_URL`, that over ~/.config/aryl/config.toml,
    and that over the cell that runs on this machine.

    timeout_s: how long one answer may take.

    Raises:
        ConfigError: nothing names a cell, or what names it is invalid.
        AccessError: NATS lets this person not in; `cause` gives the reason.
    """
    flags = Choice(nats_url=nats_url, cell=cell, tenant=tenant, user=user, insecure=insecure)
    directory = registry.home(os.environ)
    found = target.resolve(flags, os.environ, lambda: registry.find(directory))
    async with target.over_nats(found) as bus:
        client = Client(
            bus, cell=found.cell, tenant=found.tenant, user=found.user, timeout_s=timeout_s
        )
        yield AsyncCell(client, clock=SystemClock())
