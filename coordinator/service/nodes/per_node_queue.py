"""Runs work beside the decisions, one piece at a time for each node."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from common.model import NodeName


class OneEach:
    """Does the wanted work for nodes; no work outlives `run`.

    Args:
        work: for one node. An exception from it is a defect, and ends `run`.
        name: of the work, for tasks.
    """

    def __init__(self, work: Callable[[NodeName], Awaitable[None]], *, name: str) -> None:
        self._work = work
        self._name = name
        self._wanted: dict[NodeName, None] = {}
        self._busy: set[NodeName] = set()
        self._wake = asyncio.Event()

    def want(self, node: NodeName) -> None:
        """Request the work for a node, once more if it is under way now."""
        self._wanted[node] = None
        self._wake.set()

    def is_busy(self, node: NodeName) -> bool:
        """True if the work is under way for a node."""
        return node in self._busy

    async def run(self) -> None:
        """Do the requested work, for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._wake.wait()
                self._wake.clear()
                for node in [node for node in self._wanted if node not in self._busy]:
                    del self._wanted[node]
                    self._busy.add(node)
                    group.create_task(self._do(node), name=f"{self._name} {node}")

    async def _do(self, node: NodeName) -> None:
        try:
            await self._work(node)
        finally:
            self._busy.discard(node)
            self._wake.set()
