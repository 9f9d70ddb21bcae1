"""Curves as lines of text: one character for each cell, of eight heights. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

__all__ = ["heads_line", "plot_line", "resampled"]

_HEIGHTS: Final = "▁▂▃▄▅▆▇█"
Points = Sequence[tuple[float, float]]


def resampled(points: Points, begin: float, end: float, cells: int) -> list[float | None]:
    """The values of a curve in equal cells of `begin` to `end`: the mean of the points in a cell, between points what
    lies on the line from one to the next, and None before the first and behind the last. Of points with the same x the
    last one counts, and points that are not finite do not."""
    known = sorted({x: y for x, y in points if math.isfinite(y)}.items())
    inside: list[list[float]] = [[] for _ in range(cells)]
    width = max(end - begin, 1e-12) / cells
    for x, y in known:
        if begin <= x <= end:
            inside[min(cells - 1, int((x - begin) / width))].append(y)
    found: list[float | None] = []
    after = 0
    for number, values in enumerate(inside):
        middle = begin + (number + 0.5) * width
        while after < len(known) and known[after][0] < middle:
            after += 1
        if values:
            found.append(sum(values) / len(values))
        elif 0 < after < len(known):
            (x0, y0), (x1, y1) = known[after - 1], known[after]
            found.append(y0 + (y1 - y0) * (middle - x0) / (x1 - x0))
        else:
            found.append(None)
    return found


def plot_line(points: Points, *, begin: float, end: float, low: float, high: float, cells: int) -> str:
    """A curve in `cells` characters; a space where it has no value. `low` and `high` get the least and the most height:
    lines of several curves with the same ones can be compared."""
    scale = (len(_HEIGHTS) - 1) / max(high - low, 1e-12)
    return "".join(
        " " if value is None else _HEIGHTS[min(len(_HEIGHTS) - 1, max(0, round((value - low) * scale)))]
        for value in resampled(points, begin, end, cells)
    )


def heads_line(marks: Sequence[tuple[float, str]], *, begin: float, end: float, cells: int) -> str:
    """Marks of one character, above the cells of their x; of several in one cell the last is seen."""
    heads = [" "] * cells
    width = max(end - begin, 1e-12) / cells
    for x, text in marks:
        heads[min(cells - 1, max(0, int((x - begin) / width)))] = text[:1]
    return "".join(heads)
