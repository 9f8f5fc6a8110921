"""Simulated runs as a table, as JSON, as CSV of their jobs, or as an HTML page."""

from __future__ import annotations

import csv
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from rich.text import Text

from common.errors import ConfigError
from common.model import Pool
from coordinator.cli.output import fields, put, put_json
from coordinator.cli.render import Column, table
from coordinator.cli.session import Session, say
from coordinator.plain_text import MISSING
from coordinator.policies.contract.text import counted
from coordinator.sim.inputs.alike import alike, alike_text, is_seedless, lacks
from coordinator.sim.report.measures import Group, Shown, told
from coordinator.sim.report.page import Heading, page
from coordinator.sim.run.compare import Means, Task, means, plays_own
from coordinator.sim.run.play import JobRow, Run, RunResult
from coordinator.workloads.paper_runs import find_scene
from coordinator.workloads.records import Workload


class Output(StrEnum):
    """How results are printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


COLUMN_GAP = 2
WIDEST_TEXT = 100
LEAST_KEY_WIDTH = 16
"""The options are cut to this, or to a third of the terminal, where they are longer."""


def put_runs(
    here: Session,
    output: Output,
    workload: Workload,
    runs: Sequence[Run],
    *,
    options: Mapping[str, object],
    notes: Sequence[str] = (),
) -> None:
    """All runs on standard output.

    options: of the call, by name; notes: on its jobs; JSON has both.
    """
    averages = means([run.result for run in runs])
    equal = alike(runs)
    match output:
        case Output.JSON:
            put_json(
                {
                    "workload": workload.name,
                    "cluster": cluster_text(workload),
                    "options": options,
                    "notes": notes,
                    "runs": [fields(run.result) for run in runs],
                    "means": [fields(row) for row in averages],
                    "alike": equal,
                }
            )
        case Output.CSV:
            _put_csv(runs)
        case Output.TABLE:
            said = alike_text(equal, lacks(workload, [run.result for run in runs]))
            put(here, _lines(averages, here.out.width, said))


def say_skipped(runs: Sequence[Run]) -> None:
    """How many rows of each trace were left out, and why, on standard error."""
    for line in _skipped(runs):
        say(f"aryl: {line}")


def say_seedless(runs: Sequence[Run]) -> None:
    """That all seeds are one run, on standard error: an interval of 0 is no certainty then."""
    if is_seedless(runs):
        say("aryl: the seed changes nothing here: no shares, losses or chances are drawn by it")


def say_begun_again(workload: Workload, runs: Sequence[Run]) -> None:
    """Warn on stderr about policies that stopped jobs of a trace without save information: all of
    these jobs start over, which most other simulators do not simulate.
    """
    if any(job.has_checkpoints for job in workload.jobs):
        return
    stopped = [run.result for run in runs if run.result.preemptions and not run.result.reclaims]
    names = ", ".join(dict.fromkeys(result.policy for result in stopped))
    if names:
        say(
            f"aryl: {names}: preempted jobs start from the beginning, as no job saves checkpoints; "
            "published figures most often take --checkpoints on-request"
        )


def _skipped(runs: Sequence[Run]) -> list[str]:
    """A line for each trace of which rows were left out."""
    found: dict[str, None] = {}
    for run in runs:
        workload = run.result.swept.get("workload")
        of = f"{workload}: " if workload else ""
        for count, why in (
            (run.result.skipped_zero_gpus, "have no GPU"),
            (run.result.skipped_not_run, "never ran"),
        ):
            if count:
                found[f"{of}rows of the trace that {why} and are left out: {count:,}"] = None
    return list(found)


def _lines(rows: Sequence[Means], width: int, same: str) -> Iterator[Text | str]:
    """The measures in short, in as many tables as the width needs, and notes that fit beside them.

    same: policies with equal rows, noted below.
    """
    measures, zero = told(rows)
    keys = _keys(rows)
    short = [each for each in measures if each.measure.group == Group.SHORT]
    more = [each for each in measures if each.measure.group != Group.SHORT]
    more.sort(key=lambda each: not each.measure.is_drawn)
    columns = [_column(each) for each in [*short, *more]]
    if any(row.seeds > 1 for row in rows):
        columns.insert(len(short), Column("SEEDS", lambda row: str(row.seeds), is_number=True))
    left = len(columns)
    for place, block in enumerate(_blocks(rows, keys, columns, width)):
        if left <= len(more):
            break
        if place:
            yield ""
        yield from table(rows, [*keys, *block], width=width)
        left -= len(block)
    notes = [same] if same else []
    notes += [f"zero throughout: {'; '.join(zero)}"] if zero else []
    if left:
        notes.append(f"{counted(left, 'more measure')}: a wider terminal, -o json, --html FILE")
    if notes:
        yield ""
    for note in notes:
        yield from textwrap.wrap(note, min(width, WIDEST_TEXT))


def _keys(rows: Sequence[Means]) -> list[Column[Means]]:
    """The keys of a row: policy, scenario, and each swept key."""
    columns: list[Column[Means]] = [Column("POLICY", _policy, is_elastic=True)]
    if any(row.scenario for row in rows):
        columns.insert(0, Column("SCENARIO", lambda row: row.scenario, is_elastic=True))
    for key in swept_keys(rows):

        def value(row: Means, key: str = key) -> str:
            return row.swept.get(key, "")

        columns.append(Column(key.upper(), value, is_number=True))
    return columns


def _column(each: Shown) -> Column[Means]:
    """A measure with its unit in the heading; an interval stands beside its mean."""

    def text(row: Means) -> str:
        found = row.figures.get(each.measure.figure)
        if found is None:
            return MISSING
        number = each.number(found.mean)
        if found.half_width is None:
            return number
        return f"{number} ± {each.number(found.half_width)}"

    heading = f"{each.measure.heading} {each.unit}".rstrip()
    return Column(heading, text, is_number=True)


def _blocks(
    rows: Sequence[Means],
    keys: Sequence[Column[Means]],
    columns: Sequence[Column[Means]],
    width: int,
) -> Iterator[list[Column[Means]]]:
    """Columns in their order, as many at a time as fit beside the keys."""
    most = max(LEAST_KEY_WIDTH, width // 3)
    used = key_width = min(most, sum(_width(rows, column) for column in keys))
    block: list[Column[Means]] = []
    for column in columns:
        wide = _width(rows, column)
        if block and used + wide > width:
            yield block
            block, used = [], key_width
        block.append(column)
        used += wide
    yield block


def _width(rows: Sequence[Means], column: Column[Means]) -> int:
    texts = (column.heading, *(column.value(row) for row in rows))
    return max(len(text) for text in texts) + COLUMN_GAP


def _policy(row: Means) -> str:
    """A scenario's own policy without its knobs, which the scenario implies."""
    return row.policy.partition(":")[0] if plays_own(row) else row.policy


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


def write_page(
    path: Path,
    workload: Workload,
    task: Task,
    runs: Sequence[Run],
    *,
    command: str,
    notes: Sequence[str] = (),
) -> None:
    """The page with plots.

    command: the call that made it. notes: what to know of its jobs.

    Raises:
        ConfigError: it cannot be written there.
    """
    heading = Heading(
        workload=workload.name,
        cluster=cluster_text(workload),
        jobs=len(workload.jobs),
        notes=(
            *_notes(task, runs),
            *map(_sentence, (*notes, *_skipped(runs))),
            f"Made by: {command}",
        ),
        alike=_sentence(alike_text(alike(runs), lacks(workload, [run.result for run in runs]))),
    )
    try:
        path.write_text(page(heading, runs), "utf-8")
    except OSError as error:
        raise ConfigError(f"html {path}: {error.strerror or error}") from None
    say(f"wrote {path}")


def _sentence(line: str) -> str:
    return f"{line[0].upper()}{line[1:]}." if line else ""


def _notes(task: Task, runs: Sequence[Run]) -> tuple[str, ...]:
    """Notes on how the runs were played; swept values are in the names instead."""
    options = task.options
    said: list[str] = []
    if "delays" not in task.swept:
        said.append(
            "With delays: nodes and jobs take time to drain, start, resize, save and warm up."
            if options.has_delays
            else "Without delays: starts, stops and loans are at once."
        )
    if "oracle" not in task.swept:
        said.append(
            "Run-time estimates are the true running times (oracle)."
            if options.is_oracle
            else "Run-time estimates are learned from jobs that ended."
        )
    scenes = {find_scene(name) for run in runs if (name := run.result.scenario)}
    beside = ", beside the heterogeneous" if any(each.has_spanning for each in scenes) else ""
    shares = (
        ("elastic", "elastic", task.shares.elastic),
        ("fungible", f"for both GPU types{beside}", task.shares.fungible),
        ("checkpoint-share", "saving", task.shares.checkpoint),
    )
    said += [
        f"{100 * share:g} % of the jobs, drawn by seed, are {what}."
        for key, what, share in shares
        if share is not None and key not in task.swept
    ]
    if options.loss_ratio and "loss" not in task.swept:
        said.append(f"{100 * options.loss_ratio:g} % of all messages are lost.")
    if options.crashes and "crash" not in task.swept:
        said.append(f"{counted(len(options.crashes), 'node crashes', 'nodes crash')}.")
    return (" ".join(said),)
