"""Tables of metrics: the name, the kind, the meaning and the labels of each one.

A table is the only place where a metric is named. The page, the reference in docs/monitoring.md and
the tests of boards and alerts are made from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

# One more series for each counter, which nothing here asks for.
disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no annotation

Kind = Literal["gauge", "counter", "histogram"]

QUICK_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bucket bounds for what a daemon does by itself, in seconds."""
SLOW_S = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 300.0, 600.0, 1200.0)
"""Bucket bounds for a way home and its stages, in seconds."""
QUEUEING_S = (1.0, 10.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 10800.0, 21600.0, 86400.0, 259200.0)
"""Bucket bounds for the time in the queue, in seconds."""
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.5, 2.0)
"""Bucket bounds for parts of a deadline; 1 is the deadline."""


class Family(NamedTuple):
    """One metric.

    name: as it stands on the page; of a counter with its `_total`.
    buckets: upper bounds of a histogram, without the last one, +Inf.
    """

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def sample_names(self) -> tuple[str, ...]:
        """The names of its samples, which boards and alerts ask for."""
        if self.kind != "histogram":
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))


class Scrape:
    """The samples of one scrape, for the gauges and counters of a table.

    A value that is not known is no sample, which differs from 0.
    """

    def __init__(self, table: Sequence[Family]) -> None:
        self._families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
            one.name: _empty(one) for one in table if one.kind != "histogram"
        }

    def put(self, name: str, value: float | None, *labels: str) -> None:
        """Add the sample of these label values, in the order of the table."""
        if value is not None:
            self._families[name].add_metric(labels, value)

    def states(self, name: str, values: Iterable[str], present: str, *labels: str) -> None:
        """Add one sample for each state, 1 for the present one; the state is the last label."""
        for value in values:
            self.put(name, float(value == present), *labels, value)

    def found(self) -> Iterator[Metric]:
        """The metrics that have samples."""
        return (family for family in self._families.values() if family.samples)


def _empty(one: Family) -> GaugeMetricFamily | CounterMetricFamily:
    make = CounterMetricFamily if one.kind == "counter" else GaugeMetricFamily
    return make(one.name, one.meaning, labels=one.labels)


class Kept:
    """The counters and histograms of a table that are kept between two scrapes."""

    def __init__(self, table: Sequence[Family], registry: CollectorRegistry) -> None:
        self._counters = {
            one.name: Counter(one.name, one.meaning, one.labels, registry=registry)
            for one in table
            if one.kind == "counter"
        }
        self._histograms = {
            one.name: Histogram(
                one.name, one.meaning, one.labels, buckets=one.buckets, registry=registry
            )
            for one in table
            if one.kind == "histogram"
        }

    def count(self, name: str, *labels: str, amount: float = 1.0) -> None:
        """Add to a counter; less than nothing is not counted."""
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(max(0.0, amount))

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add a value to a histogram."""
        histogram = self._histograms[name]
        (histogram.labels(*labels) if labels else histogram).observe(value)
