"""How the commands reach a cell. Environment, connection and clock come in here alone."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

import msgspec

from common.api import (
    ArrayRow,
    Describe,
    Description,
    JobRow,
    Jobs,
    ListJobs,
    ListNodes,
    NodeRow,
    Nodes,
    RequestRow,
)
from common.clock import Clock, SystemClock
from common.errors import Unavailable
from common.model import FINAL_JOB_STATES, JobState
from common.slurm.options import Kind, Option, OptionError, read
from common.terminal import visible
from common.version import version
from coordinator.client import Client, registry
from coordinator.client.target import Choice, Connect, Target, over_nats, resolve

T = TypeVar("T")

TIMEOUT_S = 10.0
POLL_S = 1.0
NO_REQUEST = RequestRow(
    priority=0, time_limit_s=None, deadline_s=None, grace_s=0.0, gpu_types=(), cpus_per_worker=0,
    memory_bytes_per_worker=0, workdir="", title="", comment="",
)  # fmt: skip


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The surroundings of a command; tests pass their own. command: its name in messages."""

    command: str
    environ: Mapping[str, str]
    connect: Connect
    clock: Clock

    @classmethod
    def real(cls, command: str) -> Place:
        """This process's own."""
        return cls(command=command, environ=os.environ, connect=over_nats, clock=SystemClock())

    def target(self, *, tenant: str | None = None) -> Target:
        """The cell and the caller; `tenant` wins over the configuration."""
        directory = registry.home(self.environ)
        flags = Choice(tenant=tenant)
        return resolve(flags, self.environ, lambda: registry.find(directory))

    def run(self, work: Callable[[Client], Awaitable[T]], *, tenant: str | None = None) -> T:
        """Connect, do the work, leave. Errors are those of `Client.ask` and `over_nats`."""
        return asyncio.run(self._run(work, tenant))

    async def _run(self, work: Callable[[Client], Awaitable[T]], tenant: str | None) -> T:
        target = self.target(tenant=tenant)
        async with self.connect(target) as bus:
            caller = {"cell": target.cell, "tenant": target.tenant, "user": target.user}
            return await work(Client(bus, **caller, timeout_s=TIMEOUT_S))

    def now_s(self) -> float:
        """Seconds since 1970."""
        return self.clock.wall_s()


def put(text: str) -> None:
    """One line of data."""
    sys.stdout.write(visible(text) + "\n")


def note(command: str, text: str) -> None:
    """A message to the person: stderr, so that data stays clean."""
    sys.stderr.write(f"{command}: {visible(text)}\n")


def options_of(
    words: list[str], table: Iterable[Option], *, mixed: bool = True
) -> tuple[list[tuple[str, str]], list[str]]:
    """The options of a command line by name, and its other words.

    Raises:
        OptionError: an option that does not exist or is refused; the text names it.
    """
    found, others = read(words, table, mixed=mixed)
    for option, _ in found:
        if option.kind == Kind.REFUSED:
            raise OptionError(f"--{option.name} is not supported: {option.why}")
    return [(option.name, value) for option, value in found], others


def stray(words: list[str]) -> OptionError:
    """The error of words that are no options, where a command takes none."""
    return OptionError(f"Unrecognized option: {words[0]}")


def put_version() -> int:
    """Answer `--version`, without a claim to be Slurm."""
    put(f"aryl {version() or 'from source'}: commands of Slurm's form")
    return 0


def request_of(row: JobRow) -> RequestRow:
    """What a job asked for."""
    return row.request if isinstance(row.request, RequestRow) else NO_REQUEST


def number_of(row: JobRow) -> str:
    """The number of a job as Slurm shows it: `17_3` for a task of an array, and `17_[4-9%2]` for
    those that wait.
    """
    if isinstance(row.array, ArrayRow):
        bound = f"%{row.array.throttle}" if row.array.throttle else ""
        return f"{row.number}_[{waiting_tasks(row)}{bound}]"
    asked = request_of(row)
    if asked.array_number is not None:
        return f"{asked.array_number}_{asked.array_index}"
    return str(row.number) if isinstance(row.number, int) else row.job_id


def waiting_tasks(row: JobRow) -> str:
    """The indices of the tasks of an array that wait; empty for any other job."""
    return row.array.ranges.get("waiting", "") if isinstance(row.array, ArrayRow) else ""


async def jobs(client: Client, *, live_only: bool) -> list[JobRow]:
    """All jobs, or those that have not ended, oldest first.

    As in Slurm, one row has all tasks of an array that wait, and each other task has its own.
    """
    request = ListJobs(is_live_only=live_only, in_full=True)
    rows = (await client.ask(request, Jobs)).rows
    return [_as_of_tasks(row) for row in rows if not _is_in_another(row)]


def _is_in_another(row: JobRow) -> bool:
    """Whether other rows show it all: an array without waiting tasks, and a task that waits."""
    if isinstance(row.array, ArrayRow):
        return not waiting_tasks(row)
    return isinstance(row.array_id, str) and row.state == JobState.PENDING


def _as_of_tasks(row: JobRow) -> JobRow:
    is_array = isinstance(row.array, ArrayRow)
    return msgspec.structs.replace(row, state=JobState.PENDING) if is_array else row


async def nodes(client: Client) -> list[NodeRow]:
    """All nodes, by name."""
    return list((await client.ask(ListNodes(in_full=True), Nodes)).rows)


async def described(client: Client, name: str) -> Description:
    """Everything about a job, by its number or its id."""
    return await client.ask(Describe(kind="job", name=name, in_full=True), Description)


async def until(
    client: Client, clock: Clock, job_id: str, is_so: Callable[[JobRow], bool]
) -> JobRow:
    """The job once it is so. A coordinator that is away meanwhile is waited for."""
    while True:
        try:
            row = (await described(client, job_id)).job
        except Unavailable:
            row = None
        if row is not None and is_so(row):
            return row
        await clock.sleep(POLL_S)


async def until_ended(client: Client, clock: Clock, job_id: str) -> JobRow:
    """The job once it has ended; as `until`."""
    return await until(client, clock, job_id, lambda row: row.state in FINAL_JOB_STATES)
