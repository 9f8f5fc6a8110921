"""Classifies the failure in a failed worker's log, and reads each log once."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

import agent
from agent.workers.failure_child import Question
from agent.workers.record import tail
from agent.workers.runner import WorkerStatus
from common.children import send_signal
from common.clock import Clock
from common.decoding import UNREADABLE
from common.failure_rules import NO_SIGNATURE, TAIL_BYTES, FailureRules
from common.failures import Failure
from common.faults import Fault
from common.messages import WorkerPhase
from common.model import WorkerKey

logger = logging.getLogger(__name__)

MATCH_LIMIT_S = 5.0
"""A log that takes longer to match is not read: the node's next step waits for it."""

Match = Callable[[Question], Awaitable[Failure]]
"""Matches outside this process; it stops when it is cancelled. Raises OSError, or one of
`UNREADABLE`, when it cannot."""


class FailureReader:
    """Failures by worker, until they are forgotten.

    Args:
        rules: None reads nothing.
        match: how logs are matched where a site has patterns of its own.
        limit_s: the longest time for one match.
    """

    def __init__(
        self,
        rules: FailureRules | None,
        clock: Clock,
        *,
        match: Match | None = None,
        limit_s: float = MATCH_LIMIT_S,
    ) -> None:
        self._rules = rules
        self._clock = clock
        self._match = match or match_in_child
        self._limit_s = limit_s
        self._failures: dict[WorkerKey, Failure] = {}
        self.unread_count = 0
        """Logs that were given up."""

    def concerns(self, status: WorkerStatus) -> bool:
        """True if `added` has something to add."""
        return self._rules is not None and _failed_by_itself(status)

    async def added(self, status: WorkerStatus, directory: Path) -> WorkerStatus:
        """A status with the reason for the failure, if its worker failed by itself.

        At most the last 64 KiB of its log are read. The packaged rules match them in a thread: they
        take milliseconds, for which no other thread runs. A site's own patterns may take for ever,
        so where there are any a child process matches, and is ended at its limit; the failure then
        has no signature and states the reason.
        """
        rules = self._rules
        if rules is None or not self.concerns(status):
            return status
        if status.key not in self._failures:
            self._failures[status.key] = await self._read(rules, status, directory)
        return msgspec.structs.replace(status, failure=self._failures[status.key])

    async def _read(self, rules: FailureRules, status: WorkerStatus, directory: Path) -> Failure:
        try:
            log = await asyncio.to_thread(tail, directory, TAIL_BYTES)
        except OSError as error:  # its job, or its disk: no other worker may pay for it
            return self._unread(rules, status, str(error))
        return await self._classified(rules, log, status)

    async def _classified(self, rules: FailureRules, log: bytes, status: WorkerStatus) -> Failure:
        if not rules.has_site_patterns:
            return await asyncio.to_thread(
                rules.classify, log, exit_code=status.exit_code, error=status.error
            )
        question = Question(
            files=rules.files, log=log, exit_code=status.exit_code, error=status.error
        )
        try:
            async with self._clock.timeout(self._limit_s):
                return await self._match(question)
        except TimeoutError:
            why = f"the site's patterns took longer than {self._limit_s:g} s"
        except (OSError, *UNREADABLE) as error:
            why = f"the process that matches it ended: {error}"
        return self._unread(rules, status, why)

    def _unread(self, rules: FailureRules, status: WorkerStatus, why: str) -> Failure:
        self.unread_count += 1
        logger.warning("%s: log not read: %s (%d so far)", status.key, why, self.unread_count)
        return rules.failure(NO_SIGNATURE, line=f"log not read: {why}", is_explicit=False)

    def forget(self, key: WorkerKey) -> None:
        """Forget a worker whose failure is needed no more."""
        self._failures.pop(key, None)


async def match_in_child(question: Question) -> Failure:
    """The answer of one run of `agent.workers.failure_child`, which then has ended.

    Raises:
        OSError: it cannot be started.
        ValueError, RecursionError: it ended without an answer.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "agent.workers.failure_child",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # `-m` searches the working directory first: the child is of the agent's own release.
        cwd=Path(agent.__file__).parents[1],
    )
    try:
        found, _ = await process.communicate(msgspec.msgpack.encode(question))
    finally:
        if process.returncode is None:
            send_signal(process, signal.SIGKILL)
            await process.wait()
    return msgspec.msgpack.decode(found, type=Failure)


def _failed_by_itself(status: WorkerStatus) -> bool:
    """True if its program failed without an order to stop; a lost shim is its node's fault."""
    is_over = status.phase == WorkerPhase.EXITED and status.stop_reason is None
    is_failure = bool(status.exit_code or status.error)
    return is_over and is_failure and status.fault != Fault.SHIM_LOST
