"""Time as an argument: the protocol that every driver takes instead of calling the system clock.

An edge: `SystemClock` is the only place outside tests and the simulator that reads real time.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock(Protocol):
    """A clock that a driver runs on; a virtual one may stand in its place."""

    def now_s(self) -> float:
        """Seconds since this machine booted, suspended time included; for all intervals."""
        ...

    def boot_id(self) -> str:
        """The boot that `now_s` counts from; it differs after each boot, and on each machine."""
        ...

    def wall_s(self) -> float:
        """Seconds since 1970; for people and for instants that outlive a boot."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Return after `delay_s`."""
        ...

    def timeout(self, delay_s: float | None) -> AbstractAsyncContextManager[object]:
        """A block that raises `TimeoutError` when it takes longer; None never does."""
        ...


class SystemClock:
    """The real clock, on asyncio's loop."""

    def now_s(self) -> float:
        """CLOCK_BOOTTIME: neither NTP nor a suspend can shorten a lease."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def boot_id(self) -> str:
        """The kernel's (random(4))."""
        return BOOT_ID.read_text().strip()

    def wall_s(self) -> float:
        """Unix time."""
        return time.time()

    async def sleep(self, delay_s: float) -> None:
        """asyncio's sleep."""
        await asyncio.sleep(delay_s)

    def timeout(self, delay_s: float | None) -> AbstractAsyncContextManager[object]:
        """asyncio's timeout."""
        return asyncio.timeout(delay_s)
