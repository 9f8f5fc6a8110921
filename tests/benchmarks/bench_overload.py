"""How many reports a second a coordinator reads while submissions stay quick; run by hand.

    python -m tests.benchmarks.bench_overload [--nodes 1000 10000] [--seconds 20] [-o json]

A real nats-server, a real coordinator with its default settings, and a pretend fleet whose nodes
have 8 GPUs and report once a second. Meanwhile a caller submits a job twice a second. It asserts
nothing about time.
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
from collections.abc import Sequence
from pathlib import Path

from msgspec import UNSET, Struct, to_builtins

from common.api import GetStatus, Status
from tests.benchmarks.running import RunningCell, running_cell

LEADER = "one"
BETWEEN_S = 0.5


class Load(Struct, frozen=True, kw_only=True):
    """What one size of fleet costs. Reports are those that nodes send, read or shed."""

    nodes: int
    nodes_heard: int
    measured_s: float
    reports_per_s: float
    shed_ratio: float
    submits: int
    latency_p50_s: float
    latency_max_s: float
    coordinator_cores: float
    fleet_cores: float
    leads_lost: int
    load_average: float


async def measure(nodes: int, seconds: float) -> Load:
    """One size of fleet, in a fresh cell."""
    with tempfile.TemporaryDirectory(prefix="aryl-bench-") as directory:
        async with running_cell(Path(directory)) as cell:
            cell.start_coordinator(LEADER)
            await cell.until_led()
            cell.start_fleet(nodes)
            before = await cell.until_led(nodes_heard=nodes)
            return await _watch(cell, before, nodes, seconds)


async def _watch(cell: RunningCell, before: Status, nodes: int, seconds: float) -> Load:
    took_s: list[float] = []
    begun_s, cpu_s = time.monotonic(), cell.cpu_s(LEADER)
    fleet_cpu_s = cell.cpu_s("fleet")
    while time.monotonic() - begun_s < seconds:
        took_s.append(await cell.submit(f"r{len(took_s)}"))
        await asyncio.sleep(BETWEEN_S)
    measured_s = time.monotonic() - begun_s
    cores = (cell.cpu_s(LEADER) - cpu_s) / measured_s
    after = await cell.client.ask(GetStatus(), Status)
    shed = (after.reports_shed or 0) if after.reports_shed is not UNSET else 0
    earlier = (before.reports_shed or 0) if before.reports_shed is not UNSET else 0
    return Load(
        nodes=nodes,
        nodes_heard=after.nodes_heard,
        measured_s=measured_s,
        reports_per_s=float(nodes),
        shed_ratio=(shed - earlier) / measured_s / nodes,
        submits=len(took_s),
        latency_p50_s=statistics.median(took_s),
        latency_max_s=max(took_s),
        coordinator_cores=cores,
        fleet_cores=(cell.cpu_s("fleet") - fleet_cpu_s) / measured_s,
        leads_lost=after.epoch - before.epoch,
        load_average=os.getloadavg()[0],
    )


def table(loads: Sequence[Load]) -> str:
    """The loads as lines of text."""
    lines = [
        "  nodes  heard  reports/s  shed   submits  p50 ms  max ms  coordinator cores  "
        "fleet cores  leads lost  load"
    ]
    lines += [
        f"{one.nodes:7}  {one.nodes_heard:5}  {one.reports_per_s:9.0f}  {one.shed_ratio:4.0%}  "
        f"{one.submits:7}  {one.latency_p50_s * 1e3:6.0f}  {one.latency_max_s * 1e3:6.0f}  "
        f"{one.coordinator_cores:17.2f}  {one.fleet_cores:11.2f}  {one.leads_lost:10}  "
        f"{one.load_average:4.1f}"
        for one in loads
    ]
    return "\n".join(lines)


async def run(sizes: Sequence[int], seconds: float) -> list[Load]:
    """Each size after the other."""
    return [await measure(nodes, seconds) for nodes in sizes]


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 2500, 5000, 10000])
    parser.add_argument("--seconds", type=float, default=20.0, help="per size of fleet")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    asked = parser.parse_args(arguments)
    loads = asyncio.run(run(asked.nodes, asked.seconds))
    found = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "loads": to_builtins(loads),
    }
    text = table(loads) if asked.output == "table" else json.dumps(found, indent=2)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
