"""Records of traces: jobs, load over time, nodes, speed-ups."""

from __future__ import annotations

from bisect import bisect_left
from enum import StrEnum
from math import isfinite
from typing import Annotated

from msgspec import Meta, Struct

from common.model import MAX_INT, MAX_WORKERS, JobId, JobSpec, NonNegativeInt, Pool, PositiveInt

MIB = 2**20
MAX_MIB = MAX_INT // MIB
MAX_NODES = 100_000
"""The most nodes of a cluster; above any fleet."""


class TraceJob(Struct, frozen=True, kw_only=True):
    """One job as a trace records it; unknown values are None or empty.

    An existing record is valid: sizes are positive, times finite and not negative.

    job_id: unique in its trace.
    submit_s: on the trace's own clock.
    duration_s: running time on `gpus` GPUs; `gpus` is also the requested number.
    tenant, user: the job's owner; many traces have only a virtual cluster (the tenant).
    name, model: the program, where a trace has it; history is kept by name.
    gpus_per_worker, min_workers, max_workers: the elastic range; None where the trace has none.
    gpu_types: the types it accepts; empty: not recorded.
    deadline_s: after its submission.
    estimate_s: running time on `gpus` that its user or a profiler expected, right or wrong.
    iterations, batch_size: its work in the unit of scaling curves.
    heterogeneous_speed_ratio: fraction of its full speed in a run that spans two GPU types; 0: it
        cannot span types.
    has_checkpoints: whether it resumes where it was after a preemption.
    gpu_share: requested fraction of each GPU; Aryl gives whole ones.
    app: the group of trials that it belongs to; empty: it stands for itself.
    cpus, memory_bytes: of the whole job; 0: not recorded.
    """

    job_id: str
    submit_s: float
    duration_s: float
    gpus: int
    tenant: str = "trace"
    user: str = "trace"
    name: str = ""
    model: str = ""
    gpus_per_worker: int | None = None
    min_workers: int | None = None
    max_workers: int | None = None
    gpu_types: tuple[str, ...] = ()
    deadline_s: float | None = None
    estimate_s: float | None = None
    iterations: float | None = None
    batch_size: int | None = None
    heterogeneous_speed_ratio: float = 0.0
    has_checkpoints: bool = False
    gpu_share: float = 1.0
    priority: int = 0
    app: str = ""
    cpus: int = 0
    memory_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse impossible values; readers have named line and column before."""
        times = (self.submit_s, self.duration_s, self.deadline_s or 0.0, self.estimate_s or 0.0)
        if not isfinite(sum(times)) or min(times[1:]) < 0:
            raise ValueError(f"job {self.job_id}: times must be finite and not negative: {times}")
        if self.gpus < 1:
            raise ValueError(f"job {self.job_id}: gpus: {self.gpus}, expected at least 1")
        if self.min_workers is not None and not 1 <= self.min_workers <= (self.max_workers or 0):
            raise ValueError(
                f"job {self.job_id}: workers {self.min_workers}..{self.max_workers} are no range"
            )

    @property
    def gpu_s(self) -> float:
        """GPU-seconds that it held at the width that it asked for."""
        return self.gpus * self.duration_s

    @property
    def is_elastic(self) -> bool:
        """Whether it is known to run with more workers than its fewest."""
        return self.min_workers is not None and self.min_workers < (self.max_workers or 0)


class JobTrace(Struct, frozen=True, kw_only=True):
    """The jobs of one file in order of submission; ties in the order of the file.

    skipped_zero_gpus, skipped_not_run: rows left out, by their reason.
    gpus_column: that with the GPUs. types_column: that with the GPU types; empty: there is none.
    lines: where each job stood, by its id. put_in_order: rows that stood behind one of a later
        submission, where the format's origin publishes it in order.
    """

    name: str
    format: str
    jobs: tuple[TraceJob, ...]
    skipped_zero_gpus: int = 0
    skipped_not_run: int = 0
    gpus_column: str = ""
    types_column: str = ""
    lines: dict[str, int] = {}
    put_in_order: int = 0


class LoadUnit(StrEnum):
    """The unit of a load series."""

    REQUESTS = "req_per_s"
    """Mean requests per second over each step."""
    BUSY = "busy_ratio"
    """Part of the service's GPUs that serve at least one request."""


class LoadSeries(Struct, frozen=True, kw_only=True):
    """Inference load over time in even steps; value i is the mean over step i.

    start_s: when step 0 begins, on the trace's own clock.
    """

    name: str
    step_s: float
    values: tuple[float, ...]
    unit: LoadUnit = LoadUnit.REQUESTS
    start_s: float = 0.0

    @property
    def length_s(self) -> float:
        """How long the series lasts."""
        return len(self.values) * self.step_s

    def samples(self, *, peak: float | None = None) -> list[tuple[float, float]]:
        """(seconds, load) at the start of each step; the first one at `start_s`.

        peak: the highest value after scaling, for example the nodes of a service; None scales
            nothing.
        """
        factor = 1.0 if peak is None else peak / max(self.values)
        return [
            (self.start_s + index * self.step_s, value * factor)
            for index, value in enumerate(self.values)
        ]


class NodeGroup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes that are alike.

    nodes_per_rack: the size of their racks; None: all in one.
    cpus, memory_bytes: of one node; 0: not recorded.
    """

    count: Annotated[int, Meta(ge=1, le=MAX_NODES)]
    gpus: Annotated[int, Meta(ge=1, le=MAX_WORKERS)]
    gpu_type: Annotated[str, Meta(min_length=1)]
    home_pool: Pool = Pool.TRAINING
    nodes_per_rack: PositiveInt | None = None
    cpus: NonNegativeInt = 0
    memory_bytes: NonNegativeInt = 0


class ScalingCurve(Struct, frozen=True, kw_only=True):
    """Measured iterations per second of one model at one global batch size, by GPUs.

    points: (GPUs, iterations per second), by GPUs; sizes that were not measured are left out.
    """

    model: str
    gpu_type: str
    batch_size: int
    points: tuple[tuple[int, float], ...]

    def iterations_per_s(self, gpus: int) -> float:
        """Measured, or on the line between its neighbours.

        Raises:
            ValueError: outside of the measured range; nothing is extrapolated.
        """
        sizes = [size for size, _ in self.points]
        if not sizes or not sizes[0] <= gpus <= sizes[-1]:
            measured = f"{sizes[0]}..{sizes[-1]}" if sizes else "nothing"
            raise ValueError(f"{self.model} on {gpus} GPUs: measured {measured}")
        high = bisect_left(sizes, gpus)
        size, rate = self.points[high]
        if size == gpus:
            return rate
        low_size, low_rate = self.points[high - 1]
        return low_rate + (rate - low_rate) * (gpus - low_size) / (size - low_size)


class SpeedUp(Struct, frozen=True, kw_only=True):
    """How fast a job goes by its worker count, in workers' worth of work per second.

    rates: the rate at `min_workers`, one more, and so on. Linear is rate(w) == w.
    """

    min_workers: int
    rates: tuple[float, ...]

    def rate(self, workers: int, *, multiplier: int = 1) -> float:
        """Work per second with that many workers; nothing below the gang.

        multiplier: workers on this GPU type that stand for one of the reference type
            (`GpuRequest.worker_multiplier`); the rate is then in work of these smaller workers.
        """
        whole, part = divmod(workers, multiplier)
        at = whole - self.min_workers
        if at < 0:
            return 0.0
        low = self.rates[min(at, len(self.rates) - 1)]
        high = self.rates[min(at + 1, len(self.rates) - 1)]
        return multiplier * (low + (high - low) * part / multiplier)


class WorkloadJob(Struct, frozen=True, kw_only=True):
    """One job as a simulator plays it.

    work_s: true work in worker-seconds: with `w` workers it is done in work_s / speedup.rate(w).
    heterogeneous_speed_ratio: as `TraceJob`.
    """

    at_s: float
    job_id: JobId
    spec: JobSpec
    work_s: float
    speedup: SpeedUp
    tenant: str
    user: str
    heterogeneous_speed_ratio: float = 0.0


class Source(Struct, frozen=True, kw_only=True):
    """The file that a workload's jobs came from; nothing is set where they were generated.

    column: that with the GPUs. types_column: that with the GPU types; empty: there is none.
    lines: where each job stood, by its id.
    skipped_zero_gpus, skipped_not_run: rows left out, by their reason. put_in_order: rows that
        stood behind a later one.
    """

    file: str = ""
    column: str = ""
    types_column: str = ""
    lines: dict[str, int] = {}
    skipped_zero_gpus: int = 0
    skipped_not_run: int = 0
    put_in_order: int = 0

    def place(self, job_id: str, *, is_of_type: bool = False) -> str:
        """The beginning of an error about a job's size, or its GPU types: file, line and column;
        else empty.
        """
        line = self.lines.get(job_id)
        column = self.types_column if is_of_type and self.types_column else self.column
        return f"{self.file}: line {line}: column {column}: " if line else ""


class Workload(Struct, frozen=True, kw_only=True):
    """A named trace with all that its run needs.

    length_s: the span of submissions and of utilization figures; jobs may end later.
    pass_period_s: when set, scheduling passes happen at its multiples only, as in the paper's
        periodic scheduler; None: whenever something changed.
    source: the file of the jobs, for errors and for skipped rows.
    initial_jobs: ids of jobs that represent work from before the trace, and so are no part of a
        day's arrivals; a generator knows them, a file does not.
    """

    name: str
    jobs: tuple[TraceJob, ...]
    loads: tuple[LoadSeries, ...]
    nodes: tuple[NodeGroup, ...]
    length_s: float
    pass_period_s: float | None = None
    source: Source = Source()
    initial_jobs: frozenset[str] = frozenset()
