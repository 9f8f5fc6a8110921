"""Cuts the packaged slices from the published traces: `python -m coordinator.demo.cut`.

`data/ORIGIN.md` states the rules. A second run over the same files writes the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from common.errors import ArylError
from coordinator.demo.traces import (
    JOB_SLICE,
    LOAD_SLICE,
    read_jobs,
    read_load,
    select,
)
from coordinator.workloads.records import LoadSeries, TraceJob

JOB_START_S = 2_263_200.0
"""On the clock of the traces, which all clusters of elasticflow-traces share."""

JOB_LIMIT = 300
SHORTEST_S = 300.0
LONGEST_S = 10_800.0
MOST_GPUS = 16

LOAD_START_S = 75_600.0
LOAD_STEPS = 144


def cut_jobs(clusters: Sequence[Sequence[TraceJob]]) -> tuple[TraceJob, ...]:
    """The clusters' jobs in order of submission, cut by the rules of ORIGIN.md."""
    merged = sorted(
        (job for cluster in clusters for job in cluster),
        key=lambda job: (job.submit_s, job.gpus, job.duration_s),
    )
    return select(
        merged,
        start_s=JOB_START_S,
        limit=JOB_LIMIT,
        shortest_s=SHORTEST_S,
        longest_s=LONGEST_S,
        most_gpus=MOST_GPUS,
    )


def cut_load(load: LoadSeries) -> list[tuple[float, float]]:
    """A day that begins on a falling flank: seconds from its start, requests per second."""
    chosen = [(t_s, rate) for t_s, rate in load.samples() if t_s >= LOAD_START_S][:LOAD_STEPS]
    return [(t_s - LOAD_START_S, rate) for t_s, rate in chosen]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both slices; 1 when a trace cannot be read."""
    parser = argparse.ArgumentParser(prog="coordinator.demo.cut", description=__doc__)
    parser.add_argument("--jobs", type=Path, nargs="+", required=True, help="cluster02 04 06")
    parser.add_argument("--load", type=Path, required=True, help="rates by model, in 600 s steps")
    parser.add_argument("--into", type=Path, default=Path(__file__).with_name("data"))
    given = parser.parse_args(arguments)
    try:
        jobs = cut_jobs([read_jobs(path, is_shifted=False) for path in given.jobs])
        load = cut_load(read_load(given.load))
    except ArylError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    lines = [f"{job.submit_s:.0f},{job.duration_s:.0f},{job.gpus}\n" for job in jobs]
    (given.into / JOB_SLICE).write_text("submit_s,duration_s,gpus\n" + "".join(lines))
    rates = [f"{t_s:.0f},{req_per_s:.3f}\n" for t_s, req_per_s in load]
    (given.into / LOAD_SLICE).write_text("t_s,req_per_s\n" + "".join(rates))
    return 0


if __name__ == "__main__":
    sys.exit(main())
