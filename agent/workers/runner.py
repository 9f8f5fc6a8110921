"""The protocol of a worker runner, and the status that it reports for each worker."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from msgspec import Struct

from agent.core.state import Refusal
from common.errors import Unavailable
from common.failures import Failure
from common.faults import Fault
from common.messages import WorkerOrder, WorkerPhase
from common.model import Checkpoint, Progress, StopReason, WorkerKey


class StorageSilentError(Unavailable):
    """A worker could not be started because the storage on which it begins did not answer."""


class WorkerStatus(Struct, frozen=True, kw_only=True):
    """The status of one worker.

    pid: of its main process; its descendants are the worker's as well.
    shim_pid: of its shim while it has one, which adopts processes that left the main process; else
        0.
    running_s: since its start, until its end.
    ended_at_s, saved_at_s: instants of its end and of its reported checkpoint, on this boot's
        clock; for an earlier boot only the end is known, which is 0.
    stop_stage: the progress of its stop: requested, working, saved, released, signalled, killed.
    stop_stages_s: seconds from the order to stop until each stage.
    save_over_at_s: see its record.
    failure: why it ended by itself without success.
    fault: whose fault that is, as far as its shim, or the process that found it dead, can know.
    """

    key: WorkerKey
    phase: WorkerPhase
    pid: int
    shim_pid: int = 0
    exit_code: int | None = None
    error: str = ""
    stop_reason: StopReason | None = None
    progress: Progress | None = None
    checkpoint: Checkpoint | None = None
    running_s: float = 0.0
    ended_at_s: float | None = None
    saved_at_s: float | None = None
    stop_stage: str = ""
    stop_stages_s: dict[str, float] = {}
    save_over_at_s: float | None = None
    detail: str = ""
    garbage_count: int = 0
    failure: Failure | None = None
    fault: Fault = Fault.NONE


class WorkerRunner(Protocol):
    """Runs workers; every method may be repeated without harm."""

    async def start(self, order: WorkerOrder, *, endpoint: str) -> None:
        """Have the worker running or ended; a key is started at most once.

        Raises:
            ConfigError: the order cannot be run at all.
            StorageSilentError: the storage on which it begins does not answer.
            Unavailable: it could not be started now.
        """
        ...

    async def stop(self, key: WorkerKey, reason: StopReason, grace_s: float) -> None:
        """Begin the end of a worker; of several graces the earliest end counts.

        A worker that is starting need not begin; its status or the answer to `start` shows that.
        """
        ...

    async def resize(self, key: WorkerKey, worker_count: int) -> None:
        """Send the worker the present size of its gang."""
        ...

    async def pause(self, key: WorkerKey, *, is_suspended: bool) -> None:
        """Have the worker suspended, or computing again; its status shows when it is."""
        ...

    def contacted(self, at_s: float) -> None:
        """The coordinator answered a report of this instant: `stop_after_s` counts from there."""
        ...

    async def statuses(self, started: Collection[WorkerKey] = ()) -> tuple[WorkerStatus, ...]:
        """Every worker that was started and not forgotten, by key.

        started: those that were seen to run and not yet to end. Each of them has a status as long
        as any of its processes lives, whatever became of its files.
        """
        ...

    def has_shim(self, key: WorkerKey) -> bool:
        """True if a shim or process is at work for a worker, even without a status yet."""
        ...

    async def leaving(self, keys: Collection[WorkerKey]) -> frozenset[WorkerKey]:
        """The workers among these that may exist; all got a stop before any status showed them.

        A worker counts while a shim has time to receive the stop. After that it counts as long as
        any of its processes computes; those are ended.
        """
        ...

    async def forget(self, key: WorkerKey) -> None:
        """Remove every trace of a worker that has ended except its log, which is kept for a while.

        Raises:
            Unavailable: it has not ended.
        """
        ...

    async def log_tail(self, key: WorkerKey, max_bytes: int) -> bytes:
        """The end of the worker's output, while it runs and for a while after it ended.

        Raises:
            ConfigError: the key is not a valid place.
            Unavailable: it has no log, or no longer.
        """
        ...

    async def adopt(self) -> tuple[WorkerKey, ...]:
        """Workers that live on from before this agent started."""
        ...

    async def check_reserve(self, order: WorkerOrder) -> Refusal | None:
        """Why this node cannot run the worker; None when it can."""
        ...
