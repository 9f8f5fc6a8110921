"""A whole cell on one machine: nats-server, coordinator, agents, servers and a router.

All of them are real processes.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

from common.api import GetStatus, ListNodes, Nodes, Status
from common.bus import NatsBus, connect_nats
from common.clock import Clock
from common.errors import ArylError, Unavailable
from common.model import NodeRole
from coordinator.client import Client
from coordinator.demo.nats_keeper import NatsKeeper
from coordinator.demo.nats_server import NatsServer
from coordinator.demo.plan import (
    CELL,
    AgentBus,
    CellPlan,
    agent_toml,
    coordinator_toml,
    fleet_toml,
    metrics_address,
    node_plans,
)
from coordinator.demo.ports import HeldPorts, free_ports
from coordinator.demo.server_keeper import ServerKeeper
from coordinator.demo.supervise import Supervisor, Unit, sweep

log = logging.getLogger(__name__)

MARKER = "ARYL_CELL_DIR"
"""In the environment of every process of a cell; names its directory."""

START_TIMEOUT_S = 90.0
POLL_S = 0.2
COORDINATOR = "coordinator"
ROUTER = "router"
LOAD = "load"
ROUTER_TIMEOUT_S = 5.0
_HOME = (NodeRole.TRAINING, NodeRole.SERVING)


class Cell:
    """One cell in a directory of its own; until `stop` it keeps its ports to itself.

    Args:
        run_dir: made if missing; everything that the cell writes is below it.
    """

    def __init__(self, plan: CellPlan, run_dir: Path, *, clock: Clock) -> None:
        self.plan = plan
        self.run_dir = run_dir
        self._ports = HeldPorts()
        server_ports = self._ports.hold(plan.inference_nodes)
        pages = free_ports(1 + plan.training_nodes + plan.inference_nodes)
        self.nodes = node_plans(plan, run_dir, server_ports=server_ports, metrics_ports=pages[1:])
        self._metrics_ports = {COORDINATOR: pages[0]}
        is_mqtt = plan.bus == AgentBus.MQTT
        self.nats = NatsServer(run_dir / "nats", clock=clock, has_mqtt=is_mqtt)
        self._nats_keeper = NatsKeeper(self.nats, clock=clock)
        self.units = Supervisor(run_dir / "logs", clock=clock)
        self.checkpoint_root = run_dir / "checkpoints"
        (router_port,) = self._ports.hold(1)
        self.router_url = f"http://127.0.0.1:{router_port}"
        env = {MARKER: str(run_dir)}
        servers = {node.name: node.server_directory for node in self.nodes if node.server_port}
        self._server_keeper = ServerKeeper(servers, env=env, clock=clock)
        self._clock = clock
        self._bus: NatsBus | None = None

    async def start_nats(self) -> str:
        """Start nats-server and keep it running, as systemd would; its URL.

        A restarted server has the same port and the same store.
        """
        return await self._nats_keeper.start()

    async def kill_nats(self) -> None:
        """SIGKILL without a restart, as in a power cut; `start_nats` ends that."""
        await self._nats_keeper.leave_alone()
        await self.nats.kill()

    async def start(self) -> None:
        """Start everything else; returns at once."""
        self.checkpoint_root.mkdir(parents=True, exist_ok=True)
        fleet = self.run_dir / "fleet.toml"
        fleet.write_text(fleet_toml(self.plan, name=str(self.run_dir)))
        if self.plan.inference_nodes:
            port = self.router_url.rpartition(":")[2]
            held = ("--port", port, "--port-is-held")
            state = str(self.run_dir / "router.json")
            self._start(ROUTER, "coordinator.demo.router", *held, "--state", state)
        self.start_coordinator(COORDINATOR)
        for number, names in enumerate(self._groups(), start=1):
            configs: list[str] = []
            for name in names:
                configs += ["--config", str(self._write_agent(name))]
            self._start(
                self.agent_unit(names[0]) if len(names) == 1 else f"agents-{number}",
                "agent.daemon",
                "--fake-nvml",
                str(fleet),
                *configs,
            )
        self._server_keeper.start()
        self.prometheus_path.write_text(self._prometheus_yml())

    @property
    def prometheus_path(self) -> Path:
        """A configuration of Prometheus that scrapes this cell."""
        return self.run_dir / "prometheus.yml"

    def _prometheus_yml(self) -> str:
        """As JSON, which is YAML; the names of the jobs are those of docs/monitoring.md."""
        jobs = {"aryl-coordinator": [self.coordinator_metrics], "aryl-agent": self.agent_metrics}
        return json.dumps(
            {
                "global": {"scrape_interval": "5s", "evaluation_interval": "5s"},
                "scrape_configs": [
                    {"job_name": name, "static_configs": [{"targets": addresses}]}
                    for name, addresses in jobs.items()
                ],
            },
            indent=2,
        )

    def start_coordinator(self, name: str) -> None:
        """Start a coordinator under a unit's name; all but one coordinator stand by."""
        config = self.run_dir / f"{name}.toml"
        text = coordinator_toml(
            self.plan,
            name=name,
            nats_url=self.nats.url,
            metrics_port=self._page_of(name),
            cache_dir=str(self.run_dir / "cache"),
        )
        config.write_text(text)
        self._start(name, "coordinator.service.daemon", "--config", str(config))

    def _page_of(self, coordinator: str) -> int:
        """The port of a coordinator's metrics page, the same after each of its starts."""
        if coordinator not in self._metrics_ports:
            (self._metrics_ports[coordinator],) = free_ports(1)
        return self._metrics_ports[coordinator]

    @property
    def coordinator_metrics(self) -> str:
        """The address of the first coordinator's metrics page."""
        return metrics_address(self._page_of(COORDINATOR))

    @property
    def agent_metrics(self) -> tuple[str, ...]:
        """The addresses of the agents' metrics pages."""
        return tuple(metrics_address(node.metrics_port) for node in self.nodes)

    def _groups(self) -> list[list[str]]:
        names = [node.name for node in self.nodes]
        size = self.plan.agents_per_process
        return [names[i : i + size] for i in range(0, len(names), size)]

    def _write_agent(self, name: str) -> Path:
        node = next(node for node in self.nodes if node.name == name)
        node.directory.mkdir(parents=True, exist_ok=True)
        url = self.nats.mqtt_url if self.plan.bus == AgentBus.MQTT else self.nats.url
        node.config.write_text(agent_toml(self.plan, node, bus_url=url, router_url=self.router_url))
        return node.config

    def _start(self, name: str, module: str, *arguments: str) -> None:
        argv = (sys.executable, "-m", module, *arguments)
        self.units.start(Unit(name=name, argv=argv, env={MARKER: str(self.run_dir)}))

    @staticmethod
    def agent_unit(node: str) -> str:
        """The unit of a node's agent, where each has a process of its own."""
        return f"agent-{node}"

    async def client(self, *, user: str, tenant: str = "ops") -> Client:
        """A caller of this cell's API."""
        if self._bus is None:
            self._bus = await connect_nats(self.nats.url, identity="cell", clock=self._clock)
        return Client(self._bus, cell=CELL, tenant=tenant, user=user)

    async def ready(self, client: Client) -> Status:
        """Wait until a coordinator leads and every node is where it belongs.

        Raises:
            Unavailable: not within the time that a cell may take to start.
        """
        end_s = self._clock.now_s() + START_TIMEOUT_S
        missing = "a coordinator"
        while self._clock.now_s() < end_s:
            try:
                nodes = (await client.ask(ListNodes(), Nodes)).rows
                status = await client.ask(GetStatus(), Status)
            except ArylError as error:
                log.debug("not yet: %s", error)
            else:
                home = [row.node for row in nodes if row.is_heard and row.role in _HOME]
                if len(home) == len(self.nodes):
                    return status
                away = sorted({node.name for node in self.nodes} - set(home))
                missing = ", ".join(away)
            await self._clock.sleep(POLL_S)
        raise Unavailable(
            f"the cell did not start within {START_TIMEOUT_S:g} s: still missing {missing}; "
            f"see {self.run_dir / 'logs'}"
        )

    def start_load(self, *, speed: float) -> None:
        """Begin to send requests to the service, at the rates of the packaged load trace."""
        arguments = ("--router", self.router_url, "--speed", f"{speed:g}")
        rate = ("--peak-req-per-s", f"{self.plan.peak_req_per_s:g}")
        stats = ("--stats", str(self._load_stats_path))
        self._start(LOAD, "coordinator.demo.load", *arguments, *rate, *stats)

    @property
    def _load_stats_path(self) -> Path:
        return self.run_dir / "load.json"

    def load_stats(self) -> dict[str, Any] | None:
        """The counts of the load driver, timeouts and a dead router included; None without one."""
        try:
            found: dict[str, Any] = json.loads(self._load_stats_path.read_bytes())
        except FileNotFoundError:
            return None
        return found

    async def router_stats(self) -> dict[str, Any]:
        """The router's own counts: requests to the service, and refusals.

        Raises:
            Unavailable: the router does not answer.
        """
        if not self.plan.inference_nodes:
            return {}
        import aiohttp  # it takes long, and every command of `aryl` imports this module

        try:
            timeout = aiohttp.ClientTimeout(total=ROUTER_TIMEOUT_S)
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"{self.router_url}/stats") as answer,
            ):
                found: dict[str, Any] = await answer.json()
                return found
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(f"router {self.router_url}: {error}") from error

    async def stop(self) -> None:
        """Stop everything, workers included; nothing of this cell runs afterwards."""
        if self._bus is not None:
            await self._bus.close()
            self._bus = None
        await self._server_keeper.leave_alone()
        await self.units.stop()
        await self._nats_keeper.leave_alone()
        await sweep(self.run_dir, clock=self._clock)
        await self.nats.stop()
        self._ports.close()

    def remove(self) -> None:
        """Delete its files."""
        shutil.rmtree(self.run_dir, ignore_errors=True)
