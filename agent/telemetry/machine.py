"""Facts that this machine answers at once: its TCP ports, and the parents of processes. An edge."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from agent.proc.process_tree import strangers
from agent.settings import ServerSettings
from agent.telemetry.server_processes import ServerProcesses, listening


class Machine(Protocol):
    """The machine as its node queries it; a test or a simulation puts a model in its place."""

    def free_port(self) -> int:
        """A TCP port without a listener now."""
        ...

    def listening_ports(self) -> frozenset[int]:
        """Every TCP port with a listener now."""
        ...

    def strangers(self, pids: Iterable[int], owners: Iterable[int]) -> set[int]:
        """The processes among `pids` that are alive and descend from none of `owners`."""
        ...

    def beside_server(self, pids: Iterable[int], server: ServerSettings) -> set[int] | None:
        """The processes among `pids` that are alive and not this server's; None: unknown."""
        ...

    def owner(self, pid: int) -> str:
        """The user and the program of a process, such as `uid 1001: python3`.

        Empty if it is gone.
        """
        ...


class ThisMachine:
    """`Machine` by its sockets and its /proc."""

    def __init__(self) -> None:
        self._server_processes = ServerProcesses()

    def free_port(self) -> int:
        """A port from the kernel; another program may take it before it is used."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
            return port

    def listening_ports(self) -> frozenset[int]:
        """Ports from the kernel's tables: test connections would disturb the listeners."""
        return frozenset(port for port, _ in listening())

    def strangers(self, pids: Iterable[int], owners: Iterable[int]) -> set[int]:
        """As `agent.proc.process_tree.strangers`."""
        return strangers(pids, owners)

    def beside_server(self, pids: Iterable[int], server: ServerSettings) -> set[int] | None:
        """As `agent.telemetry.server_processes`."""
        return self._server_processes.beside(
            pids,
            urls=[instance.health_url for instance in server.all_instances()],
            units=server.units,
        )

    def owner(self, pid: int) -> str:
        """The user by number, because the lookup of a name may need another machine."""
        process = Path("/proc", str(pid))
        try:
            program = (process / "comm").read_text(errors="replace").strip()
            return f"uid {process.stat().st_uid}: {program}"
        except OSError:
            return ""
