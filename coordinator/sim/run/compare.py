"""Many runs: policies x seeds, over cores or over a cluster of an existing execution engine.

Each run is a pure function of its task, so where it runs cannot change a figure; joblib carries
tasks out (docs/decisions/0006-dependencies.md).
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
from coordinator import plugins
from coordinator.engine.state.accounting import plain
from coordinator.policies.knobs import idle
from coordinator.policies.names import YARDSTICK
from coordinator.policies.registry import policy as find_policy
from coordinator.sim.inputs.inputs import Shares, read_workload
from coordinator.sim.inputs.loads import Loads
from coordinator.sim.report.statistics import Estimate, estimate
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import Run, RunResult, play
from coordinator.sim.run.stall_detection import UnfinishedError
from coordinator.workloads.formats import read_all_curves
from coordinator.workloads.paper import PaperParameters
from coordinator.workloads.paper_runs import find_scene
from coordinator.workloads.records import Workload

LOCAL_BACKENDS = ("loky", "multiprocessing", "threading", "sequential")
BACKENDS = (*LOCAL_BACKENDS, "dask", "ray")
ALL_AT_ONCE = ("multiprocessing", "ray")
"""Backends that give nothing back before the last run has ended."""
KNOB = "policy."
"""The prefix of the key of a swept knob."""

LEAST_GAP = 1e-9
"""As a fraction of its own mean; a smaller part of the way from sjf to the bound is rounding."""

INSTALLS = {"dask": "'dask[distributed]'", "ray": "'ray[default]'"}
"""The package that provides a backend outside joblib."""


class Task(Struct, frozen=True, kw_only=True):
    """One run, small enough to send anywhere; files are read where it runs.

    seed: None for a named trace that has its seed in its name.
    scenario: of the paper, by name; changes the workload only: `Scene` names its policy.
    parameters: of the generator, where other than the fitted.
    skip_zero_gpus: rows of a trace without a GPU are left out; else they are an error.
    swept: the changes of a sweep, as a person wrote them; shown with the results.
    curves: directory of measured scaling curves, for `RuntimeModel.TABLE`.
    progress: file with the run's progress, as `jobs events`; None writes none.
    keeps_jobs: whether its jobs and its samples come back, or its figures only.
    """

    workload: str
    options: RunOptions
    seed: int | None = 1
    cluster: str | None = None
    load: Loads = None
    shares: Shares = Shares()
    scenario: str | None = None
    parameters: PaperParameters | None = None
    skip_zero_gpus: bool = False
    swept: dict[str, str] = {}
    curves: str | None = None
    progress: str | None = None
    keeps_jobs: bool = False

    def read(self) -> Workload:
        """Its workload.

        Raises:
            ConfigError: as `read_workload`, `find_scene` and `check_shares`, or a workload that
                the scenario cannot be made of.
        """
        self.check_shares()
        found = read_workload(
            self.workload,
            seed=self.seed,
            cluster=self.cluster,
            load=self.load,
            shares=self.shares,
            parameters=self.parameters,
            skip_zero_gpus=self.skip_zero_gpus,
        )
        if self.scenario is None:
            return found
        try:
            return find_scene(self.scenario).of(
                found, self.options.seed, draws_ranges=self.shares.elastic is None
            )
        except ValueError as error:
            raise ConfigError(f"scenario {self.scenario}: {error}") from None

    def check_shares(self) -> None:
        """Look that every share that was asked for is one of the jobs as they are played.

        Raises:
            ConfigError: the scenario sets that share itself, so that its jobs would not be those
                that were asked for, and not those of its name either.
        """
        if self.scenario is None:
            return
        given = {
            "elastic": self.shares.elastic,
            "fungible": self.shares.fungible,
            "checkpoint-share": self.shares.checkpoint,
        }
        for option in find_scene(self.scenario).sets:
            if given[option] is not None:
                raise ConfigError(
                    f"{option}: {given[option]:g} cannot be given, as scenario {self.scenario} "
                    f"sets this share itself; leave --{option} or the scenario out"
                )


def play_task(task: Task) -> Run:
    """Carry out a task.

    Raises:
        ConfigError: as `read_workload` and `play`.
    """
    plugins.load()  # where it runs may be another process, or another machine
    options = task.options
    if task.curves is not None:
        options = structs.replace(options, curves=read_all_curves(Path(task.curves)))
    told = None if task.progress is None else teller(Path(task.progress))
    run = play(task.read(), options, clock=SystemClock(), told=told)
    result = structs.replace(run.result, scenario=task.scenario or "", swept=task.swept)
    if task.keeps_jobs:
        return structs.replace(run, result=result)
    return structs.replace(run, result=result, rows=(), samples=())


def teller(path: Path) -> Callable[[int, int], None]:
    """Says how far a run is into a file of its own, as `jobs events`."""
    beside = path.with_name(f"{path.name}.new")

    def tell(jobs: int, events: int) -> None:
        # A reader meets this content or the last one, never an empty file: bars go forward.
        beside.write_text(f"{jobs} {events}")
        beside.replace(path)

    return tell


def _attempt(task: Task) -> Run | str:
    """A run, or why it never came to its end."""
    try:
        return play_task(task)
    except UnfinishedError as error:
        return str(error)


def compare(
    tasks: Sequence[Task],
    *,
    cores: int = 1,
    backend: str = "loky",
    unfinished: Callable[[str], None] | None = None,
) -> Iterator[Run]:
    """Carry out tasks and yield their runs in the order of the tasks, as they finish.

    Args:
        cores: how many at a time, where the backend is on this machine.
        backend: one of `BACKENDS`; dask is `dask=ADDRESS` of its scheduler.
        unfinished: called with a run that does not come to its end, which is then left out.

    Raises:
        ConfigError: of a task, or a backend that is not known or not installed.
        UnfinishedError: of a run that does not come to its end, without `unfinished`.
    """
    for found in _results(tasks, cores, backend):
        if isinstance(found, Run):
            yield found
        elif unfinished is None:
            raise UnfinishedError(found)
        else:
            unfinished(found)


def _results(tasks: Sequence[Task], cores: int, backend: str) -> Iterator[Run | str]:
    if backend == "sequential" or (len(tasks) == 1 and backend in LOCAL_BACKENDS):
        yield from map(_attempt, tasks)
        return
    joblib: Any = import_module("joblib")  # it has no types
    return_as = "list" if backend in ALL_AT_ONCE else "generator"
    with _configured(joblib, backend, cores):
        yield from joblib.Parallel(return_as=return_as)(
            joblib.delayed(_attempt)(task) for task in tasks
        )


@contextlib.contextmanager
def _configured(joblib: Any, backend: str, cores: int) -> Generator[None]:
    name, _, address = backend.partition("=")
    if name not in BACKENDS:
        raise ConfigError(f"backend: {name!r} is not one of {', '.join(BACKENDS)}")
    extra: dict[str, Any] = {}
    try:
        if name == "dask":
            if not address:
                raise ConfigError("backend dask: name its scheduler, as in dask=tcp://HOST:8786")
            import_module("distributed")
            extra = {"scheduler_host": address}
        elif name == "ray":
            import_module("ray.util.joblib").register_ray()
    except ImportError as error:
        raise ConfigError(
            f"backend {name}: {error.name} is not installed here; pip install {INSTALLS[name]}"
        ) from None
    cores = cores if name in LOCAL_BACKENDS else -1  # elsewhere its engine knows how many
    try:
        config = joblib.parallel_config(backend=name, n_jobs=cores, **extra)
    except OSError as error:
        raise ConfigError(f"backend {backend}: {error}") from None
    with config:
        try:
            yield
        finally:
            if name == "loky":
                # It keeps its processes for the next caller, who would get the old environment and
                # installed policies; and they would never end.
                loky: Any = import_module("joblib.externals.loky")
                loky.get_reusable_executor(reuse=True).shutdown(wait=True)


# --- beside a bound -----------------------------------------------------------------------------


def with_gaps(runs: Sequence[Run]) -> list[Run]:
    """The same runs, each with its part of the way from `sjf` to the bound, in mean JCT.

    0 is no better than sjf, 1 is at the bound, below 0 is worse than sjf. sjf is that of the same
    scenario, seed and swept options; a knob changes no jobs, so what has one turned is measured
    from sjf without, or with its own values swept. There is none where either run did not finish
    all jobs: their means and bounds are of different ones.
    """
    yardsticks = {
        _same_jobs(run.result): run.result.jct_s.mean
        for run in runs
        if run.result.policy == YARDSTICK and _finished_all(run.result) and _is_own(run.result)
    }
    return [_with_gap(run, yardsticks.get(_same_jobs(run.result))) for run in runs]


def _same_jobs(result: RunResult) -> tuple[object, ...]:
    swept = tuple((key, value) for key, value in result.swept.items() if not _is_knob(key))
    return result.scenario, result.seed, swept


def _finished_all(result: RunResult) -> bool:
    return result.jobs_rejected == result.jobs_failed == 0


def _is_knob(key: str) -> bool:
    return key.startswith(KNOB)


def _is_own(result: RunResult) -> bool:
    """True if all swept knobs of a run have their policy's own values."""
    turned = [f"{k.removeprefix(KNOB)}={v}" for k, v in result.swept.items() if _is_knob(k)]
    name = ":".join((result.policy, *turned))
    return find_policy(name, is_whole=False).knobs == find_policy(result.policy).knobs


def _with_gap(run: Run, sjf_s: float | None) -> Run:
    result = run.result
    if sjf_s is None or not _finished_all(result):
        return run
    if sjf_s - result.jct_bound_s <= LEAST_GAP * sjf_s:
        return run
    closed = (sjf_s - result.jct_s.mean) / (sjf_s - result.jct_bound_s)
    return structs.replace(run, result=structs.replace(result, gap_closed_ratio=closed))


# --- over seeds ---------------------------------------------------------------------------------


class Means(Struct, frozen=True, kw_only=True):
    """The means of one task over its seeds: each figure of `RunResult` by its dotted name."""

    policy: str
    seeds: int
    scenario: str = ""
    swept: dict[str, str] = {}
    figures: dict[str, Estimate]


TOLD = {"policy", "seed", "scenario", "swept"}
"""The options of a result."""


def label(row: RunResult | Means) -> str:
    """The options, seeds aside, in one line: `basic sjf elastic=0.2`.

    A scenario under its own policy is shown by its name alone.
    """
    swept = (f"{key}={value}" for key, value in row.swept.items())
    return " ".join(filter(None, (row.scenario, "" if plays_own(row) else row.policy, *swept)))


def plays_own(row: RunResult | Means) -> bool:
    """Whether a row is of its scenario's own policy, less what a sweep replaced or left idle."""
    if not row.scenario:
        return False
    own, told = find_scene(row.scenario).policy.split(":"), row.policy.split(":")
    turned = {k.removeprefix(KNOB): v for k, v in row.swept.items() if _is_knob(k)}
    if not turned or own[0] != told[0] or not set(told) <= set(own):
        return own == told
    name = ":".join((row.policy, *(f"{knob}={value}" for knob, value in turned.items())))
    unused = idle(find_policy(name, is_whole=False).knobs)
    gone = [text.partition("=")[0] for text in own if text not in told]
    return all(knob in turned or knob in unused for knob in gone)


def means(results: Sequence[RunResult]) -> tuple[Means, ...]:
    """The tasks in order, each averaged over its seeds."""
    rows: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[dict[str, float]]] = {}
    for result in results:
        key = (result.scenario, result.policy, tuple(result.swept.items()))
        rows.setdefault(key, []).append(flat(result))
    return tuple(
        Means(
            policy=policy,
            scenario=scenario,
            swept=dict(swept),
            seeds=len(found),
            figures={
                name: estimate([row[name] for row in found])
                for name in found[0]
                if all(name in row for row in found)
            },
        )
        for (scenario, policy, swept), found in rows.items()
    )


def flat(result: RunResult) -> dict[str, float]:
    """The figures of a run by dotted name: `jct_s.mean`; without missing ones, and without lists,
    whose parts differ from run to run.
    """
    return dict(_flat("", plain(result)))


def _flat(prefix: str, values: dict[str, object]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if not prefix and name in TOLD:
            continue
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", cast("dict[str, object]", value))
        elif value is not None and not isinstance(value, list | tuple):
            yield f"{prefix}{name}", float(cast("float", value))
