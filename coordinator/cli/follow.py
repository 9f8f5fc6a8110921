"""Follow a job until its end, or a log as it grows. Data is printed once.

Everything here polls. It waits for a coordinator that is away, because the job runs on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from common.api import (
    ApiErrorCode,
    Describe,
    Description,
    GetLogs,
    JobRow,
    Logs,
    RequestRow,
    WindowRow,
)
from common.clock import Clock
from common.errors import Unavailable
from common.model import FINAL_JOB_STATES, JobState
from coordinator import plain_text
from coordinator.cli.reconnect import Patience
from coordinator.cli.session import EXIT_ERROR, say
from coordinator.client import ApiRefused, Client

POLL_S = 1.0


async def until_ended(client: Client, clock: Clock, job_id: str) -> JobRow:
    """The job once it has ended; each change of its state is printed on stderr.

    Raises:
        ApiRefused: there is no such job.
    """
    state: JobState | None = None
    patience = Patience(is_first_awaited=True)
    while True:
        row = await patience.answer(_row(client, job_id))
        if row is not None:
            if row.state != state:
                why = plain_text.why(row) if row.state in FINAL_JOB_STATES else ""
                say(
                    f"job {row.job_id} is {row.state}"
                    + (f": {plain_text.plain(why)}" if why else "")
                )
            state = row.state
            if state in FINAL_JOB_STATES:
                return row
        await clock.sleep(POLL_S)


def exit_code_of(row: JobRow) -> int:
    """The exit code of a job that ended, as a shell would have it.

    Its own code where it has one, 128 + N where signal N ended it; else 0 if it succeeded and 1
    if it did not.
    """
    if row.state == JobState.SUCCEEDED:
        return row.exit_code or 0
    if row.exit_code is None or row.exit_code == 0:
        return EXIT_ERROR
    return 128 - row.exit_code if row.exit_code < 0 else row.exit_code


async def until_vacated(client: Client, clock: Clock, node: str) -> bool:
    """Wait until no job has anything on a node that is drained, or will be; False when the drain
    was ended.

    When the drain begins is printed on stderr once; after that, the remaining jobs whenever they
    change.

    Raises:
        ApiRefused: there is no such node.
    """
    patience, told, is_awaited = Patience(is_first_awaited=True), "", False
    while True:
        found = await patience.answer(client.ask(Describe(kind="node", name=node), Description))
        if found is not None:
            row = found.node
            assert row is not None, "a node's description has its row"
            if isinstance(row.window, WindowRow):
                if not is_awaited:
                    say(f"node {node} {plain_text.closes(row.window)}: waiting until then")
                is_awaited = True
            elif not (row.is_draining and row.jobs):
                return row.is_draining
            else:
                still = f"node {node} is {plain_text.role(row)}, with {', '.join(row.jobs)}"
                if still != told:
                    say(still)
                told = still
        await clock.sleep(POLL_S)


async def follow_logs(
    client: Client,
    clock: Clock,
    request: GetLogs,
    *,
    show: Callable[[Logs], None],
) -> None:
    """Show a worker's log as it grows, until the job ends.

    It waits for a worker that is not there yet, or not now (its job waits or restarts), and for a
    node or a coordinator that does not answer while the job goes on. With an attempt given by
    number, it ends when another one begins.

    Args:
        show: called with each new piece and its source.

    Raises:
        ApiRefused: there is no such job, or no log of one that ended.
        Unavailable: no coordinator answers from the start, or no node has the log of a job that
            ended.
    """
    told = _Told(show)
    is_told = False
    patience, for_log = Patience(), Patience(whom="the log", is_first_awaited=True)
    while True:
        row = await patience.answer(_row(client, request.job_id))
        if row is None:
            await clock.sleep(POLL_S)
            continue
        # By its id from now on: its name may pass to another one.
        request = msgspec.structs.replace(request, job_id=row.job_id)
        has_ended = row.state in FINAL_JOB_STATES or row.attempt > (request.attempt or row.attempt)
        asked = client.ask(request, Logs)
        try:
            # A log that grows no more may lie on a node that is never heard again.
            answer = await (asked if has_ended else for_log.answer(asked))
        except ApiRefused as refused:
            if refused.error.code != ApiErrorCode.NOT_FOUND:
                raise
            if has_ended and told.of_worker is None:
                raise
            if told.of_worker is None and not is_told:
                is_told = True
                say(f"waiting: {refused.error.message}")
        else:
            if answer is not None:
                await _catch_up(client, request, told, answer)
                told.take(answer)
        if has_ended:
            return
        await clock.sleep(POLL_S)


async def follow_all_logs(
    client: Client, clock: Clock, job_id: str, *, show: Callable[[Logs], None]
) -> None:
    """Show the logs of all workers of a job side by side, in whole lines, until the job ends.

    It waits as `follow_logs` does. A worker that never ran has no log.

    Args:
        show: called with each new piece and its source.

    Raises:
        ApiRefused: there is no such job.
        Unavailable: no coordinator answers from the start, or a node has a log of the job that
            ended, and does not answer.
    """
    whole: dict[int, _Lines] = {}
    patience, for_log = Patience(), Patience(whom="the logs", is_first_awaited=True)

    async def read(index: int, *, has_ended: bool) -> None:
        own = GetLogs(job_id=job_id, worker_index=index)
        asked = client.ask(own, Logs)
        try:
            answer = await (asked if has_ended else for_log.answer(asked))
        except ApiRefused as refused:
            if refused.error.code != ApiErrorCode.NOT_FOUND:
                raise
            return
        if answer is not None:
            await _catch_up(client, own, whole[index].told, answer)
            whole[index].told.take(answer)

    while True:
        request = Describe(kind="job", name=job_id, in_full=True)
        found = await patience.answer(client.ask(request, Description))
        if found is not None and found.job is not None:
            has_ended = found.job.state in FINAL_JOB_STATES
            for index in _workers(found):
                whole.setdefault(index, _Lines(show))
            await asyncio.gather(*(read(index, has_ended=has_ended) for index in sorted(whole)))
            if has_ended:
                for lines in whole.values():
                    lines.end()
                return
        await clock.sleep(POLL_S)


async def _catch_up(client: Client, request: GetLogs, told: _Told, answer: Logs) -> None:
    """Show what attempts before an answer's wrote since the last look: a restart can be quicker
    than two looks, and the last lines of a failed attempt say why it failed."""
    if told.of_worker is None:
        return
    _, latest, index = told.of_worker
    for attempt in range(latest, answer.attempt):
        earlier = msgspec.structs.replace(request, worker_index=index, attempt=attempt)
        try:
            told.take(await client.ask(earlier, Logs))
        except (ApiRefused, Unavailable) as error:
            say(f"... the rest of attempt {attempt} is missing: {error} ...")


def _workers(found: Description) -> set[int]:
    """The workers that a job has, and those that ran in its latest attempt."""
    assert found.job is not None, "a job's description has its row"
    asked = found.job.request
    ran = asked.ran_workers if isinstance(asked, RequestRow) else 0
    return {worker.worker_index for worker in found.workers} | set(range(ran))


class _Lines:
    """Shows a log in whole lines, so that lines of several logs do not mix.

    Args:
        show: called with each new piece.
    """

    def __init__(self, show: Callable[[Logs], None]) -> None:
        self.told = _Told(self._take)
        self._show = show
        self._rest: Logs | None = None

    def _take(self, piece: Logs) -> None:
        text = piece.text if self._rest is None else self._rest.text + piece.text
        lines, end, rest = text.rpartition("\n")
        if end:
            self._show(msgspec.structs.replace(piece, text=lines + end))
        self._rest = msgspec.structs.replace(piece, text=rest) if rest else None

    def end(self) -> None:
        """Show a last line without an end."""
        if self._rest is not None:
            self._show(self._rest)
            self._rest = None


class _Told:
    """The part of a log already shown.

    Args:
        show: called with each new piece.
    """

    def __init__(self, show: Callable[[Logs], None]) -> None:
        self.of_worker: tuple[str, int, int] | None = None
        self._show = show
        self._text = ""

    def take(self, answer: Logs) -> None:
        """Show what the log has more than before; that of another worker, or attempt, is new."""
        worker = (answer.node, answer.attempt, answer.worker_index)
        if worker != self.of_worker:
            self._text, self.of_worker = "", worker
            say(f"worker {answer.worker_index} on {answer.node}:")
        more = _more(self._text, answer.text)
        if more:
            self._show(msgspec.structs.replace(answer, text=more))
        self._text = answer.text


def _more(shown: str, text: str) -> str:
    more, is_gap = growth(shown, text)
    if is_gap:
        say("... some lines were too fast to be shown ...")
    return more


def growth(shown: str, text: str) -> tuple[str, bool]:
    """The lines of a log window that are not in the last one, and whether lines between are lost.

    Both are the end of the same log; the window may have moved. The longest overlap is taken: a
    line that repeats itself must not be shown twice.
    """
    if not shown:
        return text, False
    if text.startswith(shown):
        return text[len(shown) :], False
    # The window slid and may begin within a character or line: compare from its first whole line.
    start = text.find("\n") + 1
    body = text[start:]
    if body:
        probe = body[:256]
        place = shown.find(probe) if len(body) >= len(probe) else -1
        while place != -1:
            overlap = shown[place:]
            if body.startswith(overlap):
                return body[len(overlap) :], False
            place = shown.find(probe, place + 1)
        for size in range(min(len(probe), len(shown), len(body)), 0, -1):
            if body.startswith(shown[-size:]):
                return body[size:], False
    return text, True


async def _row(client: Client, job_id: str) -> JobRow:
    found = await client.ask(Describe(kind="job", name=job_id), Description)
    assert found.job is not None, "a job's description has its row"
    return found.job
