"""Sums of a usage report: amounts within a span of time, by chosen columns. Pure.

An interval that crosses an end of the span counts with its part inside. An amount of an instant
counts if the instant is in the span; the end of the span is excluded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from coordinator.service.history.facts import Fact, FactKind

DIMENSIONS = ("tenant", "user", "job", "service", "node", "gpu_type")
"""What a report may be split by."""
PERSONAL = frozenset({"tenant", "user", "job"})
"""Of these, the ones that GPUs on loan do not have by themselves."""


class Totals(Struct):
    """The amounts of one row, in GPU-seconds; `waited_s` in job-seconds.

    lost_by_cause_gpu_s: the same as `lost_gpu_s`, by cause.
    """

    training_gpu_s: float = 0.0
    on_loan_gpu_s: float = 0.0
    lent_gpu_s: float = 0.0
    lost_gpu_s: float = 0.0
    waited_s: float = 0.0
    waited_gpu_s: float = 0.0
    lost_by_cause_gpu_s: dict[str, float] = {}


Key = tuple[str, ...]
"""Values of the chosen columns."""


class Sums:
    """A report in the making.

    Args:
        by: the columns, from `DIMENSIONS`.
        since_s, until_s: the span, engine time.
    """

    def __init__(self, by: Sequence[str], *, since_s: float, until_s: float) -> None:
        self.by = tuple(by)
        self.since_s = since_s
        self.until_s = until_s
        self.rows: dict[Key, Totals] = {}

    def add_facts(self, found: Iterable[Fact]) -> None:
        """Add amounts one by one, each as far as it lies in the span."""
        for fact in found:
            if not covers(fact, since_s=self.since_s, until_s=self.until_s):
                continue
            span_s = max(0.0, min(fact.ended_s, self.until_s) - max(fact.began_s, self.since_s))
            key = tuple(str(getattr(fact, name)) for name in self.by)
            gpu_s = fact.gpu_s + fact.gpus * span_s
            self.add(key, fact.kind, fact.pool, fact.cause, gpu_s=gpu_s, span_s=span_s)

    def add(
        self, key: Key, kind: FactKind, pool: str, cause: str, *, gpu_s: float, span_s: float
    ) -> None:
        """Add an amount to a row."""
        if kind == FactKind.LENT and not PERSONAL.isdisjoint(self.by):
            return  # idle or not, it is the service's and not a person's
        row = self.rows.get(key)
        if row is None:
            row = self.rows[key] = Totals()
        match kind:
            case FactKind.HELD if pool == "loan":
                row.on_loan_gpu_s += gpu_s
            case FactKind.HELD:
                row.training_gpu_s += gpu_s
            case FactKind.LENT:
                row.lent_gpu_s += gpu_s
            case FactKind.LOST:
                row.lost_gpu_s += gpu_s
                costs = row.lost_by_cause_gpu_s
                costs[cause] = costs.get(cause, 0.0) + gpu_s
            case FactKind.WAITED:
                row.waited_gpu_s += gpu_s
                row.waited_s += span_s


def covers(fact: Fact, *, since_s: float, until_s: float) -> bool:
    """Whether any of an amount lies in a span."""
    if fact.began_s == fact.ended_s:
        return since_s <= fact.began_s < until_s
    return fact.ended_s > since_s and fact.began_s < until_s
