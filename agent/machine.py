"""What only this machine can answer at once: its TCP ports, whose child a process is. An edge;
must not know why it is asked.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from agent.processes import strangers

TCP_LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp (Linux, include/net/tcp_states.h)."""


class Machine(Protocol):
    """The machine as its node asks it; a test or a simulation puts a model in its place."""

    def free_port(self) -> int:
        """A TCP port that nobody listens on now."""
        ...

    def listening_ports(self) -> frozenset[int]:
        """Every TCP port that somebody listens on now."""
        ...

    def strangers(self, pids: Iterable[int], owners: Iterable[int]) -> set[int]:
        """Those of `pids` that are alive and descend from none of `owners`."""
        ...


class ThisMachine:
    """`Machine` by its sockets and its /proc."""

    def free_port(self) -> int:
        """As the kernel gives it; somebody else may take it before it is used."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
            return port

    def listening_ports(self) -> frozenset[int]:
        """By the kernel's tables: nobody is disturbed by a connection that only wants to know."""
        found: set[int] = set()
        for table in ("tcp", "tcp6"):
            with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
                for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                    _, local, _, state, *_ = line.split()
                    if state == TCP_LISTEN:
                        found.add(int(local.rpartition(":")[2], 16))
        return frozenset(found)

    def strangers(self, pids: Iterable[int], owners: Iterable[int]) -> set[int]:
        """As `agent.processes.strangers`."""
        return strangers(pids, owners)
