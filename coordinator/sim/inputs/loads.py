"""The inference services of a run and the load of each, as written and as played.

`FILE` or `FILE:SERIES` is a service under the name of its series. `NAME=FILE` or `NAME=FILE:SERIES`
is one under a name of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from msgspec import structs

from common.errors import ConfigError
from coordinator.workloads.formats import find
from coordinator.workloads.load_formats import read_load
from coordinator.workloads.records import LoadSeries, LoadUnit

Loads = str | Sequence[str] | None
"""As asked for: one, several, or the workload's own."""

PEAK_RATIO = 0.95
"""A load in requests is scaled so that its peak needs this part of a service's nodes (Figure 1)."""

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,63})=(.+)")


def texts(asked: Loads) -> tuple[str, ...]:
    """Each load that was asked for, as it was written."""
    if asked is None:
        return ()
    return (asked,) if isinstance(asked, str) else tuple(asked)


def read_loads_of(asked: Loads) -> tuple[LoadSeries, ...]:
    """One series for each service, all from the beginning of the run on.

    Raises:
        ConfigError: as `find` and `read_load`, or two services of one name.
    """
    loads = [_read(text) for text in texts(asked)]
    names = [load.name for load in loads]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"load: {', '.join(twice)} is given twice; NAME=FILE gives a service its own name"
        )
    return tuple(loads)


def busy_nodes(load: LoadSeries, value: float, nodes: int) -> float:
    """Nodes' worth of load; a series in requests is scaled by its peak."""
    if load.unit == LoadUnit.BUSY:
        return value * nodes
    return value * PEAK_RATIO * nodes / max(load.values)


def for_ever(load: LoadSeries, nodes: int) -> Iterator[tuple[float, float]]:
    """(seconds, nodes' worth of load) at each step, the series again and again."""
    step = 0
    while True:
        value = load.values[step % len(load.values)]
        yield step * load.step_s, busy_nodes(load, value, nodes)
        step += 1


def _read(text: str) -> LoadSeries:
    named = _NAMED.fullmatch(text)
    file, _, series = (named[2] if named else text).partition(":")
    load = structs.replace(read_load(find(file, what="load"), name=series or None), start_s=0.0)
    return structs.replace(load, name=named[1]) if named else load
