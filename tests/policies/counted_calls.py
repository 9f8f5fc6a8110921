"""What something costs, counted in calls: the same wherever it runs. Tests nothing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType


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
