"""Our own CSV of jobs, read and written; docs/traces.md defines it.

`job_lines(read_jobs(file))` gives the file's bytes back when it was written here: the checksums of
the named traces are over these bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import TypeVar

from common.model import MAX_INT, MAX_WORKERS
from coordinator.workloads.records import TraceJob
from coordinator.workloads.table import Row

T = TypeVar("T")

COLUMNS = (
    "job_id",
    "submit_s",
    "duration_s",
    "gpus",
    "tenant",
    "user",
    "name",
    "model",
    "gpus_per_worker",
    "min_workers",
    "max_workers",
    "gpu_types",
    "deadline_s",
    "estimate_s",
    "iterations",
    "batch_size",
    "heterogeneous_speed_ratio",
    "has_checkpoints",
    "gpu_share",
    "priority",
    "app",
    "cpus",
    "memory_bytes",
)
"""All columns, in the order they are written; the first four without job_id are enough to read."""

_NEEDS_QUOTES = re.compile(r'[,"\r\n]')

RARE_COLUMNS = frozenset({"app", "cpus", "memory_bytes"})
"""Written only where a job has something there: the checksums of older traces stay."""


def read_own(row: Row) -> TraceJob:
    """One row; an absent column or an empty field is an unknown value."""
    gpus = row.whole("gpus")
    size, minimum, maximum = _widths(row, gpus)
    return TraceJob(
        job_id=row.optional("job_id") or str(row.line - 1),
        submit_s=row.clock_s("submit_s"),
        duration_s=row.seconds("duration_s"),
        gpus=gpus,
        tenant=row.optional("tenant") or "trace",
        user=row.optional("user") or "trace",
        name=row.optional("name"),
        model=row.optional("model"),
        gpus_per_worker=size,
        min_workers=minimum,
        max_workers=maximum,
        gpu_types=tuple(kind for kind in row.optional("gpu_types").split("|") if kind),
        deadline_s=_maybe(row, "deadline_s", Row.seconds),
        estimate_s=_maybe(row, "estimate_s", Row.seconds),
        iterations=_maybe(row, "iterations", Row.count),
        batch_size=_maybe(row, "batch_size", _at_least_1),
        heterogeneous_speed_ratio=_maybe(row, "heterogeneous_speed_ratio", _ratio) or 0.0,
        has_checkpoints=_maybe(row, "has_checkpoints", _truth) or False,
        gpu_share=1.0 if (share := _maybe(row, "gpu_share", _ratio)) is None else share,
        priority=_maybe(row, "priority", _priority) or 0,
        app=row.optional("app"),
        cpus=_maybe(row, "cpus", Row.whole) or 0,
        memory_bytes=_maybe(row, "memory_bytes", Row.whole) or 0,
    )


def job_lines(jobs: Iterable[TraceJob]) -> Iterator[str]:
    """The header and one line per job, each with its newline; numbers in their shortest form."""
    jobs = tuple(jobs)
    columns = [
        column
        for column in COLUMNS
        if column not in RARE_COLUMNS or any(getattr(job, column) for job in jobs)
    ]
    yield ",".join(columns) + "\n"
    values = attrgetter(*columns)
    place = columns.index("gpu_types")
    for job in jobs:
        fields: list[object] = [*values(job)]
        fields[place] = "|".join(job.gpu_types)
        yield ",".join([_written(value) for value in fields]) + "\n"


def _written(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    text = str(value)
    if _NEEDS_QUOTES.search(text) is None:
        return text
    quoted = text.replace('"', '""')
    return f'"{quoted}"'


def _maybe(row: Row, column: str, read: Callable[[Row, str], T]) -> T | None:
    return read(row, column) if row.optional(column) else None


def _widths(row: Row, gpus: int) -> tuple[int | None, int | None, int | None]:
    """GPUs of a worker, fewest and most workers; the job had its `gpus` with a number between."""
    size = _maybe(row, "gpus_per_worker", _at_least_1)
    if size is not None and gpus % size:
        raise row.wrong("gpus_per_worker", f"{size}, expected a divisor of gpus, {gpus}")
    minimum = _maybe(row, "min_workers", _workers)
    maximum = _maybe(row, "max_workers", _workers)
    if minimum is None or maximum is None:
        if minimum is not maximum:
            raise row.wrong("max_workers", "min_workers and max_workers must be given together")
        return size, None, None
    if maximum < minimum:
        raise row.wrong("max_workers", f"{maximum}, expected at least min_workers, {minimum}")
    had = f"{gpus} GPUs" if size is None else f"{gpus} GPUs, which are {gpus // size} workers"
    if minimum > gpus // (size or 1):
        raise row.wrong("min_workers", f"{minimum}, expected at most what it had: {had}")
    if size is not None and maximum < gpus // size:
        raise row.wrong("max_workers", f"{maximum}, expected at least what it had: {had}")
    return size, minimum, maximum


def _workers(row: Row, column: str) -> int:
    return row.whole(column, least=1, most=MAX_WORKERS)


def _at_least_1(row: Row, column: str) -> int:
    return row.whole(column, least=1)


def _priority(row: Row, column: str) -> int:
    return row.whole(column, least=-MAX_INT)


def _ratio(row: Row, column: str) -> float:
    return row.number(column, least=0, most=1)


def _truth(row: Row, column: str) -> bool:
    text = row.text(column)
    if text not in {"true", "false"}:
        raise row.wrong(column, f"{text!r}, expected true or false")
    return text == "true"
