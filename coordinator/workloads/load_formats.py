"""Inference-load files as even series.

Formats: our own CSV (`t_s` and `req_per_s` or `busy_ratio`), ServeGen's aggregate (`model`) and
clients' rates (`client`), and the request logs of Azure LLM and Mooncake, which are binned here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from common.decoding import UNREADABLE
from common.errors import ConfigError
from common.model import MAX_INT
from coordinator.workloads.records import LoadSeries, LoadUnit
from coordinator.workloads.table import Row, Table, read_text

EVEN_S = 1e-6
"""Steps that differ by less are even."""

CLIENT_STEP_S = 600.0
"""ServeGen's clients have rows only for steps in which they asked anything."""

BIN_S = 10.0
"""Default step for request logs, which last about an hour."""


LEAST_STEP_S = 1.0
"""The least step of a series: nodes report their load once a second, and a load is played for ever.
"""

MAX_LOG_S = 366 * 86_400.0
"""From the first request of a log to its last: one of another year is damaged, and every step
between has a value."""


class _MooncakeRequest(Struct, frozen=True):
    """The fields read from a line of Mooncake; its timestamp is in milliseconds."""

    timestamp: float


def read_loads(path: Path, *, bin_s: float = BIN_S) -> dict[str, LoadSeries]:
    """Every series of a load file, by name, on the file's own clock.

    Names: ServeGen's model without its family (`m-small`), `client-N`, else the file's name.

    Args:
        path: a file of any format in docs/traces.md, gzip or plain.
        bin_s: the step of request logs, in seconds.

    Raises:
        ConfigError: unreadable, unknown, uneven, not sorted, a bad value, or no load at all.
    """
    return parse_loads(str(path), read_text(path), bin_s=bin_s)


def parse_loads(name: str, text: str, *, bin_s: float = BIN_S) -> dict[str, LoadSeries]:
    """As `read_loads`, of text that is at hand; errors call it `name`."""
    if text.lstrip().startswith("{"):
        return _only(_binned(name, _mooncake(name, text), bin_s))
    table = Table(name, text)
    columns = set(table.columns)
    if "TIMESTAMP" in columns:
        return _only(_binned(name, _azure(table), bin_s))
    units = [unit for unit in LoadUnit if unit.value in columns]
    if "t_s" not in columns or not units:
        missing = "t_s" if "t_s" not in columns else "req_per_s or busy_ratio"
        raise table.wrong(f"column {missing}: missing; there are: {', '.join(table.columns)}")
    if "client" in columns:
        return _clients(table)
    return _even(table, units[0])


def read_load(path: Path, *, name: str | None = None, bin_s: float = BIN_S) -> LoadSeries:
    """One series of a load file: the named one, or the only one.

    Raises:
        ConfigError: as `read_loads`; also a name that is not there, or several and no name.
    """
    loads = read_loads(path, bin_s=bin_s)
    if name is None and len(loads) == 1:
        return next(iter(loads.values()))
    if name in loads:
        return loads[name]
    asked = "several series, name one" if name is None else f"no load series {name}"
    raise ConfigError(f"{path}: {asked}: {', '.join(sorted(loads))}")


def _stem(name: str) -> str:
    return Path(name).name.partition(".")[0]


def _only(series: LoadSeries) -> dict[str, LoadSeries]:
    return {series.name: series}


def _even(table: Table, unit: LoadUnit) -> dict[str, LoadSeries]:
    """Rows of one or more series in even steps; a gap is an error, not a zero."""
    has_models = "model" in table.index
    times: dict[str, list[float]] = {}
    values: dict[str, list[float]] = {}
    for row in table.rows():
        name = row.named("model").rpartition(":")[2] if has_models else _stem(table.name)
        before = times.setdefault(name, [])
        t_s = row.clock_s("t_s")
        _check_step(row, before, t_s)
        before.append(t_s)
        value = row.number(unit.value, least=0, most=1 if unit is LoadUnit.BUSY else MAX_INT)
        values.setdefault(name, []).append(value)
    loads: dict[str, LoadSeries] = {}
    for name in sorted(times):
        if len(times[name]) < 2:
            raise ConfigError(f"{table.name}: line 2: column t_s: {name}: one row is no series")
        if not any(values[name]):
            raise ConfigError(f"{table.name}: line 2: column {unit.value}: {name}: all zero")
        loads[name] = LoadSeries(
            name=name,
            step_s=times[name][1] - times[name][0],
            values=tuple(values[name]),
            unit=unit,
            start_s=times[name][0],
        )
    return loads


def _check_step(row: Row, before: list[float], t_s: float) -> None:
    if before and t_s <= before[-1]:
        raise row.wrong("t_s", f"{t_s:g} is not after the row above, {before[-1]:g}: not sorted")
    if len(before) == 1 and t_s - before[0] < LEAST_STEP_S:
        raise row.wrong("t_s", f"{t_s:g}, expected a step of at least {LEAST_STEP_S:g} s")
    if len(before) > 1:
        expected_s = before[-1] + (before[1] - before[0])
        if abs(t_s - expected_s) > EVEN_S:
            raise row.wrong("t_s", f"{t_s:g}, expected {expected_s:g}: steps must be even")


def _clients(table: Table) -> dict[str, LoadSeries]:
    """One series per client over the span of the whole file; steps without a row are idle."""
    rates: dict[str, dict[int, float]] = {}
    last: dict[str, int] = {}
    for row in table.rows():
        name = f"client-{row.whole('client', least=0)}"
        t_s = row.seconds("t_s")
        step, rest_s = divmod(t_s, CLIENT_STEP_S)
        if rest_s:
            raise row.wrong("t_s", f"{t_s:g}, expected a multiple of {CLIENT_STEP_S:g}")
        if int(step) <= last.get(name, -1):
            raise row.wrong("t_s", f"{t_s:g} is not after the client's row above: not sorted")
        last[name] = int(step)
        rates.setdefault(name, {})[int(step)] = row.count("req_per_s")
    steps = 1 + max(last.values())
    return {
        name: LoadSeries(
            name=name,
            step_s=CLIENT_STEP_S,
            values=tuple(_filled(rates[name], steps)),
        )
        for name in sorted(rates, key=lambda name: int(name.removeprefix("client-")))
    }


def _filled(rates: Mapping[int, float], steps: int) -> Iterable[float]:
    return (rates.get(step, 0.0) for step in range(steps))


def _azure(table: Table) -> Iterable[float]:
    clock = _LogClock()
    for row in table.rows():
        at_s = row.instant("TIMESTAMP")
        if (wrong := clock.wrong(at_s)) is not None:
            raise row.wrong("TIMESTAMP", f"{row.text('TIMESTAMP')} {wrong}")
        yield at_s


def _mooncake(name: str, text: str) -> Iterable[float]:
    decoder = msgspec.json.Decoder(_MooncakeRequest)
    clock = _LogClock()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            at_s = decoder.decode(line).timestamp / 1000.0
        except UNREADABLE as error:
            raise ConfigError(f"{name}: line {number}: column timestamp: {error}") from None
        wrong = "is negative" if at_s < 0 else clock.wrong(at_s)
        if wrong is not None:
            told = f"{at_s * 1000:g} ms {wrong}"
            raise ConfigError(f"{name}: line {number}: column timestamp: {told}")
        yield at_s


class _LogClock:
    """The instants of a request log, as they come."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._before_s = 0.0

    def wrong(self, at_s: float) -> str | None:
        """The error of the next instant; None: no error."""
        first_s = self._first_s = at_s if self._first_s is None else self._first_s
        if at_s < self._before_s:
            return "is before the row above: not sorted"
        if at_s - first_s > MAX_LOG_S:
            return f"is more than {MAX_LOG_S:g} s after the first request"
        self._before_s = at_s
        return None


def _binned(name: str, instants: Iterable[float], bin_s: float) -> LoadSeries:
    """Requests per second from the first request on; the last, partial step is left out."""
    counts: list[int] = []
    first_s: float | None = None
    for at_s in instants:
        first_s = at_s if first_s is None else first_s
        step = int((at_s - first_s) / bin_s)
        counts.extend([0] * (step + 1 - len(counts)))
        counts[step] += 1
    if len(counts) < 3:
        raise ConfigError(
            f"{name}: line {1 + sum(counts)}: column 1: less than two steps of {bin_s:g} s"
        )
    return LoadSeries(
        name=_stem(name), step_s=bin_s, values=tuple(count / bin_s for count in counts[:-1])
    )
