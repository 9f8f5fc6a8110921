"""The log of a worker whose shim was lost: nobody else keeps it within its limit. An edge; must not
know why the shim is gone, nor who asks for the log.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from agent import shim_files
from agent.runner import WorkerStatus
from common.faults import Fault
from common.messages import WorkerPhase


async def cut_lost(status: WorkerStatus, directory: Path, *, max_bytes: int) -> None:
    """Cut it at `max_bytes` as its shim would have, once nothing of the worker is left to write it.

    At each look: one that is short enough costs a glance. Outside the event loop, because as much
    as a whole log is copied; a disk that does not take it now may do so at the next look.
    """
    if status.phase == WorkerPhase.EXITED and status.fault == Fault.SHIM_LOST:
        path = str(directory / shim_files.LOG_FILE)
        with contextlib.suppress(OSError):
            await asyncio.to_thread(shim_files.cut_log, path, max_bytes)
