"""A program's entry point, called where the test runs. Knows no program, and tests nothing.

An interpreter of its own costs a daemon a third of a second, most of it imports. It is worth that
where a process matters: signals, exit codes as the system sees them, what is left behind. What a
program says of a settings file can be asked here; each program has a test besides in which a real
process says it.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable

NAMES = ("", "nats")
"""Loggers whose level or handlers a program sets up."""


def ended(main: Callable[[list[str]], int], *arguments: str) -> tuple[int, str]:
    """Exit status, and what was written to standard error; logging is left as it was.

    A program that began to serve would not end. Where a test's own event loop runs, that is an
    error: asyncio refuses a second one.
    """
    kept = [(log, log.handlers[:], log.level) for log in map(logging.getLogger, NAMES)]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            status = main(list(arguments))
    finally:
        for log, handlers, level in kept:
            log.handlers[:] = handlers
            log.setLevel(level)
    return status, said.getvalue()
