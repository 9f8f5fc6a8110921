"""Shims that do not end their worker in time: they are killed, by identity. Must not know sockets.

A shim that hangs hears no order and kills nothing, and while it lives the agent leaves its worker
to it. Dead, it is like any lost shim: what it left is killed by its recorded identity.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from pathlib import Path

from agent.worker_marks import owner, signal_if
from agent.worker_record import WorkerRecord, is_shim_alive
from common.model import WorkerKey

log = logging.getLogger(__name__)

HUNG_AFTER_S = 5.0
"""From the end of a worker's grace; a shim needs two for its look at the last checkpoint."""


class HungShims:
    """When each worker that was told to stop must be gone."""

    def __init__(self, boot_id: str) -> None:
        self._boot_id = boot_id
        self._end_by_s: dict[WorkerKey, float] = {}

    def told_to_stop(self, key: WorkerKey, grace_s: float, *, now_s: float) -> None:
        """A stop was ordered, heard or not; of several the earliest end holds, as in the shim."""
        end_by_s = now_s + grace_s + HUNG_AFTER_S
        self._end_by_s[key] = min(end_by_s, self._end_by_s.get(key, end_by_s))

    def is_overdue(self, key: WorkerKey, *, now_s: float) -> bool:
        """Whether the worker was told to stop and should be gone."""
        return now_s >= self._end_by_s.get(key, float("inf"))

    def forget(self, key: WorkerKey) -> None:
        """The worker has ended."""
        self._end_by_s.pop(key, None)

    def end_if_hung(
        self, key: WorkerKey, directory: Path, record: WorkerRecord, *, now_s: float
    ) -> None:
        """SIGKILL to the shim of a worker that should be gone, if it is still the one on record.

        Only to a process of the directory's owner, so that a forged record cannot aim a root agent.
        """
        if not self.is_overdue(key, now_s=now_s) or not is_shim_alive(
            directory, record, self._boot_id
        ):
            return
        log.error("worker %s should have ended: its shim %d hangs, killed", key, record.shim_pid)

        def is_it(pid: int) -> bool:
            is_own = owner(pid) == directory.stat().st_uid
            return is_own and is_shim_alive(directory, record, self._boot_id)

        with contextlib.suppress(FileNotFoundError):
            signal_if(record.shim_pid, signal.SIGKILL, is_it)
