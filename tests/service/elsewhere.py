"""The real coordinator as if on a machine of its own, with an event loop that a file blocks.

    python -m tests.service.elsewhere --config coordinator.toml --machine NAME [--block FILE]

No other process can see whether it has ended, so a standby waits for its lease to run out. While
FILE is there, its event loop does nothing but look for it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from pathlib import Path

from msgspec import structs

from common.errors import ArylError
from common.log import set_up
from common.settings import load
from coordinator.service import daemon
from coordinator.service.leadership.process import ProcessId, this_process
from coordinator.service.settings import CoordinatorSettings

LOOK_S = 0.02


async def run(settings: CoordinatorSettings, machine: str, block: Path | None) -> None:
    """The daemon's part, and the part that is in its way."""

    def process() -> ProcessId | None:
        here = this_process()
        return None if here is None else structs.replace(here, boot_id=machine)

    blocking = asyncio.create_task(_block(block)) if block is not None else None
    try:
        await daemon.run(settings, process=process)
    finally:
        if blocking is not None:
            blocking.cancel()


async def _block(file: Path) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        while file.exists():  # noqa: ASYNC240 - it is to block
            pass


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--machine", required=True)
    parser.add_argument("--block", type=Path)
    given = parser.parse_args()
    set_up(level="INFO", style="plain")
    gc.set_threshold(*daemon.GC_THRESHOLDS)
    try:
        with asyncio.Runner(loop_factory=daemon.loop_factory()) as runner:
            settings = load(given.config, CoordinatorSettings)
            runner.run(run(settings, given.machine, given.block))
    except (ArylError, ExceptionGroup) as error:
        return daemon.status_of(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
