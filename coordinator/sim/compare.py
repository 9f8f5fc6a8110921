"""Many runs: policies x seeds, over cores or over a cluster of an existing engine.

Must not know options or pages. Each run is a pure function of its task, so where it runs cannot
change a figure; joblib carries tasks out (docs/decisions/0006-dependencies.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from msgspec import Struct, structs

from common.clock import SystemClock
from common.errors import ConfigError
from coordinator.engine.accounting import plain
from coordinator.sim.inputs import Shares, read_workload
from coordinator.sim.run import Run, RunResult, play
from coordinator.sim.stage import RunOptions
from coordinator.sim.statistics import Estimate, estimate
from coordinator.workloads.formats import read_all_curves
from coordinator.workloads.records import Workload

LOCAL_BACKENDS = ("loky", "multiprocessing", "threading", "sequential")
BACKENDS = (*LOCAL_BACKENDS, "dask", "ray")


class Task(Struct, frozen=True, kw_only=True):
    """One run, small enough to send anywhere; files are read where it runs.

    seed: None for a named trace that has its seed in its name.
    curves: directory of measured scaling curves, for `RuntimeModel.TABLE`.
    progress: file that says how far the run is, as `jobs events`; None keeps quiet.
    keeps_jobs: whether its jobs and its samples come back, or its figures only.
    """

    workload: str
    options: RunOptions
    seed: int | None = 1
    cluster: str | None = None
    load: str | None = None
    shares: Shares = Shares()
    curves: str | None = None
    progress: str | None = None
    keeps_jobs: bool = False

    def read(self) -> Workload:
        """Its workload.

        Raises:
            ConfigError: as `read_workload`.
        """
        return read_workload(
            self.workload,
            seed=self.seed,
            cluster=self.cluster,
            load=self.load,
            shares=self.shares,
        )


def play_task(task: Task) -> Run:
    """Carry out a task.

    Raises:
        ConfigError: as `read_workload` and `play`.
    """
    options = task.options
    if task.curves is not None:
        options = structs.replace(options, curves=read_all_curves(Path(task.curves)))
    told = None if task.progress is None else _teller(Path(task.progress))
    run = play(task.read(), options, clock=SystemClock(), told=told)
    return run if task.keeps_jobs else structs.replace(run, rows=(), samples=())


def _teller(path: Path) -> Callable[[int, int], None]:
    def tell(jobs: int, events: int) -> None:
        path.write_text(f"{jobs} {events}")

    return tell


def compare(tasks: Sequence[Task], *, cores: int = 1, backend: str = "loky") -> Iterator[Run]:
    """Carry out tasks and give their runs back in the order of the tasks, as they come.

    Args:
        cores: how many at a time, where the backend is on this machine.
        backend: one of `BACKENDS`; `dask=ADDRESS` names a scheduler.

    Raises:
        ConfigError: of a task, or a backend that is not known or not installed.
    """
    if backend == "sequential" or (len(tasks) == 1 and backend in LOCAL_BACKENDS):
        yield from map(play_task, tasks)
        return
    joblib: Any = import_module("joblib")  # it has no types
    with _configured(joblib, backend, cores):
        yield from joblib.Parallel(return_as="generator")(
            joblib.delayed(play_task)(task) for task in tasks
        )


@contextlib.contextmanager
def _configured(joblib: Any, backend: str, cores: int) -> Generator[None]:
    name, _, address = backend.partition("=")
    if name not in BACKENDS:
        raise ConfigError(f"backend: {name!r} is not one of {', '.join(BACKENDS)}")
    extra: dict[str, Any] = {}
    try:
        if name == "dask":
            import_module("distributed")
            extra = {"scheduler_host": address} if address else {}
        elif name == "ray":
            import_module("ray.util.joblib").register_ray()
    except ImportError as error:
        raise ConfigError(f"backend {name}: {error.name} is not installed here") from None
    cores = cores if name in LOCAL_BACKENDS else -1  # elsewhere its engine knows how many
    with joblib.parallel_config(backend=name, n_jobs=cores, **extra):
        yield


# --- over seeds ---------------------------------------------------------------------------------


class Means(Struct, frozen=True, kw_only=True):
    """One policy over its seeds: each figure of `RunResult` by its dotted name."""

    policy: str
    seeds: int
    figures: dict[str, Estimate]


def means(results: Sequence[RunResult]) -> tuple[Means, ...]:
    """The policies in the order in which they come, each averaged over its seeds."""
    by_policy: dict[str, list[dict[str, float]]] = {}
    for result in results:
        by_policy.setdefault(result.policy, []).append(flat(result))
    return tuple(
        Means(
            policy=policy,
            seeds=len(rows),
            figures={name: estimate([row[name] for row in rows]) for name in rows[0]},
        )
        for policy, rows in by_policy.items()
    )


def flat(result: RunResult) -> dict[str, float]:
    """The figures of a run by dotted name: `jct_s.mean`."""
    figures: dict[str, float] = {}
    for name, value in plain(result).items():
        if isinstance(value, dict):
            for part, number in cast("dict[str, float]", value).items():
                figures[f"{name}.{part}"] = number
        elif name not in {"policy", "seed"}:
            figures[name] = float(cast("float", value))
    return figures
