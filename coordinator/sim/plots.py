"""Plots as SVG text: lines over time, distributions, bars. Must not know what is plotted.

No library and nothing from outside: a page of these opens anywhere, for ever. Colors come from
the page's style sheet (`--c1` to `--c8`), so that light and dark pages share the plots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import ceil, floor, log10

from msgspec import Struct

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 34
COLORS = 8

Text = Callable[[float], str]


class Line(Struct, frozen=True, kw_only=True):
    """One curve.

    color: its place among the colors. is_step: constant between points. is_faint: background.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: int
    is_step: bool = False
    is_faint: bool = False


class Axis(Struct, frozen=True, kw_only=True):
    """One direction of a plot.

    text: a value as people read it. top: its end; None is the largest value, rounded up.
    log_ticks: makes it logarithmic; ticks are those of these values that fall on it.
    """

    title: str
    text: Text
    top: float | None = None
    bottom: float = 0.0
    log_ticks: tuple[float, ...] = ()


class Bar(Struct, frozen=True, kw_only=True):
    """One bar; `half_width` is that of its confidence interval."""

    name: str
    value: float
    color: int
    half_width: float | None = None


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
    """Curves over a common axis, with their legend."""
    x_scale = _Scale(x, [value for curve in curves for value in curve.xs], LEFT, WIDTH - RIGHT)
    y_scale = _Scale(y, [value for curve in curves for value in curve.ys], HEIGHT - BOTTOM, TOP)
    parts = [_open(label), *_grid(x_scale, y_scale)]
    for curve in curves:
        kind = "faint" if curve.is_faint else "line"
        parts.append(
            f'<path class="{kind} c{_color(curve.color)}" d="{_path(curve, x_scale, y_scale)}">'
            f"<title>{escape(curve.name)}</title></path>"
        )
    parts.append("</svg>")
    return "".join(parts) + _legend([(curve.name, curve.color) for curve in curves])


def bars(values: Sequence[Bar], *, y: Axis, label: str) -> str:
    """A bar per value, its number above it and its name below."""
    tops = [bar.value + (bar.half_width or 0.0) for bar in values]
    y_scale = _Scale(y, [top * 1.1 for top in tops], HEIGHT - BOTTOM, TOP)
    room = (WIDTH - LEFT - RIGHT) / max(1, len(values))
    wide = min(64.0, 0.6 * room)
    parts = [_open(label), *_y_grid(y_scale)]
    for index, bar in enumerate(values):
        middle = LEFT + room * (index + 0.5)
        top, base = y_scale(bar.value), y_scale(y_scale.low)
        parts.append(
            f'<rect class="bar c{_color(bar.color)}" x="{middle - wide / 2:.1f}" y="{top}" '
            f'width="{wide:.1f}" height="{max(0.0, base - top):.1f}"/>'
        )
        upper = top
        if bar.half_width is not None:
            upper = y_scale(bar.value + bar.half_width)
            lower = y_scale(bar.value - bar.half_width)
            parts.append(f'<path class="whisker" d="M{middle:.1f} {upper}V{lower}"/>')
        parts.append(_text(middle, upper - 4, y.text(bar.value), "middle", "value"))
        parts.append(_text(middle, HEIGHT - BOTTOM + 16, bar.name, "middle"))
    parts.append("</svg>")
    return "".join(parts)


def distribution(values: Sequence[float], points: int = 200) -> tuple[list[float], list[float]]:
    """(values, share of all that are at most so large), thinned to so many points."""
    ordered = sorted(values)
    last = len(ordered) - 1
    places = sorted({round(last * index / points) for index in range(points + 1)})
    return [ordered[place] for place in places], [(place + 1) / (last + 1) for place in places]


def _color(color: int) -> int:
    return color % COLORS + 1


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


def _legend(names: Sequence[tuple[str, int]]) -> str:
    items = "".join(
        f'<li><i class="c{_color(color)}"></i>{escape(name)}</li>' for name, color in names
    )
    return f'<ul class="legend">{items}</ul>'
