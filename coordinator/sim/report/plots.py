"""Plots as SVG text: lines over time, distributions.

They use no library and load nothing from outside, so a page opens anywhere, for ever. Colors and
dashes come from the page's style sheet (`style`), so that light and dark pages share the plots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import ceil, floor, log10

from msgspec import Struct

from coordinator.sim.report.style import mark

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 34

Text = Callable[[float], str]


class Line(Struct, frozen=True, kw_only=True):
    """One curve.

    color: its place among colors and dashes.
    is_step: constant between points. is_faint: thin.
    is_ground: the area below it, behind all lines.
    key: classes of a page on which one picks the lines in color.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: int
    is_step: bool = False
    is_faint: bool = False
    is_ground: bool = False
    key: str = ""


class Axis(Struct, frozen=True, kw_only=True):
    """One direction of a plot.

    text: a value as people read it. top: its end; None is the largest value, rounded up.
    log_ticks: makes it logarithmic; ticks are those of these values that fall on it.
    mark: a value of a horizontal axis at which a line stands.
    """

    title: str
    text: Text
    top: float | None = None
    bottom: float = 0.0
    log_ticks: tuple[float, ...] = ()
    mark: float | None = None


class _Scale:
    """From values to pixels."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        self.axis = axis
        self._start, self._end = start, end
        largest = axis.top if axis.top is not None else max(values, default=0.0)
        if axis.log_ticks:
            self.low = axis.bottom
            self.high = max(largest, 10.0 * axis.bottom)
            self.ticks = [tick for tick in axis.log_ticks if self.low <= tick <= self.high]
        else:
            step = _step(largest - axis.bottom)
            self.low = axis.bottom
            self.high = largest if axis.top is not None else ceil(largest / step) * step or step
            count = floor((self.high - self.low) / step + 1e-9)
            self.ticks = [self.low + step * index for index in range(count + 1)]

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        if self.axis.log_ticks:
            part = log10(value / self.low) / log10(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return round(self._start + part * (self._end - self._start), 1)


def _step(span: float) -> float:
    """A round number that divides a span into 3 to 7 parts."""
    if span <= 0:
        return 1.0
    raw = span / 5.0
    size = 10.0 ** floor(log10(raw))
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)


def lines(curves: Sequence[Line], *, x: Axis, y: Axis, label: str) -> str:
    """Curves over a common axis, the first on top, with their legend."""
    x_scale = _Scale(x, [value for curve in curves for value in curve.xs], LEFT, WIDTH - RIGHT)
    y_scale = _Scale(y, [value for curve in curves for value in curve.ys], HEIGHT - BOTTOM, TOP)
    parts = [_open(label), *_grid(x_scale, y_scale)]
    above = [curve for curve in curves if not curve.is_ground]
    for curve in [*(curve for curve in curves if curve.is_ground), *reversed(above)]:
        path = _path(curve, x_scale, y_scale)
        if curve.is_ground:
            path += f"V{y_scale(y_scale.low)}H{x_scale(curve.xs[0])}Z"
        parts.append(
            f'<path class="{_kind(curve)}" d="{path}"><title>{escape(curve.name)}</title></path>'
        )
    parts.append("</svg>")
    return "".join(parts) + _legend(curves)


def swatch(kind: str) -> str:
    """A short line, drawn as those of its classes are."""
    return f'<svg viewBox="0 0 22 8" aria-hidden="true"><path class="{kind}" d="M0 4H22"/></svg>'


def line_kind(color: int, key: str = "") -> str:
    """The classes of a line of this place; with a key its color comes from the page."""
    number, dash = mark(color)
    return f"line d{dash} {key or f'c{number}'}"


def distribution(values: Sequence[float], points: int = 200) -> tuple[list[float], list[float]]:
    """(values, fraction of all values at most that large), thinned to a number of points."""
    if not values:
        return [], []
    ordered = sorted(values)
    last = len(ordered) - 1
    places = sorted({round(last * index / points) for index in range(points + 1)})
    return [ordered[place] for place in places], [(place + 1) / (last + 1) for place in places]


def _kind(curve: Line) -> str:
    if curve.is_ground:
        return "ground"
    if curve.is_faint:
        return f"faint c{mark(curve.color)[0]}"
    return line_kind(curve.color, curve.key)


def _open(label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'


def _path(curve: Line, x_scale: _Scale, y_scale: _Scale) -> str:
    parts: list[str] = []
    for x, y in zip(curve.xs, curve.ys, strict=True):
        if not parts:
            parts.append(f"M{x_scale(x)} {y_scale(y)}")
        elif curve.is_step:
            parts.append(f"H{x_scale(x)}V{y_scale(y)}")
        else:
            parts.append(f"L{x_scale(x)} {y_scale(y)}")
    return "".join(parts)


def _grid(x_scale: _Scale, y_scale: _Scale) -> list[str]:
    parts = _y_grid(y_scale)
    base = HEIGHT - BOTTOM
    for tick in x_scale.ticks:
        at = x_scale(tick)
        parts.append(f'<path class="tick" d="M{at} {base}v4"/>')
        anchor = "end" if at > WIDTH - RIGHT - 20 else "middle"
        parts.append(_text(at, base + 16, x_scale.axis.text(tick), anchor))
    if x_scale.axis.mark is not None:
        parts.append(f'<path class="tick" d="M{x_scale(x_scale.axis.mark)} {TOP}V{base}"/>')
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 3, x_scale.axis.title, "middle"))
    return parts


def _y_grid(y_scale: _Scale) -> list[str]:
    parts: list[str] = []
    for tick in y_scale.ticks:
        at = y_scale(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {at}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 6, at + 3.5, y_scale.axis.text(tick), "end"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text transform="translate(11 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_scale.axis.title)}</text>"
    )
    return parts


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    of = f' class="{kind}"' if kind else ""
    return f'<text{of} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _legend(curves: Sequence[Line]) -> str:
    items: list[str] = []
    for curve in curves:
        drawn = '<i class="block"></i>' if curve.is_ground else swatch(_kind(curve))
        items.append(f'<li class="{curve.key}">{drawn}{escape(curve.name)}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'
