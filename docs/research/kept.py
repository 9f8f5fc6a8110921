"""Figures of runs as they are kept below docs/results/: one file an experiment, one run a line.

A line is the run's name and its figures in JSON, in order of name, so that a run that is played
again changes one line. Must not know what a run is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

RESULTS = Path(__file__).parents[1] / "results"

T = TypeVar("T")


def read(path: Path, kind: type[T]) -> dict[str, T]:
    """Every run by name; nothing where no file is.

    Raises:
        msgspec.ValidationError: a run does not fit.
    """
    if not path.exists():
        return {}
    lines = path.read_bytes().splitlines()
    return dict(msgspec.json.decode(line, type=tuple[str, kind]) for line in lines)


def write(path: Path, runs: Mapping[str, Any]) -> None:
    """All runs of an experiment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [msgspec.json.encode((name, runs[name])) + b"\n" for name in sorted(runs)]
    path.write_bytes(b"".join(lines))


def keep(path: Path, kind: type[T], name: str, run: T) -> None:
    """One run more, or one of them anew."""
    write(path, {**read(path, kind), name: run})
