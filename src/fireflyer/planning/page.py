"""The answer of `ff plan cluster` as one HTML file that needs nothing else: tables, parts of a step, loads of links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from markupsafe import Markup

from fireflyer.analytics.html import load_template
from fireflyer.planning.cluster import ClusterAnswer
from fireflyer.planning.loads import HeatMap, LayerLoad, LinkLoads

__all__ = ["render_cluster"]

_WIDTH: Final = 720
_PARTS: Final = ("compute", "tensor", "experts", "bubble", "sends", "gradients", "optimizer", "waiting")


def render_cluster(
    name: str, sections: Mapping[str, Mapping[str, str]], answer: ClusterAnswer, loads: LinkLoads | None
) -> str:
    """A complete HTML document. `sections`: title -> name -> value, as a terminal shows them; `loads`: None for a job
    of one node. Every text is escaped."""
    return load_template("fireflyer.planning", "cluster.html.j2").render(
        name=name,
        sections={title: rows for title, rows in sections.items() if rows},
        notes=answer.notes,
        suffices=answer.suffices,
        # The pictures escape every text that they draw.
        step=Markup(_step_bars(answer)),  # noqa: S704
        layers=Markup(_layer_bars(loads.layers)) if loads is not None else "",  # noqa: S704
        heat=Markup(_heat_map(loads.heat)) if loads is not None and loads.heat is not None else "",  # noqa: S704
        heat_of=(loads.heat.below, loads.heat.above) if loads is not None and loads.heat is not None else None,
    )


def _bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """Label, length, and what is written beside it. As elements of the page, so that their text has its size on a
    narrow screen, too."""
    longest = max((value for _, value, _ in rows), default=0.0) or 1.0
    return "".join(
        f'<tr><th scope="row">{escape(label)}</th><td class="track"><div class="bar" '
        f'style="width: {100 * value / longest:.1f}%"></div></td><td>{escape(words)}</td></tr>'
        for label, value, words in rows
    )


def _step_bars(answer: ClusterAnswer) -> str:
    parts = {part: (getattr(answer.alone.parts, part), getattr(answer.contended.parts, part)) for part in _PARTS}
    rows = []
    for part, (alone, contended) in parts.items():
        if max(alone, contended) > 0:
            rows.append((part, alone, f"{alone:.3f} s"))
            if contended > alone * 1.001:
                rows.append((f"{part}, slowest flow", contended, f"{contended:.3f} s"))
    return _bars(rows)


def _layer_bars(layers: Sequence[LayerLoad]) -> str:
    rows = [
        (
            one.name,
            one.most,
            f"{one.most:.1f} at most, {one.mean:.2f} in the mean; busy {one.most_utilisation:.0%} at most, "
            f"{one.utilisation:.1%} in the mean",
        )
        for one in layers
        if one.most
    ]
    return _bars(rows)


def _heat_map(heat: HeatMap) -> str:
    used = [(row, line) for row, line in enumerate(heat.cells) if any(line)]
    rows, columns = len(used), len(heat.cells[0])
    size = min(24.0, (_WIDTH - 4) / columns)
    most = max((max(line) for _, line in used), default=0.0) or 1.0
    body = [
        f'<rect class="cell" x="{2 + column * size:.2f}" y="{2 + at * size:.2f}" width="{size - 0.5:.2f}" '
        f'height="{size - 0.5:.2f}" fill-opacity="{0.06 + 0.94 * value / most:.3f}"><title>{escape(heat.below)} {row} '
        f"to {escape(heat.above)} {column}: {value:.2f} flows</title></rect>"
        for at, (row, line) in enumerate(used)
        for column, value in enumerate(line)
    ]
    words = f"{rows} rows of {heat.below}, {columns} columns of {heat.above}; at most {most:.2f} flows on a link"
    return _svg(int(rows * size) + 4, "Flows on links between switches", words, body)


def _svg(height: int, title: str, description: str, body: Sequence[str]) -> str:
    name = "".join(char for char in title.lower() if char.isalpha())
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(description)}</desc>'
        f"{''.join(body)}</svg>"
    )
