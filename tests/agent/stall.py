"""Places in a model of a machine at which a test lets nobody get on. Knows no machine."""

from __future__ import annotations

import asyncio


class Stall:
    """Places at which nobody gets on: what is awaited there never ends, and nothing else waits."""

    def __init__(self) -> None:
        self._gates: dict[str, asyncio.Event] = {}

    def begin(self, place: str) -> None:
        """Whoever comes there from now on waits."""
        self._gates[place] = asyncio.Event()

    def end(self) -> None:
        """Everybody gets on."""
        for gate in self._gates.values():
            gate.set()
        self._gates.clear()

    async def at(self, place: str, job: str = "") -> None:
        """Pass this place; that of one job alone is "PLACE of JOB"."""
        for name in (place, f"{place} of {job}"):
            if name in self._gates:
                await self._gates[name].wait()
