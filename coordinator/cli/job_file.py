"""Read a job file into a mapping, with the line of each key where the format has them.

TOML (`*.toml`, and any file without another known suffix), YAML (`*.yaml`, `*.yml`) or JSON
(`*.json`); `-` is standard input.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, cast

from msgspec import Struct, field

from common.decoding import parse_toml
from common.errors import ConfigError

STDIN = Path("-")


class FileKind(StrEnum):
    """How a job file is written."""

    TOML = "toml"
    YAML = "yaml"
    JSON = "json"


_KIND_BY_SUFFIX = {".yaml": FileKind.YAML, ".yml": FileKind.YAML, ".json": FileKind.JSON}


class JobFile(Struct, frozen=True, kw_only=True):
    """The contents of a file. `line_by_path` has the paths of keys and entries, `workers.min`."""

    source: str
    values: Mapping[str, Any]
    line_by_path: Mapping[str, int] = field(default_factory=dict[str, int])


def read(file: Path, *, kind: FileKind | None, stdin: BinaryIO) -> JobFile:
    """Read a job file; `kind` None goes by its name.

    Raises:
        ConfigError: no such file, not of its kind, a key twice, or not a table at the top; names
            the file, and the line where its format is read with lines.
    """
    source = "standard input" if file == STDIN else str(file)
    text = _text(file, source, stdin)
    kind = kind or _KIND_BY_SUFFIX.get(file.suffix, FileKind.TOML)
    try:
        return _parsed(text, kind, source)
    except RecursionError:
        raise ConfigError(f"{source}: tables and lists are nested too deep") from None


def _text(file: Path, source: str, stdin: BinaryIO) -> str:
    try:
        return (stdin.read() if file == STDIN else file.read_bytes()).decode()
    except FileNotFoundError:
        raise ConfigError(f"{source}: there is no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{source}: expected a job file, this is a directory") from None
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{source} is not text; a job file is TOML, YAML or JSON") from None


def _parsed(text: str, kind: FileKind, source: str) -> JobFile:
    match kind:
        case FileKind.YAML:
            from coordinator.cli import yaml_text  # only here: few commands read a file

            found = yaml_text.read(text, source=source)
            return JobFile(source=source, values=found.values, line_by_path=found.line_by_path)
        case FileKind.JSON:
            return JobFile(source=source, values=_json(text, source))
        case FileKind.TOML:
            try:
                return JobFile(source=source, values=parse_toml(text))
            except ValueError as error:
                raise ConfigError(f"{source} is not TOML: {error}") from None


def _json(text: str, source: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """json takes the last of two equal keys; a user who wrote both meant something else."""
        [(key, count)] = Counter(key for key, _ in pairs).most_common(1) or [("", 0)]
        if count > 1:
            raise ConfigError(f"{source}: {key} is given twice")
        return dict(pairs)

    try:
        values = json.loads(text, object_pairs_hook=once)
    except ValueError as error:
        raise ConfigError(f"{source} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: expected an object with the fields of a job")
    return cast("dict[str, Any]", values)
