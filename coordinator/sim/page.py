"""Runs as one HTML page with plots and nothing from outside. Must not run or read anything."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from msgspec import Struct

from coordinator.sim.compare import Means, label, means
from coordinator.sim.plots import Axis, Bar, Line, bars, distribution, lines
from coordinator.sim.run import Run

HOUR_S = 3_600.0
DAY_S = 86_400.0
SHORTEST_S = 1.0
TIME_TICKS = (1.0, 10.0, 60.0, 600.0, HOUR_S, 10 * HOUR_S, DAY_S, 10 * DAY_S, 100 * DAY_S)
"""Where the logarithmic axes of waiting and completion begin."""

STYLE = """
:root{--paper:#fff;--ink:#1c2430;--soft:#5b6675;--rule:#dfe4ea;--panel:#f6f8fa;
--c1:#2563eb;--c2:#d9480f;--c3:#2b8a3e;--c4:#9c36b5;--c5:#b08900;--c6:#0b7285;--c7:#c2255c;
--c8:#5c6773}
@media(prefers-color-scheme:dark){:root{--paper:#12161c;--ink:#e6eaf0;--soft:#9aa6b5;
--rule:#2b333e;--panel:#1a2028;--c1:#6ea8fe;--c2:#ff922b;--c3:#69db7c;--c4:#da77f2;--c5:#ffd43b;
--c6:#3bc9db;--c7:#f783ac;--c8:#adb5bd}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1380px;padding:28px 20px 60px;background:var(--paper);
color:var(--ink);font:15px/1.5 system-ui,sans-serif}
h1{font-size:26px;margin:0 0 4px}h2{font-size:18px;margin:34px 0 10px}
h3{font-size:14px;margin:0 0 6px;font-weight:600}
p{margin:0 0 10px;color:var(--soft);max-width:80ch}
.wrap{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;
font-size:14px}th,td{padding:5px 12px;text-align:right;border-bottom:1px solid var(--rule);
white-space:nowrap}th{color:var(--soft);font-weight:600}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:var(--paper)}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr));gap:14px}
figure{margin:0;padding:12px 14px;background:var(--panel);border-radius:8px}
figcaption{color:var(--soft);font-size:13px;margin-top:4px}
svg{width:100%;height:auto;display:block}
svg text{fill:var(--soft);font-size:11px}svg text.value{fill:var(--ink)}
.grid{stroke:var(--rule);fill:none}.tick{stroke:var(--soft);fill:none}
.line{fill:none;stroke-width:1.7;stroke-linejoin:round}
.faint{fill:none;stroke-width:1.2;stroke-dasharray:4 3;opacity:.75}
.whisker{stroke:var(--ink);stroke-width:1.4;fill:none}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;margin:6px 0 0;padding:0;
font-size:13px}.legend i{display:inline-block;width:14px;height:3px;margin-right:6px;
vertical-align:middle}
""" + "".join(
    f".line.c{n},.faint.c{n}{{stroke:var(--c{n})}}.bar.c{n}{{fill:var(--c{n})}}"
    f"i.c{n}{{background:var(--c{n})}}"
    for n in range(1, 9)
)


class Heading(Struct, frozen=True, kw_only=True):
    """What was compared, in words."""

    workload: str
    cluster: str
    jobs: int
    notes: tuple[str, ...] = ()


def page(heading: Heading, runs: Sequence[Run]) -> str:
    """The whole page.

    Plots over time and distributions are of each policy's first seed; bars and the table are
    means over all seeds, with 95 % confidence intervals.
    """
    averages = means([run.result for run in runs])
    first: dict[str, Run] = {}
    for run in runs:
        first.setdefault(label(run.result), run)
    shown = list(first.values())
    title = f"aryl simulate: {heading.workload}"
    notes = "".join(f"<p>{escape(note)}</p>" for note in heading.notes)
    seeds = max(row.seeds for row in averages)
    over = f"{seeds} seeds" if seeds > 1 else "1 seed"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>"
        f"<p>{heading.jobs:,} jobs on {escape(heading.cluster)}; {over}.</p>{notes}"
        f"<h2>Figures</h2>{_table(averages)}"
        f"<h2>By policy</h2>{_bars(averages)}"
        f"<h2>Distributions</h2>{_distributions(shown)}"
        f"<h2>Over time</h2>{_times(shown)}"
        "</body></html>\n"
    )


# --- table and bars -----------------------------------------------------------------------------


COLUMNS = (
    ("queueing mean", "queueing_s.mean", "s"),
    ("queueing p50", "queueing_s.p50", "s"),
    ("queueing p95", "queueing_s.p95", "s"),
    ("JCT mean", "jct_s.mean", "s"),
    ("JCT p50", "jct_s.p50", "s"),
    ("JCT p95", "jct_s.p95", "s"),
    ("JCT bound", "jct_bound_s", "s"),
    ("training use", "training_gpu_ratio", "%"),
    ("overall use", "overall_gpu_ratio", "%"),
    ("on-loan use", "on_loan_gpu_ratio", "%"),
    ("preemptions", "preemptions", ""),
    ("jobs preempted", "preempted_jobs_ratio", "%"),
    ("lost GPU-h", "lost_gpu_s", "h"),
    ("reclaims", "reclaims", ""),
    ("late", "reclaims_late", ""),
    ("makespan", "makespan_s", "s"),
    ("deadlines met", "deadlines_met_ratio", "%"),
    ("FTF mean", "finish_time_fairness.mean", "x"),
    ("FTF max", "finish_time_fairness.max", "x"),
    ("FTF above 1", "finish_time_fairness.share_above_1", "%"),
)
"""Heading, figure, unit."""


def figure_text(value: float, unit: str) -> str:
    """A figure as people read it."""
    match unit:
        case "%":
            return f"{100 * value:.1f} %"
        case "h":
            return f"{value / HOUR_S:,.1f}"
        case "s":
            return f"{value:,.0f} s"
        case "x":
            return f"{value:,.2f}"
        case _:
            return f"{value:,.0f}"


def _table(averages: Sequence[Means]) -> str:
    """A row per figure, so that many policies fit and few are not lost in width."""
    head = "".join(f"<th>{escape(label(row))}</th>" for row in averages)
    body = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f"<td>{_cell(row, figure, unit)}</td>" for row in averages)
        + "</tr>"
        for name, figure, unit in COLUMNS
    )
    return f'<div class="wrap"><table><tr><th></th>{head}</tr>{body}</table></div>'


def _cell(row: Means, figure: str, unit: str) -> str:
    found = row.figures.get(figure)
    if found is None:
        return "-"
    text = figure_text(found.mean, unit)
    if found.half_width is None:
        return escape(text)
    return escape(f"{text} ± {figure_text(found.half_width, unit)}")


def _bars(averages: Sequence[Means]) -> str:
    shown = (
        ("Mean queueing", "queueing_s.mean", "s", None),
        ("Mean JCT", "jct_s.mean", "s", None),
        ("95th percentile of queueing", "queueing_s.p95", "s", None),
        ("Training GPUs held", "training_gpu_ratio", "%", 1.0),
        ("Preemptions", "preemptions", "", None),
        ("GPU-hours lost", "lost_gpu_s", "h", None),
        ("Makespan", "makespan_s", "s", None),
        ("Finish-time fairness, mean", "finish_time_fairness.mean", "x", None),
        ("Finish-time fairness, worst app", "finish_time_fairness.max", "x", None),
        ("Apps worse off than alone", "finish_time_fairness.share_above_1", "%", 1.0),
        ("Deadlines met", "deadlines_met_ratio", "%", 1.0),
    )
    figures: list[str] = []
    for title, figure, unit, top in shown:
        if not any(figure in row.figures for row in averages):
            continue
        # Hours are divided here, so that ticks are round.
        size = HOUR_S if unit == "h" else 1.0

        def text(value: float, unit: str = unit, size: float = size) -> str:
            return figure_text(value * size, unit)

        drawn = bars(
            [
                Bar(
                    name=label(row),
                    value=row.figures[figure].mean / size,
                    half_width=_divided(row.figures[figure].half_width, size),
                    color=index,
                )
                for index, row in enumerate(averages)
                if figure in row.figures
            ],
            y=Axis(title="", text=text, top=top),
            label=title,
        )
        figures.append(_figure(title, drawn))
    return f'<div class="plots">{"".join(figures)}</div>'


def _divided(half_width: float | None, size: float) -> float | None:
    return None if half_width is None else half_width / size


def _figure(title: str, drawn: str, caption: str = "") -> str:
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure><h3>{escape(title)}</h3>{drawn}{below}</figure>"


# --- distributions and time ---------------------------------------------------------------------


def span_text(seconds: float) -> str:
    """A length of time in its largest unit."""
    for unit, size in (("d", DAY_S), ("h", HOUR_S), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _distributions(runs: Sequence[Run]) -> str:
    share = Axis(title="share of jobs", text=_percent, top=1.0)
    figures: list[str] = []
    for title, attribute in (("Queueing time", "queueing_s"), ("Job completion time", "jct_s")):
        curves: list[Line] = []
        for index, run in enumerate(runs):
            xs, ys = distribution([getattr(row, attribute) for row in run.rows])
            curves.append(Line(name=label(run.result), xs=xs, ys=ys, color=index))
        time = Axis(title="at most", text=span_text, bottom=SHORTEST_S, log_ticks=TIME_TICKS)
        figures.append(_figure(title, lines(curves, x=time, y=share, label=title)))
    return f'<div class="plots">{"".join(figures)}</div>'


def _times(runs: Sequence[Run]) -> str:
    figures = [
        _over_time(runs, "Training GPUs held", "training_gpu_ratio", is_share=True),
        _over_time(runs, "Jobs that wait", "queue_jobs", is_share=False),
        _over_time(runs, "GPUs that waiting jobs ask for", "queue_gpus", is_share=False),
    ]
    if any(sample.lendable_nodes or sample.lent_nodes for run in runs for sample in run.samples):
        figures.insert(1, _over_time(runs, "On-loan GPUs held", "on_loan_gpu_ratio", is_share=True))
        figures.append(_lent(runs))
    return f'<div class="plots">{"".join(figures)}</div>'


class _Span:
    """The whole time of the runs, in the unit in which its ticks are round."""

    def __init__(self, runs: Sequence[Run]) -> None:
        end_s = max(run.samples[-1].at_s for run in runs)
        units = (("days", DAY_S), ("hours", HOUR_S), ("minutes", 60.0), ("seconds", 1.0))
        self._unit, self._size = next(
            ((unit, size) for unit, size in units if end_s >= 2 * size), ("seconds", 1.0)
        )
        self._end = max(end_s, 1.0) / self._size

    @property
    def axis(self) -> Axis:
        return Axis(title=self._unit, text=lambda value: f"{value:g}", top=self._end)

    def instants(self, run: Run) -> list[float]:
        """The samples of a run, in this unit."""
        return [sample.at_s / self._size for sample in run.samples]


def _over_time(runs: Sequence[Run], title: str, attribute: str, *, is_share: bool) -> str:
    span = _Span(runs)
    curves = [
        Line(
            name=label(run.result),
            xs=span.instants(run),
            ys=[float(getattr(sample, attribute)) for sample in run.samples],
            color=index,
        )
        for index, run in enumerate(runs)
    ]
    y = Axis(title="share", text=_percent, top=1.0) if is_share else _counted(title)
    return _figure(title, lines(curves, x=span.axis, y=y, label=title))


def _counted(title: str) -> Axis:
    return Axis(title="GPUs" if "GPUs" in title else "jobs", text=lambda value: f"{value:,.0f}")


def _lent(runs: Sequence[Run]) -> str:
    title = "Nodes lent, and nodes that could be"
    span = _Span(runs)
    curves = [
        Line(
            name=label(run.result),
            xs=span.instants(run),
            ys=[float(sample.lent_nodes) for sample in run.samples],
            color=index,
            is_step=True,
        )
        for index, run in enumerate(runs)
    ]
    longest = max(runs, key=lambda run: run.samples[-1].at_s)
    curves.append(
        Line(
            name="lendable",
            xs=span.instants(longest),
            ys=[float(sample.lendable_nodes) for sample in longest.samples],
            color=7,
            is_step=True,
            is_faint=True,
        )
    )
    count = Axis(title="nodes", text=lambda value: f"{value:,.0f}")
    return _figure(
        title,
        lines(curves, x=span.axis, y=count, label=title),
        "Lendable: what the load of that instant leaves over, headroom kept.",
    )
