"""Sweeps: the options of one run with one of them varied, by the key that a person writes.

A key is an option of `aryl simulate` (`elastic`, `cluster`), or a field of a part of the run
(`policy.resize_cost_s`, `workload.load`, `service.headroom_ratio`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct, structs

from common.errors import ConfigError
from common.model import MAX_JOB_S
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from coordinator.policies.policy import plainly
from coordinator.policies.registry import KNOBS, policy
from coordinator.sim.inputs.failure_sources import FailureSource
from coordinator.sim.inputs.inputs import DAY_S, RANGES, parse_crash, read_tenants
from coordinator.sim.inputs.swept_knobs import may_use, refuse, turned, without_idle
from coordinator.sim.run.build import TimesTaken
from coordinator.sim.run.compare import Task
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.formats import TRACES_VARIABLE
from coordinator.workloads.named import seed_of
from coordinator.workloads.paper import PaperParameters
from coordinator.workloads.shaping import RuntimeModel
from coordinator.workloads.table import digits

DEFAULT_SAVE_PERIOD_S = 1800.0
LEAST_SAVE_PERIOD_S = 0.001

MOST_RESTARTS = 1_000_000
"""The most restarts that a job may ask for, see docs/job-contract.md."""

Restarts = Annotated[int, Meta(ge=0, le=MOST_RESTARTS)]

S = TypeVar("S", bound=Struct)

NOT_SWEPT = {
    "policy", "services", "tenants", "name", "mode",
    "load_window_samples", "finished_jobs_kept", "ended_loans_kept", "job_histories_kept",
    "story_lines_kept",
    "waiting_jobs_max",
    "unknown_load_s",
}  # fmt: skip
"""Fields of settings that have an option of their own, that only set how much is kept, or that have
no effect in a simulation, whose loads are all known.
"""


# --- single options -----------------------------------------------------------------------------


def parse_saves(text: str | None) -> tuple[Saves | None, float]:
    """The work that a stop leaves: `trace`, `never`, `on-request`, or a period in seconds.

    Raises:
        ConfigError: any other text.
    """
    match text:
        case None | "trace":
            return None, DEFAULT_SAVE_PERIOD_S
        case "never":
            return Saves.NEVER, DEFAULT_SAVE_PERIOD_S
        case "on-request":
            return Saves.ON_REQUEST, DEFAULT_SAVE_PERIOD_S
        case _:
            try:
                period_s = float(digits(text))
            except ValueError:
                period_s = 0.0
            if not LEAST_SAVE_PERIOD_S <= period_s <= MAX_JOB_S:
                raise ConfigError(
                    f"checkpoints: {text!r}, expected trace, never, on-request or the seconds "
                    f"between two saves, {LEAST_SAVE_PERIOD_S:g} to {MAX_JOB_S:g}"
                )
            return Saves.PERIODIC, period_s


def parse_speedup(text: str) -> tuple[RuntimeModel, str | None]:
    """`linear`, `lossy`, `goodput`, `tuned`, or a directory of measured scaling curves.

    Raises:
        ConfigError: neither, or no such directory, there and below `ARYL_TRACES`.
    """
    named = [str(model) for model in RuntimeModel if model != RuntimeModel.TABLE]
    if text in named:
        return RuntimeModel(text), None
    directory = Path(text)
    if not directory.is_dir():
        root = os.environ.get(TRACES_VARIABLE)
        directory = Path(root, text) if root else directory
    if not directory.is_dir():
        raise ConfigError(
            f"speedup: {text!r}, expected {', '.join(named)} or a directory of scaling curves"
        )
    return RuntimeModel.TABLE, str(directory)


def _number(key: str, text: str, low: float, high: float) -> float:
    try:
        value = float(digits(text))
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise ConfigError(f"{key}: {text!r}, expected a number from {low:g} to {high:g}")
    return value


def _share(name: str) -> Callable[[Task, str, str], Task]:
    def change(task: Task, key: str, text: str) -> Task:
        shares = structs.replace(task.shares, **{name: _number(key, text, 0.0, 1.0)})
        return structs.replace(task, shares=shares)

    return change


def _option(name: str) -> Callable[[Task, str, str], Task]:
    def change(task: Task, key: str, text: str) -> Task:
        value = _number(key, text, *RANGES[key])
        return structs.replace(task, options=structs.replace(task.options, **{name: value}))

    return change


def _field(name: str) -> Callable[[Task, str, str], Task]:
    def change(task: Task, key: str, text: str) -> Task:
        return structs.replace(task, **{name: text})

    return change


def _run_option(name: str, kind: Any, expected: str) -> Callable[[Task, str, str], Task]:
    def change(task: Task, key: str, text: str) -> Task:
        value = _converted(key, text, kind, expected)
        return structs.replace(task, options=structs.replace(task.options, **{name: value}))

    return change


def _converted(key: str, text: str, kind: Any, expected: str) -> Any:
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        raise ConfigError(f"{key}: {text!r}, expected {expected}") from None


def _skips(task: Task, key: str, text: str) -> Task:
    return structs.replace(task, skip_zero_gpus=_converted(key, text, bool, YES_OR_NO))


def _crash(task: Task, key: str, text: str) -> Task:
    options = structs.replace(task.options, crashes=(parse_crash(text),))
    return structs.replace(task, options=options)


def _tenants(task: Task, key: str, text: str) -> Task:
    engine = {**task.options.engine, "tenants": read_tenants(text)}
    return structs.replace(task, options=structs.replace(task.options, engine=engine))


def _workload_name(task: Task, key: str, text: str) -> Task:
    options = structs.replace(task.options, seed=seed_of(text, task.seed))
    return structs.replace(task, workload=text, options=options)


def _speedup(task: Task, key: str, text: str) -> Task:
    model, curves = parse_speedup(text)
    options = structs.replace(task.options, speedup=model)
    return structs.replace(task, options=options, curves=curves)


def _saves(task: Task, key: str, text: str) -> Task:
    saves, period_s = parse_saves(text)
    options = structs.replace(task.options, saves=saves, save_period_s=period_s)
    return structs.replace(task, options=options)


YES_OR_NO = "true or false"
YES_AND_NO = {"true": 1.0, "false": 0.0}
"""Either may be written as a number."""

OPTIONS: dict[str, Callable[[Task, str, str], Task]] = {
    "checkpoint-share": _share("checkpoint"),
    "checkpoints": _saves,
    "cluster": _field("cluster"),
    "coalesce": _option("coalesce_s"),
    "crash": _crash,
    "delays": _run_option("has_delays", bool, YES_OR_NO),
    "elastic": _share("elastic"),
    "failures": _run_option("failures", FailureSource, "none, philly or philly-drawn"),
    "fungible": _share("fungible"),
    "load": _field("load"),
    "loss": _option("loss_ratio"),
    "oracle": _run_option("is_oracle", bool, YES_OR_NO),
    "pass-period": _option("pass_period_s"),
    "prerun": _option("prerun_s"),
    "restarts": _run_option("restarts", Restarts, f"a whole number from 0 to {MOST_RESTARTS}"),
    "skip-zero-gpus": _skips,
    "speedup": _speedup,
    "tenants": _tenants,
    "workload": _workload_name,
}
"""Options of `aryl simulate` that can be swept."""

NAMED = {"cluster", "crash", "load", "speedup", "tenants", "workload"}
"""Those of them whose values are names and shapes, of which two may look like one number."""

DELAY = "delays."
"""The prefix of the key of a step's time."""

BY_THEMSELVES = {
    "policy": "--policy A,B",
    "scenario": "--scenario A,B",
    "seed": "--seeds 1..10",
    "seeds": "--seeds 1..10",
}
"""Options that take several values where they are given."""


# --- fields of a part ---------------------------------------------------------------------------


def converted(part: str, kind: type[S], changes: Sequence[tuple[str, str]], base: S) -> S:
    """`base` with fields given as text.

    Raises:
        ConfigError: a value that is none of the field's.
    """
    types = {field.name: field.type for field in structs.fields(kind)}
    found: dict[str, object] = {}
    for name, text in changes:
        try:
            found[name] = msgspec.convert(text, types[name], strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{part}.{name}: {text!r}: {plainly(error)}") from None
        value = found[name]
        if isinstance(value, float) and not isfinite(value):
            raise ConfigError(f"{part}.{name}: {text!r}, expected a number")
    return structs.replace(base, **found)


def _policy(task: Task, name: str, text: str) -> Task:
    found = turned(task, name, text)
    policy(found.options.policy_text, is_whole=False)  # `sweep` turns the others, then looks again
    return found


def _workload(task: Task, name: str, text: str) -> Task:
    base = task.parameters or PaperParameters()
    found = converted("workload", PaperParameters, [(name, text)], base)
    return structs.replace(task, parameters=found)


def _settings(task: Task, name: str, text: str) -> Task:
    found = converted("engine", EngineSettings, [(name, text)], EngineSettings())
    changes = {**task.options.engine, name: getattr(found, name)}
    return structs.replace(task, options=structs.replace(task.options, engine=changes))


def _service(task: Task, name: str, text: str) -> Task:
    base = ServiceSettings(name="any", capacity_per_node=1.0)
    found = converted("service", ServiceSettings, [(name, text)], base)
    changes = {**task.options.service, name: getattr(found, name)}
    return structs.replace(task, options=structs.replace(task.options, service=changes))


def _times(task: Task, name: str, text: str) -> Task:
    if not task.options.has_delays:
        raise ConfigError(
            f"sweep: delays.{name} says nothing of a run without delays, as all are here; without "
            "--no-delays and delays=false, or with --delays beside --scenario"
        )
    found = converted("delays", TimesTaken, [(name, text)], task.options.times)
    if not 0.0 <= getattr(found, name) <= DAY_S:
        raise ConfigError(f"delays.{name}: {text!r}, expected 0 to {DAY_S:g} seconds")
    return structs.replace(task, options=structs.replace(task.options, times=found))


def _names(kind: type[Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in structs.fields(kind) if field.name not in NOT_SWEPT)


PARTS: dict[str, tuple[tuple[str, ...], Callable[[Task, str, str], Task]]] = {
    "delays": (_names(TimesTaken), _times),
    "engine": (_names(EngineSettings), _settings),
    "policy": (tuple(KNOBS), _policy),
    "service": (tuple(n for n in _names(ServiceSettings) if n != "capacity_per_node"), _service),
    "workload": (_names(PaperParameters), _workload),
}
"""By the first half of a key: the fields that the second half may name."""


def keys() -> tuple[str, ...]:
    """Every key that can be swept, sorted."""
    dotted = (f"{part}.{name}" for part, (names, _) in PARTS.items() for name in names)
    return tuple(sorted((*OPTIONS, *dotted)))


def vary(task: Task, key: str, text: str) -> Task:
    """A task with one thing changed; its row says so.

    Raises:
        ConfigError: an unknown key, which lists the valid ones, or a value that is none of its.
    """
    part, _, name = key.partition(".")
    if key in BY_THEMSELVES:
        raise ConfigError(f"sweep: {key} takes several values by itself: {BY_THEMSELVES[key]}")
    if key in OPTIONS:
        found = OPTIONS[key](task, key, text)
    elif part in PARTS and name in PARTS[part][0]:
        found = PARTS[part][1](task, name, text)
    else:
        raise ConfigError(f"sweep: {key!r} is not one of {', '.join(keys())}")
    return structs.replace(found, swept={**task.swept, key: text})


def parse_sweep(text: str) -> tuple[str, tuple[str, ...]]:
    """A key and its values from `KEY=V1,V2`.

    Raises:
        ConfigError: no key, no value, or a value twice.
    """
    key, _, values = text.partition("=")
    found = tuple(value.strip() for value in values.split(",") if value.strip())
    if not key or not found:
        raise ConfigError(f"sweep {text!r}: expected KEY=VALUE,VALUE,..")
    key = key.strip()
    if len({_meant(key, value) for value in found}) < len(found):
        raise ConfigError(f"sweep {text!r}: a value is given twice")
    return key, found


def _meant(key: str, text: str) -> float | str:
    """A value that is a number is the same however it is written, and so are yes and no; a name is
    not."""
    if key in NAMED:
        return text
    if text.lower() in YES_AND_NO:
        return YES_AND_NO[text.lower()]
    try:
        return float(digits(text))
    except ValueError:
        return text


def sweep(tasks: Sequence[Task], texts: Sequence[str]) -> list[Task]:
    """Every task at every combination of the swept values, the last key's changing fastest.

    A knob is changed only for policies that have it and can use it; others run once. A policy also
    runs once at a value of another swept knob that leaves this one without effect, and so does a
    run without delays at the time of a step.

    Raises:
        ConfigError: as `parse_sweep` and `vary`, a key twice, or a knob or a step's time without
            effect at any combination.
    """
    axes = [parse_sweep(text) for text in texts]
    names = [key for key, _ in axes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"sweep: {', '.join(twice)} is given twice")
    varied: list[Task] = []
    for values in product(*(values for _, values in axes)):
        for task in tasks:
            made = without_idle(_combined(task, names, values))
            if made not in varied:
                varied.append(made)
    for key, values in axes:
        if not any(key in task.swept for task in varied):
            if _is_delay(key):
                vary(varied[0], key, values[0])
            refuse(varied, key, values[0])
    return varied


def _combined(task: Task, keys: Sequence[str], values: Sequence[str]) -> Task:
    """A task at one combination; a task without delays ignores the time of its steps."""
    made = task
    for key, value in sorted(zip(keys, values, strict=True), key=lambda pair: _is_delay(pair[0])):
        is_idle = _is_delay(key) and not made.options.has_delays
        if not is_idle and may_use(task, key):
            made = vary(made, key, value)
    told = {key: made.swept[key] for key in (*task.swept, *keys) if key in made.swept}
    return structs.replace(made, swept=told)


def _is_delay(key: str) -> bool:
    """Whether a key says how long a step takes: to be turned when it is known who has delays."""
    return key.startswith(DELAY)
