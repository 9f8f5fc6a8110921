"""Small runs as reports; run as a program it writes them to `golden/`. Asserts nothing."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import structs

from common.clock import SystemClock
from common.model import NodeName
from coordinator import demo
from coordinator.engine.state.accounting import plain
from coordinator.sim.inputs.inputs import Shares, parse_cluster
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.compare import Task, play_task
from coordinator.sim.run.outages import Crash
from coordinator.sim.run.play import RunResult, play
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.records import Workload
from tests.sim.small import small

GOLDEN = Path(__file__).parent / "golden"
DEMO = Path(demo.__file__).parent / "data"

DIGITS = 6
"""Of a written figure; the rest is rounding."""


def _pool() -> Workload:
    """Half of the GPUs, nothing lent, so that jobs compete."""
    return structs.replace(small(120), nodes=parse_cluster("4x8"), loads=())


def demo_task(policy: str, *, seed: int) -> Task:
    """The demo's slice of a trace and its day of load, beside as many nodes that serve.

    Nothing is known of the load's day until all of its jobs have come.
    """
    return Task(
        workload=str(DEMO / "elasticflow_itp_slice.csv"),
        load=str(DEMO / "servegen_m_small_day.csv"),
        cluster="8x8+8x8",
        shares=Shares(elastic=0.3),
        options=RunOptions(policy=policy, seed=seed),
        seed=seed,
    )


REPORTS: dict[str, tuple[Workload, tuple[RunOptions, ...]]] = {
    "pool": (
        _pool(),
        tuple(
            RunOptions(policy=policy, has_delays=False, saves=Saves.ON_REQUEST)
            for policy in ("fifo", "fifo-skip", "sjf", "srtf", "srsf", "aryl-elastic")
        ),
    ),
    "loans": (
        small(120),
        tuple(RunOptions(policy=policy) for policy in ("fifo", "sjf", "aryl-loan", "aryl")),
    ),
    "faults": (
        small(80),
        tuple(
            RunOptions(
                policy=policy,
                loss_ratio=0.05,
                crashes=(Crash(node=NodeName("t00001"), at_s=20_000.0, down_s=1800.0),),
                is_oracle=False,
            )
            for policy in ("fifo", "aryl")
        ),
    ),
    "foresight": (
        small(120, is_dense=False),
        tuple(RunOptions(policy=policy) for policy in ("aryl", "foresight")),
    ),
}
"""Name: workload and runs."""

DEMO_POLICIES = ("aryl", "foresight")
UNKNOWN_DAY = "unknown-day"
NAMES = (*REPORTS, UNKNOWN_DAY)


@cache  # a report has the first of those that are compared over seeds
def demo_result(policy: str, *, seed: int) -> RunResult:
    """The figures of `demo_task`."""
    return play_task(demo_task(policy, seed=seed)).result


def _results(name: str) -> list[RunResult]:
    if name == UNKNOWN_DAY:
        return [demo_result(policy, seed=1) for policy in DEMO_POLICIES]
    workload, options = REPORTS[name]
    return [play(workload, each, clock=SystemClock()).result for each in options]


def report(name: str) -> list[dict[str, Any]]:
    """The figures of a report's runs, less what depends on the machine."""
    rows: list[dict[str, Any]] = []
    for result in _results(name):
        figures = plain(result)
        del figures["wall_s"], figures["peak_rss_bytes"]
        rows.append(_rounded(figures))
    return rows


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def main() -> None:
    """Write every report."""
    GOLDEN.mkdir(exist_ok=True)
    for name in NAMES:
        (GOLDEN / f"{name}.json").write_text(json.dumps(report(name), indent=1) + "\n")


if __name__ == "__main__":
    main()
