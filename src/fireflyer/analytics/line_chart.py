"""Several curves over one axis as inline SVG. Colours are CSS variables of the page (`--series-0` …); no curve is told
by colour alone: each has dashes of its own and its name beside its end. Every text is escaped here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Final

import msgspec

from fireflyer.analytics.charts import nice_ticks

__all__ = ["MAX_SERIES", "Series", "line_chart"]

MAX_SERIES: Final = 4
MAX_MARKS: Final = 20
MAX_POINTS: Final = 400
"""Of a curve; more are averaged over neighbours."""
WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 40, 40
_DASHES: Final = ("", "7 3", "2 3", "9 3 2 3")


class Series(msgspec.Struct, frozen=True):
    """One curve: a name, and its points (x, y) in the order of x."""

    name: str
    points: tuple[tuple[float, float], ...]


def line_chart(
    series: Sequence[Series],
    *,
    name: str,
    title: str,
    x_label: str,
    y_label: str,
    y_text: Callable[[float], str] = "{:,.4g}".format,
    y_least: float | None = None,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """SVG; an empty string where there is no point. `name` is the prefix of its ids in the page; the y axis begins at
    `y_least`, or where the points do. `marks`: places on the x axis with their names, at most `MAX_MARKS`, each a
    vertical line."""
    drawn = [Series(one.name, _thinned(one.points)) for one in series if one.points][:MAX_SERIES]
    if not drawn:
        return ""
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points]
    low = min(ys) if y_least is None else y_least
    y_ticks = nice_ticks(low, max(max(ys), low + 1e-9))
    bottom, top = min(low, y_ticks[0]), max(y_ticks[-1], *ys)
    width, height = max(max(xs) - min(xs), 1e-9), max(top - bottom, 1e-9)

    def at(x: float, y: float) -> tuple[float, float]:
        right = LEFT + (x - min(xs)) / width * (WIDTH - LEFT - RIGHT)
        return right, HEIGHT - BOTTOM - (max(y, bottom) - bottom) / height * (HEIGHT - BOTTOM - TOP)

    body = []
    for value in y_ticks:
        _, y = at(min(xs), value)
        body.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        label = escape(y_text(value))
        body.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for value in nice_ticks(min(xs), max(xs), 6):
        if min(xs) <= value <= max(xs):
            x, _ = at(value, bottom)
            body.append(
                f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:,g}</text>'
            )
    body.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>')
    body.append(f'<text class="label" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(x_label)}</text>')
    body.append(f'<text class="label" x="0" y="{TOP - 12}">{escape(y_label)}</text>')
    for number, (x_value, label) in enumerate(marks[:MAX_MARKS]):
        if min(xs) <= x_value <= max(xs):
            x, _ = at(x_value, bottom)
            body.append(
                f'<g class="mark"><line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
                f'<text x="{x + 3:.1f}" y="{TOP + 10 + 12 * (number % 4)}">{escape(label)}</text></g>'
            )
    for number, one in enumerate(drawn):
        path = " L".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in one.points))
        dashes = f' stroke-dasharray="{_DASHES[number]}"' if _DASHES[number] else ""
        body.append(f'<path class="series-{number}"{dashes} d="M{path}"><title>{escape(one.name)}</title></path>')
    body += _legend(drawn)
    said = "; ".join(f"{one.name} ends at {y_text(one.points[-1][1])}" for one in drawn)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(said)}.</desc>'
        f"{''.join(body)}</svg>"
    )


def _legend(drawn: Sequence[Series]) -> list[str]:
    parts = []
    each = (WIDTH - LEFT) / MAX_SERIES
    for number, one in enumerate(drawn):
        x = LEFT + number * each
        dashes = f' stroke-dasharray="{_DASHES[number]}"' if _DASHES[number] else ""
        parts.append(f'<path class="series-{number}"{dashes} d="M{x:.1f},10 h26"/>')
        parts.append(f'<text class="tick" x="{x + 32:.1f}" y="14">{escape(one.name)}</text>')
    return parts


def _thinned(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    finite = [point for point in points if math.isfinite(point[1])]
    size = math.ceil(len(finite) / MAX_POINTS) if finite else 1
    groups = [finite[begin : begin + size] for begin in range(0, len(finite), size)]
    return tuple((sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups)
