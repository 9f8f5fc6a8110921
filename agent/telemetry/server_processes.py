"""Finds the GPU processes of the inference server, from /proc. An edge.

The server is the set of units that its settings name, or else the process that listens at the port
of its health check: that process, its session, its descendants, and the rest of its control group,
unless that is the agent's own. The kernel shows listeners only to the same account and to root; an
agent that runs as another account needs the units in its settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from agent.proc.process_tree import PROC, leaders, lineage
from common.errors import ConfigError

TCP_LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp (Linux, include/net/tcp_states.h)."""
UNIT_KINDS = (".service", ".scope", ".slice")
"""Kinds of systemd unit that are control groups with processes."""
MOST_LOOKS_BETWEEN = 64
"""For a server that was never found so far."""

_PORTS = {"http": 80, "https": 443}


def checked_units(units: Sequence[str]) -> None:
    """Refuse a text that is no unit's name: it would silently match nothing.

    Raises:
        ConfigError: names the field.
    """
    for unit in units:
        stem = next((unit.removesuffix(kind) for kind in UNIT_KINDS if unit.endswith(kind)), "")
        if not stem or "/" in stem or any(letter.isspace() for letter in stem):
            kinds = " or ".join(UNIT_KINDS)
            raise ConfigError(f"server.units: {unit!r} is no unit's name, which ends in {kinds}")


def listening(proc: Path = PROC) -> Iterator[tuple[int, str]]:
    """(port, inode) of every TCP socket that listens."""
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == TCP_LISTEN:
                yield int(fields[1].rpartition(":")[2], 16), fields[9]


class ServerProcesses:
    """Remembers the last listeners: a search through all processes costs some milliseconds."""

    def __init__(self, *, proc: Path = PROC) -> None:
        self._proc = proc
        self._sockets: dict[int, list[tuple[int, Path, str]]] = {}
        self._looks_in_vain = 0

    def beside(
        self, pids: Iterable[int], *, urls: Iterable[str], units: Sequence[str]
    ) -> set[int] | None:
        """The processes among `pids` that are alive and not the server's; None: unknown.

        It is unknown if none of them would be the server's: the server has its GPUs, so the search
        missed it.

        Args:
            urls: of its health checks.
            units: names in the paths of its control groups.
        """
        alive = {pid: family for pid in pids if (family := lineage(pid, proc=self._proc))}
        groups = {pid: self._groups(str(pid)) for pid in alive}
        if units:
            own = {pid for pid in alive if any(_has(path, units) for path in groups[pid])}
        else:
            listeners = [self._listeners(_port_of(url)) for url in urls]
            # A server that does not listen may have its processes all the same: they are not
            # foreign.
            if not all(listeners):
                return None
            own = self._of_listeners(alive, groups, {pid for one in listeners for pid in one})
        if not own:
            return None
        return alive.keys() - own

    def _of_listeners(
        self, alive: dict[int, set[int]], groups: dict[int, set[str]], listeners: set[int]
    ) -> set[int]:
        shared = {"/", *self._groups("self")}
        own_groups = {path for pid in listeners for path in self._groups(str(pid))} - shared
        owners = set(listeners)
        for pid in listeners:
            owners |= leaders(pid, proc=self._proc)
        return {pid for pid, family in alive.items() if family & owners or groups[pid] & own_groups}

    def _listeners(self, port: int) -> set[int]:
        """Processes that hold a socket which listens at a port, as far as this account may see."""
        known = [held for held in self._sockets.get(port, []) if self._is_held(*held)]
        if not known:
            known = list(self._search(port)) if self._is_worth_a_search() else []
            self._sockets[port] = known
            self._looks_in_vain = 0 if known else self._looks_in_vain + 1
        return {pid for pid, _, _ in known}

    def _is_worth_a_search(self) -> bool:
        """True if a search through all processes is worth its cost.

        It runs ever less often while it finds nothing, as for an agent that may not see the
        sockets' owners.
        """
        looks = self._looks_in_vain
        return looks & (looks - 1) == 0 or looks % MOST_LOOKS_BETWEEN == 0

    def _is_held(self, _pid: int, file: Path, socket: str) -> bool:
        try:
            return str(file.readlink()) == socket
        except OSError:
            return False

    def _search(self, port: int) -> Iterator[tuple[int, Path, str]]:
        sockets = {f"socket:[{inode}]" for at, inode in listening(self._proc) if at == port}
        if not sockets:
            return
        for process in self._proc.iterdir():
            if not process.name.isdigit():
                continue
            try:
                files = list((process / "fd").iterdir())
            except OSError:  # gone, or of another account
                continue
            for file in files:
                try:
                    target = str(file.readlink())
                except OSError:
                    continue
                if target in sockets:
                    yield int(process.name), file, target
                    break

    def _groups(self, process: str) -> set[str]:
        """Where systemd has put a process; empty when it is gone.

        Other controllers of an older kernel may only show its slice.
        """
        lines = [line.split(":", 2) for line in self._text(process, "cgroup").splitlines()]
        return {path for _, controller, path in lines if controller in ("", "name=systemd")}

    def _text(self, process: str, name: str) -> str:
        try:
            return (self._proc / process / name).read_text(errors="replace")
        except OSError:
            return ""


def _has(path: str, units: Sequence[str]) -> bool:
    return any(part in units for part in path.split("/"))


def _port_of(url: str) -> int:
    parts = urlsplit(url)
    return parts.port or _PORTS.get(parts.scheme, 0)
