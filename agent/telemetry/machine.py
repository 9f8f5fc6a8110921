"""What only this machine can answer at once: its TCP ports, whose child a process is. An edge;
must not know why it is asked.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from agent.proc.process_tree import strangers
from agent.settings import ServerSettings
from agent.telemetry.server_processes import ServerProcesses, listening


class Machine(Protocol):
    """The machine as its node asks it; a test or a simulation puts a model in its place."""

    def free_port(self) -> int:
        """A TCP port that nobody listens on now."""
        ...

    def listening_ports(self) -> frozenset[int]:
        """Every TCP port that another process listens on now."""
        ...

    def strangers(self, pids: Iterable[int], owners: Iterable[int]) -> set[int]:
        """Those of `pids` that are alive and descend from none of `owners`."""
        ...

    def beside_server(self, pids: Iterable[int], server: ServerSettings) -> set[int] | None:
        """Those of `pids` that are alive and not this server's; None: nobody can tell."""
        ...

    def owner(self, pid: int) -> str:
        """The user and the program of a process, such as `uid 1001: python3`; empty: it is gone."""
        ...


class ThisMachine:
    """`Machine` by its sockets and its /proc."""

    def __init__(self) -> None:
        self._server_processes = ServerProcesses()

    def free_port(self) -> int:
        """As the kernel gives it; somebody else may take it before it is used."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
            return port

    def listening_ports(self) -> frozenset[int]:
        """By the kernel's tables: nobody is disturbed by a connection that only wants to know."""
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
        """By number: to ask for the name of a user may mean to ask another machine."""
        process = Path("/proc", str(pid))
        try:
            program = (process / "comm").read_text(errors="replace").strip()
            return f"uid {process.stat().st_uid}: {program}"
        except OSError:
            return ""
