"""The process that plays one plan: the question on standard input, the answer on standard output.

A process of its own, so that a plan holds up no pass: it shares no interpreter with the leader,
and gives way to it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time

from common.api import ApiError, ApiErrorCode
from common.errors import ConfigError
from common.messages import Message, encode
from coordinator import plugins
from coordinator.engine import what_if
from coordinator.plan.answer import answer

NICENESS = 10


def main() -> int:
    """Entry point; returns the exit status."""
    with contextlib.suppress(OSError):  # a unit may forbid it
        os.nice(NICENESS)
    question = what_if.read(sys.stdin.buffer.read())
    plugins.load()
    gc.freeze()
    try:
        reply: Message = answer(question, clock_s=time.monotonic)
    except ConfigError as error:
        reply = ApiError(code=ApiErrorCode.USAGE, message=str(error), field="target")
    sys.stdout.buffer.write(encode(reply))
    return 0


if __name__ == "__main__":
    sys.exit(main())
