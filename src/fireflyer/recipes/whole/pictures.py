"""Charts of the demonstration's page as inline SVG, legible at the width of a phone. Pure; every text is escaped here.

Colours are classes that the page defines. No curve is told by colour alone: each has a width or dashes of its own and
its name above the chart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Final

import msgspec

from fireflyer.analytics.charts import nice_ticks

__all__ = ["Band", "Curve", "Mark", "chart"]

WIDTH, HEIGHT = 400, 220
LEFT, RIGHT, TOP, BOTTOM = 40, 10, 30, 34
LEGEND_Y: Final = 10
CHARACTER: Final = 6.2
"""Upper estimate of the mean width of a character of the legend."""


class Curve(msgspec.Struct, frozen=True):
    name: str
    kind: str
    """Class in the page: `under`, `over`, `again`, `write`, `read`."""
    points: tuple[tuple[float, float], ...]


class Mark(msgspec.Struct, frozen=True):
    """A vertical line with a short text above it."""

    x: float
    text: str


class Band(msgspec.Struct, frozen=True):
    begin: float
    end: float


def chart(
    curves: Sequence[Curve],
    *,
    name: str,
    title: str,
    x_label: str,
    y_label: str,
    marks: Sequence[Mark] = (),
    bands: Sequence[Band] = (),
    y_text: Callable[[float], str] = "{:g}".format,
    y_least: float | None = None,
) -> str:
    """An empty string where there is no point. `name` is the prefix of its ids in the page."""
    drawn = [one for one in curves if one.points]
    if not drawn:
        return ""
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points]
    low = min(ys) if y_least is None else y_least
    y_ticks = nice_ticks(low, max(*ys, low + 1e-9), 4)
    place = _Place((min(xs), max(*xs, min(xs) + 1e-9)), (min(low, y_ticks[0]), max(y_ticks[-1], *ys)))
    body = [*_axes(place, y_ticks, y_text, x_label, y_label)]
    for band in bands:
        left, right = place.x(max(band.begin, place.low_x)), place.x(min(band.end, place.high_x))
        body.append(
            f'<rect class="away" x="{left:.1f}" y="{TOP}" width="{max(1.0, right - left):.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"/>'
        )
    body += [f'<path class="curve {one.kind}" d="{_path(one.points, place)}"/>' for one in drawn]
    for mark in marks:
        at = place.x(min(max(mark.x, place.low_x), place.high_x))
        body.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        body.append(f'<text class="mark" x="{at:.1f}" y="{TOP - 3}" text-anchor="middle">{escape(mark.text)}</text>')
    body += _legend(drawn)
    said = "; ".join(f"{one.name}: {len(one.points)} points, the last is {y_text(one.points[-1][1])}" for one in drawn)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(said)}.</desc>'
        f"{''.join(body)}</svg>"
    )


class _Place:
    """Where values are in the view box."""

    def __init__(self, xs: tuple[float, float], ys: tuple[float, float]) -> None:
        self.low_x, self.high_x = xs
        self._low_y, self._high_y = ys[0], max(ys[1], ys[0] + 1e-9)

    def x(self, value: float) -> float:
        return LEFT + (value - self.low_x) / (self.high_x - self.low_x) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self._low_y) / (self._high_y - self._low_y) * (HEIGHT - BOTTOM - TOP)


def _axes(
    place: _Place, y_ticks: Sequence[float], y_text: Callable[[float], str], x_label: str, y_label: str
) -> list[str]:
    parts = []
    for value in y_ticks:
        at = place.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">{escape(y_text(value))}</text>')
    base = HEIGHT - BOTTOM + 14
    parts += [
        f'<text x="{place.x(value):.1f}" y="{base}" text-anchor="middle">{value:g}</text>'
        for value in nice_ticks(place.low_x, place.high_x, 5)
        if place.low_x <= value <= place.high_x
    ]
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(x_label)}</text>')
    parts.append(f'<text x="0" y="{TOP - 6}">{escape(y_label)}</text>')
    return parts


def _legend(drawn: Sequence[Curve]) -> list[str]:
    parts, x = [], float(LEFT)
    for one in drawn:
        parts.append(f'<path class="curve {one.kind}" d="M{x:.1f},{LEGEND_Y - 4} h20"/>')
        parts.append(f'<text x="{x + 25:.1f}" y="{LEGEND_Y}">{escape(one.name)}</text>')
        x += 37 + CHARACTER * len(one.name)
    return parts


def _path(points: Sequence[tuple[float, float]], place: _Place) -> str:
    """Pieces that begin anew where a point is not finite."""
    parts, pen = [], "M"
    for x, y in points:
        if not math.isfinite(y):
            pen = "M"
            continue
        parts.append(f"{pen}{place.x(x):.1f},{place.y(y):.1f}")
        pen = "L"
    return " ".join(parts) if len(parts) > 1 else f"{parts[0]} h2" if parts else ""
