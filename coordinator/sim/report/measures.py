"""The measures of a run: names, units, and which direction is better."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from statistics import median

from msgspec import Struct

from coordinator.sim.run.compare import Means

HOUR_S = 3_600.0
MINUTE_S = 60.0


class Kind(StrEnum):
    """The unit of a figure."""

    TIME = "time"
    """Seconds, shown in the unit that suits most rows."""
    SHARE = "share"
    GPU_TIME = "gpu_time"
    """GPU-seconds, shown in GPU-hours."""
    RATIO = "ratio"
    COUNT = "count"


class Group(StrEnum):
    """Measures that belong together on a page, in this order."""

    SHORT = "In short"
    TIMES = "Queueing and completion"
    FAIRNESS = "Finish-time fairness and failures"
    USE = "GPUs held, loans and reclaims"
    COST = "Preemptions, turns and moves"


class Measure(Struct, frozen=True, kw_only=True):
    """One column.

    figure: dotted name in `RunResult`. heading: short, for a terminal.
    sign: 1: more is better; -1: less is; 0: neither.
    is_drawn: has a panel of bars of its own.
    """

    figure: str
    name: str
    heading: str
    kind: Kind
    group: Group
    sign: int = -1
    is_drawn: bool = False


def _measures(*rows: tuple[str, str, str, Kind, Group, int, bool]) -> tuple[Measure, ...]:
    return tuple(
        Measure(
            figure=figure,
            name=name,
            heading=heading,
            kind=kind,
            group=group,
            sign=sign,
            is_drawn=is_drawn,
        )
        for figure, name, heading, kind, group, sign, is_drawn in rows
    )


_T, _S, _G, _R, _C = Kind.TIME, Kind.SHARE, Kind.GPU_TIME, Kind.RATIO, Kind.COUNT
_0, _1, _2, _3, _4 = Group.SHORT, Group.TIMES, Group.FAIRNESS, Group.USE, Group.COST
_RHO = "finish_time_fairness"

MEASURES = _measures(
    ("jct_s.mean", "JCT, mean", "JCT", _T, _0, -1, True),
    ("queueing_s.mean", "Queueing, mean", "QUEUEING", _T, _0, -1, True),
    ("makespan_s", "Makespan", "MAKESPAN", _T, _0, -1, True),
    ("training_gpu_ratio", "Training GPUs held", "HELD", _S, _0, 1, True),
    (f"{_RHO}.mean", "Fairness rho, mean", "RHO", _R, _0, -1, True),
    (f"{_RHO}.max", "Fairness rho, worst app", "RHO MAX", _R, _0, -1, True),
    (f"{_RHO}.share_above_1", "Rho above 1, apps", "RHO >1", _S, _0, -1, True),
    ("deadlines_met_ratio", "Deadlines met", "MET", _S, _0, 1, True),
    ("preemptions", "Preemptions", "PREEMPTED", _C, _0, -1, True),
    ("lost_gpu_s", "GPU time lost", "LOST", _G, _0, -1, True),
    ("jct_s.p50", "JCT, p50", "JCT P50", _T, _1, -1, False),
    ("jct_s.p95", "JCT, p95", "JCT P95", _T, _1, -1, True),
    ("jct_bound_s", "JCT, bound", "JCT BOUND", _T, _1, 0, False),
    ("gap_closed_ratio", "Gap from sjf to the bound closed", "GAP CLOSED", _S, _1, 1, False),
    ("queueing_s.p50", "Queueing, p50", "QUEUEING P50", _T, _1, -1, False),
    ("queueing_s.p95", "Queueing, p95", "QUEUEING P95", _T, _1, -1, True),
    ("suspended_s.mean", "Suspended, mean", "SUSPENDED", _T, _1, -1, True),
    ("suspended_s.p95", "Suspended, p95", "SUSPENDED P95", _T, _1, -1, False),
    (f"{_RHO}.p50", "Rho, p50", "RHO P50", _R, _2, -1, False),
    (f"{_RHO}.p95", "Rho, p95", "RHO P95", _R, _2, -1, False),
    ("promised", "Deadlines promised", "PROMISED", _C, _2, 0, False),
    ("promises_missed", "Promised and missed", "BROKEN", _C, _2, -1, False),
    ("jobs_rejected", "Jobs rejected", "REJECTED", _C, _2, -1, False),
    ("jobs_failed", "Jobs failed", "FAILED", _C, _2, -1, False),
    ("failures.trials", "Attempts failed", "TRIALS FAILED", _C, _2, -1, False),
    ("failures.gpu_s", "GPU time of failed attempts", "FAILED USE", _G, _2, -1, False),
    ("overall_gpu_ratio", "All GPUs held", "ALL HELD", _S, _3, 1, False),
    ("on_loan_gpu_ratio", "On-loan GPUs held", "ON LOAN HELD", _S, _3, 1, False),
    ("on_loan_jobs.jobs", "Jobs on loan", "ON LOAN JOBS", _C, _3, 0, False),
    ("on_loan_jobs.jct_s.mean", "Their JCT, mean", "ON LOAN JCT", _T, _3, 0, False),
    ("reclaims", "Reclaims", "RECLAIMS", _C, _3, 0, False),
    ("reclaims_late", "Reclaims late", "LATE", _C, _3, -1, False),
    ("reclaim.gentle_ratio", "Reclaims without preemptions", "GENTLE", _S, _3, 0, False),
    ("preempted_jobs_ratio", "Jobs preempted", "JOBS PREEMPTED", _S, _4, -1, False),
    ("suspensions", "Suspensions", "SUSPENSIONS", _C, _4, 0, False),
    ("migrations", "Migrations", "MIGRATIONS", _C, _4, 0, False),
)
"""In display order. A measure that no row has, or that is zero in all rows, is left out."""


class Shown(Struct, frozen=True, kw_only=True):
    """One measure as all rows show it: one unit, so that the eye compares numbers only."""

    measure: Measure
    unit: str
    size: float
    decimals: int

    def number(self, value: float) -> str:
        """A value in this unit, without the unit; a value too small for the decimals is not shown
        as zero.
        """
        least = 10.0**-self.decimals
        if 0.0 < value / self.size < least / 2:
            return f"<{least:.{self.decimals}f}"
        return f"{value / self.size:,.{self.decimals}f}" if value else "0"

    def text(self, value: float) -> str:
        """A value with its unit."""
        return f"{self.number(value)} {self.unit}".rstrip()


def shown(measure: Measure, rows: Iterable[Means]) -> Shown:
    """In the unit that suits most rows that are not zero."""
    values = [row.figures[measure.figure].mean for row in rows if measure.figure in row.figures]
    middle = median([value for value in values if value] or [0.0])
    largest = max(values, default=0.0)
    match measure.kind:
        case Kind.TIME:
            units = (("h", HOUR_S), ("min", MINUTE_S))
            unit, size = next(((u, s) for u, s in units if middle >= s), ("s", 1.0))
        case Kind.GPU_TIME:
            unit, size = "GPU-h", HOUR_S
        case Kind.SHARE:
            return Shown(measure=measure, unit="%", size=0.01, decimals=1)
        case Kind.RATIO:
            return Shown(measure=measure, unit="", size=1.0, decimals=2)
        case Kind.COUNT:
            is_whole = all(value == int(value) for value in values)
            return Shown(measure=measure, unit="", size=1.0, decimals=0 if is_whole else 1)
    decimals = 2 if largest < 100 * size else 1 if largest < 1000 * size else 0
    return Shown(measure=measure, unit=unit, size=size, decimals=decimals)


def told(rows: Sequence[Means]) -> tuple[list[Shown], list[str]]:
    """The informative measures of these rows, and the names of those that are zero in all.

    A measure that no row has (no deadline, no loan) is in neither.
    """
    told_: list[Shown] = []
    zero: list[str] = []
    for measure in MEASURES:
        values = [row.figures[measure.figure] for row in rows if measure.figure in row.figures]
        if any(value.mean or value.half_width for value in values):
            told_.append(shown(measure, rows))
        elif values:
            zero.append(measure.name)
    return told_, zero


def best(each: Shown, rows: Mapping[int, float]) -> set[int]:
    """The rows with the best number as it is shown; none where most have it, or none is better."""
    sign = each.measure.sign
    if not sign or len(rows) < 2:
        return set()
    texts = {place: each.number(value) for place, value in rows.items()}
    first = max(rows, key=lambda place: sign * rows[place])
    found = {place for place, text in texts.items() if text == texts[first]}
    return found if 2 * len(found) <= len(rows) else set()
