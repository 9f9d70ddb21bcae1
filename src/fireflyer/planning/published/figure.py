"""`PublishedFigure`: what a paper printed beside what our models compute. Pure."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from fireflyer.planning.amounts import Amount

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
    """Lowest and highest value that the paper would print as it does."""
    how: str
    """Expression, or why it does not follow."""
    computed_bounds: Amount | None = None
    """Bounds of the computed value where inputs are ranges, `computed` being the middle; None: it is one number."""
    depends_on: str = ""
    """Inputs that the paper does not print, and for which others can be given; "": none."""

    @property
    def verdict(self) -> Verdict:
        """Verdict of the row. Where inputs are ranges, it follows if a value between the bounds is printed so."""
        if self.computed is None:
            return "input"
        slack = 1e-12 * abs(self.published)
        low, high = self.computed_bounds or (self.computed, self.computed)
        return "follows" if low <= self.bounds[1] + slack and high >= self.bounds[0] - slack else "does not follow"

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
    computed: float | Amount | None,
    how: str,
    *,
    unit: str = "",
    step: float = 1.0,
    printed: Printed = "rounded",
    depends_on: str = "",
) -> PublishedRow:
    """`step`: of the last digit that the paper prints. `printed`: rounded to the nearest, cut off, or as a bound."""
    between = None
    if isinstance(computed, Amount):
        between, computed = computed if computed.low < computed.high else None, computed.middle
    bounds = {
        "rounded": (published - step / 2, published + step / 2),
        "cut": (published, published + step),
        "at least": (published, math.inf),
    }
    return PublishedRow(what, published, computed, unit, bounds[printed], how, between, depends_on)
