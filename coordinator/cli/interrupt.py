"""Ctrl-C and SIGTERM: how a command ends from outside.

This module imports nothing slow. Until there is anything to stop, Ctrl-C ends the process. Catching
KeyboardInterrupt would not do: raised inside the import machinery, it is printed with a traceback,
or swallowed by the module that was being imported.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Generator
from types import FrameType

from coordinator.service.optional_deps import needing_extras

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
EXIT_TERMINATED = 143
"""128 + SIGTERM."""


@contextlib.contextmanager
def leaving_at_once() -> Generator[None]:
    """Until the block ends, Ctrl-C ends the process with one line and without cleanup.

    A process that was started to ignore Ctrl-C (`nohup`, a shell's `&`) goes on ignoring it.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def importing() -> Generator[None]:
    """While the block imports commands Ctrl-C leaves at once, and a missing extra is named.

    No garbage is looked for: imports leave next to none, and the search is a quarter of their time.
    What they make stays to the end, so later searches need not look through it either.
    """
    gc.disable()
    with leaving_at_once(), needing_extras("aryl"):
        yield
    gc.freeze()
    gc.enable()


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)


@contextlib.contextmanager
def tidying_up_on_sigterm() -> Generator[None]:
    """Until the block ends SIGTERM leaves it as Ctrl-C does, so that all it began is ended.

    By default SIGTERM ends this process alone: its worker processes would go on for hours.
    """
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(EXIT_TERMINATED)
