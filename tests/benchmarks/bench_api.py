"""How many submits a second a coordinator acknowledges, and how long one takes; run by hand.

    python tests/benchmarks/bench_api.py [--seconds 10] [--callers 1 32] [-o json]

A real nats-server and a real coordinator process; this program is the callers, each of which asks
again as soon as it has its answer, all on one connection. Every submit is a new job. No node
reports, so jobs wait and a pass has little to do: what is measured is the way of a submit into the
journal and back. It asserts nothing about time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import Struct, to_builtins

from common.api import GetStatus, Status, Submit, Submitted
from common.bus import NatsBus, connect_nats
from common.clock import SystemClock
from common.errors import ArylError
from coordinator.client import Client
from coordinator.demo.nats_server import NatsServer
from coordinator.demo.supervise import Supervisor, Unit
from tests.harness.builders import make_spec

ROOT = Path(__file__).parents[2]
CELL = "bench"
START_LIMIT_S = 60.0
SPEC = make_spec(name="bench", command=("true",), workers=(1, 1), gpus_per_worker=1)


class Rate(Struct, frozen=True, kw_only=True):
    """What a number of callers got. Latencies are of single submits, asked to answered."""

    callers: int
    measured_s: float
    submits: int
    submits_per_s: float
    latency_p50_s: float
    latency_p99_s: float
    coordinator_cpu_s: float


class Result(Struct, frozen=True, kw_only=True):
    """One run."""

    cpus: int
    python: str
    kernel: str
    rates: tuple[Rate, ...]


@asynccontextmanager
async def running_coordinator(directory: Path) -> AsyncIterator[tuple[int, NatsBus]]:
    """A nats-server and a coordinator that leads; its process and a bus to it."""
    clock = SystemClock()
    nats = NatsServer(directory / "nats", clock=clock)
    units = Supervisor(directory / "logs", clock=clock)
    url = await nats.start()
    config = directory / "coordinator.toml"
    config.write_text(
        f'cell = "{CELL}"\nnats_url = "{url}"\nrebuild_wait_s = 0\nrequests_per_s = 1e6\n'
        "[engine]\nwaiting_jobs_max = 10000000\n"
    )
    argv = (sys.executable, "-m", "coordinator.service.daemon", "--config", str(config))
    bus = await connect_nats(url, identity="bench", clock=clock)
    try:
        units.start(
            Unit(name="coordinator", argv=argv, env={"PYTHONPATH": str(ROOT)}, is_restarted=False)
        )
        await until_it_leads(bus)
        pid = units.pid("coordinator")
        assert pid is not None
        yield pid, bus
    finally:
        await bus.close()
        await units.stop()
        await nats.stop()


async def until_it_leads(bus: NatsBus) -> None:
    """Ask until a coordinator answers."""
    client = Client(bus, cell=CELL, tenant="bench", user="bench", timeout_s=1.0)
    async with asyncio.timeout(START_LIMIT_S):
        while True:
            try:
                await client.ask(GetStatus(), Status)
            except ArylError:
                await asyncio.sleep(0.05)
            else:
                return


async def measure(bus: NatsBus, pid: int, callers: int, seconds: float) -> Rate:
    """Let that many callers submit for some time."""
    client = Client(bus, cell=CELL, tenant="bench", user="bench")
    took_s: list[float] = []
    begun_s, cpu_s = time.perf_counter(), process_cpu_s(pid)
    end_s = begun_s + seconds

    async def call(caller: int) -> None:
        count = 0
        while (asked_s := time.perf_counter()) < end_s:
            request_id = f"{callers}-{caller}-{count}"
            await client.ask(Submit(spec=SPEC, request_id=request_id), Submitted)
            took_s.append(time.perf_counter() - asked_s)
            count += 1

    await asyncio.gather(*(call(caller) for caller in range(callers)))
    measured_s = time.perf_counter() - begun_s
    hundredths = statistics.quantiles(took_s, n=100, method="inclusive")
    return Rate(
        callers=callers,
        measured_s=measured_s,
        submits=len(took_s),
        submits_per_s=len(took_s) / measured_s,
        latency_p50_s=hundredths[49],
        latency_p99_s=hundredths[98],
        coordinator_cpu_s=process_cpu_s(pid) - cpu_s,
    )


def process_cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def run(callers: Sequence[int], seconds: float) -> Result:
    """A fresh cell for each number of callers, so that none starts behind the jobs of another."""
    rates: list[Rate] = []
    for count in callers:
        with tempfile.TemporaryDirectory(prefix="aryl-bench-") as directory:
            async with running_coordinator(Path(directory)) as (pid, bus):
                rates.append(await measure(bus, pid, count, seconds))
    return Result(
        cpus=os.cpu_count() or 1,
        python=platform.python_version(),
        kernel=platform.release(),
        rates=tuple(rates),
    )


def table(result: Result) -> str:
    """The rates as lines of text."""
    lines = ["callers   submits/s   p50 ms   p99 ms   coordinator CPU ms per submit"]
    for rate in result.rates:
        cpu_ms = rate.coordinator_cpu_s / rate.submits * 1e3
        lines.append(
            f"{rate.callers:7}   {rate.submits_per_s:9.1f}   {rate.latency_p50_s * 1e3:6.1f}   "
            f"{rate.latency_p99_s * 1e3:6.1f}   {cpu_ms:8.2f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="per number of callers")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 32])
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    asked = parser.parse_args(arguments)
    result = asyncio.run(run(asked.callers, asked.seconds))
    text = table(result) if asked.output == "table" else json.dumps(to_builtins(result), indent=2)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
