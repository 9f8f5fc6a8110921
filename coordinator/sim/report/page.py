"""Runs as one HTML page with plots, which loads nothing from outside.

It serves one policy as well as twenty. Numbers stand as sorted bars and in tables, one measure
each. Lines over time and distributions have some policies in color and the others as their
background.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from msgspec import Struct

from coordinator.sim.report.measures import HOUR_S, Group
from coordinator.sim.report.panels import Cast, bars, cast, chips, table, zeros
from coordinator.sim.report.plots import Axis, Line, distribution, lines
from coordinator.sim.report.style import document, picked
from coordinator.sim.run.compare import label, means
from coordinator.sim.run.play import JobRow, Run

DAY_S = 86_400.0
SHORTEST_S = 1.0
TIME_TICKS = (1.0, 10.0, 60.0, 600.0, HOUR_S, 10 * HOUR_S, DAY_S, 10 * DAY_S, 100 * DAY_S)


class Heading(Struct, frozen=True, kw_only=True):
    """The subject of the comparison, as text.

    notes: before all figures. alike: policies with equal rows, below the first of them.
    """

    workload: str
    cluster: str
    jobs: int
    notes: tuple[str, ...] = ()
    alike: str = ""


class _Shown(Struct, frozen=True, kw_only=True):
    """A run that is drawn, and its place among colors."""

    run: Run
    name: str
    place: int


def page(heading: Heading, runs: Sequence[Run]) -> str:
    """The whole page.

    Plots over time and distributions are of each policy's first seed; bars and tables are means
    over all seeds, with 95 % confidence intervals.
    """
    who = cast(means([run.result for run in runs]))
    seeds = max(row.seeds for row in who.rows)
    over = f"{seeds} seeds" if seeds > 1 else "1 seed"
    first = f" Of the first of {seeds} seeds." if seeds > 1 else ""
    notes = "".join(f"<p>{escape(note)}</p>" for note in heading.notes)
    hint = (
        "Pick the policies shown in color; the tables mark the best number."
        if len(who.rows) > 1
        else ""
    )
    alike = f"<p>{escape(heading.alike)}</p>" if heading.alike else ""
    shown = _drawn(who, runs)
    rest = "".join(table(who, group) for group in Group if group != Group.SHORT)
    body = (
        f"<p>{heading.jobs:,} jobs on {escape(heading.cluster)}; {over}. {hint}</p>{notes}"
        f"{chips(who)}"
        f"<h2>{Group.SHORT}</h2>{table(who, Group.SHORT, has_caption=False)}{alike}"
        f"{bars(who)}"
        f"<h2>Distributions</h2><p>{RHO}{first}</p>{_distributions(shown)}"
        f"<h2>Over time</h2>{_times(shown)}"
        f'<h2>More figures</h2><div class="tables">{rest}</div>{zeros(who)}'
    )
    return document(f"aryl simulate: {heading.workload}", body, style=picked(len(who.rows)))


RHO = (
    "Finish-time fairness rho of an app: how long it took over how long it would have taken on a "
    "share of the training GPUs of its own; above 1 sharing has cost it more than it gave."
)


def _drawn(who: Cast, runs: Sequence[Run]) -> list[_Shown]:
    """The first run of each row, those in color first."""
    first: dict[str, Run] = {}
    for run in runs:
        first.setdefault(label(run.result), run)
    found = [_Shown(run=run, name=name, place=who.place_of(name)) for name, run in first.items()]
    return sorted(found, key=lambda each: each.place)


def _figure(title: str, drawn: str, caption: str = "") -> str:
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure><h3>{escape(title)}</h3>{drawn}{below}</figure>"


def _line(each: _Shown, xs: Sequence[float], ys: Sequence[float], *, is_step: bool = False) -> Line:
    key = f"one p{each.place}"
    return Line(name=each.name, xs=xs, ys=ys, color=each.place, is_step=is_step, key=key)


# --- distributions and time ---------------------------------------------------------------------


def span_text(seconds: float) -> str:
    """A length of time in its largest unit."""
    for unit, size in (("d", DAY_S), ("h", HOUR_S), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _distributions(runs: Sequence[_Shown]) -> str:
    waits = [[row.queueing_s for row in each.run.rows] for each in runs]
    jcts = [[row.jct_s for row in each.run.rows] for each in runs]
    rhos = [_rhos(each.run.rows) for each in runs]
    figures = [
        _distribution(runs, "Queueing time of jobs", waits, _time_axis(waits), "jobs"),
        _distribution(runs, "Completion time of jobs", jcts, _time_axis(jcts), "jobs"),
    ]
    if any(rhos):
        top = min(4.0, max(max(each, default=0.0) for each in rhos))
        axis = Axis(title="rho", text=lambda value: f"{value:g}", top=top, mark=1.0)
        caption = "Beyond 4 the line ends." if top == 4.0 else ""
        figures.append(
            _distribution(runs, "Finish-time fairness of apps", rhos, axis, "apps", caption)
        )
    return f'<div class="plots">{"".join(figures)}</div>'


def _distribution(
    runs: Sequence[_Shown],
    title: str,
    values: Sequence[Sequence[float]],
    axis: Axis,
    of: str,
    caption: str = "",
) -> str:
    share = Axis(title=f"share of {of}", text=_percent, top=1.0)
    curves: list[Line] = []
    for each, found in zip(runs, values, strict=True):
        xs, ys = distribution(found)
        if axis.top is not None:  # what lies beyond the axis is not drawn on its edge
            kept = [place for place, x in enumerate(xs) if x <= axis.top]
            xs, ys = [xs[place] for place in kept], [ys[place] for place in kept]
        curves.append(_line(each, xs, ys))
    return _figure(title, lines(curves, x=axis, y=share, label=title), caption)


def _time_axis(values: Sequence[Sequence[float]]) -> Axis:
    """Logarithmic from the tick below all but the least values; no time is below a second."""
    low = min((sorted(each)[len(each) // 50] for each in values if each), default=SHORTEST_S)
    bottom = max((tick for tick in TIME_TICKS if tick <= low), default=SHORTEST_S)
    return Axis(title="at most", text=span_text, bottom=bottom, log_ticks=TIME_TICKS)


def _rhos(rows: Sequence[JobRow]) -> list[float]:
    """rho of each app once, however many jobs it has."""
    return list({row.app: row.rho for row in rows if row.rho is not None}.values())


def _times(runs: Sequence[_Shown]) -> str:
    figures = [
        _over_time(runs, "Training GPUs held", "training_gpu_ratio", is_share=True),
        _over_time(runs, "Jobs that wait", "queue_jobs", is_share=False),
        _over_time(runs, "GPUs that waiting jobs ask for", "queue_gpus", is_share=False),
    ]
    samples = [sample for each in runs for sample in each.run.samples]
    if any(sample.inference_gpu_ratio for sample in samples):
        figures.insert(1, _inference(runs))
    if any(sample.lendable_nodes or sample.lent_nodes for sample in samples):
        figures.insert(2, _over_time(runs, "On-loan GPUs held", "on_loan_gpu_ratio", is_share=True))
        figures.append(_lent(runs))
    return f'<div class="plots">{"".join(figures)}</div>'


class _Span:
    """The whole time of the runs, in the unit in which its ticks are round."""

    def __init__(self, runs: Sequence[_Shown]) -> None:
        end_s = max(each.run.samples[-1].at_s for each in runs)
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


def _over_time(runs: Sequence[_Shown], title: str, attribute: str, *, is_share: bool) -> str:
    span = _Span(runs)
    curves = [
        _line(
            each,
            span.instants(each.run),
            [float(getattr(sample, attribute)) for sample in each.run.samples],
        )
        for each in runs
    ]
    y = Axis(title="share", text=_percent, top=1.0) if is_share else _counted(title)
    return _figure(title, lines(curves, x=span.axis, y=y, label=title))


def _counted(title: str) -> Axis:
    return Axis(title="GPUs" if "GPUs" in title else "jobs", text=lambda value: f"{value:,.0f}")


def _inference(runs: Sequence[_Shown]) -> str:
    """The load is the same under every policy: it is the ground, and a line is what loans add."""
    title = "Inference GPUs that serve or are held on loan"
    span = _Span(runs)
    curves = [
        _line(
            each,
            span.instants(each.run),
            [sample.inference_gpu_ratio for sample in each.run.samples],
        )
        for each in runs
    ]
    curves.append(_ground(runs, span, "serving", "serving_gpu_ratio", is_step=False))
    y = Axis(title="share", text=_percent, top=1.0)
    return _figure(
        title,
        lines(curves, x=span.axis, y=y, label=title),
        "Of all GPUs of the inference pool, lent ones included; the ground is what serves.",
    )


def _ground(
    runs: Sequence[_Shown], span: _Span, name: str, attribute: str, *, is_step: bool
) -> Line:
    """The curves that no policy changes, from the run that lasts longest."""
    longest = max((each.run for each in runs), key=lambda run: run.samples[-1].at_s)
    return Line(
        name=name,
        xs=span.instants(longest),
        ys=[float(getattr(sample, attribute)) for sample in longest.samples],
        color=0,
        is_step=is_step,
        is_ground=True,
    )


def _lent(runs: Sequence[_Shown]) -> str:
    title = "Nodes lent, and nodes that could be"
    span = _Span(runs)
    curves = [
        _line(
            each,
            span.instants(each.run),
            [float(sample.lent_nodes) for sample in each.run.samples],
            is_step=True,
        )
        for each in runs
    ]
    curves.append(_ground(runs, span, "lendable", "lendable_nodes", is_step=True))
    count = Axis(title="nodes", text=lambda value: f"{value:,.0f}")
    return _figure(
        title,
        lines(curves, x=span.axis, y=count, label=title),
        "Lendable: nodes that the load at that instant does not need, headroom kept.",
    )
