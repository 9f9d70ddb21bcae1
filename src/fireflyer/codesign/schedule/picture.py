"""A picture of a timeline as SVG: time to the right, one line a rank, one block a pass. Pure.

Blocks name their micro-batches where there is room. The text that a browser shows at a block says its kind, stage and
micro-batch, so that nothing is told by colour alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Final

from fireflyer.analytics.charts import nice_ticks
from fireflyer.base.errors import UsageError
from fireflyer.codesign.schedule.actions import Action, Kind, Pair, passes
from fireflyer.codesign.schedule.timing import Timeline

__all__ = ["MAX_BLOCKS", "draw"]

MAX_BLOCKS: Final = 20_000
"""Passes of a picture, which then has about 3 MB."""
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 64, 40
ROW, GAP = 26, 4
CHARACTER: Final = 6.2
"""Upper estimate of the mean width of a character."""
BLOCK: Final = 18.0
"""Width of the shortest pass, where the picture does not get too wide by it."""
WIDEST: Final = 6000.0
NARROWEST: Final = 560.0

_NAMES: Final = {
    Kind.FORWARD: "F forward",
    Kind.BACKWARD: "B backward",
    Kind.INPUT: "I backward for the input",
    Kind.WEIGHT: "W backward for the weights",
}
_STYLE: Final = """\
svg{background:#fff}text{font:11px system-ui,sans-serif;fill:#1c2733}
.n{text-anchor:middle;font-size:10px}.r{text-anchor:end}.t{font-size:14px;font-weight:600}
.grid{stroke:#e3e8ee}.line{fill:#f3f5f8}
rect.F,rect.B,rect.I,rect.W{stroke:#fff;stroke-width:.6}
.F{fill:#9ec5fe}.B{fill:#8fd19e}.I{fill:#a9e5d3}.W{fill:#ffd479}
.F.u{fill:#5b8def}.B.u{fill:#3f9d5c}.I.u{fill:#45b39d}.W.u{fill:#e8a013}
"""


def draw(timeline: Timeline, title: str) -> str:
    """An SVG document. Stages beyond the first of a rank, and those of the second direction, have darker colours.

    Raises `UsageError` for more than `MAX_BLOCKS` passes.
    """
    schedule = timeline.program.schedule
    if schedule.actions() > MAX_BLOCKS:
        raise UsageError(
            f"{schedule.actions():,} passes are too many to draw, more than {MAX_BLOCKS:,}; give fewer micro-batches"
        )
    ranks = len(schedule.rows)
    shortest = min(
        (end - begin for rank in range(ranks) for begin, end, _ in timeline.spans(rank) if end > begin), default=1.0
    )
    total = timeline.total_s or 1.0
    width = max(NARROWEST, min(WIDEST, total / shortest * BLOCK))
    scale = width / total
    bottom = TOP + ranks * (ROW + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + width + RIGHT:.0f} {bottom + BOTTOM}" '
        f'width="{LEFT + width + RIGHT:.0f}" role="img"><title>{escape(title)}</title><style>{_STYLE}</style>',
        f'<text class="t" x="{LEFT}" y="20">{escape(title)}</text>',
        *_legend(timeline),
    ]
    for value in nice_ticks(0.0, total, max(4, int(width // 120))):
        if value <= total * (1 + 1e-9):
            x = LEFT + value * scale
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom + 4}"/>')
            parts.append(f'<text class="n" x="{x:.1f}" y="{bottom + 18}">{value:g}</text>')
    for rank in range(ranks):
        y = TOP + rank * (ROW + GAP)
        parts.append(f'<rect class="line" x="{LEFT}" y="{y}" width="{width:.1f}" height="{ROW}"/>')
        parts.append(f'<text class="r" x="{LEFT - 8}" y="{y + ROW / 2 + 4:.1f}">rank {rank}</text>')
        for begin, end, item in timeline.spans(rank):
            parts += _blocks(timeline, item, LEFT + begin * scale, (end - begin) * scale, y)
    parts.append("</svg>\n")
    return "\n".join(parts)


def _blocks(timeline: Timeline, item: Action | Pair, x: float, width: float, y: float) -> Iterator[str]:
    """The block of an action; of a pair, its forward above its backward."""
    if isinstance(item, Pair):
        yield _block(timeline, item.forward, x, width, y, ROW / 2)
        yield _block(timeline, item.backward, x, width, y + ROW / 2, ROW / 2)
    else:
        yield _block(timeline, item, x, width, y, ROW)


def _block(timeline: Timeline, action: Action, x: float, width: float, y: float, height: float) -> str:
    schedule = timeline.program.schedule
    upper = action.stage >= schedule.placement.ranks or schedule.direction(action.micro_batch) == 1
    kind = f"{action.kind.value} u" if upper else action.kind.value
    text = str(action.micro_batch)
    label = ""
    if width >= CHARACTER * len(text) + 2:
        label = f'<text class="n" x="{x + width / 2:.1f}" y="{y + height / 2 + 3.5:.1f}">{text}</text>'
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}">'
        f"<title>{action.kind.value}, stage {action.stage}, micro-batch {action.micro_batch}</title></rect>{label}"
    )


def _legend(timeline: Timeline) -> Iterator[str]:
    used = {action.kind for row in timeline.program.schedule.rows for item in row for action in passes(item)}
    x = float(LEFT)
    for kind, name in _NAMES.items():
        if kind in used:
            yield f'<rect class="{kind.value}" x="{x:.1f}" y="34" width="14" height="14"/>'
            yield f'<text x="{x + 20:.1f}" y="45">{name}</text>'
            x += 34 + CHARACTER * len(name)
    placement = timeline.program.schedule.placement
    if placement.directions == 2:
        yield f'<text x="{x:.1f}" y="45">dark: second direction</text>'
    elif placement.stages > placement.ranks:
        yield f'<text x="{x:.1f}" y="45">dark: second stage of a rank, and further ones</text>'
