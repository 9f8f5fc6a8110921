"""How the commands reach a cell. Environment, connection and clock come in here alone."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from common import arrays
from common.api import (
    ApiErrorCode,
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
from coordinator.client import ApiRefused, Client, registry
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


def unknown_job() -> int:
    """Say of a job in Slurm's words that the cell does not know it; the exit code."""
    sys.stderr.write("slurm_load_jobs error: Invalid job id specified\n")
    return 1


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


def is_about_itself(given: Container[str], help_text: str) -> bool:
    """Answer `--help` and `--version` of a command; whether it was asked for one of them."""
    if "help" in given or "usage" in given:
        sys.stdout.write(help_text)
        return True
    if "version" in given:  # without a claim to be Slurm
        put(f"aryl {version() or 'from source'}: commands of Slurm's form")
        return True
    return False


def request_of(row: JobRow) -> RequestRow:
    """What a job asked for."""
    return row.request if isinstance(row.request, RequestRow) else NO_REQUEST


def number_of(row: JobRow) -> str:
    """The number of a job as Slurm shows it: `17_3` for a task of an array, and `17_[4-9%2]` for
    those that wait.
    """
    if isinstance(row.array, ArrayRow):
        is_bound = row.array.throttle and row.state == JobState.PENDING
        bound = f"%{row.array.throttle}" if is_bound else ""
        return f"{row.number}_[{tasks_of(row) or row.array.indices}{bound}]"
    asked = request_of(row)
    if asked.array_number is not None:
        return f"{asked.array_number}_{asked.array_index}"
    shared = row.job_id.partition("_[")[2]  # tasks cancelled before their turn, in one account
    if shared and isinstance(row.number, int):
        return f"{row.number}_[{shared}"
    return str(row.number) if isinstance(row.number, int) else row.job_id


def tasks_of(row: JobRow) -> str:
    """The indices of the tasks that the row of an array stands for: those that wait, or were
    cancelled before they started. Empty for any other job.
    """
    if not isinstance(row.array, ArrayRow):
        return ""
    kind = {JobState.PENDING: "waiting", JobState.CANCELLED: "cancelled"}.get(row.state, "")
    return row.array.ranges.get(kind, "")


async def jobs(client: Client, *, live_only: bool) -> list[JobRow]:
    """All jobs, or those that have not ended, oldest first.

    As in Slurm, one row has all tasks of an array that wait, one those that were cancelled before
    they started, and each other task has its own.
    """
    return of_tasks(await listed(client, live_only=live_only), live_only=live_only)


async def listed(client: Client, *, live_only: bool) -> tuple[JobRow, ...]:
    """The rows as the cell lists them: an array is one that sums up its tasks."""
    return (await client.ask(ListJobs(is_live_only=live_only, in_full=True), Jobs)).rows


def of_tasks(rows: Sequence[JobRow], *, live_only: bool) -> list[JobRow]:
    """Rows with those of tasks in place of those of arrays, as of `jobs`."""
    own: dict[str, set[int]] = {}
    for row in rows:
        if isinstance(row.array_id, str) and isinstance(row.array_index, int):
            own.setdefault(row.array_id, set()).add(row.array_index)
    found: list[JobRow] = []
    for row in rows:
        if isinstance(row.array, ArrayRow):
            found += _of_array(row, row.array, own.get(row.job_id, set()), live_only=live_only)
        elif not (isinstance(row.array_id, str) and row.state == JobState.PENDING):
            found.append(row)
    return found


def _of_array(row: JobRow, array: ArrayRow, own: set[int], *, live_only: bool) -> list[JobRow]:
    """The rows of tasks of an array that have none of their own; a forgotten one is the history's.

    A cell of an earlier version does not know which of the cancelled ones are forgotten.
    """
    found = [as_of_waiting(row)] if "waiting" in array.ranges else []
    unstarted = array.unstarted
    text = unstarted if isinstance(unstarted, str) else array.ranges.get("cancelled", "")
    cancelled = arrays.indices(text) if text else ()
    rest = ",".join(map(str, arrays.runs_of(index for index in cancelled if index not in own)))
    if rest and not live_only:
        tasks = msgspec.structs.replace(array, ranges={"cancelled": rest})
        found.append(_of_one_task(row, JobState.CANCELLED, tasks))
    return found


def as_of_waiting(row: JobRow) -> JobRow:
    """The row of an array as that of its tasks that wait, where some do; any other as it is."""
    if not isinstance(row.array, ArrayRow) or "waiting" not in row.array.ranges:
        return row
    return _of_one_task(row, JobState.PENDING, row.array)


def _of_one_task(row: JobRow, state: JobState, array: ArrayRow) -> JobRow:
    """The row of an array with the amounts of one task that has not started."""
    return msgspec.structs.replace(
        row, state=state, array=array, worker_count=0, gpus=0, started_at_s=None, exit_code=None,
        error="",
    )  # fmt: skip


async def nodes(client: Client) -> list[NodeRow]:
    """All nodes, by name."""
    return list((await client.ask(ListNodes(in_full=True), Nodes)).rows)


async def described(client: Client, name: str) -> Description:
    """Everything about a job, by its number or its id; of an array, about the tasks that wait."""
    found = await client.ask(Describe(kind="job", name=name, in_full=True), Description)
    row = found.job
    return found if row is None else msgspec.structs.replace(found, job=as_of_waiting(row))


async def knows(client: Client, name: str) -> bool:
    """Whether the cell remembers a job of this number or id."""
    try:
        await described(client, name)
    except ApiRefused as refused:
        return refused.error.code != ApiErrorCode.NOT_FOUND
    return True


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
