"""Job files and flags -> the mapping that `common.jobspec.parse` reads.

A file has the fields of `JobSpec`; flags win over it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct

from common import arrays
from common.errors import ConfigError
from common.jobspec import parse
from common.model import MAX_JOB_S, TOKEN_PATTERN, DependencyKind, JobSpec
from coordinator.cli import job_file
from coordinator.cli.job_file import FileKind

_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")


class SubmitFlags(Struct, frozen=True, kw_only=True):
    """The flags of `aryl job submit`; None leaves a field to the file."""

    name: str | None = None
    workers: str | None = None
    gpus_per_worker: int | None = None
    workdir: str | None = None
    env: Sequence[str] = ()
    gpu_types: Sequence[str] = ()
    priority: int | None = None
    preemptibility: str | None = None
    grace: str | None = None
    checkpoint: str | None = None
    expected_runtime: str | None = None
    deadline: str | None = None
    time_limit: str | None = None
    launcher: str | None = None
    after: Sequence[str] = ()
    is_held: bool = False
    array: str | None = None
    require: Sequence[str] = ()
    exclude: Sequence[str] = ()
    require_nodes: Sequence[str] = ()
    exclude_nodes: Sequence[str] = ()


def job_spec(
    file: Path | None,
    flags: SubmitFlags,
    command: Sequence[str],
    *,
    here: Path,
    kind: FileKind | None = None,
    stdin: BinaryIO | None = None,
) -> JobSpec:
    """The job that a file, flags and a command describe.

    Args:
        kind: the format of the file; None goes by its name.
        stdin: the contents of the file `-`; standard input where None.
        here: the current directory; the job runs there if neither a flag nor a file names a
            directory, as with sbatch.

    Raises:
        ConfigError: names the file or flag, the field and what was expected.
    """
    overlay = _overlay(flags, here)
    if command:
        overlay["command"] = list(command)
    if file is None:
        return parse(_merged(_defaults(command, here), overlay), source="the command line")
    found = job_file.read(file, kind=kind, stdin=stdin or sys.stdin.buffer)
    return parse(
        _merged(found.values, overlay),
        source=f"{found.source} and the command line" if overlay else found.source,
        place_by_path={
            path: f"{found.source}, line {line}"
            for path, line in found.line_by_path.items()
            if not _is_hidden(path, overlay)
        },
    )


def _defaults(command: Sequence[str], here: Path) -> dict[str, Any]:
    """The defaults of a command alone; a flag wins over them."""
    if not command:
        raise ConfigError(
            "field command is missing; give a job file, or the command after `--`: "
            "aryl job submit --workers 1 -- python train.py"
        )
    return {
        "name": _name_of(command),
        "workers": {"min": 1, "max": 1},
        "workdir": str(here),
    }


def seconds(text: str, *, flag: str) -> float:
    """`90`, `90s`, `15m`, `2h` or `1d` in seconds; ConfigError names the flag."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ConfigError(f"--{flag}: {text!r}, expected seconds, or a number with s, m, h or d")
    return float(found[1]) * _UNITS_S[found[2]]


def deadline_s(text: str | None) -> float | None:
    """The value of `--deadline` of an order, in seconds; ConfigError names the flag."""
    if text is None:
        return None
    found_s = seconds(text, flag="deadline")
    if not 0 < found_s <= MAX_JOB_S:
        raise ConfigError(
            f"--deadline: {text!r}, expected more than 0 and at most {MAX_JOB_S:g} seconds"
        )
    return found_s


def worker_range(text: str) -> dict[str, int]:
    """`4` or `2:8` as the field `workers`; ConfigError names the flag."""
    low, colon, high = text.partition(":")
    try:
        return {"min": int(low), "max": int(high if colon else low)}
    except ValueError:
        raise ConfigError(f"--workers: {text!r}, expected MIN or MIN:MAX, such as 4 or 2:8") from (
            None
        )


def dependencies(texts: Sequence[str]) -> list[dict[str, str]]:
    """`ok:JOB` texts as the field `depends_on`; ConfigError names the flag."""
    found: list[dict[str, str]] = []
    for text in texts:
        when, colon, job = text.partition(":")
        if not colon or when not in list(DependencyKind):
            kinds = ", ".join(f"{kind}:JOB" for kind in DependencyKind)
            raise ConfigError(f"--after: {text!r}, expected one of {kinds}")
        if not re.fullmatch(TOKEN_PATTERN, job):
            raise ConfigError(
                f"--after: {text!r}, expected the id or number of a job after the colon"
            )
        found.append({"job": job, "when": when})
    return found


def node_names(texts: Sequence[str]) -> list[str]:
    """Names of nodes, each text one or several with commas between."""
    return [name for text in texts for name in text.split(",") if name]


def environment(pairs: Sequence[str]) -> dict[str, str]:
    """`K=V` pairs; a later one wins. ConfigError names the flag."""
    values: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--env: {pair!r}, expected NAME=VALUE")
        values[key] = value
    return values


def _overlay(flags: SubmitFlags, here: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = {"path": flags.checkpoint}
    if flags.grace is not None:
        checkpoint["grace_s"] = seconds(flags.grace, flag="grace")
    overlay: dict[str, Any] = {
        "name": flags.name,
        "workers": None if flags.workers is None else worker_range(flags.workers),
        "gpus_per_worker": flags.gpus_per_worker,
        "workdir": None if flags.workdir is None else str(here / flags.workdir),
        "env": environment(flags.env) or None,
        "gpu": {"types": list(flags.gpu_types)} if flags.gpu_types else None,
        "priority": flags.priority,
        "preemptibility": flags.preemptibility,
        "checkpoint": _said(checkpoint) or None,
        "expected_runtime_s": _seconds(flags.expected_runtime, "expected-runtime"),
        "deadline_s": _seconds(flags.deadline, "deadline"),
        "time_limit_s": _seconds(flags.time_limit, "time-limit"),
        "launcher": flags.launcher,
        "depends_on": dependencies(flags.after) or None,
        "is_held": flags.is_held or None,
        "array": None if flags.array is None else _array(flags.array),
        "require": list(flags.require) or None,
        "exclude": list(flags.exclude) or None,
        "require_nodes": node_names(flags.require_nodes) or None,
        "exclude_nodes": node_names(flags.exclude_nodes) or None,
    }
    return _said(overlay)


def _array(text: str) -> dict[str, Any]:
    """`0-99%5` as the field `array`; ConfigError names the flag, or later the field."""
    try:
        found = arrays.spec_of(text)
    except ConfigError as error:
        raise ConfigError(f"--array: {error}") from None
    return _said({"indices": found.indices, "throttle": found.throttle})


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _seconds(text: str | None, flag: str) -> float | None:
    return None if text is None else seconds(text, flag=flag)


def _merged(values: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """`overlay` over `values`; env, gpu and checkpoint field by field, the rest as a whole."""
    merged = dict(values)
    for key, value in overlay.items():
        below = merged.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            merged[key] = {**below, **value}
        else:
            merged[key] = value
    return merged


def _is_hidden(path: str, overlay: Mapping[str, Any]) -> bool:
    """Whether a flag may have given what stands there: its line would blame the file."""
    return re.split(r"[.\[]", path, maxsplit=1)[0] in overlay


def _name_of(command: Sequence[str]) -> str:
    """A job name from its program, as one token."""
    stem = Path(command[0]).stem
    return re.sub(r"[^A-Za-z0-9_-]", "-", stem)[:64] or "job"
