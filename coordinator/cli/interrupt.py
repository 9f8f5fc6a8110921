"""Ctrl-C before there is anything to stop. Must import nothing that takes time, nor know a command.

Not by catching KeyboardInterrupt: one that is raised inside the import machinery is printed with a
traceback, or swallowed by whatever was just being imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Generator
from types import FrameType

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""


@contextlib.contextmanager
def leaving_at_once() -> Generator[None]:
    """Until the block ends Ctrl-C ends the process with one line; nothing of it is tidied up.

    Whoever was started to ignore Ctrl-C (`nohup`, a shell's `&`) goes on ignoring it.
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


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)
