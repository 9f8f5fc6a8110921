"""The parts of a cell on one machine, and their settings files. Starts nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import cast

from msgspec import Struct

from common.model import CheckpointSpec, Pool

SERVICE = "chat"
CELL = "local"
GPU_MODEL = "NVIDIA H100 80GB HBM3"
GPU_MEMORY_BYTES = 85_899_345_920
ANSWER_TIMEOUT_S = 30.0
"""Requests of the service's users that get no answer by then count as refused."""
HERE = Path(__file__).parent


class Periods(Struct, frozen=True, kw_only=True):
    """The cell's control periods, in real seconds: they are settings, and no speed scales them.

    grace_s: the longest grace of a job that may run on a lent node: a job's own default, so that
        any job of a visitor can be lent to. With it a node may need 48 s to come home.
    reclaim_deadline_s: that, and 4 s for the last resort of a node whose agent is dead or hangs: it
        fires after the lease, must start, and looks at an agent that hangs before it ends it.
    lease_ttl_s: long enough that a coordinator that is killed and restarted, on a busy machine too,
        renews every lease before it ends, even if the last renewal was a third of it ago.
    trace_grace_s: the grace that the trace's jobs ask for; they save in far less.
    """

    report_s: float = 1.0
    pass_s: float = 1.0
    loan_pass_s: float = 2.0
    load_sample_s: float = 2.0
    lease_ttl_s: float = 12.0
    grace_s: float = CheckpointSpec().grace_s
    trace_grace_s: float = 3.0
    device_free_s: float = 2.0
    warm_up_s: float = 4.0
    reclaim_deadline_s: float = 52.0
    hold_off_s: float = 5.0
    unknown_load_s: float = 15.0
    resize_cooldown_s: float = 5.0
    min_runtime_s: float = 5.0
    start_s: float = 3.0
    restart_s: float = 2.0
    resize_s: float = 2.0
    gang_ready_s: float = 20.0
    lost_after_s: float = 10.0
    leader_ttl_s: float = 4.0
    rebuild_wait_s: float = 1.5


class AgentBus(StrEnum):
    """The protocol of a cell's agents."""

    NATS = "nats"
    MQTT = "mqtt"


class CellPlan(Struct, frozen=True, kw_only=True):
    """One cell. `peak_req_per_s` is the rated load of all nodes of the service together.

    headroom_nodes: nodes of the service that stay home above the forecast, whatever the load.
    bus: the protocol between the agents and nats-server; the coordinator always uses NATS.
    """

    training_nodes: int = 6
    inference_nodes: int = 6
    gpus_per_node: int = 8
    agents_per_process: int = 1
    policy: str = "aryl"
    bus: AgentBus = AgentBus.NATS
    peak_req_per_s: float = 30.0
    headroom_nodes: int = 1
    periods: Periods = Periods()

    @property
    def capacity_per_node(self) -> float:
        """Requests per second that a node is rated for.

        The peak needs all nodes except the headroom.
        """
        return self.peak_req_per_s / max(1, self.inference_nodes - self.headroom_nodes)

    @property
    def headroom_ratio(self) -> float:
        """The same headroom as the share of its nodes that a service's settings want."""
        return min(1.0, self.headroom_nodes / max(1, self.inference_nodes))


class NodePlan(Struct, frozen=True, kw_only=True):
    """One node and its files.

    server_port: 0 on training nodes. metrics_port: of its agent's metrics page; 0: it has none.
    """

    name: str
    pool: Pool
    directory: Path
    server_port: int = 0
    metrics_port: int = 0

    @property
    def config(self) -> Path:
        """Its agent's settings file."""
        return self.directory / "agent.toml"

    @property
    def server_directory(self) -> Path:
        """Where its server's hooks keep their files."""
        return self.directory / "server"


def node_plans(
    plan: CellPlan,
    run_dir: Path,
    *,
    server_ports: Sequence[int],
    metrics_ports: Sequence[int] = (),
) -> tuple[NodePlan, ...]:
    """Every node of a cell, training nodes first.

    server_ports: one for each inference node. metrics_ports: one for each node; empty: no pages.
    """
    names = [(f"train-{i}", Pool.TRAINING) for i in range(1, plan.training_nodes + 1)]
    names += [(f"infer-{i}", Pool.INFERENCE) for i in range(1, plan.inference_nodes + 1)]
    ports, pages = iter(server_ports), iter(metrics_ports)
    return tuple(
        NodePlan(
            name=name,
            pool=pool,
            directory=run_dir / "nodes" / name,
            server_port=next(ports) if pool == Pool.INFERENCE else 0,
            metrics_port=next(pages, 0),
        )
        for name, pool in names
    )


def fleet_toml(plan: CellPlan, *, name: str) -> str:
    """The fake GPUs of each node; `name` distinguishes them from other cells on this machine."""
    group = {"count": plan.gpus_per_node, "model": GPU_MODEL, "memory_bytes": GPU_MEMORY_BYTES}
    return toml({"name": name, "gpu": [group]})


def metrics_address(port: int) -> str:
    """Where a page is served; empty for port 0, which is none."""
    return f"127.0.0.1:{port}" if port else ""


def coordinator_toml(
    plan: CellPlan, *, name: str, nats_url: str, metrics_port: int = 0, cache_dir: str = ""
) -> str:
    """The coordinator's settings file."""
    periods = plan.periods
    service = {
        "name": SERVICE,
        "capacity_per_node": plan.capacity_per_node,
        "mode": "act",
        "min_serving": 1,
        "headroom_ratio": plan.headroom_ratio,
        "reclaim_deadline_s": periods.reclaim_deadline_s,
        "max_grace_s": periods.grace_s,
        "device_free_p99_s": periods.device_free_s,
        "warm_up_p99_s": periods.warm_up_s,
        "hold_off_s": periods.hold_off_s,
        "unknown_load_s": periods.unknown_load_s,
    }
    engine = {
        "policy": plan.policy,
        "gang_ready_timeout_s": periods.gang_ready_s,
        "resize_cooldown_s": periods.resize_cooldown_s,
        "lease_ttl_s": periods.lease_ttl_s,
        "min_runtime_s": periods.min_runtime_s,
        "start_p99_s": periods.start_s,
        "restart_p99_s": periods.restart_s,
        "resize_p99_s": periods.resize_s,
        "loan_period_s": periods.loan_pass_s,
        "default_expected_runtime_s": 30.0,
        "services": [service] if plan.inference_nodes else [],
    }
    return toml(
        {
            "cell": CELL,
            "name": name,
            "nats_url": nats_url,
            "has_mqtt_agents": plan.bus == AgentBus.MQTT,
            "pass_period_s": periods.pass_s,
            "lost_after_s": periods.lost_after_s,
            "load_period_s": periods.load_sample_s,
            "progress_period_s": 2.0,
            "leader_ttl_s": periods.leader_ttl_s,
            "history_index_dir": cache_dir,
            "rebuild_wait_s": periods.rebuild_wait_s,
            "metrics": {"address": metrics_address(metrics_port)},
            "engine": engine,
        }
    )


def agent_toml(plan: CellPlan, node: NodePlan, *, bus_url: str, router_url: str) -> str:
    """One agent's settings file; `bus_url` has the plan's protocol."""
    periods = plan.periods
    values: dict[str, object] = {
        "cell": CELL,
        "node": node.name,
        "home_pool": node.pool.value,
        f"{plan.bus}_url": bus_url,
        "state_dir": str(node.directory / "state"),
        "report_period_s": periods.report_s,
        "vacate_grace_s": periods.grace_s,
        "device_free_timeout_s": 15.0,
        "unresponsive_gpu_wait_s": periods.device_free_s,
        "warm_up_timeout_s": 60.0,
        "quarantine_s": 5.0,
        "worker_starter": "detached",
        "last_resort": "detached",
        "is_root_allowed": True,
        "metrics": {"address": metrics_address(node.metrics_port)},
    }
    if node.pool == Pool.INFERENCE:
        values["service"] = SERVICE
        values["server"] = _server(node, router_url)
    return toml(values)


def _server(node: NodePlan, router_url: str) -> dict[str, object]:
    python = (sys.executable, "-I", "-S")
    url = f"http://127.0.0.1:{node.server_port}"
    ctl = [*python, str(HERE / "server_ctl.py")]
    files = ["--node", node.name, "--state-dir", str(node.server_directory)]
    usage = node.directory / "gpu-usage.json"
    # The agent passes the node's GPUs in ARYL_GPU_UUIDS. A server expects them under CUDA's name,
    # and `sh` is the shortest way from one to the other.
    start = [
        "/bin/sh",
        "-c",
        'exec "$@" --env "CUDA_VISIBLE_DEVICES=$ARYL_GPU_UUIDS" -- --port-is-held --warm-up-s 1.5',
        "start",
        *ctl,
        "start",
        *files,
        "--port",
        str(node.server_port),
        "--env",
        f"ARYL_FAKE_GPU_USAGE_FILE={usage}",
    ]
    route = [*python, str(HERE / "route.py")]
    return {
        "health_url": f"{url}/health",
        "metrics_url": f"{url}/metrics",
        "engine": "vllm",
        "start": start,
        "stop": [*ctl, "stop", *files],
        "route": [*route, "add", router_url, node.name, url],
        "unroute": [*route, "remove", router_url, node.name],
        "hook_timeout_s": 15.0,
    }


def toml(values: Mapping[str, object]) -> str:
    """Nested plain values as TOML, one line per top-level key."""
    return "".join(f"{key} = {_toml(value)}\n" for key, value in values.items())


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value)
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in items.items()) + "}"
    if isinstance(value, list | tuple):
        parts = cast("Sequence[object]", value)
        return "[" + ", ".join(_toml(item) for item in parts) + "]"
    # JSON's numbers, booleans and strings are TOML's, as long as nothing is escaped as \/.
    return json.dumps(value, ensure_ascii=False)
