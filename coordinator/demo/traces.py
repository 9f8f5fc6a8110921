"""Job and load traces as typed values: the packaged slices, or a published trace by path.

Must not know processes or the wire: a trace row becomes a `JobSpec` and a time, nothing is sent.
Where the slices come from and by what rules they were cut: `data/ORIGIN.md`.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path

from msgspec import Struct

from common.errors import ConfigError
from common.model import CheckpointSpec, JobSpec, WorkerRange

JOB_SLICE = "elasticflow_itp_slice.csv"
LOAD_SLICE = "servegen_m_small_day.csv"
TRACES_VARIABLE = "ARYL_TRACES"

LOAD_FACTOR = 6.0
"""The load runs this much faster than the jobs: at speed 120 a day passes in two minutes, so that
one fall, one trough and one rise are seen while jobs of hours last tens of seconds."""

Row = dict[str, str]


class TraceJob(Struct, frozen=True, kw_only=True):
    """One job as it was: submitted `submit_s` after the first, ran `duration_s` on `gpus`."""

    submit_s: float
    duration_s: float
    gpus: int


class LoadSample(Struct, frozen=True):
    """The mean request rate of one step that begins at `t_s`."""

    t_s: float
    req_per_s: float


class LoadSlice(Struct, frozen=True, kw_only=True):
    """A request rate over time in even steps, as published."""

    samples: tuple[LoadSample, ...]
    step_s: float

    @property
    def length_s(self) -> float:
        """How long the slice lasts."""
        return len(self.samples) * self.step_s

    def ratios(self) -> tuple[float, ...]:
        """Each step's rate over the highest one."""
        peak = max(sample.req_per_s for sample in self.samples)
        return tuple(sample.req_per_s / peak for sample in self.samples)


class Submission(Struct, frozen=True, kw_only=True):
    """A job to submit `at_s` real seconds after the demo's start."""

    at_s: float
    spec: JobSpec


class JobOptions(Struct, frozen=True, kw_only=True):
    """How trace rows become the demo's jobs.

    name_prefix: what the jobs' names begin with; a token.
    speed: trace seconds per second, for submissions and durations alike.
    checkpoint_root: a directory that all nodes see; each job saves in one of its own below.
    most_gpus: larger jobs are cut to this, the largest that the demo's cluster starts soon.
    gpus_per_node: a worker never spans nodes.
    grace_s, save_s, save_every_s: real seconds, never scaled: they are the machine's own.
    """

    speed: float
    checkpoint_root: Path
    most_gpus: int = 16
    gpus_per_node: int = 8
    grace_s: float = 3.0
    save_s: float = 0.5
    save_every_s: float = 15.0
    busy_ratio: float = 0.93
    name_prefix: str = "itp"


# --- reading ------------------------------------------------------------------------------------


def read_jobs(path: Path | None = None, *, is_shifted: bool = True) -> tuple[TraceJob, ...]:
    """Jobs in order of submission: the packaged slice, or a file.

    Times count from the first job, or stay on the file's own clock without `is_shifted`.

    Files are recognized by their header: our slice, Philly as cut by ElasticFlow, the clusters of
    elasticflow-traces; `.gz` is unpacked.

    Raises:
        ConfigError: unreadable, unknown columns or a bad value; names file, line and column.
    """
    table = _Table.open(path, JOB_SLICE)
    columns = set(table.columns)
    if {"submit_s", "duration_s", "gpus"} <= columns:
        names = ("submit_s", "duration_s", "gpus")
        convert = _number
    elif {"timestamp", "duration", "num_gpus"} <= columns:
        names = ("timestamp", "duration", "num_gpus")
        convert = _instant
    elif {"submission_time", "duration", "num_gpu"} <= columns:
        names = ("submission_time", "duration", "num_gpu")
        convert = _number
    else:
        raise ConfigError(
            f"{table.name}: line 1: columns {', '.join(table.columns)}; expected submit_s, "
            "duration_s, gpus, or a Philly or elasticflow-traces file"
        )
    jobs = [
        TraceJob(
            submit_s=table.value(line, row, names[0], convert, least=None),
            duration_s=table.value(line, row, names[1], _number, least=0.0),
            gpus=int(table.value(line, row, names[2], _whole, least=0.0)),
        )
        for line, row in table.rows
    ]
    # Published traces hold rows without a GPU; they are no load for this cluster.
    jobs = [job for job in jobs if job.gpus > 0]
    return from_first(jobs) if is_shifted else tuple(jobs)


def read_load(path: Path | None = None, *, model: str = "m-small") -> LoadSlice:
    """A load series: the packaged day, or an aggregate of ServeGen, of which one model is taken.

    Raises:
        ConfigError: as `read_jobs`; also uneven steps, and no load at all.
    """
    table = _Table.open(path, LOAD_SLICE)
    if not {"t_s", "req_per_s"} <= set(table.columns):
        raise ConfigError(
            f"{table.name}: line 1: columns {', '.join(table.columns)}; expected t_s, req_per_s"
        )
    samples: list[LoadSample] = []
    for line, row in table.rows:
        if row.get("model", model).rpartition(":")[2] != model:
            continue
        t_s = table.value(line, row, "t_s", _number, least=None)
        req_per_s = table.value(line, row, "req_per_s", _number, least=0.0)
        samples.append(LoadSample(t_s, req_per_s))
        if len(samples) > 2:
            step_s = samples[1].t_s - samples[0].t_s
            if abs(t_s - samples[-2].t_s - step_s) > 1e-6:
                raise ConfigError(
                    f"{table.name}: line {line}: column t_s: {t_s:g}, "
                    f"expected {samples[-2].t_s + step_s:g}: steps must be even"
                )
    if len(samples) < 2 or samples[1].t_s <= samples[0].t_s:
        raise ConfigError(f"{table.name}: no load series of model {model}: {len(samples)} rows")
    if not any(sample.req_per_s for sample in samples):
        raise ConfigError(f"{table.name}: column req_per_s: all zero")
    return LoadSlice(samples=tuple(samples), step_s=samples[1].t_s - samples[0].t_s)


def find(name: str, directory: str | None = None) -> Path:
    """A trace file by path, or by name below `directory` or `$ARYL_TRACES`.

    Raises:
        ConfigError: it is in neither place.
    """
    root = directory or os.environ.get(TRACES_VARIABLE)
    places = [Path(name)] + ([Path(root) / name] if root else [])
    for place in places:
        if place.is_file():
            return place
    hint = "" if root else f"; {TRACES_VARIABLE} may name the directory of traces"
    raise ConfigError(f"trace {name}: no such file: {', '.join(map(str, places))}{hint}")


def from_first(jobs: Sequence[TraceJob]) -> tuple[TraceJob, ...]:
    """Sorted by submission, with the first one at 0."""
    ordered = sorted(jobs, key=lambda job: (job.submit_s, job.gpus, job.duration_s))
    first_s = ordered[0].submit_s if ordered else 0.0
    return tuple(
        TraceJob(submit_s=job.submit_s - first_s, duration_s=job.duration_s, gpus=job.gpus)
        for job in ordered
    )


def select(
    jobs: Sequence[TraceJob],
    *,
    start_s: float = 0.0,
    limit: int | None = None,
    shortest_s: float = 0.0,
    longest_s: float = float("inf"),
    most_gpus: int | None = None,
) -> tuple[TraceJob, ...]:
    """The first `limit` jobs from `start_s` on whose duration and size are within the bounds."""
    fitting = [
        job
        for job in jobs
        if job.submit_s >= start_s
        and shortest_s <= job.duration_s <= longest_s
        and (most_gpus is None or job.gpus <= most_gpus)
    ]
    return from_first(fitting[:limit])


class _Table:
    """A CSV file with a header, and where each of its rows stood."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self._reader = csv.DictReader(io.StringIO(text))
        self.columns = list(self._reader.fieldnames or ())

    @classmethod
    def open(cls, path: Path | None, packaged: str) -> _Table:
        """The file at `path`, or the packaged one."""
        if path is None:
            text = resources.files("coordinator.demo").joinpath("data", packaged).read_text("utf-8")
            return cls(packaged, text)
        try:
            data = path.read_bytes()
            return cls(
                str(path), (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
            )
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from None

    @property
    def rows(self) -> Iterator[tuple[int, Row]]:
        """Each row with its line number."""
        for row in self._reader:
            yield self._reader.line_num, row

    def value(
        self,
        line: int,
        row: Row,
        column: str,
        convert: Callable[[str], float],
        *,
        least: float | None,
    ) -> float:
        """One field, converted and not below `least`."""
        text: str | None = row[column]
        try:
            number = convert(text or "")
        except ValueError:
            raise ConfigError(
                f"{self.name}: line {line}: column {column}: {text!r} is not {_expected(convert)}"
            ) from None
        if least is not None and number < least:
            raise ConfigError(
                f"{self.name}: line {line}: column {column}: {text}, expected at least {least:g}"
            )
        return number


def _number(text: str) -> float:
    number = float(text)
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(text)
    return number


def _whole(text: str) -> float:
    return float(int(text))


def _instant(text: str) -> float:
    """Philly writes local wall time without a zone; only differences are used."""
    return (datetime.fromisoformat(text) - datetime(2017, 1, 1)).total_seconds()  # noqa: DTZ001


def _expected(convert: Callable[[str], float]) -> str:
    if convert is _whole:
        return "a whole number"
    return "a date and time" if convert is _instant else "a number"


# --- from rows to submissions -------------------------------------------------------------------


def shape(
    gpus: int, *, is_elastic: bool, most_gpus: int, gpus_per_node: int
) -> tuple[int, WorkerRange]:
    """GPUs per worker, and how many workers, for a job that had `gpus`.

    Sizes are rounded up to a power of two and cut to `most_gpus`. An inelastic job is one worker,
    or whole nodes. An elastic one is two workers of half its size that may become four: the range
    is ours, as no public trace tells one.
    """
    size = 1
    while size < gpus and size * 2 <= most_gpus:
        size *= 2
    wanted = size // 2 if is_elastic and size > 1 else size
    per_worker = min(wanted, gpus_per_node)
    count = size // per_worker
    return per_worker, WorkerRange(min=count, max=count * 2 if is_elastic else count)


def submissions(jobs: Sequence[TraceJob], options: JobOptions) -> tuple[Submission, ...]:
    """What to submit and when: every other job of two GPUs and more is elastic.

    No running time is declared: the cell has to learn it from history and progress, as it must
    with people's jobs.
    """
    made: list[Submission] = []
    larger = 0
    for number, job in enumerate(jobs, start=1):
        is_elastic = False
        if job.gpus >= 2:
            is_elastic = larger % 2 == 0
            larger += 1
        spec = job_spec(job, number, options, is_elastic=is_elastic)
        made.append(Submission(at_s=job.submit_s / options.speed, spec=spec))
    return tuple(made)


def job_spec(job: TraceJob, number: int, options: JobOptions, *, is_elastic: bool) -> JobSpec:
    """One trace row as a job of the demo's worker."""
    gpus_per_worker, workers = shape(
        job.gpus,
        is_elastic=is_elastic,
        most_gpus=options.most_gpus,
        gpus_per_node=options.gpus_per_node,
    )
    kind = "-elastic" if is_elastic else ""
    name = f"{options.name_prefix}-{number:04d}-{workers.min * gpus_per_worker}g{kind}"
    work_s = job.duration_s / options.speed
    # A hundred steps a job, but neither finer nor coarser than people's steps are.
    step_s = min(max(work_s / 100, 0.05), 0.5)
    command = (
        sys.executable,
        "-I",
        "-S",
        str(Path(__file__).with_name("worker.py")),
        f"--work-s={work_s:.3f}",
        f"--step-s={step_s:.3f}",
        f"--save-s={options.save_s:g}",
        f"--save-every-s={options.save_every_s:g}",
    )
    return JobSpec(
        name=name,
        command=command,
        workers=workers,
        gpus_per_worker=gpus_per_worker,
        env={"ARYL_FAKE_GPU_BUSY_RATIO": f"{options.busy_ratio:g}"},
        checkpoint=CheckpointSpec(
            path=str(options.checkpoint_root / name), grace_s=options.grace_s
        ),
    )
