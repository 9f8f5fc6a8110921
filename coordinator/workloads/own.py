"""Our own CSV of jobs, read and written: docs/traces.md is its law. Must not know other formats.

`job_lines(read_jobs(file))` gives the file's bytes back when it was written here: the checksums of
the named traces are over these bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

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

RARE_COLUMNS = frozenset({"app", "cpus", "memory_bytes"})
"""Written only where a job has something there: the checksums of older traces stay."""


def read_own(row: Row) -> TraceJob:
    """One row; an absent column or an empty field is a value that is not told."""
    minimum = _maybe(row, "min_workers", _at_least_1)
    maximum = _maybe(row, "max_workers", _at_least_1)
    if (minimum is None) != (maximum is None):
        raise row.wrong("max_workers", "min_workers and max_workers are told together or not")
    if minimum is not None and maximum is not None and maximum < minimum:
        raise row.wrong("max_workers", f"{maximum}, expected at least min_workers, {minimum}")
    return TraceJob(
        job_id=row.optional("job_id") or str(row.line - 1),
        submit_s=row.number("submit_s"),
        duration_s=row.number("duration_s", least=0),
        gpus=row.whole("gpus"),
        tenant=row.optional("tenant") or "trace",
        user=row.optional("user") or "trace",
        name=row.optional("name"),
        model=row.optional("model"),
        gpus_per_worker=_maybe(row, "gpus_per_worker", _at_least_1),
        min_workers=minimum,
        max_workers=maximum,
        gpu_types=tuple(kind for kind in row.optional("gpu_types").split("|") if kind),
        deadline_s=_maybe(row, "deadline_s", _not_negative),
        estimate_s=_maybe(row, "estimate_s", _not_negative),
        iterations=_maybe(row, "iterations", _not_negative),
        batch_size=_maybe(row, "batch_size", _at_least_1),
        heterogeneous_speed_ratio=_maybe(row, "heterogeneous_speed_ratio", _ratio) or 0.0,
        has_checkpoints=_maybe(row, "has_checkpoints", _truth) or False,
        gpu_share=1.0 if (share := _maybe(row, "gpu_share", _ratio)) is None else share,
        priority=_maybe(row, "priority", lambda r, c: r.whole(c)) or 0,
        app=row.optional("app"),
        cpus=_maybe(row, "cpus", lambda r, c: r.whole(c, least=0)) or 0,
        memory_bytes=_maybe(row, "memory_bytes", lambda r, c: r.whole(c, least=0)) or 0,
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
    for job in jobs:
        fields: dict[str, object] = {column: getattr(job, column) for column in columns}
        fields["gpu_types"] = "|".join(job.gpu_types)
        yield ",".join(_written(value) for value in fields.values()) + "\n"


def _written(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case float():
            return repr(value).removesuffix(".0")
        case _:
            text = str(value)
            quoted = text.replace('"', '""')
            return f'"{quoted}"' if any(mark in text for mark in ',"\r\n') else text


def _maybe(row: Row, column: str, read: Callable[[Row, str], T]) -> T | None:
    return read(row, column) if row.optional(column) else None


def _at_least_1(row: Row, column: str) -> int:
    return row.whole(column, least=1)


def _not_negative(row: Row, column: str) -> float:
    return row.number(column, least=0)


def _ratio(row: Row, column: str) -> float:
    value = row.number(column, least=0)
    if value > 1:
        raise row.wrong(column, f"{value:g}, expected at most 1")
    return value


def _truth(row: Row, column: str) -> bool:
    text = row.text(column)
    if text not in {"true", "false"}:
        raise row.wrong(column, f"{text!r}, expected true or false")
    return text == "true"
