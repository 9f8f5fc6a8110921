"""Whose the GPU processes of a node are, by what it does now. An edge: asks the machine.

Must not know what follows from it. A stranger is a process of nobody who was given the GPUs: while
a node runs workers, one of no worker; while it serves, one that is not its server's; and while its
GPUs change hands, whoever is alive on them and of neither. In between, as while a server warms up
or does not answer, nobody can be told from it: whoever was a stranger before stays one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from agent.settings import ServerSettings
from agent.state import Memory
from common.messages import GpuReport
from common.model import GpuUuid, NodeRole

Found = tuple[tuple[int, GpuUuid], ...]

log = logging.getLogger(__name__)

LOOKS_IN_VAIN = 3
"""So many samples in a row show that the server's units are not those that it runs in: one may be
of processes that have ended meanwhile."""
_RUNS_WORKERS = (NodeRole.TRAINING, NodeRole.ON_LOAN)


class Look(Struct, frozen=True, kw_only=True):
    """One sample, and what is known of the node at that time.

    gpus: None: they were not seen. owners: ancestors of all that was granted GPUs. is_healthy: its
        server answered.
    """

    at_s: float
    gpus: Sequence[GpuReport] | None
    owners: Sequence[int]
    is_healthy: bool


class Kinship(Protocol):
    """What of `agent.machine.Machine` is asked here."""

    def strangers(self, pids: set[int], owners: Sequence[int]) -> set[int]: ...

    def beside_server(self, pids: set[int], server: ServerSettings) -> set[int] | None: ...


class Strangers:
    """Looks at each sample; `found` and `others` are of the last one."""

    def __init__(self, machine: Kinship, server: ServerSettings | None) -> None:
        self.found: Found = ()
        """(pid, GPU) of those that are strangers for certain."""
        self.others: frozenset[int] = frozenset()
        """While the GPUs change hands, all that are alive and of no worker, the server's too."""
        self._machine = machine
        self._server = server
        self._servers: frozenset[int] | None = None
        """Processes of the server as it was seen last; None: nobody could tell."""
        self._suspects: set[int] = set()
        self._judged_at_s: float | None = None
        self._looks_in_vain = 0
        self._is_warned = False

    @property
    def unknown_server(self) -> str:
        """Why nobody can tell the server's processes although its units are named; else empty."""
        if self._server is None or self._looks_in_vain < LOOKS_IN_VAIN:
            return ""
        units = ", ".join(self._server.units)
        return (
            f"server.units: no process on a GPU is in {units}, so the server is not known and "
            "no other process beside it is seen"
        )

    def saw(self, look: Look, memory: Memory) -> None:
        """Judge the GPU processes of a sample by the node's role; one that saw no GPU shows nothing
        new."""
        if look.gpus is None:
            return
        used = [(process.pid, gpu.uuid) for gpu in look.gpus for process in gpu.processes]
        pids = {pid for pid, _ in used}
        left = pids & set(memory.left_behind)
        known = left.union(memory.strangers)
        self.others = frozenset()
        certain = known & pids
        is_draining = memory.role == NodeRole.DRAINING
        is_serving = memory.role == NodeRole.SERVING or is_draining
        if memory.role in _RUNS_WORKERS:
            self._servers = frozenset()  # its GPUs were seen free before
            certain = self._machine.strangers(pids, look.owners) if pids else set[int]()
        elif memory.role == NodeRole.VACATING or (is_draining and memory.is_server_stopped):
            self.others = frozenset(self._machine.strangers(pids, look.owners) if pids else ())
            if self._servers is not None:
                certain |= self.others - self._servers
        elif is_serving and look.is_healthy and self._server is not None:
            certain = self._beside_server(look, pids, known, left, self._server)
        self.found = tuple((pid, uuid) for pid, uuid in used if pid in certain)
        memory.strangers = sorted({pid for pid, _ in self.found})

    def _beside_server(
        self, look: Look, pids: set[int], known: set[int], left: set[int], server: ServerSettings
    ) -> set[int]:
        """Those that are none of the server's in two samples: one may show a server that ends,
        and be judged by the one that has begun. Of whoever outlived a stop of the server it does
        not matter whose it is: it would again, and no worker could have its GPU."""
        if look.at_s == self._judged_at_s:
            return {pid for pid, _ in self.found}
        self._judged_at_s = look.at_s
        beside = self._machine.beside_server(pids, server) if pids else set[int]()
        self._count_in_vain(is_in_vain=beside is None and bool(server.units))
        if beside is None:
            self._servers, self._suspects = None, set[int]()
            return known & pids
        beside |= left
        certain = beside & (known | self._suspects)
        self._suspects = beside
        self._servers = frozenset(pids - beside)
        return certain

    def _count_in_vain(self, *, is_in_vain: bool) -> None:
        self._looks_in_vain = self._looks_in_vain + 1 if is_in_vain else 0
        if not is_in_vain:
            self._is_warned = False
        elif self.unknown_server and not self._is_warned:
            self._is_warned = True
            log.warning("%s", self.unknown_server)
