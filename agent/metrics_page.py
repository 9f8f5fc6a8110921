"""The agent's metrics page: what its latest sample and its node's state say, and nothing more.

A scrape reads no device and no file of a job: it costs the same whatever hangs. A value that the
device, the driver or the server does not report is no sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from agent.agent import Agent
from agent.driver import Node
from agent.telemetry.sample import Sample, Sampler
from common.messages import GpuHealth, GpuReport, WorkerPhase
from common.model import NodeRole
from common.monitoring.families import QUICK_S, Family, Kept, Scrape
from common.version import version

_GPU = ("node", "gpu", "uuid")

READ: tuple[Family, ...] = (
    Family("aryl_build_info", "gauge", "1; the version of this agent", ("version",)),
    Family(
        "aryl_node_info",
        "gauge",
        "1; the pool and the service that a node belongs to",
        ("node", "pool", "service"),
    ),
    Family("aryl_node_role", "gauge", "1 for the present role of the node", ("node", "role")),
    Family(
        "aryl_node_takes_work",
        "gauge",
        "0 if nothing new may begin on the node, as its ledger cannot be written or its GPUs cannot"
        " be read",
        ("node",),
    ),
    Family(
        "aryl_node_workers", "gauge", "workers that the node holds, by phase", ("node", "phase")
    ),
    Family(
        "aryl_node_trespassers",
        "gauge",
        "GPU processes that belong to no worker and not to the server",
        ("node",),
    ),
    Family(
        "aryl_node_lease_remaining_seconds",
        "gauge",
        "time until the lease of a lent node ends without a renewal; no sample without a lease",
        ("node",),
    ),
    Family("aryl_gpu_info", "gauge", "1; the type of a GPU", (*_GPU, "type")),
    Family("aryl_gpu_health", "gauge", "1 for the present health of a GPU", (*_GPU, "health")),
    Family("aryl_gpu_busy_ratio", "gauge", "NVML's busy share of the sample period", _GPU),
    Family("aryl_gpu_memory_used_bytes", "gauge", "GPU memory in use", _GPU),
    Family("aryl_gpu_memory_size_bytes", "gauge", "GPU memory there is", _GPU),
    Family("aryl_gpu_temperature_celsius", "gauge", "temperature of a GPU", _GPU),
    Family("aryl_gpu_power_watts", "gauge", "power draw of a GPU", _GPU),
    Family("aryl_gpu_power_limit_watts", "gauge", "enforced power limit of a GPU", _GPU),
    Family(
        "aryl_gpu_ecc_uncorrected_errors_total",
        "counter",
        "uncorrected ECC errors, as the driver counts them",
        _GPU,
    ),
    Family("aryl_gpu_xids_total", "counter", "XIDs since the agent started", (*_GPU, "code")),
    Family("aryl_host_cpus", "gauge", "logical CPUs of the machine", ("node",)),
    Family("aryl_host_cpu_busy_ratio", "gauge", "busy share of all CPUs", ("node",)),
    Family("aryl_host_memory_used_bytes", "gauge", "memory in use on the machine", ("node",)),
    Family("aryl_host_memory_size_bytes", "gauge", "memory of the machine", ("node",)),
    Family(
        "aryl_server_load_known",
        "gauge",
        "0 if the load of the inference server cannot be read; a node that does not serve has no"
        " sample",
        ("node", "service"),
    ),
    Family(
        "aryl_server_healthy",
        "gauge",
        "0 if the inference server misses its health checks; a node that does not serve has no"
        " sample",
        ("node", "service"),
    ),
    Family(
        "aryl_server_running_requests",
        "gauge",
        "requests that the inference server is processing; no sample while the load is unknown",
        ("node", "service"),
    ),
    Family(
        "aryl_server_waiting_requests",
        "gauge",
        "requests in the inference server's queue; no sample while the load is unknown",
        ("node", "service"),
    ),
    Family(
        "aryl_server_requests_total",
        "counter",
        "requests that the inference server has completed, by its own count",
        ("node", "service"),
    ),
    Family(
        "aryl_server_kv_cache_used_ratio",
        "gauge",
        "share of the KV cache in use; no sample where the engine does not report it",
        ("node", "service"),
    ),
    Family(
        "aryl_collector_success",
        "gauge",
        "0 if the latest try of a collector failed",
        ("node", "collector"),
    ),
    Family("aryl_agent_sample_age_seconds", "gauge", "age of the sample on this page", ("node",)),
    Family("aryl_agent_connected", "gauge", "1 while NATS is connected", ("node",)),
    Family(
        "aryl_agent_cpu_seconds_total",
        "counter",
        "CPU time of the agent and its reading children",
        ("node",),
    ),
    Family(
        "aryl_agent_memory_bytes",
        "gauge",
        "resident memory of the agent and its reading children",
        ("node",),
    ),
    Family("aryl_agent_bad_messages_total", "counter", "invalid messages, dropped", ("node",)),
    Family(
        "aryl_agent_lease_failures_total",
        "counter",
        "renewals without a usable answer, and last resorts that could not be armed or disarmed",
        ("node",),
    ),
    Family("aryl_agent_bus_errors_total", "counter", "errors of the NATS connection", ("node",)),
    Family("aryl_agent_bus_reconnects_total", "counter", "times that NATS was lost", ("node",)),
    Family(
        "aryl_agent_bus_dropped_messages_total",
        "counter",
        "messages dropped because they came faster than they were taken",
        ("node",),
    ),
)
"""What a scrape reads from the agent's state."""

KEPT: tuple[Family, ...] = (
    Family(
        "aryl_collector_duration_seconds",
        "histogram",
        "time that a collector took for one sample",
        ("node", "collector"),
        QUICK_S,
    ),
    Family(
        "aryl_collector_failures_total",
        "counter",
        "samples for which a collector failed",
        ("node", "collector"),
    ),
)
"""Counts of each sample."""

FAMILIES = (*READ, *KEPT)


class CountedSampler:
    """A sampler whose collectors' times and failures are counted."""

    def __init__(self, sampler: Sampler, node: str, kept: Kept) -> None:
        self._sampler = sampler
        self._node = node
        self._kept = kept

    async def sample(self) -> Sample:
        """Take one sample."""
        sample = await self._sampler.sample()
        for one in sample.collectors:
            labels = (self._node, one.name)
            self._kept.observe("aryl_collector_duration_seconds", one.duration_s, *labels)
            amount = float(not one.is_success)
            self._kept.count("aryl_collector_failures_total", *labels, amount=amount)
        return sample

    async def close(self) -> None:
        """Release all resources."""
        await self._sampler.close()


class NodeMetrics(Collector):
    """Reads an agent's state at each scrape."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def collect(self) -> Iterator[Metric]:
        """All metrics that have a value now."""
        scrape, node = Scrape(READ), self._agent.node
        scrape.put("aryl_build_info", 1.0, version() or "source")
        _node(scrape, node)
        for gpu in node.last_sample.gpus or ():
            _gpu(scrape, gpu, node.settings.node)
        _machine(scrape, node)
        _server(scrape, node)
        _agent(scrape, self._agent)
        return scrape.found()


def make_registry(agent: Agent, registry: CollectorRegistry) -> CollectorRegistry:
    """The registry of the page: the kept counts, this process, and the agent's state."""
    ProcessCollector(registry=registry)
    registry.register(NodeMetrics(agent))
    return registry


def _node(scrape: Scrape, node: Node) -> None:
    settings, life = node.settings, node.life
    memory, name, now_s = life.memory, settings.node, node.clock.now_s()
    scrape.put("aryl_node_info", 1.0, name, settings.home_pool, settings.service or "")
    scrape.states("aryl_node_role", NodeRole, memory.role, name)
    scrape.put("aryl_node_takes_work", float(not life.takes_nothing), name)
    phases = Counter(worker.phase for worker in life.workers.reports(now_s))
    for phase in WorkerPhase:
        scrape.put("aryl_node_workers", phases[phase], name, phase)
    scrape.put("aryl_node_trespassers", len(life.trespasses), name)
    ends_at_s = memory.lease_ends_at_s
    left_s = None if ends_at_s is None else max(0.0, ends_at_s - now_s)
    scrape.put("aryl_node_lease_remaining_seconds", left_s, name)


def _gpu(scrape: Scrape, gpu: GpuReport, node: str) -> None:
    labels = (node, str(gpu.index), gpu.uuid)
    scrape.put("aryl_gpu_info", 1.0, *labels, gpu.gpu_type)
    scrape.states("aryl_gpu_health", GpuHealth, gpu.health, *labels)
    scrape.put("aryl_gpu_busy_ratio", gpu.gpu_busy_ratio, *labels)
    scrape.put("aryl_gpu_memory_used_bytes", gpu.memory_used_bytes, *labels)
    scrape.put("aryl_gpu_memory_size_bytes", gpu.memory_total_bytes, *labels)
    scrape.put("aryl_gpu_temperature_celsius", gpu.temperature_c, *labels)
    scrape.put("aryl_gpu_power_watts", gpu.power_w, *labels)
    scrape.put("aryl_gpu_power_limit_watts", gpu.power_limit_w, *labels)
    scrape.put("aryl_gpu_ecc_uncorrected_errors_total", gpu.ecc_uncorrected_count, *labels)
    for xid in gpu.xid_counts:
        scrape.put("aryl_gpu_xids_total", xid.count, *labels, str(xid.code))


def _machine(scrape: Scrape, node: Node) -> None:
    sample, name = node.last_sample, node.settings.node
    if (host := sample.host) is not None:
        scrape.put("aryl_host_cpus", host.cpu_count, name)
        scrape.put("aryl_host_cpu_busy_ratio", host.cpu_busy_ratio, name)
        scrape.put("aryl_host_memory_used_bytes", host.memory_used_bytes, name)
        scrape.put("aryl_host_memory_size_bytes", host.memory_total_bytes, name)
    if (cost := sample.cost) is not None:
        scrape.put("aryl_agent_cpu_seconds_total", cost.cpu_s, name)
        scrape.put("aryl_agent_memory_bytes", cost.rss_bytes, name)
    for one in sample.collectors:
        scrape.put("aryl_collector_success", float(one.is_success), name, one.name)
    age_s = max(0.0, node.clock.now_s() - sample.began_at_s)
    scrape.put("aryl_agent_sample_age_seconds", age_s, name)


def _server(scrape: Scrape, node: Node) -> None:
    """The load of the server; of a server that should not run nothing is known or unknown."""
    service, role = node.settings.service, node.life.memory.role
    if service is None or role not in (NodeRole.SERVING, NodeRole.DRAINING):
        return
    labels = (node.settings.node, service)
    load = node.last_sample.inference
    scrape.put("aryl_server_load_known", float(load is not None), *labels)
    scrape.put("aryl_server_healthy", float(not node.life.is_server_down), *labels)
    if load is not None:
        scrape.put("aryl_server_running_requests", load.running_count, *labels)
        scrape.put("aryl_server_waiting_requests", load.waiting_count, *labels)
        scrape.put("aryl_server_requests_total", load.success_total, *labels)
        scrape.put("aryl_server_kv_cache_used_ratio", load.kv_cache_used_ratio, *labels)


def _agent(scrape: Scrape, agent: Agent) -> None:
    name, own = agent.node.settings.node, agent.counters()
    scrape.put("aryl_agent_connected", float(agent.is_connected), name)
    scrape.put("aryl_agent_bad_messages_total", own.bad_messages, name)
    scrape.put("aryl_agent_lease_failures_total", own.lease_failures, name)
    scrape.put("aryl_agent_bus_errors_total", own.bus_errors, name)
    scrape.put("aryl_agent_bus_reconnects_total", own.bus_reconnects, name)
    scrape.put("aryl_agent_bus_dropped_messages_total", own.bus_dropped_messages, name)
