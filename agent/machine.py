"""What only this machine can answer at once: a free port, whose child a process is. An edge; must
not know why it is asked.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Protocol

from agent.processes import strangers


class Machine(Protocol):
    """The machine as its node asks it; a test or a simulation puts a model in its place."""

    def free_port(self) -> int:
        """A TCP port that nobody listens on now."""
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

    def strangers(self, pids: Iterable[int], owners: Iterable[int]) -> set[int]:
        """As `agent.processes.strangers`."""
        return strangers(pids, owners)
