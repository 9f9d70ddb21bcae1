"""`PublishedFigure`: what a paper printed beside what our models compute. Pure."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

__all__ = ["PublishedFigure", "PublishedRow", "row"]

Verdict = Literal["follows", "does not follow", "input"]
Printed = Literal["rounded", "cut", "at least"]


class PublishedRow(NamedTuple):
    what: str
    published: float
    computed: float | None
    """None: the paper's figure is an input here, which nothing else in it determines."""
    unit: str
    bounds: tuple[float, float]
    """Between which a value lies that the paper prints as it does."""
    how: str
    """Expression, or why it does not follow."""

    @property
    def verdict(self) -> Verdict:
        if self.computed is None:
            return "input"
        slack = 1e-12 * abs(self.published)
        return "follows" if self.bounds[0] - slack <= self.computed <= self.bounds[1] + slack else "does not follow"

    @property
    def difference(self) -> float | None:
        """Difference of what is computed from what is published, relative to that."""
        return None if self.computed is None else self.computed / self.published - 1


class PublishedFigure(NamedTuple):
    name: str
    title: str
    source: str
    rows: tuple[PublishedRow, ...]


def row(
    what: str,
    published: float,
    computed: float | None,
    how: str,
    *,
    unit: str = "",
    step: float = 1.0,
    printed: Printed = "rounded",
) -> PublishedRow:
    """`step`: of the last digit that the paper prints. `printed`: rounded to the nearest, cut off, or as a bound."""
    bounds = {
        "rounded": (published - step / 2, published + step / 2),
        "cut": (published, published + step),
        "at least": (published, math.inf),
    }
    return PublishedRow(what, published, computed, unit, bounds[printed], how)
