"""A cell whose service is real: vLLM on each inference node, haproxy and `aryl-route` in front.

Must not know what is asked of it.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from msgspec import Struct

from common.clock import Clock
from coordinator.demo.cell import COORDINATOR, MARKER, Cell
from coordinator.demo.plan import CellPlan, NodePlan, Periods, agent_toml, fleet_toml, toml
from coordinator.demo.supervise import Unit

HERE = Path(__file__).parent
MODEL = "tiny"
BACKEND = "chat"
GRACE_S = 10.0
"""Of a job on a lent node."""
HAPROXY = """\
global
  stats socket {socket} mode 600 level admin
defaults
  mode http
  option httpchk GET /health
  option redispatch 1
  retries 3
  retry-on conn-failure
  timeout connect 2s
  timeout client 120s
  timeout server 120s
frontend front
  bind 127.0.0.1:{port}
  default_backend {backend}
backend {backend}
  balance leastconn
  default-server check inter 1s fall 2 rise 1 init-addr none
"""
IN_FLIGHT_PER_NODE = 2.5
"""The capacity of a node, in the unit of what vLLM's page tells: requests running and waiting."""


class Timing(Struct, frozen=True, kw_only=True):
    """What the real server takes, in seconds, on a machine with two busy cores."""

    warm_up_s: float = 360.0
    reclaim_deadline_s: float = 480.0
    device_free_s: float = 30.0


def cell_plan() -> CellPlan:
    """Two nodes that serve, one of which may be lent, and one that trains."""
    timing = Timing()
    return CellPlan(
        training_nodes=1,
        inference_nodes=2,
        gpus_per_node=2,
        headroom_nodes=0,
        peak_req_per_s=2 * IN_FLIGHT_PER_NODE,
        periods=Periods(
            warm_up_s=timing.warm_up_s,
            reclaim_deadline_s=timing.reclaim_deadline_s,
            device_free_s=timing.device_free_s,
            grace_s=GRACE_S,
        ),
    )


class VllmCell(Cell):
    """As `aryl up` makes one, but for what serves.

    Args:
        python: of the environment that has vLLM.
        model: directory of the model.
    """

    def __init__(self, run_dir: Path, *, clock: Clock, python: Path, model: Path) -> None:
        super().__init__(cell_plan(), run_dir, clock=clock)
        self._ports.close()  # vLLM takes no port beside somebody who holds it
        self._python = python
        self._model = model
        self.socket = run_dir / "haproxy.sock"
        self._route = Path(sys.executable).with_name("aryl-route")

    @property
    def servers(self) -> tuple[NodePlan, ...]:
        """The nodes that serve."""
        return tuple(node for node in self.nodes if node.server_port)

    async def start(self) -> None:
        """haproxy, the coordinator and the agents, which start vLLM."""
        self.checkpoint_root.mkdir(parents=True, exist_ok=True)
        fleet = fleet_toml(self.plan, name=str(self.run_dir))
        (self.run_dir / "fleet.toml").write_text(fleet)
        config = self.run_dir / "haproxy.cfg"
        lines = [f"  server {node.name} 127.0.0.1:{node.server_port}" for node in self.servers]
        text = HAPROXY.format(
            socket=self.socket, port=self.router_url.rpartition(":")[2], backend=BACKEND
        )
        config.write_text(text + "\n".join(lines) + "\n")
        self._unit("haproxy", "haproxy", "-db", "-f", str(config))
        self.start_daemons()

    def start_daemons(self) -> None:
        """The coordinator and the agents; also after `units.kill` of them."""
        self.start_coordinator(COORDINATOR)
        for node in self.nodes:
            arguments = ("--fake-nvml", str(self.run_dir / "fleet.toml"), "--config")
            config = str(self._write_agent(node.name))
            self._start(self.agent_unit(node.name), "agent.daemon", *arguments, config)

    def _unit(self, name: str, *argv: str) -> None:
        self.units.start(Unit(name=name, argv=argv, env={MARKER: str(self.run_dir)}))

    def _write_agent(self, name: str) -> Path:
        node = next(node for node in self.nodes if node.name == name)
        node.directory.mkdir(parents=True, exist_ok=True)
        text = agent_toml(self.plan, node, bus_url=self.nats.url, router_url=self.router_url)
        values = tomllib.loads(text)
        if node.server_port:
            values["server"] = self._server_toml(node)
            values["warm_up_timeout_s"] = Timing().warm_up_s
            values["device_free_timeout_s"] = Timing().device_free_s
        node.config.write_text(toml(values))
        return node.config

    def _server_toml(self, node: NodePlan) -> dict[str, object]:
        url = f"http://127.0.0.1:{node.server_port}"
        ctl = (str(self._python), str(HERE / "vllm_ctl.py"))
        # Bound, each vLLM takes the first core: one that starts waits for one that serves.
        variables = ("VLLM_CPU_KVCACHE_SPACE=1", "HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1",
                     "OMP_NUM_THREADS=1", "VLLM_CPU_OMP_THREADS_BIND=nobind",
                     f"{MARKER}={self.run_dir}",
                     f"HOME={self.run_dir}")  # fmt: skip
        vllm = (
            "/usr/bin/env", *variables,
            str(self._python), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(self._model), "--served-model-name", MODEL,
            "--load-format", "dummy", "--dtype", "float32", "--max-model-len", "512",
            "--enforce-eager", "--host", "127.0.0.1", "--port", str(node.server_port),
        )  # fmt: skip
        route = (
            str(self._route), "haproxy", "--socket", str(self.socket), "--backend", BACKEND,
        )  # fmt: skip
        return {
            "engine": "vllm",
            "health_url": f"{url}/health",
            "metrics_url": f"{url}/metrics",
            "start": [*ctl, "start", str(node.server_directory), "--", *vllm],
            "stop": [*ctl, "stop", str(node.server_directory)],
            "route": [*route, "add"],
            "unroute": [*route, "remove"],
            "hook_timeout_s": 25.0,
        }
