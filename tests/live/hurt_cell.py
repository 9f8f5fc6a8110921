"""A real cell that a nemesis can hurt: each part has a proxy before NATS, each node has GPUs and a
disk of its own, and a standby stands by. Must not hurt anything itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from msgspec import Struct

from common.clock import Clock
from coordinator.demo import server_ctl
from coordinator.demo.cell import COORDINATOR, MARKER, Cell
from coordinator.demo.nats_keeper import NatsKeeper
from coordinator.demo.nats_server import NatsServer
from coordinator.demo.plan import CellPlan, agent_toml, coordinator_toml, fleet_toml, toml
from coordinator.demo.supervise import Unit
from tests.live.proxy import HOST, Link, Proxy

STANDBY = "standby"
COORDINATORS = (COORDINATOR, STANDBY)
DISK_BYTES = 16 << 20
"""Of a node's state directory; it is filled often."""
RETRY_BACKOFF_S = 2.0
"""A job may go back to a node soon: the nemesis hits every node again and again."""
PROC = Path("/proc")


class LiveWorker(Struct, frozen=True, kw_only=True):
    """A worker's process and its shim's, by /proc."""

    pid: int
    shim_pid: int
    job: str
    attempt: int
    index: int
    node: str
    directory: Path

    @property
    def name(self) -> str:
        """Which process it is, as in `recording.Worker`."""
        return f"{self.job}.{self.attempt}.{self.index}.{self.pid}"


class PeerServer(NatsServer):
    """A nats-server of a cluster on this machine, whose clients keep to the URLs that they have.

    Args:
        place: its own among `cluster_ports`.
    """

    def __init__(
        self, directory: Path, *, clock: Clock, cluster_ports: tuple[int, ...], place: int
    ) -> None:
        super().__init__(directory, clock=clock)
        self._cluster_ports = cluster_ports
        self._place = place

    def _config(self) -> str:
        routes = ", ".join(f'"nats://{HOST}:{port}"' for port in self._cluster_ports)
        own = f"{HOST}:{self._cluster_ports[self._place]}"
        cluster = f'name: "live", listen: "{own}", no_advertise: true, routes: [{routes}]'
        return f'{super()._config()}server_name: "nats-{self._place}"\ncluster {{ {cluster} }}\n'


class LiveCell(Cell):
    """A cell as `aryl up` makes it, and what is needed to hurt each part alone.

    Args:
        nats_servers: one, or as many as are to keep each record of the journal.
    """

    def __init__(
        self, plan: CellPlan, run_dir: Path, *, clock: Clock, seed: int, nats_servers: int = 1
    ) -> None:
        super().__init__(plan, run_dir, clock=clock)
        self.unit_by_name: dict[str, Unit] = {}
        self.proxies: dict[str, tuple[Proxy, ...]] = {}
        self.servers: list[NatsServer] = [self.nats]
        if nats_servers > 1:
            ports = free_ports(nats_servers)
            self.servers = [
                PeerServer(run_dir / f"nats-{i}", clock=clock, cluster_ports=ports, place=i)
                for i in range(nats_servers)
            ]
            self.nats = self.servers[0]
        self._keepers = [NatsKeeper(server, clock=clock) for server in self.servers]
        self._nats_keeper = self._keepers[0]
        self.has_disks = False
        self._rng = random.Random(seed)

    async def open(self) -> None:
        """Disks, NATS, proxies, and everything else; returns at once."""
        self._mount_disks()
        await asyncio.gather(*(keeper.start() for keeper in self._keepers))
        for name in (*COORDINATORS, *(node.name for node in self.nodes)):
            self.proxies[name] = tuple([await self._proxy(server) for server in self.servers])
        for node in self.nodes:
            self.write_fleet(node.name, is_hanging=False)
        await self.start()
        self.start_coordinator(STANDBY)

    async def close(self) -> None:
        """Stop everything; no mount is left."""
        try:
            await self.stop()
        finally:
            for keeper, server in zip(self._keepers[1:], self.servers[1:], strict=True):
                await keeper.leave_alone()
                await server.stop()
            for proxy in chain.from_iterable(self.proxies.values()):
                await proxy.stop()
            if self.has_disks:
                for node in self.nodes:
                    _quietly("umount", "--lazy", str(self.state_dir(node.name)))

    def _mount_disks(self) -> None:
        """A small disk for each node, where this account may mount one."""
        self.has_disks = True
        for node in self.nodes:
            path = self.state_dir(node.name)
            path.mkdir(parents=True)
            options = f"size={DISK_BYTES},mode=0755"
            if not _quietly("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)):
                self.has_disks = False

    # --- how parts are started: each with its own way to NATS, its own GPUs

    def nats_url(self, name: str) -> str:
        """What a part connects to."""
        return ",".join(f"nats://{HOST}:{proxy.port}" for proxy in self.proxies[name])

    def link(self, name: str, link: Link) -> None:
        """Treat a part's way to every nats-server so from now on."""
        for proxy in self.proxies[name]:
            proxy.set(link)

    async def _proxy(self, server: NatsServer) -> Proxy:
        port = int(server.url.rpartition(":")[2])
        proxy = Proxy(port, rng=random.Random(self._rng.random()))
        await proxy.start()
        return proxy

    @property
    def urls(self) -> str:
        """The nats-servers themselves, past the proxies."""
        return ",".join(server.url for server in self.servers)

    async def kill_server(self, place: int) -> None:
        """SIGKILL of a nats-server and no other start; `start_server` ends that."""
        await self._keepers[place].leave_alone()
        await self.servers[place].kill()

    async def start_server(self, place: int) -> None:
        """Start a nats-server and keep it."""
        await self._keepers[place].start()

    def start_coordinator(self, name: str) -> None:
        text = coordinator_toml(self.plan, name=name, nats_url=self.nats_url(name))
        values = tomllib.loads(text)
        values["journal_replicas"] = len(self.servers)
        values["engine"] |= {
            "retry_backoff_s": RETRY_BACKOFF_S,
            "retry_backoff_max_s": RETRY_BACKOFF_S,
            "retry_avoid_s": RETRY_BACKOFF_S,
        }
        config = self.run_dir / f"{name}.toml"
        config.write_text(toml(values))
        self._start(name, "coordinator.service.daemon", "--config", str(config))

    def _write_agent(self, name: str) -> Path:
        node = next(node for node in self.nodes if node.name == name)
        url = self.nats_url(name)
        text = agent_toml(self.plan, node, bus_url=url, router_url=self.router_url)
        node.config.write_text(text)
        return node.config

    def _start(self, name: str, module: str, *arguments: str) -> None:
        shared = str(self.run_dir / "fleet.toml")
        node = name.removeprefix("agent-")
        own = [str(self.fleet_path(node)) if word == shared else word for word in arguments]
        argv = (sys.executable, "-m", module, *own)
        unit = Unit(name=name, argv=argv, env={MARKER: str(self.run_dir)})
        self.unit_by_name[name] = unit
        self.units.start(unit)

    # --- what there is of a node

    def state_dir(self, node: str) -> Path:
        """Where its agent keeps its ledger and its workers."""
        return self.run_dir / "nodes" / node / "state"

    def fleet_path(self, node: str) -> Path:
        """What its GPUs are read from."""
        return self.run_dir / "nodes" / f"{node}.fleet.toml"

    def write_fleet(self, node: str, *, is_hanging: bool) -> None:
        """Its GPUs; whoever begins to read them hangs, or does not."""
        text = fleet_toml(self.plan, name=str(self.run_dir))
        if is_hanging:
            text += toml({"fault": [{"kind": "hang"}]})
        scratch = self.fleet_path(node).with_suffix(".new")
        scratch.write_text(text)
        scratch.replace(self.fleet_path(node))

    def reader_pid(self, node: str) -> int | None:
        """The process that reads its GPUs for its agent."""
        agent_pid = self.units.pid(self.agent_unit(node))
        for pid, words, parent in processes():
            if parent == agent_pid and b"agent.gpu.nvml_child" in words:
                return pid
        return None

    def server_pid(self, node: str) -> int | None:
        """Its inference server."""
        directory = next(each.server_directory for each in self.nodes if each.name == node)
        if not directory.exists():
            return None
        return server_ctl.running_pid(server_ctl.Files(str(directory), node))

    def workers(self) -> list[LiveWorker]:
        """The workers that run, in the order of their names."""
        mark = os.fsencode(f"ARYL_WORKER_DIRECTORY={self.run_dir}/")
        found: list[LiveWorker] = []
        for pid, words, parent in processes():
            if not any(word.endswith(b"beating_worker.py") for word in words):
                continue
            with contextlib.suppress(OSError, KeyError):
                raw = (PROC / str(pid) / "environ").read_bytes()
                if mark not in raw:
                    continue
                pairs = (text.partition("=") for text in os.fsdecode(raw).split("\0"))
                values = {name: value for name, _, value in pairs}
                directory = Path(values["ARYL_WORKER_DIRECTORY"])
                found.append(
                    LiveWorker(
                        pid=pid,
                        shim_pid=parent,
                        job=values["ARYL_JOB_ID"],
                        attempt=int(values["ARYL_ATTEMPT"]),
                        index=int(values["ARYL_WORKER_INDEX"]),
                        node=directory.parents[2].name,
                        directory=directory,
                    )
                )
        return sorted(found, key=lambda worker: (worker.job, worker.attempt, worker.index))


def processes() -> Iterator[tuple[int, tuple[bytes, ...], int]]:
    """Every process with its command line and its parent."""
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = tuple((entry / "cmdline").read_bytes().split(b"\0"))
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                yield int(entry.name), words, int(fields[1])


def has_words(pid: int, word: bytes) -> bool:
    """Whether a process's command line has a word that ends so."""
    with contextlib.suppress(OSError):
        words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
        return any(each.endswith(word) for each in words)
    return False


def _quietly(*argv: str) -> bool:
    """Whether a command succeeded."""
    try:
        return subprocess.run(argv, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def free_ports(count: int) -> tuple[int, ...]:
    """Ports that nothing listens at now; a cluster has to know its own before it starts."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = tuple(each.getsockname()[1] for each in sockets)
    for each in sockets:
        each.close()
    return ports


class Held:
    """One process by a descriptor: a signal never reaches another one that got its pid.

    Raises:
        ProcessLookupError: there is none.
    """

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still is there."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    def close(self) -> None:
        """Let it go."""
        os.close(self._fd)
