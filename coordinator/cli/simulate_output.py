"""Simulated runs as a table, as JSON, as CSV of their jobs, or as a page. Must not run anything."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from common.errors import ConfigError
from common.model import Pool
from coordinator.cli.output import fields, put, put_json
from coordinator.cli.render import Column, table
from coordinator.cli.session import Session, say
from coordinator.sim.compare import Means, Task, means
from coordinator.sim.page import COLUMNS, Heading, figure_text, page
from coordinator.sim.run import JobRow, Run, RunResult
from coordinator.sim.scenarios import find_scene
from coordinator.workloads.records import Workload


class Output(StrEnum):
    """How results are printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


RANKS = {
    "queueing_s.mean": 0,
    "jct_s.mean": 0,
    "queueing_s.p95": 1,
    "jct_s.p95": 1,
    "queueing_s.p50": 2,
    "jct_s.p50": 2,
    "training_gpu_ratio": 3,
    "preemptions": 4,
    "reclaims_late": 5,
    "makespan_s": 5,
    "finish_time_fairness.mean": 4,
    "deadlines_met_ratio": 4,
}
"""Columns stay in this order where a terminal is narrow; the others go first."""


def put_runs(here: Session, output: Output, workload: Workload, runs: Sequence[Run]) -> None:
    """All runs on standard output."""
    averages = means([run.result for run in runs])
    match output:
        case Output.JSON:
            put_json(
                {
                    "workload": workload.name,
                    "cluster": cluster_text(workload),
                    "runs": [fields(run.result) for run in runs],
                    "means": [fields(row) for row in averages],
                }
            )
        case Output.CSV:
            _put_csv(runs)
        case Output.TABLE:
            put(here, table(averages, _columns(averages), width=here.out.width))


def _columns(rows: Sequence[Means]) -> list[Column[Means]]:
    """What was asked for first: policy, scenario, and each key that was swept."""
    columns: list[Column[Means]] = [Column("POLICY", _policy)]
    if any(row.scenario for row in rows):
        columns.insert(0, Column("SCENARIO", lambda row: row.scenario))
    for key in swept_keys(rows):

        def value(row: Means, key: str = key) -> str:
            return row.swept.get(key, "")

        columns.append(Column(key.upper(), value, is_number=True))
    columns.append(Column("SEEDS", lambda row: str(row.seeds), is_number=True, rank=7))
    for name, figure, unit in COLUMNS:

        def text(row: Means, figure: str = figure, unit: str = unit) -> str:
            found = row.figures.get(figure)
            if found is None:
                return "-"
            value = figure_text(found.mean, unit)
            if found.half_width is None:
                return value
            return f"{value} ± {figure_text(found.half_width, unit)}"

        columns.append(Column(name.upper(), text, is_number=True, rank=RANKS.get(figure, 6)))
    return columns


def _policy(row: Means) -> str:
    """A scenario's own policy without its knobs, which the scenario tells."""
    is_own = bool(row.scenario) and find_scene(row.scenario).policy == row.policy
    return row.policy.partition(":")[0] if is_own else row.policy


def swept_keys(rows: Sequence[Means] | Sequence[RunResult]) -> list[str]:
    """Keys that were swept in any row, in their order."""
    return list(dict.fromkeys(key for row in rows for key in row.swept))


def _put_csv(runs: Sequence[Run]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    results = [run.result for run in runs]
    scenario = ("scenario",) if any(result.scenario for result in results) else ()
    keys = swept_keys(results)
    writer.writerow(("policy", "seed", *scenario, *keys, *JobRow.__struct_fields__))
    for run in runs:
        said = (run.result.policy, run.result.seed, *(run.result.scenario for _ in scenario))
        swept = [run.result.swept.get(key, "") for key in keys]
        for row in run.rows:
            values = (_plain(getattr(row, name)) for name in JobRow.__struct_fields__)
            writer.writerow((*said, *swept, *values))


def _plain(value: object) -> object:
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return repr(value).removesuffix(".0")
        case _:
            return value


def cluster_text(workload: Workload) -> str:
    """The nodes in words: `443 x 8 V100 + 520 x 8 T4 (inference)`."""
    return " + ".join(
        f"{group.count} x {group.gpus} {group.gpu_type}"
        + (" (inference)" if group.home_pool == Pool.INFERENCE else "")
        for group in workload.nodes
    )


def write_page(path: Path, workload: Workload, task: Task, runs: Sequence[Run]) -> None:
    """The page with plots.

    Raises:
        ConfigError: it cannot be written there.
    """
    heading = Heading(
        workload=workload.name,
        cluster=cluster_text(workload),
        jobs=len(workload.jobs),
        notes=_notes(task),
    )
    try:
        path.write_text(page(heading, runs), "utf-8")
    except OSError as error:
        raise ConfigError(f"html {path}: {error.strerror or error}") from None
    say(f"wrote {path}")


def _notes(task: Task) -> tuple[str, ...]:
    """What a reader must know of how it was played."""
    options = task.options
    said = [
        "With delays: nodes and jobs take time to drain, start, resize, save and warm up."
        if options.has_delays
        else "Without delays: starts, stops and loans are at once.",
        "Run-time estimates are the true running times (oracle)."
        if options.is_oracle
        else "Run-time estimates are learned from jobs that ended.",
    ]
    shares = (
        ("elastic", task.shares.elastic),
        ("for both GPU types", task.shares.fungible),
        ("saving", task.shares.checkpoint),
    )
    said += [
        f"{100 * share:g} % of the jobs, drawn by seed, are {what}."
        for what, share in shares
        if share is not None
    ]
    if options.loss_ratio:
        said.append(f"{100 * options.loss_ratio:g} % of all messages are lost.")
    if options.crashes:
        said.append(f"{len(options.crashes)} nodes crash.")
    return (" ".join(said),)
