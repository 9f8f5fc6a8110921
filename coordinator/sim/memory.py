"""The largest resident memory of this process since an instant. Must not know what uses it."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

RESET_PEAK = "5"
"""Written to clear_refs it makes the peak the present size, proc(5); Linux 4.0 and later."""


class PeakMemory:
    """Watches from its creation on.

    Where the kernel keeps no peak that can be reset, it is the peak since the process began.
    """

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text(RESET_PEAK)

    def peak_bytes(self) -> int:
        """The largest resident size so far."""
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
