"""What the logs of failed workers say, each read once. Must not know the rules' words, nor what is
done about a failure.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agent.worker_record import SHIM_LOST, tail
from common.failure_rules import TAIL_BYTES, FailureRules
from common.failures import Failure
from common.messages import WorkerPhase
from common.model import WorkerKey

if TYPE_CHECKING:
    from agent.workers import WorkerStatus


class FailureReader:
    """Failures by worker, until they are forgotten.

    Args:
        rules: None reads nothing.
    """

    def __init__(self, rules: FailureRules | None) -> None:
        self._rules = rules
        self._failures: dict[WorkerKey, Failure] = {}

    async def added(self, status: WorkerStatus, directory: Path) -> WorkerStatus:
        """A status with why its worker failed, where it did so by itself.

        At most the last 64 KiB of its log are read, and matched outside the event loop.
        """
        rules = self._rules
        if rules is None or not _failed_by_itself(status):
            return status
        if status.key not in self._failures:
            log = await asyncio.to_thread(tail, directory, TAIL_BYTES)
            self._failures[status.key] = await asyncio.to_thread(
                rules.classify, log, exit_code=status.exit_code, error=status.error
            )
        return msgspec.structs.replace(status, failure=self._failures[status.key])

    def forget(self, key: WorkerKey) -> None:
        """Nobody will ask for it again."""
        self._failures.pop(key, None)


def _failed_by_itself(status: WorkerStatus) -> bool:
    """Whether its program ended without success and without an order; a lost shim is its node's."""
    is_over = status.phase == WorkerPhase.EXITED and status.stop_reason is None
    is_failure = bool(status.exit_code or status.error)
    return is_over and is_failure and not status.error.startswith(SHIM_LOST)
