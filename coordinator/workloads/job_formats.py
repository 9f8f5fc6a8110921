"""One function per published job format: a row becomes a `TraceJob`.

docs/traces.md has origins, licences and the meaning of each column. Units end here: seconds, whole
GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import ceil

from msgspec import Struct

from common.model import MAX_JOB_S
from coordinator.workloads.own import COLUMNS as OWN_COLUMNS
from coordinator.workloads.own import read_own
from coordinator.workloads.records import MAX_MIB, MIB, TraceJob
from coordinator.workloads.table import MAX_CLOCK_S, Row, shown

MINUTE_S = 60.0
MINUTES = re.compile(r"[0-9]{1,9}")
BATCH = re.compile(r"[1-9][0-9]{0,9}")

Throughputs = Mapping[tuple[str, int], float]
"""Steps per second of (job type, GPUs), alone on its GPUs."""


class Context(Struct, frozen=True, kw_only=True):
    """The context of a row.

    throughputs: steps per second, for traces with steps and without durations.
    """

    throughputs: Throughputs | None = None


class JobFormat(Struct, frozen=True, kw_only=True):
    """A published format.

    columns: required; the format is recognized by all of them.
    gpus: the column with the GPUs, checked before the row is read. types: that with the GPU types
        that a job accepts; empty: there is none.
    is_sorted: its origin publishes it in order of submission, so disorder is reported.
    read: the row as a job; None when it never ran.
    may_have: columns beyond `columns`, when others are errors.
    is_whole_header: recognized only where nothing but these columns is there.
    has_not: columns of a format that contains this one; where one is present the file is of that
        format, or damaged.
    width: of a headerless table, its number of columns.
    """

    name: str
    columns: tuple[str, ...]
    gpus: str
    submit: str
    read: Callable[[Row, Context], TraceJob | None]
    is_sorted: bool = True
    may_have: frozenset[str] | None = None
    is_whole_header: bool = False
    has_not: frozenset[str] = frozenset()
    types: str = ""


def _elasticflow(row: Row, _: Context) -> TraceJob:
    return _itp(row, "submission_time", "num_iteration", "deadline")


def _elasticflow_cut(row: Row, _: Context) -> TraceJob:
    """The measured columns; those that its authors made up are cut away."""
    return TraceJob(
        job_id=str(row.line - 1),
        submit_s=row.clock_s("submission_time"),
        duration_s=row.seconds("duration"),
        gpus=row.whole("num_gpu"),
    )


def _elasticflow_pollux(row: Row, _: Context) -> TraceJob:
    return _itp(row, "submit_time", "iteration", "ddl")


def _itp(row: Row, submit: str, iterations: str, deadline: str) -> TraceJob:
    """Deadlines are instants on the clock of the submissions."""
    submit_s = row.clock_s(submit)
    deadline_s = row.clock_s(deadline)
    if deadline_s < submit_s:
        raise row.wrong(deadline, f"{deadline_s:g} is before the submission, {submit_s:g}")
    if deadline_s > submit_s + MAX_JOB_S:
        raise row.wrong(deadline, f"{deadline_s:g}, expected at most {submit_s + MAX_JOB_S:g}")
    model = row.text("model_name")
    return TraceJob(
        job_id=row.named("job_id"),
        submit_s=submit_s,
        duration_s=row.seconds("duration"),
        gpus=row.whole("num_gpu"),
        name=model,
        model=model,
        deadline_s=deadline_s - submit_s,
        iterations=row.count(iterations),
        batch_size=row.whole("batch_size", least=1),
    )


def _philly(row: Row, _: Context) -> TraceJob:
    tenant = row.text("cluster")
    return TraceJob(
        job_id=f"philly-{row.line - 1}",
        submit_s=row.instant("timestamp"),
        duration_s=row.seconds("duration"),
        gpus=row.whole("num_gpus"),
        tenant=f"vc_{tenant}",
    )


def _helios(row: Row, _: Context) -> TraceJob | None:
    """Ran for its duration from its start; one that never started is no job."""
    if not row.text("start_time"):
        return None
    return TraceJob(
        job_id=row.named("job_id"),
        submit_s=row.instant("submit_time"),
        duration_s=row.seconds("duration"),
        gpus=row.whole("gpu_num"),
        tenant=row.text("vc"),
        user=row.text("user"),
        cpus=row.whole("cpu_num"),
    )


def _tiresias(row: Row, _: Context) -> TraceJob:
    model = row.text("model_name")
    return TraceJob(
        job_id=row.named("job_id"),
        submit_s=row.clock_s("submit_time"),
        duration_s=row.seconds("duration"),
        gpus=row.whole("num_gpu"),
        name=model,
        model=model,
        iterations=row.count("iterations"),
    )


def _chronus(row: Row, _: Context) -> TraceJob:
    """All times are minutes; of several deadlines the last one counts, the others only lose value.

    A job of type `best` has no deadline.
    """
    kind = row.text("job_type")
    if kind not in {"strict", "soft", "best"}:
        raise row.wrong("job_type", f"{kind!r}, expected strict, soft or best")
    deadline_s = None
    if kind != "best":
        last = row.text("expect_time_list").rpartition("-")[2]
        if not MINUTES.fullmatch(last) or int(last) * MINUTE_S > MAX_JOB_S:
            raise row.wrong(
                "expect_time_list", f"{shown(last)} is not a whole number of minutes of a job"
            )
        deadline_s = int(last) * MINUTE_S
    model = row.text("model_name")
    return TraceJob(
        job_id=row.named("job_id"),
        submit_s=row.clock_s("submit_time", unit_s=MINUTE_S),
        duration_s=row.seconds("duration", unit_s=MINUTE_S),
        gpus=row.whole("num_gpu"),
        tenant=row.text("user"),
        name=model,
        model=model,
        deadline_s=deadline_s,
        iterations=row.count("iterations"),
    )


def _shockwave(row: Row, context: Context) -> TraceJob:
    return _gavel_like(row, row.seconds("duration"))


def _gavel(row: Row, context: Context) -> TraceJob:
    """Durations are steps over the throughput of the job alone on the reference GPU."""
    kind, gpus = row.text("job type"), row.whole("GPUs")
    rate_per_s = (context.throughputs or {}).get((kind, gpus), 0.0)
    if rate_per_s <= 0.0:
        raise row.wrong("job type", f"no throughput of {kind!r} on {gpus} GPUs is known")
    duration_s = row.count("total steps") / rate_per_s
    if duration_s > MAX_JOB_S:
        raise row.wrong("total steps", f"{duration_s:g} s long, expected at most {MAX_JOB_S:g} s")
    return _gavel_like(row, duration_s)


def _gavel_like(row: Row, duration_s: float) -> TraceJob:
    """An SLO below 0 is none; otherwise it is a multiple of the duration."""
    slo = row.number("SLO", most=MAX_JOB_S / duration_s if duration_s else None)
    kind = row.text("job type")
    batch = kind.rpartition("(batch size ")[2].removesuffix(")")
    return TraceJob(
        job_id=str(row.line - 1),
        submit_s=row.clock_s("arrival"),
        duration_s=duration_s,
        gpus=row.whole("GPUs"),
        name=kind.replace(" ", "_").replace("(", "").replace(")", ""),
        model=kind.partition(" (")[0],
        deadline_s=slo * duration_s if slo > 0 else None,
        iterations=row.count("total steps"),
        batch_size=int(batch) if BATCH.fullmatch(batch) else None,  # A3C and CycleGAN have none
    )


def _openb(row: Row, _: Context) -> TraceJob | None:
    """Ran from its scheduling to its deletion; a pod that was never scheduled is no job.

    `gpu_spec` names the types that it accepts, `|` between them.
    """
    if not row.text("scheduled_time"):
        return None
    created_s = row.clock_s("creation_time")
    scheduled_s = row.number("scheduled_time", least=created_s, most=MAX_CLOCK_S)
    deleted_s = row.number("deletion_time", least=scheduled_s, most=scheduled_s + MAX_JOB_S)
    return TraceJob(
        job_id=row.named("name"),
        submit_s=created_s,
        duration_s=deleted_s - scheduled_s,
        gpus=row.whole("num_gpu"),
        tenant=row.text("qos"),
        gpu_types=tuple(kind for kind in row.text("gpu_spec").split("|") if kind),
        gpu_share=row.number("gpu_milli", least=0, most=1000) / 1000.0,
        cpus=ceil(row.count("cpu_milli") / 1000.0) if row.optional("cpu_milli") else 0,
        memory_bytes=row.whole("memory_mib", most=MAX_MIB) * MIB
        if row.optional("memory_mib")
        else 0,
    )


_GAVEL_COLUMNS = (
    "job type",
    "command",
    "working dir",
    "steps arg",
    "needs data dir",
    "total steps",
    "GPUs",
)

SHOCKWAVE = JobFormat(
    name="shockwave",
    columns=(*_GAVEL_COLUMNS, "mode", "priority", "SLO", "duration", "arrival"),
    gpus="GPUs",
    submit="arrival",
    read=_shockwave,
)

GAVEL = JobFormat(
    name="gavel",
    columns=(*_GAVEL_COLUMNS, "priority", "SLO", "arrival"),
    gpus="GPUs",
    submit="arrival",
    read=_gavel,
)

HEADERLESS = (GAVEL, SHOCKWAVE)
"""Tab separated; recognized by how many columns they have."""

WITH_HEADER = (
    JobFormat(
        name="aryl",
        columns=("submit_s", "duration_s", "gpus"),
        gpus="gpus",
        submit="submit_s",
        types="gpu_types",
        read=lambda row, _: read_own(row),
        may_have=frozenset(OWN_COLUMNS),
    ),
    JobFormat(
        name="elasticflow-traces",
        columns=(
            "job_id",
            "submission_time",
            "num_iteration",
            "model_name",
            "deadline",
            "batch_size",
            "num_gpu",
            "duration",
        ),
        gpus="num_gpu",
        submit="submission_time",
        read=_elasticflow,
    ),
    JobFormat(
        name="elasticflow-traces, cut",
        columns=("submission_time", "num_gpu", "duration"),
        gpus="num_gpu",
        submit="submission_time",
        read=_elasticflow_cut,
        is_whole_header=True,
    ),
    JobFormat(
        name="elasticflow",
        columns=(
            "job_id",
            "submit_time",
            "iteration",
            "model_name",
            "ddl",
            "batch_size",
            "num_gpu",
            "duration",
        ),
        gpus="num_gpu",
        submit="submit_time",
        read=_elasticflow_pollux,
    ),
    JobFormat(
        name="chronus",
        columns=(
            "job_id",
            "user",
            "num_gpu",
            "submit_time",
            "iterations",
            "model_name",
            "duration",
            "expect_time_list",
            "job_type",
        ),
        gpus="num_gpu",
        submit="submit_time",
        read=_chronus,
        is_sorted=False,
    ),
    JobFormat(
        name="tiresias",
        columns=("job_id", "num_gpu", "submit_time", "iterations", "model_name", "duration"),
        gpus="num_gpu",
        submit="submit_time",
        read=_tiresias,
        has_not=frozenset({"user", "expect_time_list", "expect_value_list", "job_type"}),
    ),
    JobFormat(
        name="philly",
        columns=("timestamp", "duration", "num_gpus", "cluster"),
        gpus="num_gpus",
        submit="timestamp",
        read=_philly,
    ),
    JobFormat(
        name="helios",
        columns=(
            "job_id",
            "user",
            "vc",
            "gpu_num",
            "cpu_num",
            "state",
            "submit_time",
            "start_time",
            "duration",
        ),
        gpus="gpu_num",
        submit="submit_time",
        read=_helios,
    ),
    JobFormat(
        name="openb",
        columns=(
            "name",
            "num_gpu",
            "gpu_milli",
            "gpu_spec",
            "qos",
            "creation_time",
            "deletion_time",
            "scheduled_time",
        ),
        gpus="num_gpu",
        submit="creation_time",
        types="gpu_spec",
        read=_openb,
    ),
)
"""In order of recognition: the one with more columns before the one that it contains."""
