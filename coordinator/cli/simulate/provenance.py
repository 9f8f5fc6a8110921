"""The provenance of a simulated run: its options, stored with its results."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import cast

import typer
from msgspec import Struct

ELSEWHERE = {"output", "html", "cores", "backend", "help"}
"""Options that change no figure."""


class _Given(Struct, frozen=True):
    """An option as it was given, or by default; no: how its opposite is written, if it has one."""

    name: str
    value: object
    default: object
    no: str


def options(
    ctx: typer.Context, resolved: Mapping[str, object], *, swept: Container[str] = ()
) -> dict[str, object]:
    """Every option that shapes the runs, by its long name without dashes; options without a value
    are left out. Options that were not given have their default value.

    resolved: the effective values of some options that were not given.
    swept: options of which each run has its own value.
    """
    given = {
        each.name: _plain(each.value)
        for each in _given(ctx)
        if each.value is not None and each.value not in ([], ())
    }
    return {name: value for name, value in (given | dict(resolved)).items() if name not in swept}


def command(ctx: typer.Context) -> str:
    """The call in one line for a shell, with only the options that differ from their defaults."""
    words = ["aryl", "simulate"]
    for each in _given(ctx):
        if each.value is None or each.value == each.default:
            continue
        if isinstance(each.value, bool):
            words.append(f"--{each.name}" if each.value else each.no)
            continue
        for value in _parts(each.value):
            words += [f"--{each.name}", str(_plain(value))]
    return shlex.join(words)


def _given(ctx: typer.Context) -> Iterator[_Given]:
    for parameter in ctx.command.params:
        key = parameter.name
        if key in ctx.params and key not in ELSEWHERE:
            yield _Given(
                parameter.opts[0].removeprefix("--"),
                ctx.params[key],
                parameter.get_default(ctx),
                next(iter(parameter.secondary_opts), ""),
            )


def _parts(value: object) -> Sequence[object]:
    """The values of an option that may be repeated, else its one value."""
    return cast("Sequence[object]", value) if isinstance(value, list | tuple) else (value,)


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in _parts(cast("object", value))]
    return str(value) if isinstance(value, Path) else value
