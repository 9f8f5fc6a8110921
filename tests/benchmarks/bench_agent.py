"""What an agent costs its node: CPU and memory of agent, NVML child and shims apart, measured.

    python tests/benchmarks/bench_agent.py [--seconds 60] [--scrape-s 15] [-o json]

Everything measured is a real process: a nats-server, one agent with fake GPUs, its NVML child, and
workers under shims. This program stands where the coordinator would: it orders the workers and
hears the reports. It asserts nothing about time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from urllib.request import urlopen

import psutil
from msgspec import Struct, to_builtins

from common import subjects
from common.bus import BusMessage, NatsBus, connect_nats
from common.clock import SystemClock
from common.errors import Unavailable
from common.messages import (
    DesiredReply,
    DesiredState,
    GpuReport,
    NodeReport,
    OrderPhase,
    WorkerOrder,
    WorkerPhase,
    decode,
    encode,
)
from common.model import CheckpointSpec, JobId, NodeRole, WorkerKey
from coordinator.demo.nats_server import NatsServer
from coordinator.demo.ports import free_ports
from coordinator.demo.supervise import Supervisor, Unit, sweep
from tests.harness.builders import make_spec

ROOT = Path(__file__).parents[2]
CELL, NODE = "bench", "n1"
START_LIMIT_S = 120.0
LOOK_S = 5.0
MIB = 1 << 20


class Cost(Struct, frozen=True, kw_only=True):
    """Processes of one kind. Bytes are the largest seen; of several processes, of the largest one.

    RSS counts shared pages in full, PSS by the share of each process, USS not at all.
    """

    processes: int
    cpu_s_per_min: float
    rss_bytes: int
    pss_bytes: int
    uss_bytes: int


class Result(Struct, frozen=True, kw_only=True):
    """One run. `reports` arrived while `measured_s` passed.

    scrape_s: between two scrapes of the metrics page; 0: the agent serves none.
    scrapes_s: how long each took. page_bytes: of the last one.
    """

    cpus: int
    memory_bytes: int
    python: str
    kernel: str
    gpus: int
    workers: int
    report_period_s: float
    measured_s: float
    reports: int
    agent: Cost
    nvml_child: Cost
    shim: Cost
    agent_and_child_pss_bytes: int
    agent_and_child_rss_bytes: int
    scrape_s: float
    scrapes_s: list[float]
    page_bytes: int


class Watched:
    """Processes of one kind over the interval."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self.processes = processes
        self._first_cpu_s = [_cpu_s(process) for process in processes]
        self.rss_bytes = self.pss_bytes = self.uss_bytes = 0

    def look(self) -> None:
        """Keep the largest of each size so far."""
        for process in self.processes:
            memory = process.memory_full_info()
            self.rss_bytes = max(self.rss_bytes, memory.rss)
            self.pss_bytes = max(self.pss_bytes, memory.pss)
            self.uss_bytes = max(self.uss_bytes, memory.uss)

    def cost(self, measured_s: float) -> Cost:
        """All since the start; CPU is of one process on average."""
        used_s = sum(map(_cpu_s, self.processes)) - sum(self._first_cpu_s)
        count = len(self.processes)
        return Cost(
            processes=count,
            cpu_s_per_min=used_s / max(1, count) / measured_s * 60,
            rss_bytes=self.rss_bytes,
            pss_bytes=self.pss_bytes,
            uss_bytes=self.uss_bytes,
        )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


class Desk:
    """The coordinator's end of the wire: the latest report, and orders."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self._clock = SystemClock()
        self.report: NodeReport | None = None
        self.reports = 0

    async def open(self) -> None:
        await self._bus.subscribe(subjects.node_report(CELL), self._heard)

    async def _heard(self, message: BusMessage) -> None:
        self.report = decode(message.data, NodeReport)
        self.reports += 1

    async def first_report(self) -> NodeReport:
        """The agent's first word with GPUs in it."""
        async with self._clock.timeout(START_LIMIT_S):
            while self.report is None or not self.report.gpus:
                await self._clock.sleep(0.05)
        return self.report

    async def order(self, orders: tuple[WorkerOrder, ...]) -> None:
        """Have these workers run; returns when the node says that all do.

        Raises:
            Unavailable: the agent refuses, or a worker ends.
        """
        wanted = DesiredState(
            node=NODE, epoch=1, generation=1, role=NodeRole.TRAINING, workers=orders
        )
        data = await self._bus.request(
            subjects.node_desired(CELL, NODE), encode(wanted), timeout_s=START_LIMIT_S
        )
        reply = decode(data, DesiredReply)
        if not reply.is_accepted:
            raise Unavailable(f"the agent refused: {reply.error}")
        async with self._clock.timeout(START_LIMIT_S):
            while not self._are_running(len(orders)):
                await self._clock.sleep(0.05)

    def _are_running(self, count: int) -> bool:
        workers = self.report.workers if self.report else ()
        for worker in workers:
            if worker.phase in (WorkerPhase.EXITED, WorkerPhase.REFUSED):
                raise Unavailable(f"worker {worker.key} is {worker.phase}: {worker.error}")
        return sum(worker.phase == WorkerPhase.RUNNING for worker in workers) == count


def worker_order(gpu: GpuReport, number: int, checkpoints: Path) -> WorkerOrder:
    """One job of one worker on one GPU: the demo's, which reports its progress every second."""
    script = ROOT / "coordinator" / "demo" / "worker.py"
    spec = make_spec(
        name=f"bench-{number}",
        command=(sys.executable, "-I", "-S", str(script), "--work-s=86400"),
        workers=(1, 1),
        gpus_per_worker=1,
        checkpoint=CheckpointSpec(path=str(checkpoints / str(number)), grace_s=1.0),
    )
    return WorkerOrder(
        key=WorkerKey(JobId(f"bench-{number}"), 1, 0),
        spec=spec,
        tenant="bench",
        user="bench",
        submitted_at_s=0.0,
        gpu_uuids=(gpu.uuid,),
        gpu_type=gpu.gpu_type,
        is_flexible=False,
        phase=OrderPhase.RUN,
        worker_count=1,
    )


@asynccontextmanager
async def running_agent(
    directory: Path, *, gpus: int, period_s: float, metrics: str
) -> AsyncIterator[tuple[int, Desk]]:
    """A nats-server and one agent; nothing of it runs after the block."""
    clock = SystemClock()
    nats = NatsServer(directory / "nats", clock=clock)
    units = Supervisor(directory / "logs", clock=clock)
    url = await nats.start()
    fleet, config = directory / "fleet.toml", directory / "agent.toml"
    fleet.write_text(
        f"name = {json.dumps(str(directory))}\n"
        f'gpu = [{{count = {gpus}, model = "H100", memory_bytes = 85899345920}}]\n'
    )
    config.write_text(
        f'cell = "{CELL}"\nnode = "{NODE}"\nhome_pool = "training"\nnats_url = "{url}"\n'
        f"state_dir = {json.dumps(str(directory / 'state'))}\nreport_period_s = {period_s}\n"
        'worker_starter = "detached"\nlast_resort = "detached"\nis_root_allowed = true\n'
        f'metrics.address = "{metrics}"\n'
    )
    argv = (sys.executable, "-m", "agent.daemon", "--config", str(config), "--fake-nvml")
    bus = await connect_nats(url, identity="bench", clock=clock)
    try:
        desk = Desk(bus)
        await desk.open()
        units.start(
            Unit(
                name="agent",
                argv=(*argv, str(fleet)),
                env={"PYTHONPATH": str(ROOT)},
                is_restarted=False,
            )
        )
        await desk.first_report()
        pid = units.pid("agent")
        assert pid is not None
        yield pid, desk
    finally:
        await bus.close()
        await units.stop()
        await sweep(directory, clock=clock)
        await nats.stop()


def find_child(agent_pid: int) -> psutil.Process:
    """The agent's NVML child."""
    [child] = [
        process
        for process in psutil.Process(agent_pid).children()
        if "agent.gpu.nvml_child" in process.cmdline()
    ]
    return child


def find_shims(directory: Path) -> list[psutil.Process]:
    """The shims of the workers whose directories are below this one."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        words: list[str] = process.info["cmdline"] or []
        is_shim = any(word.endswith("agent/shim/main.py") for word in words)
        if is_shim and any(word.startswith(str(directory)) for word in words):
            found.append(process)
    return found


class Scraper:
    """Reads a metrics page each so often, and keeps how long it took."""

    def __init__(self, address: str) -> None:
        self.took_s: list[float] = []
        self.page_bytes = 0
        self._url = f"http://{address}/metrics"
        self._clock = SystemClock()

    async def run(self, period_s: float) -> None:
        """For ever."""
        while True:
            began_s = self._clock.now_s()
            self.page_bytes = len(await asyncio.to_thread(self._read))
            self.took_s.append(self._clock.now_s() - began_s)
            await self._clock.sleep(period_s)

    def _read(self) -> bytes:
        with urlopen(self._url, timeout=10.0) as answer:
            data: bytes = answer.read()
            return data


async def measure(
    *, seconds: float, gpus: int, workers: int, period_s: float, scrape_s: float
) -> Result:
    """Start it all, wait until it is quiet, and watch it for `seconds`."""
    clock = SystemClock()
    metrics = f"127.0.0.1:{free_ports(1)[0]}" if scrape_s else ""
    scraper = Scraper(metrics)
    with tempfile.TemporaryDirectory(prefix="aryl-bench-") as name:
        directory = Path(name)
        running = running_agent(directory, gpus=gpus, period_s=period_s, metrics=metrics)
        async with running as (pid, desk):
            report = await desk.first_report()
            (directory / "checkpoints").mkdir()
            orders = tuple(
                worker_order(report.gpus[number % gpus], number, directory / "checkpoints")
                for number in range(workers)
            )
            if orders:
                await desk.order(orders)
            await clock.sleep(LOOK_S)  # what a start costs is not what a running node costs
            kinds = [
                Watched([psutil.Process(pid)]),
                Watched([find_child(pid)]),
                Watched(find_shims(directory)),
            ]
            began_at_s, first_reports = clock.now_s(), desk.reports
            scraping = asyncio.create_task(scraper.run(scrape_s)) if scrape_s else None
            while (left_s := began_at_s + seconds - clock.now_s()) > 0:
                await clock.sleep(min(LOOK_S, left_s))
                for kind in kinds:
                    kind.look()
            measured_s = clock.now_s() - began_at_s
            if scraping is not None:
                scraping.cancel()
            agent, child, shim = (kind.cost(measured_s) for kind in kinds)
            return Result(
                cpus=os.cpu_count() or 1,
                memory_bytes=psutil.virtual_memory().total,
                python=platform.python_version(),
                kernel=platform.release(),
                gpus=gpus,
                workers=workers,
                report_period_s=period_s,
                measured_s=measured_s,
                reports=desk.reports - first_reports,
                agent=agent,
                nvml_child=child,
                shim=shim,
                agent_and_child_pss_bytes=agent.pss_bytes + child.pss_bytes,
                agent_and_child_rss_bytes=agent.rss_bytes + child.rss_bytes,
                scrape_s=scrape_s,
                scrapes_s=scraper.took_s,
                page_bytes=scraper.page_bytes,
            )


def table(result: Result) -> str:
    """The figures for people; sizes in MiB."""
    lines = [
        f"{result.cpus} CPUs, {result.memory_bytes / MIB / 1024:.0f} GiB, "
        f"Python {result.python}, Linux {result.kernel}",
        f"{result.gpus} fake GPUs, {result.workers} workers, a report every "
        f"{result.report_period_s:g} s, measured {result.measured_s:.0f} s, "
        f"{result.reports} reports",
        "",
        f"{'':<12}{'processes':>10}{'CPU s/min':>11}{'RSS MiB':>9}{'PSS MiB':>9}{'USS MiB':>9}",
    ]
    costs = {"agent": result.agent, "NVML child": result.nvml_child, "each shim": result.shim}
    for name, cost in costs.items():
        sizes = "".join(
            f"{size / MIB:>9.1f}" for size in (cost.rss_bytes, cost.pss_bytes, cost.uss_bytes)
        )
        lines.append(f"{name:<12}{cost.processes:>10}{cost.cpu_s_per_min:>11.3f}{sizes}")
    lines.append(
        f"agent and child together: {result.agent_and_child_rss_bytes / MIB:.1f} MiB RSS, "
        f"{result.agent_and_child_pss_bytes / MIB:.1f} MiB PSS"
    )
    if result.scrapes_s:
        lines.append(
            f"{len(result.scrapes_s)} scrapes of {result.page_bytes} bytes: median "
            f"{median(result.scrapes_s) * 1000:.1f} ms, longest "
            f"{max(result.scrapes_s) * 1000:.1f} ms"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(prog="bench_agent.py", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the measurement")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--period-s", type=float, default=1.0, help="between two reports")
    parser.add_argument(
        "--scrape-s", type=float, default=15.0,
        help="between two scrapes of the metrics page; 0: the agent serves none",
    )  # fmt: skip
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    given = parser.parse_args(arguments)
    if given.seconds <= 0 or given.gpus < 1 or given.workers < 0 or given.period_s <= 0:
        parser.error("--seconds and --period-s must be above 0, --gpus at least 1")
    result = asyncio.run(
        measure(
            seconds=given.seconds,
            gpus=given.gpus,
            workers=given.workers,
            period_s=given.period_s,
            scrape_s=given.scrape_s,
        )
    )
    said = table(result) if given.output == "table" else json.dumps(to_builtins(result), indent=2)
    sys.stdout.write(f"{said}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
