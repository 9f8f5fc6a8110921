"""What something costs, counted in calls or steps: the same wherever it runs. Tests nothing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls(act: Callable[[], object]) -> int:
    """Functions of Python that are called for it.

    Garbage waits meanwhile: who watches its collection, as tools of tests do, would be counted.
    """
    found = 0

    def count(_: FrameType, event: str, __: object) -> None:
        nonlocal found
        found += event == "call"

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return found


def steps(act: Callable[[], object]) -> int:
    """Instructions of Python that are executed for it, loops within one expression included.

    Slow, a microsecond or so for each: for small cases only.
    """
    found = 0

    def count(
        frame: FrameType, event: str, _: object
    ) -> Any:  # the type of a trace function is typeshed's own
        nonlocal found
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        found += event == "opcode"
        return count

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(count)
    try:
        act()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return found
