"""How many workers of one job nodes take, kept while others come and go. Must not know who goes."""

from __future__ import annotations

from collections.abc import Iterable

from common.model import NodeName
from coordinator.policies.placing.vectors import Bins
from coordinator.policies.snapshot import JobView


class RoomsLeft:
    """The same total as of a look at all nodes of a GPU type, for a look at those that change.

    workers: that these nodes take; `Bins.pick` finds nodes for as many and no more.
    """

    def __init__(self, bins: Bins, job: JobView, gpu_type: str) -> None:
        self._bins = bins
        self._job = job
        self._rooms = {
            name: bins.room(job, name)
            for name, node in bins.floor.nodes.items()
            if node.gpu_type == gpu_type
        }
        self.workers = sum(self._rooms.values())

    def look(self, nodes: Iterable[NodeName]) -> None:
        """What is free of these nodes may have changed; of others of the type nothing has."""
        for name in nodes:
            if name in self._rooms:
                now = self._bins.room(self._job, name)
                self.workers += now - self._rooms[name]
                self._rooms[name] = now
