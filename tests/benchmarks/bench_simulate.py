"""Time per event and memory of `aryl simulate`, by jobs and by nodes; run by hand, never by CI.

    python -m tests.benchmarks.bench_simulate [--policy fifo aryl] [--jobs 10000 50000 200000]
                                              [--nodes 1000 5000 10000] [--no-delays] [--profile]

The paper's workload as it is, then more and fewer of its jobs on its cluster, then as many jobs on
larger clusters. More jobs are those of the next seeds, fifteen days later each; a cluster of k
times the nodes gets the jobs of k seeds side by side, so that the load on a node stays what it is.
Each run has a process of its own. Time is the CPU time of that process, so that other programs
disturb it little; its spread is over slices of a run, as a run is not the same all along.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context

from msgspec import Struct, structs

from common.clock import SystemClock
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import play
from coordinator.workloads.named import paper
from coordinator.workloads.records import TraceJob, Workload

PAPER_NODES = 963
SLICE_EVENTS = 5000
NODE_JOBS = 20_000
"""Jobs of each run with another number of nodes."""


class Cell(Struct, frozen=True, kw_only=True):
    """What one run plays; None leaves it as the paper has it."""

    policy: str
    has_delays: bool = True
    jobs: int | None = None
    nodes: int | None = None


class Cost(Struct, frozen=True, kw_only=True):
    """What one run took: CPU seconds, microseconds per event slice by slice, peak memory."""

    jobs: int
    nodes: int
    events: int
    cpu_s: float
    slices_us: list[float]
    peak_rss_bytes: int


def _numbered(jobs: Sequence[TraceJob], seed: int, *, later_s: float = 0.0) -> list[TraceJob]:
    return [
        structs.replace(job, job_id=f"{seed}-{job.job_id}", submit_s=job.submit_s + later_s)
        for job in jobs
    ]


def make_workload(cell: Cell) -> Workload:
    """The paper's workload, with as many jobs and nodes as are asked for."""
    base = paper(1)
    nodes = cell.nodes or PAPER_NODES
    sides = max(1, round(nodes / PAPER_NODES))
    wanted = cell.jobs or (len(base.jobs) if cell.nodes is None else NODE_JOBS)
    jobs: list[TraceJob] = []
    seed, later_s = 1, 0.0
    while len(jobs) < wanted:
        span: list[TraceJob] = []
        for _ in range(sides):
            span += _numbered(paper(seed).jobs, seed, later_s=later_s)
            seed += 1
        jobs += sorted(span, key=lambda job: job.submit_s)
        later_s += base.length_s
    jobs = jobs[:wanted]
    groups = tuple(
        structs.replace(group, count=max(1, round(group.count * nodes / PAPER_NODES)))
        for group in base.nodes
    )
    return structs.replace(
        base, jobs=tuple(jobs), nodes=groups, length_s=max(job.submit_s for job in jobs) + 1.0
    )


def measure(cell: Cell) -> Cost:
    """Play one cell, in the process that calls."""
    workload = make_workload(cell)
    looks: list[tuple[int, float]] = []

    def told(_: int, events: int) -> None:
        if not looks or events - looks[-1][0] >= SLICE_EVENTS:
            looks.append((events, time.process_time()))

    before_s = time.process_time()
    options = RunOptions(policy=cell.policy, has_delays=cell.has_delays)
    run = play(workload, options, clock=SystemClock(), told=told)
    cpu_s = time.process_time() - before_s
    slices_us = [
        (after[1] - before[1]) / (after[0] - before[0]) * 1e6 for before, after in pairwise(looks)
    ]
    return Cost(
        jobs=run.result.jobs,
        nodes=sum(group.count for group in workload.nodes),
        events=run.result.events,
        cpu_s=cpu_s,
        slices_us=slices_us,
        peak_rss_bytes=run.result.peak_rss_bytes,
    )


def spread(values: Sequence[float]) -> str:
    """Median and quartiles; a run of less than three slices has none."""
    if len(values) < 3:
        return f"{'':>25}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:6.1f} ({low:6.1f} .. {high:6.1f})"


def row(policy: str, cost: Cost) -> str:
    """One line of the table."""
    return (
        f"{policy:10} {cost.jobs:7} {cost.nodes:6} {cost.events:8} {cost.cpu_s:8.1f} "
        f"{cost.cpu_s / cost.events * 1e6:10.1f}   {spread(cost.slices_us)} "
        f"{cost.peak_rss_bytes / 1e6:7.0f}\n"
    )


HEAD = (
    f"{'policy':10} {'jobs':>7} {'nodes':>6} {'events':>8} {'CPU s':>8} {'us/event':>10}   "
    f"{'of slices (quartiles)':25} {'RSS MB':>7}\n"
)


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--policy", nargs="+", default=["fifo", "aryl"])
    parser.add_argument("--jobs", type=int, nargs="*", default=[10_000, 50_000, 200_000])
    parser.add_argument("--nodes", type=int, nargs="*", default=[1000, 5000, 10_000])
    parser.add_argument("--no-delays", action="store_true", help="nothing takes time")
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Print one row per run."""
    asked = options(arguments)
    say = sys.stdout.write
    say(HEAD)
    for policy in asked.policy:
        base = Cell(policy=policy, has_delays=not asked.no_delays)
        cells = [base]
        cells += [structs.replace(base, jobs=count) for count in asked.jobs]
        cells += [structs.replace(base, nodes=count) for count in asked.nodes]
        for cell in cells:
            if asked.profile:
                with cProfile.Profile(time.process_time) as profile:
                    cost = measure(cell)
                say(row(policy, cost))
                pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(30)
                continue
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                say(row(policy, pool.submit(measure, cell).result()))
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
