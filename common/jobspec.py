"""Job files: a mapping as a person wrote it -> `JobSpec`, or an error that names the field. Pure.

Must not know where the mapping came from (TOML, YAML or flags).
"""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Iterator, Mapping
from enum import Enum, EnumMeta
from typing import NamedTuple, cast

import msgspec

from common.errors import ConfigError
from common.model import JobSpec

_ABOUT = re.compile(r"Object (?P<what>contains unknown|missing required) field `(?P<field>.+)`")


def parse(values: Mapping[str, object], *, source: str) -> JobSpec:
    """The job that a mapping describes.

    Raises:
        ConfigError: an unknown or missing key, a value that does not fit, min > max; the text
            names source, field and what was expected.
    """
    _known_keys(values, source)
    try:
        spec = msgspec.convert(dict(values), JobSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {readable(str(error))}{_choices(str(error))}") from None
    found = misfit(spec)
    if found is not None:
        raise ConfigError(f"{source}: field {found.field}: {found.what}")
    return spec


class Misfit(NamedTuple):
    """A field that no node could carry out, and what is wrong with it."""

    field: str
    what: str


def misfit(spec: JobSpec) -> Misfit | None:
    """The first field of a job that does not fit and whose type could not say so.

    Wherever a job enters it must pass here: no process can be given a NUL, and no name of a
    variable may hold `=` (POSIX, "Environment Variables").
    """
    return next((Misfit(field, what) for field, what in _misfits(spec) if what), None)


def _misfits(spec: JobSpec) -> Iterator[tuple[str, str]]:
    if spec.workers.min > spec.workers.max:
        yield (
            "workers",
            f"min is {spec.workers.min}, expected at most max, which is {spec.workers.max}",
        )
    if not spec.command[0].strip():
        yield "command", f"its program is {spec.command[0]!r}, expected a name or a path"
    for argument in spec.command:
        yield "command", _nul(argument)
    yield "workdir", _nul(spec.workdir)
    if not spec.workdir.startswith("/"):
        yield (
            "workdir",
            f"{spec.workdir!r}, expected an absolute path: each node would take another one",
        )
    for name, value in spec.env.items():
        if not name or "=" in name:
            yield "env", f"{name!r} is no name of a variable: it may not be empty or hold ="
        yield "env", _nul(name) or _nul(value)
    if spec.checkpoint.path is not None:
        yield "checkpoint.path", _nul(spec.checkpoint.path)
        if not spec.checkpoint.path:
            yield "checkpoint.path", "'', expected a path, or no such field"
    if spec.checkpoint.signal not in signal.Signals.__members__:
        yield (
            "checkpoint.signal",
            f"{spec.checkpoint.signal!r}, expected a signal name such as SIGTERM or SIGUSR1",
        )


def _nul(text: str) -> str:
    return f"{text!r} holds a NUL, which no process can be given" if "\0" in text else ""


def _known_keys(values: Mapping[str, object], source: str) -> None:
    """msgspec names an unknown key, but not the one that was probably meant."""
    known = [item.name for item in msgspec.structs.fields(JobSpec)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"{source}: unknown field {key}; {hint}")


def _choices(message: str) -> str:
    """msgspec says which value does not fit, but not which ones would."""
    for item in msgspec.structs.fields(JobSpec):
        if message.endswith(f"`$.{item.name}`") and isinstance(item.type, EnumMeta):
            values = ", ".join(str(member.value) for member in cast("type[Enum]", item.type))
            return f", expected one of {values}"
    return ""


def readable(message: str) -> str:
    """msgspec's `... - at `$.a.b`` as `field a.b: ...`, with the field that it is really about."""
    text, _, path = message.partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    found = _ABOUT.fullmatch(text)
    if found is None:
        return f"field {field}: {text}" if field else text
    inner = ".".join(part for part in (field, found["field"]) if part)
    if found["what"] == "contains unknown":
        return f"unknown field {inner}"
    return f"field {inner} is missing"
