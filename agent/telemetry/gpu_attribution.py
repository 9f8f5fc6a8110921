"""Attributes a node's GPU processes to workers, to the server, or to neither (foreign). An edge.

A foreign process uses a GPU that was not assigned to it. While a node runs workers, that is a
process of no worker. While the node serves, it is a process that is not the server's. While its
GPUs change hands, it is any live process of neither. In between, as while a server warms up or does
not answer, processes cannot be attributed: those that were foreign before stay foreign. The same
holds on the GPUs of a starting worker, until its shim has reported the worker's process.

Where a driver does not list GPU processes, a GPU that is in use without a worker has a foreign
process. About the GPUs of a server nothing is known in that case.

A process that uses the GPUs only for a moment, as a diagnostic does, does not count as foreign on a
node that could be lent. Its pid differs each time, and each one would cost a loan or a stop of the
server.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from agent.core.gpu_handover import use_by_nobody
from agent.core.state import Memory
from agent.settings import ServerSettings
from common.messages import UNTOLD_PID, GpuHealth, GpuReport
from common.model import GpuUuid, NodeRole

Found = tuple[tuple[int, GpuUuid], ...]

log = logging.getLogger(__name__)

LOOKS_IN_VAIN = 3
"""After this many samples in a row the server's units are not those that it runs in: one sample may
show processes that have ended meanwhile."""
STREAM_RATIO = 5.0
"""Processes that follow each other on one GPU for this many times `after_s`, with no lasting one in
between, count as foreign like one that stays: a diagnostic's end sooner, and a crash loop never
ends."""
_RUNS_WORKERS = (NodeRole.TRAINING, NodeRole.ON_LOAN)


class Look(Struct, frozen=True, kw_only=True):
    """One sample, and the state of the node at that time.

    gpus: None: they were not seen.
    owners: ancestors of all processes that were granted GPUs.
    is_healthy: its server answered.
    unnamed: GPUs of workers that may run already, or still, and whose processes are unknown.
    held: GPUs of workers that may run.
    """

    at_s: float
    gpus: Sequence[GpuReport] | None
    owners: Sequence[int]
    is_healthy: bool
    unnamed: frozenset[GpuUuid] = frozenset()
    held: frozenset[GpuUuid] = frozenset()


class Kinship(Protocol):
    """The part of `agent.telemetry.machine.Machine` that is used here."""

    def strangers(self, pids: set[int], owners: Sequence[int]) -> set[int]: ...

    def beside_server(self, pids: set[int], server: ServerSettings) -> set[int] | None: ...


class Strangers:
    """Examines each sample; `found`, `suspects` and `others` are of the last one.

    Args:
        after_s: beside a server, and until a loan begins, a process is foreign once it was on a GPU
            in each sample for this long. The delay does not apply beside workers, where a report
            costs nothing, nor on the way home, which does not wait for foreign processes. A GPU in
            use without a worker is also reported only after this time: a process that has just left
            is seen for a moment.
        free_memory_ratio: a GPU with less memory used does not count as in use.
    """

    def __init__(
        self,
        machine: Kinship,
        server: ServerSettings | None,
        *,
        after_s: float,
        free_memory_ratio: float,
    ) -> None:
        self.found: Found = ()
        """(pid, GPU) of the certain foreign processes; `UNTOLD_PID`: one without a known pid."""
        self.suspects: frozenset[int] = frozenset()
        """Processes that become foreign if they stay."""
        self.others: frozenset[int] = frozenset()
        """While the GPUs change hands, all that are alive and of no worker, the server's too."""
        self._machine = machine
        self._server = server
        self._after_s = after_s
        self._free_memory_ratio = free_memory_ratio
        self._in_use_since_s: dict[GpuUuid, float] = {}
        """Start of the first sample in a row that shows it in use by an unlisted process."""
        self._servers: frozenset[int] | None = None
        """Processes of the server as it was seen last; None: unknown."""
        self._beside: set[int] | None = None
        """Processes beside the server in the last judged sample; None: unknown."""
        self._since_s: dict[int | GpuUuid, float] = {}
        """Start of the first sample in a row that shows the process as foreign, by pid, or a
        foreign process on the GPU, by GPU."""
        self._judged_at_s: float | None = None
        self._looks_in_vain = 0
        self._is_warned = False

    @property
    def unknown_server(self) -> str:
        """Why the server's processes are unknown although its units are named; else empty."""
        if self._server is None or self._looks_in_vain < LOOKS_IN_VAIN:
            return ""
        units = ", ".join(self._server.units)
        return (
            f"server.units: no process on a GPU is in {units}, so the server's processes are "
            "unknown and foreign ones are not detected"
        )

    def saw(self, look: Look, memory: Memory) -> None:
        """Judge the GPU processes of a sample by the node's role.

        A sample without GPUs changes nothing.
        """
        if look.gpus is None:
            return
        used = [(process.pid, gpu.uuid) for gpu in look.gpus for process in gpu.processes or ()]
        pids = {pid for pid, _ in used}
        left = pids & set(memory.left_behind)
        known = left.union(memory.strangers)
        self.others, self.suspects = frozenset(), frozenset()
        since_s, self._since_s = self._since_s, {}
        certain = known & pids
        is_draining = memory.role == NodeRole.DRAINING
        is_serving = memory.role == NodeRole.SERVING or is_draining
        if memory.role in _RUNS_WORKERS:
            self._servers = frozenset()  # its GPUs were seen free before
            certain = self._machine.strangers(pids, look.owners) if pids else set[int]()
        elif memory.role == NodeRole.VACATING or (is_draining and memory.is_server_stopped):
            self.others = frozenset(self._machine.strangers(pids, look.owners) if pids else ())
            beside = set[int]() if self._servers is None else set(self.others - self._servers)
            certain |= self._lasting(beside, known, since_s, look) if is_draining else beside
        elif is_serving and look.is_healthy and self._server is not None:
            self._judge(look, pids, self._server)
            if self._beside is not None:
                # The owner of a process that outlived a stop of the server does not matter: it
                # would again, and no worker could have its GPU.
                beside = self._beside | left
                self._servers = frozenset(pids - beside)
                certain = self._lasting(beside, known, since_s, look)
        # A worker has the GPU before it can report its process: that would count as foreign.
        self.found = tuple(
            (pid, uuid)
            for pid, uuid in used
            if pid in certain and (uuid not in look.unnamed or pid in known)
        )
        memory.strangers = sorted({pid for pid, _ in self.found})
        untold = self._untold(look, look.gpus) if memory.role in _RUNS_WORKERS else []
        self.found += tuple((UNTOLD_PID, uuid) for uuid in untold)

    def _untold(self, look: Look, gpus: Sequence[GpuReport]) -> list[GpuUuid]:
        """GPUs that are in use without a worker of ours, and by an unknown process."""
        in_use = [
            gpu.uuid
            for gpu in gpus
            if gpu.processes is None
            and gpu.health == GpuHealth.OK
            and gpu.uuid not in look.held
            and use_by_nobody(gpu, self._free_memory_ratio)
        ]
        since_s = self._in_use_since_s
        self._in_use_since_s = {uuid: since_s.get(uuid, look.at_s) for uuid in in_use}
        return [
            uuid
            for uuid, began_at_s in self._in_use_since_s.items()
            if look.at_s - began_at_s >= self._after_s
        ]

    def _judge(self, look: Look, pids: set[int], server: ServerSettings) -> None:
        """Find the processes that are not the server's, once for each sample."""
        if look.at_s == self._judged_at_s:
            return
        self._judged_at_s = look.at_s
        self._beside = self._machine.beside_server(pids, server) if pids else set[int]()
        self._count_in_vain(is_in_vain=self._beside is None and bool(server.units))
        if self._beside is None:
            self._servers = None

    def _lasting(
        self, beside: set[int], known: set[int], since_s: Mapping[int | GpuUuid, float], look: Look
    ) -> set[int]:
        """The processes that are known, or have been there for long enough.

        One sample is not enough: it may show a server that ends, and be judged by the one that has
        begun. For processes that follow each other on a GPU, the newest counts.
        """
        by_gpu = {
            gpu.uuid: found
            for gpu in look.gpus or ()
            if (found := {process.pid for process in gpu.processes or ()} & beside)
        }
        judged: list[int | GpuUuid] = [*beside, *by_gpu]
        self._since_s = {one: since_s.get(one, look.at_s) for one in judged}
        for_s = {one: look.at_s - at_s for one, at_s in self._since_s.items()}
        lasting = {pid for pid in beside if for_s[pid] >= self._after_s}
        for uuid, pids in by_gpu.items():
            if for_s[uuid] >= STREAM_RATIO * self._after_s and not pids & (known | lasting):
                lasting.add(min(pids, key=lambda pid: (for_s[pid], -pid)))
        self.suspects = frozenset(beside - known - lasting)
        return beside & (known | lasting)

    def _count_in_vain(self, *, is_in_vain: bool) -> None:
        self._looks_in_vain = self._looks_in_vain + 1 if is_in_vain else 0
        if not is_in_vain:
            self._is_warned = False
        elif self.unknown_server and not self._is_warned:
            self._is_warned = True
            log.warning("%s", self.unknown_server)
