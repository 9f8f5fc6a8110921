"""Computes inference load from a server's metrics page. Pure.

A page is Prometheus' text format or a JSON document. A `MetricsSettings`, a site's own or one of
`agent.telemetry.engine_series`, names the series that count. An invalid value is dropped without
its page, and the last good value stands for it. Without a last good value the number is unknown,
not zero.

A load is the growth of what succeeded, so there a value that is missing makes the sum unknown, and
a last good one stands for `MAX_STANDS` pages only: a counter that stands still is no load of zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import cast

import msgspec
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from agent.settings import Combine, CountSettings, MetricsSettings
from agent.telemetry.engine_series import Dialect, engine_named
from common.decoding import UNREADABLE
from common.errors import ConfigError, ProtocolError
from common.messages import InferenceReport
from common.model import MAX_INT

COMMAND_OUTPUT = MetricsSettings(
    running=(CountSettings(path="/running"),),
    waiting=(CountSettings(path="/waiting"),),
    succeeded=(CountSettings(path="/succeeded"),),
    kv_cache=(CountSettings(path="/kv_cache_used_ratio", optional=True),),
)
"""A command's output, as a JSON object."""
SHORT = 8
"""Only this much of a name is compared first: few lines begin like one that matters."""
MAX_LINE_CHARS = 120
"""Most characters of a dropped line or value in a report."""
MAX_STANDS = 3
"""For this many pages in a row the last good value of a counter stands for a dropped one; as many
reports without a page make a load unknown."""
MAX_DROPPED = 5
"""This many values are reported as dropped, of further ones only the number."""

_Heads = dict[str, tuple[str, Mapping[str, str]]]


class Sample(Struct, frozen=True, kw_only=True):
    """One value of a page; `labels` are None where the line cannot be read at all.

    value: None where it is no count.
    text: as on the page, for people.
    """

    name: str
    labels: Mapping[str, str] | None
    value: float | None
    text: str

    @property
    def key(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """The key that finds it again on the next page."""
        return self.name, tuple(sorted((self.labels or {}).items()))


class Count(Struct, frozen=True, kw_only=True):
    """The result of one `CountSettings`.

    value: None where the page does not say. samples: what of the page it is made of. dropped: those
        of them that are no count; the last good value stands for each that has one, for a while.
    """

    name: str
    value: float | None
    samples: tuple[Sample, ...] = ()
    dropped: tuple[Sample, ...] = ()


class Quantity(Struct, frozen=True, kw_only=True):
    """A number of the report, and the counts that add up to it."""

    name: str
    value: float | None
    counts: tuple[Count, ...]


class Reading(Struct, frozen=True, kw_only=True):
    """The content of a page, even if it is not enough for a load."""

    dialect: str
    running: Quantity
    waiting: Quantity
    succeeded: Quantity
    kv_cache: Quantity

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """The quantities that make up a load."""
        return self.running, self.waiting, self.succeeded

    @property
    def dropped(self) -> tuple[Sample, ...]:
        """Every value that is no count, of those that make up a load."""
        found = (count.dropped for one in self.quantities for count in one.counts)
        return tuple(sample for dropped in found for sample in dropped)

    def problem(self) -> str:
        """Why there is no load; empty where there is one."""
        counts = [count for one in self.quantities for count in one.counts]
        none = [count for count in counts if count.value is None]
        missing = [count.name for count in none if not count.dropped]
        said = [f"no {name}" for name in missing]
        said += [
            f"{count.name}: {_short(count.dropped[0].text)}, expected a number from 0 to"
            f" {MAX_INT:g}"
            for count in none
            if count.dropped
        ]
        said += [
            f"{one.counts[0].name}: {one.value:g}, expected a number from 0 to {MAX_INT:g}"
            for one in self.quantities
            if one.value is not None and one.value > MAX_INT
        ]
        return ", ".join(said)

    def warning(self) -> str:
        """The dropped values, as text; empty if there are none."""
        dropped = self.dropped
        told = [_short(sample.text) for sample in dropped[:MAX_DROPPED]]
        if len(dropped) > MAX_DROPPED:
            told.append(f"and {len(dropped) - MAX_DROPPED} more")
        return f"dropped, as they are no counts: {'; '.join(told)}" if told else ""

    def load(self) -> InferenceReport:
        """The load that the page reports.

        Raises:
            ProtocolError: it reports none; the text names a value that is missing or is no count.
        """
        problem = self.problem()
        values = [one.value for one in self.quantities]
        if problem or None in values:
            raise ProtocolError(f"metrics page of {self.dialect}: {problem}")
        running, waiting, succeeded = cast("list[float]", values)
        return InferenceReport(
            running_count=running,
            waiting_count=waiting,
            success_total=succeeded,
            kv_cache_used_ratio=self.kv_cache.value,
        )


class _Good(Struct, frozen=True):
    """The last good value of a sample, and for how many pages it has stood for one that was not."""

    value: float
    stood: int = 0


class PageReader:
    """Reads the pages of one server, and remembers the last good values of the newest one."""

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        self._dialects = tuple(dialects)
        # Only the lines that matter are parsed: a page has thousands of histogram buckets, and the
        # agent has a hundredth of a core.
        self._names = frozenset(name for one in self._dialects for name in _series(one))
        self._starts = tuple({name[:SHORT] for name in self._names})
        self._last: dict[object, _Good] = {}
        self._heads: _Heads = {}

    @classmethod
    def of(cls, engine: str, metrics: MetricsSettings | None = None) -> PageReader:
        """A reader by a site's own names, or else by those of an engine.

        Raises:
            ConfigError: the engine is unknown.
        """
        if metrics is None:
            return cls(engine_named(engine))
        is_command = bool(metrics.command)
        named = COMMAND_OUTPUT if is_command else metrics
        return cls((Dialect(name="the command" if is_command else "the settings", metrics=named),))

    def read(self, text: str) -> Reading:
        """Read one page.

        Raises:
            ProtocolError: no JSON where it should be.
        """
        page: _Page
        if self._names:
            page = _Text(text, self._names, self._starts, self._heads)
            self._heads = page.heads
        else:
            page = _Json(text)
        dialect = self._dialect(page)
        metrics = dialect.metrics
        known: dict[object, _Good] = {}
        reading = Reading(
            dialect=dialect.name,
            running=self._quantity("running", metrics.running, page, known),
            waiting=self._quantity("waiting", metrics.waiting, page, known),
            succeeded=self._quantity("succeeded", metrics.succeeded, page, known),
            kv_cache=self._quantity("kv_cache", metrics.kv_cache, page, known),
        )
        self._last = known
        return reading

    def _dialect(self, page: _Page) -> Dialect:
        """The first dialect whose numbers are all on the page, else the one with the most."""
        best, best_count = self._dialects[0], -1
        for dialect in self._dialects:
            if dialect.when is not None and not page.find(dialect.when):
                continue
            metrics = dialect.metrics
            counts = [one for one in (*metrics.running, *metrics.waiting) if not one.optional]
            found = [bool(page.find(one)) for one in counts]
            found += [
                bool(page.find(one)) or page.declares(one)
                for one in metrics.succeeded
                if not one.optional
            ]
            if all(found):
                return dialect
            if sum(found) > best_count:
                best, best_count = dialect, sum(found)
        return best

    def _quantity(
        self, name: str, settings: Sequence[CountSettings], page: _Page, known: dict[object, _Good]
    ) -> Quantity:
        counts = tuple(self._count(one, page, known, name) for one in settings)
        values = [count.value for count in counts if count.value is not None]
        value: float | None
        if name == "kv_cache":  # a missing value is no empty cache
            value = max(
                (one.value for one in counts if one.samples and one.value is not None), default=None
            )
        else:
            value = sum(values) if len(values) == len(counts) else None
        return Quantity(name=name, value=value, counts=counts)

    def _count(self, one: CountSettings, page: _Page, known: dict[object, _Good], of: str) -> Count:
        """`of` is the quantity that it is of."""
        samples = page.find(one)
        name = one.path or " or ".join(one.series)
        if not samples:
            # A page that declares a counter without any sample creates each label set at its first
            # event. A page that does not even declare it is another engine's.
            is_zero = one.optional or (of == "succeeded" and page.declares(one))
            return Count(name=name, value=0.0 if is_zero else None)
        is_max = one.combine == Combine.MAX or of == "kv_cache"
        name = samples[0].name
        values: list[tuple[Mapping[str, str], float]] = []
        dropped: list[Sample] = []
        is_told = True
        for sample in samples:
            good = None if sample.value is None else _Good(sample.value)
            if good is None:
                dropped.append(sample)
                good = None if sample.labels is None else self._stand_in(sample)
                is_told &= of != "succeeded" or (good is not None and good.stood <= MAX_STANDS)
            if good is not None:
                known[sample.key] = good
                values.append((sample.labels or {}, good.value))
        return Count(
            name=name,
            value=_combined(one, values, is_max=is_max) if values and is_told else None,
            samples=tuple(samples),
            dropped=tuple(dropped),
        )

    def _stand_in(self, sample: Sample) -> _Good | None:
        last = self._last.get(sample.key)
        return None if last is None else _Good(last.value, last.stood + 1)


def parse_metrics(text: str, engine: str) -> InferenceReport:
    """Load of an inference server from one metrics page of an engine.

    Raises:
        ConfigError: the engine is unknown.
        ProtocolError: the page is not one of this engine, and the text names the gap; or no
            value of a number, or its sum, is a count.
    """
    return PageReader.of(engine).read(text).load()


def checked_metrics(metrics: MetricsSettings, field: str) -> None:
    """Refuse settings that no page could satisfy.

    Raises:
        ConfigError: names the field.
    """
    lists = {"running": metrics.running, "waiting": metrics.waiting, "succeeded": metrics.succeeded}
    lists["kv_cache"] = metrics.kv_cache
    if metrics.command:
        if any(lists.values()):
            raise ConfigError(f"{field}.command: prints the numbers itself, expected no lists")
        return
    for name in ("running", "succeeded"):
        if not lists[name]:
            raise ConfigError(f"{field}.{name}: is required and missing, where there is no command")
    are_json: set[bool] = set()
    for name, counts in lists.items():
        for number, one in enumerate(counts):
            _check_count(one, f"{field}.{name}[{number}]")
            are_json.add(bool(one.path))
    if len(are_json) > 1:
        raise ConfigError(f"{field}: a page has series or paths, not both")


def _check_count(one: CountSettings, where: str) -> None:
    if bool(one.series) == bool(one.path) or "" in one.series:
        raise ConfigError(f"{where}: expected a series or a path")
    if one.by and one.combine != Combine.MAX:
        raise ConfigError(f"{where}.by: a sum is of all label sets; expected combine = 'max'")
    if one.path and (one.labels or one.copies or one.by):
        raise ConfigError(f"{where}.path: a JSON document has no labels")
    if one.path and not one.path.startswith("/"):
        raise ConfigError(f"{where}.path: {one.path!r}: expected a JSON pointer, as /a/b")


# --- pages ------------------------------------------------------------------------------------


class _Page:
    """Finds the samples of a `CountSettings` on a page."""

    def find(self, one: CountSettings) -> list[Sample]:
        """All its samples; empty where the page has none."""
        raise NotImplementedError

    def declares(self, one: CountSettings) -> bool:
        """True if the page declares it, with or without a sample."""
        raise NotImplementedError


class _Text(_Page):
    """Prometheus' text format, where each line stands alone: a broken line costs one sample.

    known: names and labels of earlier lines, by their text without the value: a page has the same
        ones each second.
    heads: those of this page.
    """

    def __init__(
        self, text: str, names: frozenset[str], starts: tuple[str, ...], known: _Heads
    ) -> None:
        self._text = text
        self._samples: dict[str, list[Sample]] = {}
        self.heads: _Heads = {}
        for line in text.split("\n"):
            if line.startswith(starts) and _name(line) in names:
                sample = self._read(line.rstrip(), known)
                self._samples.setdefault(sample.name, []).append(sample)

    def _read(self, line: str, known: _Heads) -> Sample:
        head, tail = _halves(line)
        found = known.get(head)
        if found is not None and (value := _number(tail)) is not None:
            self.heads[head] = found
            name, labels = found
            return Sample(name=name, labels=labels, value=_as_count(value), text=line)
        sample = _sample(line)
        if sample.labels is not None and _number(tail) is not None:
            self.heads[head] = sample.name, sample.labels
        return sample

    def find(self, one: CountSettings) -> list[Sample]:
        for name in one.series:
            found = [
                sample
                for sample in self._samples.get(name, ())
                if sample.labels is None or _has_labels(sample.labels, one.labels)
            ]
            if found:
                return found
        return []

    def declares(self, one: CountSettings) -> bool:
        # The text format names a counter's family as its samples, OpenMetrics without `_total`.
        return any(
            self._text.startswith(f"# TYPE {family} ") or f"\n# TYPE {family} " in self._text
            for name in one.series
            for family in (name, name.removesuffix("_total").removesuffix("_count"))
        )


class _Json(_Page):
    """A JSON document; a place without a number is a value that is no count."""

    def __init__(self, text: str) -> None:
        try:
            self._document: object = msgspec.json.decode(text)
        except UNREADABLE as error:
            raise ProtocolError(f"expected JSON: {error}") from None

    def find(self, one: CountSettings) -> list[Sample]:
        steps = [step.replace("~1", "/").replace("~0", "~") for step in one.path.split("/")[1:]]
        return [
            Sample(
                name=one.path,
                labels={"at": where},
                value=_as_count(value),
                text=f"{where}: {_short(msgspec.json.encode(value).decode())}",
            )
            for where, value in _places(self._document, steps, "")
        ]

    def declares(self, one: CountSettings) -> bool:
        return False


def _places(value: object, steps: Sequence[str], where: str) -> Iterator[tuple[str, object]]:
    if not steps:
        yield where, value
        return
    step, rest = steps[0], steps[1:]
    items: dict[str, object]
    if isinstance(value, dict):
        items = {str(key): item for key, item in cast("dict[object, object]", value).items()}
    elif isinstance(value, list):
        items = {str(number): item for number, item in enumerate(cast("list[object]", value))}
    else:
        return
    for key, item in items.items() if step == "*" else ((step, items.get(step)),):
        if key in items:
            yield from _places(item, rest, f"{where}/{key}")


def _name(line: str) -> str:
    return line.partition("{")[0].split(None, 1)[0]


def _halves(line: str) -> tuple[str, str]:
    """A line up to its value, and the rest of it."""
    end = line.rfind("}") + 1 or line.find(" ")
    return (line[:end], line[end:]) if end > 0 else (line, "")


def _number(tail: str) -> float | None:
    """The value after the labels, perhaps before a time; None: it is none."""
    words = tail.split()
    try:
        return float(words[0]) if 1 <= len(words) <= 2 else None
    except ValueError:
        return None


def _sample(line: str) -> Sample:
    """One line of the text format, by the format's reference parser."""
    parsed = _parsed(line)
    if parsed is None and " # " in line:  # an exemplar, which only OpenMetrics has
        parsed = _parsed(line.rpartition(" # ")[0])
    if parsed is not None:
        name, labels, value = parsed
        return Sample(name=name, labels=labels, value=_as_count(value), text=line)
    # Its value may be the broken part; then the labels identify the sample.
    parsed = _parsed(f"{line.rpartition(' ')[0]} NaN")
    if parsed is not None:
        return Sample(name=parsed[0], labels=parsed[1], value=None, text=line)
    return Sample(name=_name(line), labels=None, value=None, text=line)


def _parsed(line: str) -> tuple[str, Mapping[str, str], float] | None:
    try:
        for family in text_string_to_metric_families(line + "\n"):
            for sample in family.samples:
                return sample.name, sample.labels, float(sample.value)
    except (ValueError, KeyError, IndexError):
        pass
    return None


def _as_count(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and 0 <= value <= MAX_INT else None


def _has_labels(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(
        fnmatchcase(found, value) if (found := labels.get(key, "")) else not value
        for key, value in wanted.items()
    )


def _combined(
    one: CountSettings, values: Iterable[tuple[Mapping[str, str], float]], *, is_max: bool
) -> float:
    """The one number that all label sets combine into."""
    once: dict[tuple[tuple[str, str], ...], float] = {}
    for labels, value in values:
        rest = tuple(sorted((k, v) for k, v in labels.items() if k not in one.copies))
        # Only copies may share a key: two lines of one label set are two values elsewhere.
        once[rest] = max(once.get(rest, 0.0), value) if one.copies else once.get(rest, 0.0) + value
    if not is_max:
        return sum(once.values())
    groups: dict[object, float] = {}
    for rest, value in once.items():
        key = tuple(dict(rest).get(label, "") for label in one.by) if one.by else rest
        groups[key] = groups.get(key, 0.0) + value
    return max(groups.values())


def _series(dialect: Dialect) -> Iterator[str]:
    metrics = dialect.metrics
    for counts in (metrics.running, metrics.waiting, metrics.succeeded, metrics.kv_cache):
        for one in counts:
            yield from one.series


def _short(text: str) -> str:
    return text if len(text) <= MAX_LINE_CHARS else f"{text[: MAX_LINE_CHARS - 3]}..."
