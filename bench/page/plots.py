"""Horizontal bars as an SVG file that stands alone. No contender is told by colour alone: ours is solid, peers are
hatched, bounds are outlines, and the legend names each."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from typing import Final

from bench.page.figures import Plot, parse_amount

__all__ = ["plot_svg"]

WIDTH: Final = 720
LEFT: Final = 184
RIGHT: Final = 110
BAR: Final = 15
GAP: Final = 12
TOP: Final = 64
_INK, _FAINT, _OURS = "#22262b", "#5f6670", "#3b6ea5"
_PEERS: Final = ("#c9772b", "#5b8c5a", "#8a5fa5")
_HATCHES: Final = ("M0,6 L6,0", "M0,0 L6,6", "M3,0 L3,6")


def plot_svg(plot: Plot) -> str:
    """Bars begin at 0, or where the scale is logarithmic at the power of ten below the least value."""
    values = [parse_amount(text).value for group in plot.groups for text in group.values if text]
    scale = _scale(values, logarithmic=plot.logarithmic)
    styles = _styles(plot)
    body, top = [], float(TOP)
    for group in plot.groups:
        middle = top + len(group.values) * BAR / 2
        body.append(f'<text x="{LEFT - 10}" y="{middle + 4:.1f}" text-anchor="end">{escape(group.label)}</text>')
        for (name, _), style, text in zip(plot.series, styles, group.values, strict=True):
            if text:
                width = scale(parse_amount(text).value)
                body.append(
                    f'<rect x="{LEFT}" y="{top:.1f}" width="{width:.1f}" height="{BAR - 3}" {style}>'
                    f"<title>{escape(group.label)}, {escape(name)}: {escape(text)}</title></rect>"
                    f'<text x="{LEFT + width + 6:.1f}" y="{top + 10:.1f}" font-size="11.5">{escape(text)}</text>'
                )
            top += BAR
        top += GAP
    body.append(f'<line x1="{LEFT}" x2="{LEFT}" y1="{TOP - 4}" y2="{top - GAP + 4:.1f}" stroke="{_INK}"/>')
    if plot.reference:
        at = LEFT + scale(100.0)
        body.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 8}" y2="{top - GAP + 4:.1f}" stroke="{_INK}" '
            f'stroke-dasharray="4 3"/><text x="{at:.1f}" y="{TOP - 12}" text-anchor="middle" fill="{_FAINT}">'
            f"{escape(plot.reference)}</text>"
        )
    else:
        body += _legend(plot, styles)
    height = round(top + 4)
    title = escape(plot.title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{title}" font-family="Helvetica, Arial, sans-serif" font-size="13" fill="{_INK}">\n'
        f"<title>{title}</title>\n<defs>{''.join(_patterns())}</defs>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n'
        f'<text x="12" y="20" font-weight="bold">{title}</text>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _scale(values: list[float], *, logarithmic: bool) -> Callable[[float], float]:
    """A value to the length of its bar."""
    room = WIDTH - LEFT - RIGHT
    if not logarithmic:
        return lambda value: room * value / max(values)
    low = math.floor(math.log10(min(values)))
    span = math.log10(max(values)) - low
    return lambda value: room * (math.log10(value) - low) / span


def _styles(plot: Plot) -> list[str]:
    """Attributes of the bars of each series."""
    peers = 0
    styles = []
    for _, kind in plot.series:
        if kind == "ours":
            styles.append(f'fill="{_OURS}" stroke="{_OURS}"')
        elif kind == "bound":
            styles.append(f'fill="#ffffff" stroke="{_INK}" stroke-dasharray="3 2"')
        else:
            styles.append(f'fill="url(#peer-{peers})" stroke="{_PEERS[peers]}"')
            peers += 1
    return styles


def _patterns() -> list[str]:
    return [
        f'<pattern id="peer-{number}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" fill="{colour}" fill-opacity="0.3"/>'
        f'<path d="{hatch}" stroke="{colour}"/></pattern>'
        for number, (colour, hatch) in enumerate(zip(_PEERS, _HATCHES, strict=True))
    ]


def _legend(plot: Plot, styles: list[str]) -> list[str]:
    parts, x = [], 12.0
    for (name, _), style in zip(plot.series, styles, strict=True):
        parts.append(f'<rect x="{x:.1f}" y="33" width="18" height="12" {style}/>')
        parts.append(f'<text x="{x + 24:.1f}" y="43" fill="{_FAINT}">{escape(name)}</text>')
        x += 44 + 7 * len(name)
    return parts
