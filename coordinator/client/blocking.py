"""A cell for scripts without asyncio: the methods of `cells.AsyncCell`, each waits for its answer.

The connection lives on an event loop in a thread of its own, so that it answers NATS' pings while
the script does other things.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

from common.api import (
    Description,
    Events,
    JobRow,
    LoanRow,
    Logs,
    NodeRow,
    ServiceRow,
    Status,
    StoryRow,
    Submitted,
    TenantRow,
)
from common.messages import Message
from common.model import JobChange, JobSpec
from coordinator.client.cells import AsyncCell, connect_async

T = TypeVar("T")
M = TypeVar("M", bound=Message)


class _Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="aryl-client", daemon=True
        )
        self._thread.start()

    def run(self, work: Awaitable[T]) -> T:
        """The result of something that is awaited; an interrupt of the caller cancels it."""

        async def waited() -> T:
            return await work

        future = asyncio.run_coroutine_threadsafe(waited(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Cell:
    """A cell, asked by one person; methods and errors as `AsyncCell`. Threads may share it."""

    def __init__(self, cell: AsyncCell, loop: _Loop) -> None:
        self._cell = cell
        self._run = loop.run

    def ask(self, request: Message, kind: type[M]) -> M:
        """As `AsyncCell.ask`."""
        return self._run(self._cell.ask(request, kind))

    def submit(self, spec: JobSpec, *, request_id: str | None = None) -> Submitted:
        """As `AsyncCell.submit`."""
        return self._run(self._cell.submit(spec, request_id=request_id))

    def cancel(self, job_id: str) -> None:
        """As `AsyncCell.cancel`."""
        self._run(self._cell.cancel(job_id))

    def hold(self, *job_ids: str) -> str:
        """As `AsyncCell.hold`."""
        return self._run(self._cell.hold(*job_ids))

    def release(self, *job_ids: str) -> str:
        """As `AsyncCell.release`."""
        return self._run(self._cell.release(*job_ids))

    def requeue(self, *job_ids: str, is_held: bool = False) -> str:
        """As `AsyncCell.requeue`."""
        return self._run(self._cell.requeue(*job_ids, is_held=is_held))

    def change(self, job_id: str, change: JobChange) -> str:
        """As `AsyncCell.change`."""
        return self._run(self._cell.change(job_id, change))

    def throttle(self, job_id: str, throttle: int | None) -> str:
        """As `AsyncCell.throttle`."""
        return self._run(self._cell.throttle(job_id, throttle))

    def job(self, job_id: str) -> JobRow:
        """As `AsyncCell.job`."""
        return self._run(self._cell.job(job_id))

    def wait(self, job_id: str, *, timeout_s: float | None = None) -> JobRow:
        """As `AsyncCell.wait`."""
        return self._run(self._cell.wait(job_id, timeout_s=timeout_s))

    def logs(
        self,
        job_id: str,
        *,
        worker_index: int | None = None,
        attempt: int | None = None,
        max_bytes: int = 65_536,
    ) -> Logs:
        """As `AsyncCell.logs`."""
        asked = self._cell.logs(
            job_id, worker_index=worker_index, attempt=attempt, max_bytes=max_bytes
        )
        return self._run(asked)

    def jobs(self, *, is_live_only: bool = False) -> tuple[JobRow, ...]:
        """As `AsyncCell.jobs`."""
        return self._run(self._cell.jobs(is_live_only=is_live_only))

    def nodes(self) -> tuple[NodeRow, ...]:
        """As `AsyncCell.nodes`."""
        return self._run(self._cell.nodes())

    def services(self) -> tuple[ServiceRow, ...]:
        """As `AsyncCell.services`."""
        return self._run(self._cell.services())

    def tenants(self) -> tuple[TenantRow, ...]:
        """As `AsyncCell.tenants`."""
        return self._run(self._cell.tenants())

    def loans(self, *, is_live_only: bool = True) -> tuple[LoanRow, ...]:
        """As `AsyncCell.loans`."""
        return self._run(self._cell.loans(is_live_only=is_live_only))

    def status(self) -> Status:
        """As `AsyncCell.status`."""
        return self._run(self._cell.status())

    def describe(self, kind: str, name: str) -> Description:
        """As `AsyncCell.describe`."""
        return self._run(self._cell.describe(kind, name))

    def events(self, *, after: int = 0, subject: str = "") -> Events:
        """As `AsyncCell.events`."""
        return self._run(self._cell.events(after=after, subject=subject))

    def follow_events(self, *, after: int = 0, subject: str = "") -> Iterator[StoryRow]:
        """As `AsyncCell.follow_events`."""
        lines = self._cell.follow_events(after=after, subject=subject)

        while True:
            yield self._run(anext(lines))

    def operate(
        self,
        action: str,
        target: str = "",
        *,
        value: str = "",
        reason: str = "",
        deadline_s: float | None = None,
        in_s: float | None = None,
    ) -> str:
        """As `AsyncCell.operate`."""
        asked = self._cell.operate(
            action, target, value=value, reason=reason, deadline_s=deadline_s, in_s=in_s
        )
        return self._run(asked)

    def drain(
        self,
        node: str,
        *,
        at_s: float | None = None,
        deadline_s: float | None = None,
        reason: str = "",
    ) -> str:
        """As `AsyncCell.drain`."""
        return self._run(self._cell.drain(node, at_s=at_s, deadline_s=deadline_s, reason=reason))

    def undrain(self, node: str, *, reason: str = "") -> str:
        """As `AsyncCell.undrain`."""
        return self._run(self._cell.undrain(node, reason=reason))


@contextmanager
def connect(
    *,
    nats_url: str | None = None,
    cell: str | None = None,
    tenant: str | None = None,
    user: str | None = None,
    insecure: bool | None = None,
    timeout_s: float = 10.0,
) -> Generator[Cell]:
    """A connection to a cell for the block; arguments and errors as `connect_async`."""
    loop = _Loop()
    try:
        connecting = connect_async(
            nats_url=nats_url,
            cell=cell,
            tenant=tenant,
            user=user,
            insecure=insecure,
            timeout_s=timeout_s,
        )
        found = loop.run(connecting.__aenter__())
        try:
            yield Cell(found, loop)
        finally:
            loop.run(connecting.__aexit__(None, None, None))
    finally:
        loop.close()
