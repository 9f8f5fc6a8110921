"""A pretend inference server of one node: real HTTP, real queue, vLLM's metrics page.

It is scraped, routed, drained and stopped like any vLLM, and imports nothing of Aryl. The only
trace of the demo is the usage file that the fake NVML reads in place of a device's registers.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web
from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from coordinator.demo.serving import PORT_IS_HELD, serve, set_up_log, stop_event, write_json

log = logging.getLogger(__name__)

USAGE_PERIOD_S = 0.5
"""The usage file changes at most this often: NVML's own utilization is as coarse."""

DRAIN_S = 10.0
"""How long SIGTERM waits for running requests."""

LONGEST_OF_MEAN = 4.0
"""A request takes at most this many mean service times, so that draining is bounded."""

METRICS_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class ServerSettings(Struct, frozen=True, kw_only=True):
    """One server.

    max_running: requests computed together (vLLM: max_num_seqs).
    max_waiting: requests in the queue; beyond, 503.
    service_time_s: mean time of a request; exponential, capped, from a seed by node name, or the
        same for all when `is_fixed`.
    warm_up_s: from process start to a healthy answer.
    weights_bytes, memory_bytes: device memory while loading, and once the cache is reserved.
    """

    node: str
    model: str = "demo"
    max_running: int = 8
    max_waiting: int = 64
    service_time_s: float = 0.4
    is_fixed: bool = False
    warm_up_s: float = 1.5
    weights_bytes: int = 16 << 30
    memory_bytes: int = 60 << 30


class Metrics:
    """The page of one server under vLLM's names (docs.vllm.ai, Production Metrics)."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        running = self._gauge("vllm:num_requests_running", "Requests in execution batches.")
        waiting = self._gauge("vllm:num_requests_waiting", "Requests waiting to be processed.")
        cache = self._gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent.")
        success = Counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self.running = running.labels(model)
        self.waiting = waiting.labels(model)
        self.cache_ratio = cache.labels(model)
        self.success = success.labels(model, "stop")

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ("model_name",), registry=self._registry)

    def page(self) -> bytes:
        """The page in Prometheus' text format."""
        return generate_latest(self._registry)


class UsageFile:
    """The usage that the fake NVML shows for this process.

    Written on change, at most every 0.5 s.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._changed = asyncio.Event()
        self._wanted: tuple[float, int] = (0.0, 0)
        self.failure_count = 0

    def set(self, busy_ratio: float, memory_bytes: int) -> None:
        """Note the present usage; `run` writes it."""
        if (busy_ratio, memory_bytes) != self._wanted:
            self._wanted = (busy_ratio, memory_bytes)
            self._changed.set()

    async def run(self) -> None:
        """Write until cancelled.

        Then remove the file, as a process's device memory disappears with it.
        """
        if self._path is None:
            return
        written: tuple[float, int] | None = None
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                if self._wanted != written:
                    written = self._write(self._path)
                await asyncio.sleep(USAGE_PERIOD_S)
        finally:
            self._path.unlink(missing_ok=True)

    def _write(self, path: Path) -> tuple[float, int] | None:
        """The usage written.

        None when the disk refuses it, which ends no server: a later write follows.
        """
        busy_ratio, memory_bytes = wanted = self._wanted
        try:
            write_json(path, {"busy_ratio": busy_ratio, "memory_bytes": memory_bytes})
        except OSError as error:
            if not self.failure_count:
                log.warning("usage file %s: %s", path, error)
            self.failure_count += 1
            self._changed.set()
            return None
        return wanted


class InferenceServer:
    """Admission, the queue and the answers; one per process."""

    def __init__(self, settings: ServerSettings, usage: UsageFile) -> None:
        self._settings = settings
        self._usage = usage
        self._metrics = Metrics(settings.model)
        self._slots = asyncio.Semaphore(settings.max_running)
        self._rng = random.Random(zlib.crc32(settings.node.encode()))
        self._running = 0
        self._waiting = 0
        self._is_ready = False
        self._is_stopping = False

    def application(self) -> web.Application:
        """The routes of the server."""
        application = web.Application()
        application.router.add_post("/v1/completions", self._complete)
        application.router.add_post("/v1/chat/completions", self._complete)
        application.router.add_get("/metrics", self._page)
        application.router.add_get("/health", self._health)
        application.on_shutdown.append(self._stop)
        return application

    async def warm_up(self) -> None:
        """Load the weights for `warm_up_s`; only then is the server healthy."""
        self._usage.set(0.0, self._settings.weights_bytes)
        await asyncio.sleep(self._settings.warm_up_s)
        self._is_ready = True
        self._show()
        log.info("ready node=%s", self._settings.node)

    def service_time_s(self) -> float:
        """How long the next request computes."""
        mean_s = self._settings.service_time_s
        if self._settings.is_fixed or mean_s <= 0:
            return mean_s
        return min(self._rng.expovariate(1 / mean_s), LONGEST_OF_MEAN * mean_s)

    async def _complete(self, request: web.Request) -> web.Response:
        if not self._is_ready or self._is_stopping:
            return web.json_response({"error": "the server is not ready"}, status=503)
        if self._slots.locked() and self._waiting >= self._settings.max_waiting:
            return web.json_response({"error": "the queue is full"}, status=503)
        await request.read()
        self._waiting += 1
        self._show()
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        self._running += 1
        self._show()
        try:
            await asyncio.sleep(self.service_time_s())
        finally:
            self._running -= 1
            self._slots.release()
            self._show()
        self._metrics.success.inc()
        answer = {"text": "", "index": 0, "finish_reason": "stop"}
        return web.json_response(
            {
                "object": "text_completion",
                "model": self._settings.model,
                "node": self._settings.node,
                "choices": [answer],
            }
        )

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.page(), headers={"Content-Type": METRICS_TYPE})

    async def _health(self, request: web.Request) -> web.Response:
        is_healthy = self._is_ready and not self._is_stopping
        return web.Response(status=200 if is_healthy else 503)

    async def _stop(self, application: web.Application) -> None:
        """Turn unhealthy and accept nothing new; running requests go on."""
        self._is_stopping = True

    def _show(self) -> None:
        busy_ratio = self._running / self._settings.max_running
        self._metrics.running.set(self._running)
        self._metrics.waiting.set(self._waiting)
        self._metrics.cache_ratio.set(busy_ratio)
        if self._is_ready:
            self._usage.set(busy_ratio, self._settings.memory_bytes)


async def run(
    settings: ServerSettings, *, host: str, port: int, is_port_held: bool, usage_path: Path | None
) -> None:
    """Serve until SIGTERM, answer what runs, leave.

    Raises:
        ExceptionGroup: of an OSError: the address is taken.
    """
    stop = stop_event()
    usage = UsageFile(usage_path)
    server = InferenceServer(settings, usage)
    async with asyncio.TaskGroup() as group:
        warming = group.create_task(server.warm_up(), name="warm-up")
        writing = group.create_task(usage.run(), name="usage")
        await serve(
            server.application(),
            host=host,
            port=port,
            stop=stop,
            drain_s=DRAIN_S,
            is_port_held=is_port_held,
        )
        warming.cancel()
        writing.cancel()
    log.info("stopped node=%s", settings.node)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m coordinator.demo.server`; 1 when the port is taken."""
    parser = argparse.ArgumentParser(prog="coordinator.demo.server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True, help="port; 0: a free one")
    parser.add_argument("--port-is-held", action="store_true", help=PORT_IS_HELD)
    parser.add_argument("--node", required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--max-running", type=int, default=8)
    parser.add_argument("--max-waiting", type=int, default=64)
    parser.add_argument("--service-time-s", type=float, default=0.4)
    parser.add_argument("--fixed-service-time", action="store_true")
    parser.add_argument("--warm-up-s", type=float, default=1.5)
    given = parser.parse_args(arguments)
    if given.max_running < 1 or given.max_waiting < 0:
        parser.error("--max-running must be at least 1 and --max-waiting at least 0")
    settings = ServerSettings(
        node=given.node,
        model=given.model,
        max_running=given.max_running,
        max_waiting=given.max_waiting,
        service_time_s=given.service_time_s,
        is_fixed=given.fixed_service_time,
        warm_up_s=given.warm_up_s,
    )
    set_up_log()
    usage_name = os.environ.get("ARYL_FAKE_GPU_USAGE_FILE")
    running = run(
        settings,
        host=given.host,
        port=given.port,
        is_port_held=given.port_is_held,
        usage_path=Path(usage_name) if usage_name else None,
    )
    status = 0
    try:
        asyncio.run(running)
    except* OSError as group:
        status = 1
        for error in group.exceptions:
            log.error("node=%s %s", settings.node, error)
    return status


if __name__ == "__main__":
    sys.exit(main())
