"""What a scrape of a coordinator's metrics page costs, by hand.

    python -m tests.benchmarks.bench_scrape [--nodes 1000 5000] [--jobs 1000] [--scrapes 100]

A real nats-server and coordinator, and a pretend fleet of nodes with 8 GPUs that report once a
second; the jobs are more than fit, so that most of them wait. The page is made on the
coordinator's event loop: the CPU time of a scrape is what everything else waits for. It asserts
nothing about time.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from urllib.request import Request, urlopen

from msgspec import Struct

from tests.benchmarks.running import RunningCell, running_cell

COORDINATOR = "machine-1"
SETTLE_S = 10.0
"""For the passes over what was submitted."""
IDLE_S = 10.0
"""Without a scrape: what the coordinator needs for all else."""


class Scrapes(Struct, frozen=True, kw_only=True):
    """One size of a cell. cpu_s: of the coordinator for one scrape."""

    nodes: int
    jobs: int
    page_bytes: int
    series: int
    took_s: tuple[float, ...]
    cpu_s: float


def read(address: str) -> bytes:
    """The page as Prometheus asks for it."""
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    with urlopen(Request(f"http://{address}/metrics", headers=accept), timeout=30.0) as answer:
        data: bytes = answer.read()
        return data


async def measure(cell: RunningCell, *, nodes: int, jobs: int, scrapes: int) -> Scrapes:
    """Fill the cell, and scrape it."""
    cell.start_coordinator(COORDINATOR)
    await cell.until_led()
    cell.start_fleet(nodes)
    await cell.until_led(nodes_heard=nodes)
    for number in range(jobs):
        await cell.submit(f"r{number}")
    await asyncio.sleep(SETTLE_S)
    page = await asyncio.to_thread(read, cell.metrics)  # this one counts the jobs without room
    first_s, began_s = cell.cpu_s(COORDINATOR), time.monotonic()
    await asyncio.sleep(IDLE_S)
    idle_cores = (cell.cpu_s(COORDINATOR) - first_s) / (time.monotonic() - began_s)
    first_s, began_s = cell.cpu_s(COORDINATOR), time.monotonic()
    took_s: list[float] = []
    for _ in range(scrapes):
        at_s = time.monotonic()
        page = await asyncio.to_thread(read, cell.metrics)
        took_s.append(time.monotonic() - at_s)
    other_s = idle_cores * (time.monotonic() - began_s)
    return Scrapes(
        nodes=nodes,
        jobs=jobs,
        page_bytes=len(page),
        series=sum(not line.startswith(b"#") for line in page.splitlines()),
        took_s=tuple(took_s),
        cpu_s=(cell.cpu_s(COORDINATOR) - first_s - other_s) / scrapes,
    )


async def run(nodes: Sequence[int], jobs: int, scrapes: int) -> list[Scrapes]:
    """Each size in a cell of its own."""
    found: list[Scrapes] = []
    for count in nodes:
        with tempfile.TemporaryDirectory(prefix="aryl-bench-") as directory:
            async with running_cell(Path(directory)) as cell:
                found.append(await measure(cell, nodes=count, jobs=jobs, scrapes=scrapes))
    return found


def table(found: Sequence[Scrapes]) -> str:
    """One line a size."""
    lines = ["nodes    jobs   series     bytes   median ms   longest ms   CPU ms"]
    lines += [
        f"{one.nodes:5}  {one.jobs:6}  {one.series:7}  {one.page_bytes:8}  "
        f"{median(one.took_s) * 1000:10.1f}  {max(one.took_s) * 1000:11.1f}  "
        f"{one.cpu_s * 1000:7.2f}"
        for one in found
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="bench_scrape.py", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--scrapes", type=int, default=100)
    given = parser.parse_args(arguments)
    found = asyncio.run(run(given.nodes, given.jobs, given.scrapes))
    sys.stdout.write(f"{table(found)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
