"""Job files: a mapping as a person wrote it -> `JobSpec`, or an error that names the field. Pure.

Must not know where the mapping came from (TOML, YAML or flags).
"""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Mapping
from enum import Enum, EnumMeta
from typing import cast

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
    if spec.workers.min > spec.workers.max:
        raise ConfigError(
            f"{source}: field workers: min is {spec.workers.min}, "
            f"expected at most max, which is {spec.workers.max}"
        )
    if spec.checkpoint.signal not in signal.Signals.__members__:
        raise ConfigError(
            f"{source}: field checkpoint.signal: {spec.checkpoint.signal!r}, "
            "expected a signal name such as SIGTERM or SIGUSR1"
        )
    return spec


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
