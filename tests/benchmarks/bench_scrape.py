"""What a scrape of a coordinator's metrics page costs, by hand.

    python -m tests.benchmarks.bench_scrape [--nodes 1000 5000] [--jobs 1000] [--tenants 50]
                                            [--scrapes 100]

A coordinator on fakes that leads a pretend fleet of nodes with 8 GPUs, a third of them of a service
that lends; the jobs are more than fit. A page is made on the coordinator's event loop, so its CPU
time is what everything else waits for. It asserts nothing about time.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from statistics import median

from msgspec import Struct

from common.model import JobId
from common.monitoring.page import renderer
from coordinator.engine.state.events import JobSubmitted
from coordinator.service.metrics.page import make_registry
from tests.harness.cluster.coordinator import Cell, make_spec

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Scrapes(Struct, frozen=True, kw_only=True):
    """One size of a cell. first_s: with the count of the jobs without room."""

    nodes: int
    jobs: int
    tenants: int
    series: int
    page_bytes: int
    cpu_s: tuple[float, ...]
    first_s: float


async def measure(*, nodes: int, jobs: int, tenants: int, scrapes: int) -> Scrapes:
    """Fill a cell, and make its page again and again."""
    lent = nodes // 3
    async with Cell(training=nodes - lent, inference=lent) as cell:
        coordinator = await cell.lead()
        for number in range(jobs):
            coordinator.decider.post(
                JobSubmitted(
                    job_id=JobId(f"j{number}"),
                    spec=make_spec(f"j{number}", workers=(2, 4)),
                    tenant=f"team-{number % tenants}",
                    user="bench",
                )
            )
        await cell.until(lambda: len(coordinator.engine.state.live_jobs) == jobs)
        render = renderer(make_registry(coordinator))
        took_s: list[float] = []
        page = b""
        for _ in range(scrapes + 1):
            began_s = time.process_time()
            page, _ = render(OPENMETRICS)
            took_s.append(time.process_time() - began_s)
    return Scrapes(
        nodes=nodes,
        jobs=jobs,
        tenants=tenants,
        series=sum(not line.startswith(b"#") for line in page.splitlines()),
        page_bytes=len(page),
        cpu_s=tuple(took_s[1:]),
        first_s=took_s[0],
    )


def table(found: Sequence[Scrapes]) -> str:
    """One line a size."""
    lines = ["nodes    jobs  tenants   series     bytes   median ms   longest ms   first ms"]
    lines += [
        f"{one.nodes:5}  {one.jobs:6}  {one.tenants:7}  {one.series:7}  {one.page_bytes:8}  "
        f"{median(one.cpu_s) * 1000:10.1f}  {max(one.cpu_s) * 1000:11.1f}  "
        f"{one.first_s * 1000:9.1f}"
        for one in found
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="bench_scrape.py", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--tenants", type=int, default=50)
    parser.add_argument("--scrapes", type=int, default=100)
    given = parser.parse_args(arguments)
    for nodes in given.nodes:
        found = asyncio.run(
            measure(nodes=nodes, jobs=given.jobs, tenants=given.tenants, scrapes=given.scrapes)
        )
        sys.stdout.write(f"{table([found])}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
