"""Job and load traces as typed values: the packaged slices, or a published trace by path.

A trace row becomes a `JobSpec` and a time; nothing is sent. `data/ORIGIN.md` states where the
slices come from and by which rules they were cut.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from msgspec import Struct, structs

from common.errors import ConfigError
from common.model import CheckpointSpec, JobId, JobSpec, WorkerRange
from common.profile import JobProfile
from coordinator.workloads import formats
from coordinator.workloads.formats import TRACES_VARIABLE, find, parse_jobs
from coordinator.workloads.load_formats import parse_loads, read_loads
from coordinator.workloads.records import LoadSeries, TraceJob, WorkloadJob
from coordinator.workloads.shaping import linear

__all__ = ["TRACES_VARIABLE", "find"]  # for the demo's other modules, beside what is below

JOB_SLICE = "elasticflow_itp_slice.csv"
LOAD_SLICE = "servegen_m_small_day.csv"

LOAD_FACTOR = 6.0
"""The load runs this much faster than the jobs. At speed 120 a day passes in two minutes, so that
one fall, one trough and one rise are seen while jobs of hours last tens of seconds."""


class JobOptions(Struct, frozen=True, kw_only=True):
    """How trace rows become the demo's jobs.

    name_prefix: the start of the jobs' names; a token.
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
    """Jobs in order of submission: the packaged slice, or a file of any format we read.

    Times count from the first job, or stay on the file's own clock without `is_shifted`. Rows
    without a GPU are no load for this cluster and are left out.

    Raises:
        ConfigError: unreadable, unknown columns or a bad value; names file, line and column.
    """
    if path is None:
        trace = parse_jobs(JOB_SLICE, _packaged(JOB_SLICE), skip_zero_gpus=True)
    else:
        trace = formats.read_jobs(path, skip_zero_gpus=True)
    return from_first(trace.jobs) if is_shifted else trace.jobs


def read_load(path: Path | None = None, *, model: str = "m-small") -> LoadSeries:
    """A load series: the packaged day, a file of one series, or one model of an aggregate.

    Raises:
        ConfigError: as `read_jobs`; also uneven steps, and no load at all.
    """
    loads = read_loads(path) if path else parse_loads(LOAD_SLICE, _packaged(LOAD_SLICE))
    own = Path(path or LOAD_SLICE).name.partition(".")[0]
    series = loads.get(model) or loads.get(own)
    if series is None:
        raise ConfigError(f"{path}: no load series of model {model}: {', '.join(loads)}")
    return series


def ratios(load: LoadSeries) -> tuple[float, ...]:
    """Each step's load over the highest one."""
    peak = max(load.values)
    return tuple(value / peak for value in load.values)


def _packaged(name: str) -> str:
    return resources.files("coordinator.demo").joinpath("data", name).read_text("utf-8")


def from_first(jobs: Sequence[TraceJob]) -> tuple[TraceJob, ...]:
    """Sorted by submission, with the first one at 0."""
    ordered = sorted(jobs, key=lambda job: (job.submit_s, job.gpus, job.duration_s))
    first_s = ordered[0].submit_s if ordered else 0.0
    return tuple(structs.replace(job, submit_s=job.submit_s - first_s) for job in ordered)


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


# --- from rows to submissions -------------------------------------------------------------------


def shape(
    gpus: int, *, is_elastic: bool, most_gpus: int, gpus_per_node: int
) -> tuple[int, WorkerRange]:
    """GPUs per worker, and number of workers, for a job that had `gpus`.

    Sizes are rounded up to a power of two and cut to `most_gpus`. An inelastic job is one worker,
    or whole nodes. An elastic one is two workers of half its size that may become four: the range
    is ours, as no public trace has one.
    """
    size = 1
    while size < gpus and size * 2 <= most_gpus:
        size *= 2
    wanted = size // 2 if is_elastic and size > 1 else size
    per_worker = min(wanted, gpus_per_node)
    count = size // per_worker
    return per_worker, WorkerRange(min=count, max=count * 2 if is_elastic else count)


TENANTS = ("research", "product", "platform")
"""The owners of the jobs, in turns; none has a guarantee."""

TRIALS = 4
"""The most trials of one search."""
TRIAL_GAP_S = 60.0
"""Trace seconds between two trials of one search, at most."""

DEADLINE_RATIOS = (1.25, 1.5, 2.0)
"""Deadlines over running times with the fewest workers, in turns. The values are ours, within the
range that ElasticFlow (ASPLOS'23) and Chronus (SoCC'21) generate."""
DEADLINE_START_S = 10.0
"""Real seconds that a deadline leaves for the way to the first step, which no speed scales."""


def searches(jobs: Sequence[TraceJob]) -> list[list[TraceJob]]:
    """Jobs that belong together: trials of one search, or one job by itself.

    Single GPUs requested within a minute of each other, one after the other, count as one
    hyper-parameter search. Traces do not mark searches; this rule is ours.
    """
    groups: list[list[TraceJob]] = []
    for job in jobs:
        last = groups[-1] if groups else []
        is_next = (
            job.gpus == 1
            and 0 < len(last) < TRIALS
            and last[-1].gpus == 1
            and job.submit_s - last[-1].submit_s <= TRIAL_GAP_S
        )
        if is_next:
            last.append(job)
        else:
            groups.append([job])
    return groups


def submissions(jobs: Sequence[TraceJob], options: JobOptions) -> tuple[WorkloadJob, ...]:
    """What to submit and when: every other job of two GPUs and more is elastic.

    A search is an app, and every other job that stands for itself has a deadline. Each search and
    each job with a deadline is the next tenant's. No running time is declared: the cell has to
    learn it from history and progress, as it must with people's jobs.
    """
    made: list[WorkloadJob] = []
    larger = alone = 0
    for turn, group in enumerate(searches(jobs)):
        app = f"{options.name_prefix}-search-{turn:04d}" if len(group) > 1 else None
        due = None
        if app is None:
            due = DEADLINE_RATIOS[alone // 2 % len(DEADLINE_RATIOS)] if alone % 2 == 0 else None
            alone += 1
        for job in group:
            is_elastic = job.gpus >= 2 and larger % 2 == 0
            larger += job.gpus >= 2
            spec = job_spec(job, len(made) + 1, options, is_elastic=is_elastic)
            work_s = job.duration_s / options.speed
            deadline_s = None if due is None else DEADLINE_START_S + due * work_s
            made.append(
                WorkloadJob(
                    at_s=job.submit_s / options.speed,
                    job_id=JobId(spec.name),
                    spec=structs.replace(spec, app=app, deadline_s=deadline_s),
                    work_s=work_s * spec.workers.min,
                    speedup=linear(spec.workers),
                    tenant=TENANTS[turn % len(TENANTS)],
                    user=job.user,
                )
            )
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
        # A real model's profile would be wrong: the demo's worker computes like none of them.
        profile=JobProfile(model=job.model),
    )
