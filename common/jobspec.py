"""Job files: turns a mapping that a person wrote into a `JobSpec`, or names the wrong field. Pure.

The mapping may come from TOML, YAML or flags.
"""

from __future__ import annotations

import difflib
import re
import reprlib
import signal
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, EnumMeta
from types import MappingProxyType
from typing import NamedTuple, cast

import msgspec

from common import arrays, node_labels
from common.errors import ConfigError
from common.model import TOKEN_PATTERN, JobSpec

MAX_SPEC_BYTES = 16 * 1024
"""Size limit of a job in a message. Each worker's order carries it, and a node's orders are one
message: 60 workers of the largest job fit (`common.messages.MAX_MESSAGE_BYTES`), or 16 of a gang
over 1,250 nodes, whose names each order carries too."""
MAX_GPU_TYPES = 64
"""Types that a job names; a pass tries each of them for each job that waits."""
MAX_DEPENDENCIES = 256
"""Jobs that a job waits for; as long as it waits, each of them is looked up when it ends."""
MAX_TERMS = 64
"""Terms of labels that a job requires, and that it excludes."""
MAX_SPEEDUP_POINTS = 512
"""Of one speed-up table; between two points speed lies on a line."""
TOKEN_WORDS = "expected a name of 1 to 64 of A-Z a-z 0-9 _ -"
_ABOUT = re.compile(r"Object (?P<what>contains unknown|missing required) field `(?P<field>.+)`")


def parse(
    values: Mapping[str, object],
    *,
    source: str,
    place_by_path: Mapping[str, str] = MappingProxyType({}),
) -> JobSpec:
    """The job that a mapping describes.

    Args:
        place_by_path: where known, the place of `workers.min` or `command[0]` in the source.

    Raises:
        ConfigError: an unknown or missing key, an invalid value, min > max; the text names source
            or place, field and what was expected.
    """

    def place(path: str) -> str:
        """The place of the field, or of its nearest parent."""
        while path and path not in place_by_path:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return place_by_path[path] if path else source

    untext = next(_untexts(values), None)
    if untext is not None:
        field = f"field {untext.field}: " if untext.field else ""
        raise ConfigError(f"{place(untext.field)}: {field}{untext.what}")
    _known_keys(values, place)
    for path, what in _variable_misfits(values.get("env")):
        raise ConfigError(f"{place(path)}: field {path}: {what}")
    try:
        spec = msgspec.convert(dict(values), JobSpec)
    except msgspec.ValidationError as error:
        text = str(error)
        raise ConfigError(f"{place(_path(text))}: {readable(text)}{_choices(text)}") from None
    found = misfit(spec)
    if found is not None:
        raise ConfigError(f"{place(found.field)}: field {found.field}: {found.what}")
    return spec


class Misfit(NamedTuple):
    """A field that no node could carry out, and its error."""

    field: str
    what: str


def misfit(spec: JobSpec) -> Misfit | None:
    """The first invalid field of a job that its type alone does not rule out.

    Every job passes here, wherever it enters: no process can be given a NUL, no name of a variable
    may hold `=` (POSIX, "Environment Variables"), and no message can hold text that is not UTF-8.
    """
    # Texts first: the rest may encode them.
    untext = next(_untexts(spec), None)
    return untext or next((Misfit(field, what) for field, what in _misfits(spec) if what), None)


def _misfits(spec: JobSpec) -> Iterator[tuple[str, str]]:
    if spec.workers.min > spec.workers.max:
        yield (
            "workers",
            f"min is {spec.workers.min}, expected at most max, which is {spec.workers.max}",
        )
    yield from _command_misfits("command", spec.command)
    yield from _command_misfits("rendezvous.command", spec.rendezvous.command)
    yield from _too_many(spec)
    yield from (("require", node_labels.term_misfit(term)) for term in spec.require or ())
    yield from (("exclude", node_labels.term_misfit(term)) for term in spec.exclude or ())
    yield "stall_timeout_s", _stall_misfit(spec)
    yield arrays.misfit(spec)
    if spec.gpu.heterogeneous_speed_ratio and len(set(spec.gpu.types)) < 2:
        yield "gpu.heterogeneous_speed_ratio", "it needs two or more types in gpu.types to span"
    yield "profile", spec.profile.misfit()
    if spec.prerun.gang is not None:
        yield "prerun.gang", "it is the coordinator's to set; give prerun.time_s and prerun.gpus"
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
    yield _size_misfit(spec)


def _stall_misfit(spec: JobSpec) -> str:
    if spec.stall_timeout_s is msgspec.UNSET or spec.retry.max_restarts:
        return ""
    return "it starts the job again within retry.max_restarts, which is 0; expected at least 1"


def _too_many(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Lists that a pass goes through, and that are longer than any fleet could use."""
    for field, count, most in (
        ("gpu.types", len(spec.gpu.types), MAX_GPU_TYPES),
        ("gpu.worker_multiplier", len(spec.gpu.worker_multiplier), MAX_GPU_TYPES),
        ("profile.speedup", len(spec.profile.speedup), MAX_SPEEDUP_POINTS),
        ("depends_on", len(spec.depends_on or ()), MAX_DEPENDENCIES),
        ("require", len(spec.require or ()), MAX_TERMS),
        ("exclude", len(spec.exclude or ()), MAX_TERMS),
    ):
        if count > most:
            yield field, f"it has {count} entries, expected at most {most}"


def _size_misfit(spec: JobSpec) -> tuple[str, str]:
    """The largest field of a job, where the whole job is too large for a message."""
    size_bytes = len(msgspec.msgpack.encode(spec))
    if size_bytes <= MAX_SPEC_BYTES:
        return "", ""
    told = msgspec.structs.asdict(spec).items()
    fields = {name: value for name, value in told if value is not msgspec.UNSET}
    largest = max(fields, key=lambda name: len(msgspec.msgpack.encode(fields[name])))
    return largest, (
        f"with it the job has {size_bytes} bytes, expected at most {MAX_SPEC_BYTES}; "
        "keep scripts and data in files that the job reads"
    )


def _command_misfits(field: str, command: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if command and not command[0].strip():
        yield field, f"its program is {command[0]!r}, expected a name or a path"
    for argument in command:
        yield field, _nul(argument)


def utf8_misfit(text: str) -> str:
    """The error of a text that no message can hold; empty where it can.

    Python keeps bytes of arguments, variables and file names that are no UTF-8 as lone surrogates
    (PEP 383), and JSON and YAML can name one as `\\ud800`.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"{text!r} is not UTF-8"
    return ""


def _untexts(whole: object) -> Iterator[Misfit]:
    """Every text below a mapping or a struct that is not UTF-8, keys included, by its field."""
    # No recursion: what a person wrote may lie deeper than the stack.
    rest: list[tuple[str, object]] = [("", whole)]
    while rest:
        path, value = rest.pop()
        texts: list[object] = [value]
        below: list[tuple[str, object]] = []
        if isinstance(value, msgspec.Struct):
            value = msgspec.structs.asdict(value)
        if isinstance(value, Mapping):
            items = cast("Mapping[object, object]", value)
            texts = list(items)
            below = [(f"{path}.{key}" if path else str(key), items[key]) for key in items]
        elif isinstance(value, list | tuple):
            many = cast("list[object]", value)
            below = [(f"{path}[{index}]", item) for index, item in enumerate(many)]
        for text in texts:
            if isinstance(text, str) and (what := utf8_misfit(text)):
                yield Misfit(path, what)
        rest += reversed(below)


def _nul(text: str) -> str:
    return f"{text!r} holds a NUL, which no process can be given" if "\0" in text else ""


def _known_keys(
    values: Mapping[str, object],
    place: Callable[[str], str],
    kind: type[msgspec.Struct] = JobSpec,
    within: str = "",
) -> None:
    """The nearest known key.

    msgspec names an unknown key, but not the one that was probably meant.
    """
    kinds = {item.encode_name: item.type for item in msgspec.structs.fields(kind)}
    for key, value in values.items():
        path = f"{within}{key}"
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(kinds)}"
            raise ConfigError(f"{place(path)}: unknown field {path}; {hint}")
        below = kinds[key]
        if (
            isinstance(value, Mapping)
            and isinstance(below, type)
            and issubclass(below, msgspec.Struct)
        ):
            _known_keys(cast("Mapping[str, object]", value), place, below, f"{path}.")


def _variable_misfits(env: object) -> Iterator[Misfit]:
    """The variable that is not text: msgspec does not name it."""
    if not isinstance(env, Mapping):
        return
    for name, value in cast("Mapping[object, object]", env).items():
        for text in (name, value):
            if not isinstance(text, str):
                what = f"Expected `str` in quotes, got {reprlib.repr(text)}"
                yield Misfit(f"env.{name}", what)


def _choices(message: str) -> str:
    """The allowed values: msgspec names only the invalid one."""
    for item in msgspec.structs.fields(JobSpec):
        if message.endswith(f"`$.{item.name}`") and isinstance(item.type, EnumMeta):
            values = ", ".join(str(member.value) for member in cast("type[Enum]", item.type))
            return f", expected one of {values}"
    return ""


def readable(message: str) -> str:
    """msgspec's `... - at `$.a.b`` as `field a.b: ...`, with the field that it is really about."""
    text, _, _ = message.partition(" - at `$")
    found = _ABOUT.fullmatch(text)
    path = _path(message)
    text = text.replace(f"Expected `str` matching regex {TOKEN_PATTERN!r}", TOKEN_WORDS)
    if found is None:
        return f"field {path}: {text}" if path else text
    if found["what"] == "contains unknown":
        return f"unknown field {path}"
    return f"field {path} is missing"


def _path(message: str) -> str:
    """The field that a message of msgspec's is really about; empty for the whole."""
    text, _, path = message.partition(" - at `$")
    found = _ABOUT.fullmatch(text)
    parts = (path.rstrip("`").lstrip("."), found["field"] if found else "")
    return ".".join(part for part in parts if part)
