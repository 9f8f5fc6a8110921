"""Trace files by their contents: the format is recognized, never named.

    read_jobs(find("elasticflow_itp/cluster01.csv.gz")).jobs
    read_load(find("servegen/aggregate_rate_10min.csv.gz"), name="m-small")

Every fault of a file is one `ConfigError` with file, line and column (`table`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import structs

from common.decoding import UNREADABLE
from common.errors import ConfigError
from common.model import MAX_WORKERS, Pool
from coordinator.workloads.foreign import not_read, without_times
from coordinator.workloads.job_formats import (
    GAVEL,
    HEADERLESS,
    WITH_HEADER,
    Context,
    JobFormat,
    Throughputs,
)
from coordinator.workloads.records import MAX_MIB, MIB, JobTrace, NodeGroup, ScalingCurve, TraceJob
from coordinator.workloads.table import Row, Table, listed, read_text

TRACES_VARIABLE = "ARYL_TRACES"
"""Environment variable that names the directory in which bare names are looked up."""

THROUGHPUTS_FILE = "simulation_throughputs.json"
"""Beside a Gavel trace, plain or with `.gz`: what its steps mean in seconds."""

REFERENCE_WORKER = "v100"
"""The worker type whose throughput turns a Gavel trace's steps into a duration."""

NODE_COLUMNS = ("sn", "gpu", "model")

ZERO_GPUS = "0, expected at least 1; --skip-zero-gpus leaves these rows out"
"""The error of a job without GPUs; the option is that of `aryl simulate`."""

HISTORY_COLUMNS = ("duration",)
"""The whole header of a list of attained service: no trace of jobs."""


ALIKE = 0.5
"""A header with fewer of a format's columns is not of that format: the error does not list missing
ones.
"""


class NoFileError(ConfigError):
    """A name of no file: it may be one of something else."""


def find(name: str, directory: str | None = None, *, what: str = "trace") -> Path:
    """A file by path, or by name below `directory` or `$ARYL_TRACES`.

    what: its purpose, for the error.

    Raises:
        NoFileError: it is in neither place.
        ConfigError: it is a directory.
    """
    root = directory or os.environ.get(TRACES_VARIABLE)
    places = [Path(name)] + ([Path(root) / name] if root else [])
    for place in places:
        if _is_file(place):
            return place
        if _is_directory(place):
            raise ConfigError(f"{what} {name}: {place} is a directory, expected a file")
    hint = "" if root else f"; {TRACES_VARIABLE} may name the directory of traces"
    raise NoFileError(f"{what} {name}: no such file: {', '.join(map(str, places))}{hint}")


def _is_file(place: Path) -> bool:
    """A name that is too long for the file system is none of a file."""
    try:
        return place.is_file()
    except OSError:
        return False


def _is_directory(place: Path) -> bool:
    """Nor is it one of a directory."""
    try:
        return place.is_dir()
    except OSError:
        return False


# --- jobs ---------------------------------------------------------------------------------------


def read_jobs(
    path: Path, *, skip_zero_gpus: bool = False, throughputs: Throughputs | None = None
) -> JobTrace:
    """The jobs of a trace file, on its own clock, in order of submission.

    Args:
        path: a file of any format in docs/traces.md, gzip or plain.
        skip_zero_gpus: leave rows without a GPU out and count them; else they are an error.
        throughputs: for Gavel traces; None reads the file beside the trace.

    Raises:
        ConfigError: unreadable, unknown, or a bad value.
    """
    text = read_text(path)
    if throughputs is None and _recognize(str(path), text)[1] is GAVEL:
        beside = path.with_name(THROUGHPUTS_FILE)
        packed = beside.with_name(f"{THROUGHPUTS_FILE}.gz")
        throughputs = read_throughputs(packed if packed.is_file() else beside)
    return parse_jobs(str(path), text, skip_zero_gpus=skip_zero_gpus, throughputs=throughputs)


def parse_jobs(
    name: str,
    text: str,
    *,
    skip_zero_gpus: bool = False,
    throughputs: Throughputs | None = None,
) -> JobTrace:
    """As `read_jobs`, of text that is at hand; errors call it `name`."""
    table, found = _recognize(name, text)
    context = Context(throughputs=throughputs)
    return _collect(table, found, context, skip_zero_gpus=skip_zero_gpus)


def _collect(table: Table, found: JobFormat, context: Context, *, skip_zero_gpus: bool) -> JobTrace:
    jobs: list[TraceJob] = []
    zero_gpus = not_run = put_in_order = 0
    latest_s = 0.0
    lines: dict[str, int] = {}
    for row in table.rows():
        if row.whole(found.gpus, most=MAX_WORKERS) == 0:
            if not skip_zero_gpus:
                raise row.wrong(found.gpus, ZERO_GPUS)
            zero_gpus += 1
            continue
        job = found.read(row, context)
        if job is None:
            not_run += 1
            continue
        put_in_order += found.is_sorted and job.submit_s < latest_s
        latest_s = max(latest_s, job.submit_s)
        if job.job_id in lines:
            raise row.wrong("job_id", f"{job.job_id} is given twice")
        lines[job.job_id] = row.line
        jobs.append(job)
    if not jobs:
        raise table.wrong(
            f"column {found.gpus}: no job is left: {zero_gpus} rows have no GPU, and {not_run} "
            "never ran"
        )
    return JobTrace(
        name=table.name,
        format=found.name,
        jobs=tuple(sorted(jobs, key=lambda job: job.submit_s)),
        skipped_zero_gpus=zero_gpus,
        skipped_not_run=not_run,
        gpus_column=found.gpus,
        types_column=found.types,
        lines=lines,
        put_in_order=put_in_order,
    )


def _recognize(name: str, text: str) -> tuple[Table, JobFormat]:
    first = text.partition("\n")[0]
    if why := not_read(text):
        raise ConfigError(f"{name}: line 1: column 1: {why}")
    if "\t" in first:
        width = first.count("\t") + 1
        for found in HEADERLESS:
            if len(found.columns) == width:
                return Table(name, text, columns=found.columns, separator="\t"), found
        widths = " or ".join(f"{len(known.columns)} ({known.name})" for known in HEADERLESS)
        raise ConfigError(f"{name}: line 1: column {width}: the last one, expected {widths}")
    table = Table(name, text)
    found = _by_header(table, WITH_HEADER)
    if found.may_have is not None:
        for column in table.columns:
            if column not in found.may_have:
                raise table.wrong(
                    f"column {listed([column])}: unknown; docs/traces.md lists the columns"
                )
    return table, found


def _by_header(table: Table, formats: Sequence[JobFormat]) -> JobFormat:
    """The first format whose columns are all there; else say what the nearest one lacks."""
    for found in formats:
        have, need = set(table.columns), set(found.columns)
        is_there = have == need or (need < have and not found.is_whole_header)
        if is_there and not have & found.has_not:
            return found

    if table.columns == HISTORY_COLUMNS:
        raise table.wrong(
            "column duration: stands alone: a history of attained service, as Gittins reads it, "
            "and no trace of jobs"
        )

    if why := without_times(table.columns):
        raise table.wrong(why)

    def near(known: JobFormat) -> float:
        if known.is_whole_header or known.has_not & set(table.columns):
            return 0.0
        return len(set(known.columns) & set(table.columns)) / len(known.columns)

    nearest = max(formats, key=near)
    if near(nearest) < ALIKE:
        names = ", ".join(known.name for known in formats)
        raise table.wrong(
            f"column {listed(table.columns[:1])}: no known trace begins so; columns are "
            f"{listed(table.columns)}; known with a header: {names}"
        )
    missing = [column for column in nearest.columns if column not in table.columns]
    raise table.wrong(f"column {missing[0]}: missing from a trace in {nearest.name} format")


def from_first(jobs: Sequence[TraceJob]) -> tuple[TraceJob, ...]:
    """The same jobs in order of submission, with the first one at 0."""
    ordered = sorted(jobs, key=lambda job: job.submit_s)
    return tuple(
        structs.replace(job, submit_s=job.submit_s - ordered[0].submit_s) for job in ordered
    )


# --- what goes with jobs ------------------------------------------------------------------------


def read_throughputs(path: Path, *, worker: str = REFERENCE_WORKER) -> dict[tuple[str, int], float]:
    """Steps per second of each (job type, GPUs) alone, from a Gavel or Shockwave throughput file.

    Raises:
        ConfigError: no such file or worker type, or no JSON of that shape.
    """
    try:
        tables = msgspec.json.decode(
            read_text(path), type=dict[str, dict[str, dict[str, float | list[float]]]]
        )
    except UNREADABLE as error:
        raise ConfigError(f"{path}: line 1: column {worker}: {error}") from None
    if worker not in tables:
        raise ConfigError(
            f"{path}: line 1: column {worker}: missing; there are: {listed([*tables])}"
        )
    alone: dict[tuple[str, int], float] = {}
    for key, rates in tables[worker].items():
        kind, _, gpus = key.strip("()").rpartition(", ")
        rate = rates.get("null")
        if not re.fullmatch(r"[1-9][0-9]{0,4}", gpus) or not isinstance(rate, float) or rate < 0:
            raise ConfigError(
                f"{path}: line 1: column {worker}: {key}: no throughput of the job alone"
            )
        alone[kind.strip("'"), int(gpus)] = rate
    return alone


def read_nodes(path: Path, *, skip_zero_gpus: bool = False) -> tuple[tuple[NodeGroup, ...], int]:
    """The nodes of an OpenB node list, alike ones together, and how many without GPUs were skipped.

    Raises:
        ConfigError: as `read_jobs`.
    """
    table = Table.open(path)
    table.require(NODE_COLUMNS)
    counts: dict[tuple[str, int, int, int], int] = {}
    skipped = 0
    for row in table.rows():
        gpus = row.whole("gpu", most=MAX_WORKERS)
        if gpus == 0 and not skip_zero_gpus:
            raise row.wrong("gpu", "0, expected at least 1")
        if gpus == 0:
            skipped += 1
            continue
        kind = row.text("model") or "GPU"
        cpus = row.whole("cpu_milli") // 1000 if "cpu_milli" in table.columns else 0
        mib = row.whole("memory_mib", most=MAX_MIB) if "memory_mib" in table.columns else 0
        key = (kind, gpus, cpus, mib)
        counts[key] = counts.get(key, 0) + 1
    groups = tuple(
        NodeGroup(
            count=counts[key],
            gpus=key[1],
            gpu_type=key[0],
            home_pool=Pool.TRAINING,
            cpus=key[2],
            memory_bytes=key[3] * MIB,
        )
        for key in sorted(counts)
    )
    return groups, skipped


def read_curves(path: Path, *, gpu_type: str) -> tuple[ScalingCurve, ...]:
    """ElasticFlow's scaling curves of one model: iterations per second by batch size and GPUs.

    Sizes without a measurement (empty, `nan`, 0) are left out.

    Raises:
        ConfigError: as `read_jobs`; also a size that is no number of GPUs.
    """
    table = Table.open(path)
    table.require(("global_batch_size",))
    sizes = [column for column in table.columns if column != "global_batch_size"]
    for size in sizes:
        if not re.fullmatch(r"[1-9][0-9]{0,4}", size):
            raise table.wrong(f"column {listed([size])}: expected a number of GPUs")
    curves: dict[int, ScalingCurve] = {}
    for row in table.rows():
        batch_size = row.whole("global_batch_size", least=1)
        if batch_size in curves:
            raise row.wrong("global_batch_size", f"{batch_size} is given twice")
        rates = ((int(size), _measured(row, size)) for size in sorted(sizes, key=int))
        curves[batch_size] = ScalingCurve(
            model=path.name.partition(".")[0],
            gpu_type=gpu_type,
            batch_size=batch_size,
            points=tuple((gpus, rate) for gpus, rate in rates if rate > 0),
        )
    return tuple(curves.values())


def _measured(row: Row, column: str) -> float:
    return 0.0 if row.text(column) in {"", "nan"} else row.number(column, least=0)


def read_all_curves(directory: Path) -> Mapping[tuple[str, int], ScalingCurve]:
    """All curves of a directory, for example `throughputs_A100`, by (model, global batch size).

    Raises:
        ConfigError: as `read_curves`; also a directory without curves.
    """
    gpu_type = directory.name.rpartition("_")[2]
    curves = {
        (curve.model, curve.batch_size): curve
        for path in sorted(directory.glob("*.csv*"))
        for curve in read_curves(path, gpu_type=gpu_type)
    }
    if not curves:
        raise ConfigError(f"{directory}: no scaling curves (*.csv, *.csv.gz)")
    return curves
