"""Indices of a job array, in Slurm's manner: `0-99`, `1,3,7`, `0-100:4`. Pure.

A text becomes ranges, not a list of numbers. The place of an index is its position in the order of
the indices, from 0; the engine counts in places, so that a step costs it nothing.
"""

from __future__ import annotations

import posixpath
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from common.errors import ConfigError
from common.model import ArraySpec, JobSpec

MAX_TASKS = 10_000
"""Tasks of one array."""
MAX_INDEX = 4_000_000
"""The highest index, as in Slurm (`MaxArraySize` of slurm.conf)."""
INDEX_MARK = "{index}"
"""Stands for the index in `checkpoint.path` of an array."""
FORM = "expected indices such as 0-99, 1,3,7 or 0-100:4"
_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?")
_THROTTLE = re.compile(r"\d{1,9}")


class Run(NamedTuple):
    """Indices from `first` to `last`, both included, `step` apart."""

    first: int
    last: int
    step: int

    @property
    def size(self) -> int:
        """How many indices it has."""
        return (self.last - self.first) // self.step + 1

    def __str__(self) -> str:
        if self.first == self.last:
            return str(self.first)
        return f"{self.first}-{self.last}" + (f":{self.step}" if self.step > 1 else "")


class Indices:
    """The indices of an array: runs in ascending order, none within another."""

    def __init__(self, runs: tuple[Run, ...]) -> None:
        self.runs = runs
        self._firsts = [run.first for run in runs]
        self._begins = [0, *accumulate(run.size for run in runs)]
        """The place of each run's first index, and the count of all."""

    def __len__(self) -> int:
        return self._begins[-1]

    def __iter__(self) -> Iterator[int]:
        for run in self.runs:
            yield from range(run.first, run.last + 1, run.step)

    def __str__(self) -> str:
        return ",".join(map(str, self.runs))

    @property
    def first(self) -> int:
        """The lowest index."""
        return self.runs[0].first

    @property
    def last(self) -> int:
        """The highest index."""
        return self.runs[-1].last

    def at(self, place: int) -> int:
        """The index at a place."""
        which = bisect_right(self._begins, place) - 1
        run = self.runs[which]
        return run.first + (place - self._begins[which]) * run.step

    def place(self, index: int) -> int | None:
        """The place of an index; None: it is not one of these."""
        which = bisect_right(self._firsts, index) - 1
        if which < 0:
            return None
        run = self.runs[which]
        steps, rest = divmod(index - run.first, run.step)
        return None if rest or index > run.last else self._begins[which] + steps


def runs_of(numbers: Iterable[int]) -> tuple[Run, ...]:
    """Ascending numbers as few runs; three of one step, or two in a row, are a run."""
    found: list[Run] = []
    rest = list(numbers)
    place = 0
    while place < len(rest):
        end = place + 1
        step = rest[end] - rest[place] if end < len(rest) else 1
        while end < len(rest) and rest[end] - rest[end - 1] == step:
            end += 1
        if end - place < 3 and step > 1:
            end, step = place + 1, 1
        found.append(Run(rest[place], rest[end - 1], step))
        place = end
    return tuple(found)


@lru_cache(maxsize=1024)  # an array is read by its text at each change of one of its tasks
def indices(text: str) -> Indices:
    """The indices that a text names; an index that it names twice is one index.

    Raises:
        ConfigError: the text names none, too many, or one that is too high. The error has no field.
    """
    found: set[int] = set()
    count = 0
    for part in text.split(","):
        run = _run(part)
        count += run.size
        if count > MAX_TASKS:
            raise ConfigError(f"more than {MAX_TASKS} tasks, expected at most {MAX_TASKS}")
        found.update(range(run.first, run.last + 1, run.step))
    return Indices(runs_of(sorted(found)))


def _run(part: str) -> Run:
    match = _PART.fullmatch(part)
    if match is None:
        raise ConfigError(f"{part!r}, {FORM}")
    first = int(match[1])
    last, step = int(match[2] or first), int(match[3] or 1)
    if last < first or not step:
        raise ConfigError(f"{part!r}, expected FIRST-LAST with FIRST at most LAST, and a step of 1 "
                          "or more")  # fmt: skip
    if last > MAX_INDEX:
        raise ConfigError(f"{part!r}, expected indices up to {MAX_INDEX}")
    return Run(first, first + (last - first) // step * step, step)


def spec_of(text: str) -> ArraySpec:
    """`0-99%5` as an array: the indices, and after `%` the most tasks at once.

    Raises:
        ConfigError: the part after `%` is no count; indices are checked with the job.
    """
    names, percent, most = text.partition("%")
    if percent and (not _THROTTLE.fullmatch(most) or not 1 <= int(most) <= MAX_TASKS):
        raise ConfigError(f"{text!r}, expected a count from 1 to {MAX_TASKS} after %")
    return ArraySpec(indices=names, throttle=int(most) if percent else None)


def misfit(spec: JobSpec) -> tuple[str, str]:
    """The first field that keeps a job from being an array, and its error; empty texts where none
    does, and of a job that is no array.

    Tasks that share a checkpoint would destroy one another's work, so each has a path of its own.
    """
    if not isinstance(spec.array, ArraySpec):
        return "", ""
    try:
        indices(spec.array.indices)
    except ConfigError as error:
        return "array.indices", str(error)
    path = spec.checkpoint.path
    if path is not None and _normal(path, 1) == _normal(path, 2):
        return (
            "checkpoint.path",
            f"{path!r} would be one for all tasks of the array, expected {INDEX_MARK} in it, such "
            f"as {path.rstrip('/') or 'save'}-{INDEX_MARK}",
        )
    return "", ""


def _normal(path: str, index: int) -> str:
    return posixpath.normpath(path.replace(INDEX_MARK, str(index)))
