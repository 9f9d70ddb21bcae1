"""The two pictures of a report as inline SVG: the loss curve with its failures, and where the time went.

Plain strings in, markup out; every text is escaped here. Colours are CSS variables of the page, and nothing is told by
colour alone: failures carry a label and a symbol, discarded steps a dash and a hatched band, parts their names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from fireflyer.analytics.accounting import Block, Failure, JobAccount, LossPoint
from fireflyer.analytics.report import PartRow
from fireflyer.base.units import format_duration

__all__ = ["MAX_POINTS", "loss_chart", "nice_ticks", "thin_out", "time_chart"]

MAX_POINTS = 1200
"""Points that a curve is drawn with; more are thinned out, keeping every bucket's extremes."""
MAX_MARKS = 12
"""Failures that are marked on the curve one by one."""
WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 46, 44
LABEL_CHARACTER = 8.4
"""Upper estimate of the mean width of a character of a label, in the units of the view box."""

_HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line class="hatch" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>'
)


def nice_ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """Round numbers that cover `[low, high]`, about `count` of them; integers when `whole`."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    raw = max(1.0, span / count) if whole else span / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(
        factor * magnitude
        for factor in ((1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10))
        if factor * magnitude >= raw * 0.999
    )
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def thin_out(points: Sequence[LossPoint], limit: int = MAX_POINTS) -> list[LossPoint]:
    """At most about `limit` points: of each bucket of neighbours the lowest and the highest, in their order, and both
    ends of the curve."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    thinned = [points[0]]
    for begin in range(0, len(points), size):
        bucket = points[begin : begin + size]
        extremes = {min(bucket, key=lambda p: p.loss), max(bucket, key=lambda p: p.loss)}
        thinned += sorted(extremes, key=lambda p: p.step)
    thinned.append(points[-1])
    return thinned


class _Scale:
    """Maps a value interval to a pixel interval."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.span = low, (high - low) or 1.0
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / self.span * (self.end - self.start)


def _drawable(points: Iterable[LossPoint]) -> list[LossPoint]:
    return [point for point in points if math.isfinite(point.loss) and abs(point.loss) < 1e150]


def loss_chart(job: JobAccount, undisturbed: Sequence[LossPoint] = ()) -> str:
    """SVG of the final loss curve over that of an undisturbed run, the discarded steps as a dashed line, and a mark for
    each failure. An empty string when no loss was reported."""
    final = _drawable(job.losses)
    discarded = _drawable(job.discarded)
    reference = _drawable(undisturbed)
    if not final and not discarded:
        return ""
    shown = final + discarded + reference
    steps = [point.step for point in shown]
    losses = [point.loss for point in shown]
    y_ticks = nice_ticks(min(losses), max(losses))
    low, high = min(y_ticks[0], *losses), max(y_ticks[-1], *losses)
    if low == high:
        low, high = low - 0.5, high + 0.5
    x = _Scale(min(steps), max(*steps, min(steps) + 1), LEFT, WIDTH - RIGHT)
    y = _Scale(low, high, HEIGHT - BOTTOM, TOP)
    marks = job.failures[:MAX_MARKS]
    body = [
        _HATCH,
        *_axes(x, y, nice_ticks(min(steps), max(steps), 6, whole=True), y_ticks, steps),
        *(_band(failure, x) for failure in marks),
        *((f'<path class="undisturbed" d="{_path(thin_out(reference), x, y)}"/>',) if reference else ()),
        *(f'<path class="discarded" d="{_path(run, x, y)}"/>' for run in _runs(discarded)),
        f'<path class="curve" d="{_path(thin_out(final), x, y)}"/>',
        *(_dot(point, x, y) for point in (final[:1] + final[-1:])),
        *_marks(marks, x),
    ]
    description = _describe(final, discarded, job.failures)
    if reference:
        last = reference[-1]
        description += f" The undisturbed run, drawn beneath, ends with {last.loss:.4g} at step {last.step}."
    return _svg(WIDTH, HEIGHT, "Loss over steps", description, body, name="loss")


def _svg(width: int, height: int, title: str, description: str, body: Iterable[str], *, name: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(description)}</desc>'
        f"{''.join(body)}</svg>"
    )


def _describe(final: Sequence[LossPoint], discarded: Sequence[LossPoint], failures: Sequence[Failure]) -> str:
    said = []
    if final:
        first, last = final[0], final[-1]
        said.append(f"The loss goes from {first.loss:.4g} at step {first.step} to {last.loss:.4g} at step {last.step}.")
    said += [f"{_failure_label(failure)}; {_resume_label(failure)}." for failure in failures[:MAX_MARKS]]
    if discarded:
        said.append(f"{len(discarded)} points of repeated steps are drawn dashed.")
    return " ".join(said)


def _axes(x: _Scale, y: _Scale, x_ticks: Sequence[float], y_ticks: Sequence[float], steps: Sequence[int]) -> list[str]:
    parts = []
    for value in y_ticks:
        at = y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
    bottom = HEIGHT - BOTTOM
    for value in x_ticks:
        if min(steps) <= value <= max(steps):
            text = f"{value:,.0f}"
            fits = x(value) + len(text) * LABEL_CHARACTER <= WIDTH  # twice as large on a phone
            place = f'x="{x(value):.1f}" text-anchor="middle"' if fits else f'x="{WIDTH}" text-anchor="end"'
            parts.append(f'<text class="tick" {place} y="{bottom + 18}">{text}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<text class="label" x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">step</text>')
    parts.append(f'<text class="label" x="{LEFT - 8}" y="{TOP - 24}" text-anchor="end">loss</text>')
    return parts


def _path(points: Sequence[LossPoint], x: _Scale, y: _Scale) -> str:
    if len(points) == 1:  # a path of no length would not be drawn
        return f"M{x(points[0].step) - 1.5:.1f},{y(points[0].loss):.1f} h3"
    return " ".join(
        f"{'M' if index == 0 else 'L'}{x(point.step):.1f},{y(point.loss):.1f}" for index, point in enumerate(points)
    )


def _dot(point: LossPoint, x: _Scale, y: _Scale) -> str:
    return (
        f'<circle class="dot" cx="{x(point.step):.1f}" cy="{y(point.loss):.1f}" r="3">'
        f"<title>step {point.step}: {point.loss:.6g}</title></circle>"
    )


def _runs(points: Sequence[LossPoint]) -> list[list[LossPoint]]:
    """Discarded points as one curve per attempt."""
    runs: dict[int, list[LossPoint]] = {}
    for point in points:
        runs.setdefault(point.attempt, []).append(point)
    return [thin_out(run) for run in runs.values()]


def _failure_label(failure: Failure) -> str:
    if failure.rank is not None:
        who = f"rank {failure.rank} failed"
    elif failure.node is not None:
        who = f"node {failure.node} lost"
    else:
        who = "failed"
    return who if failure.broken_step is None else f"{who} at step {failure.broken_step}"


def _resume_label(failure: Failure) -> str:
    return "not resumed" if failure.resumed_step is None else f"resumed from step {failure.resumed_step}"


def _band(failure: Failure, x: _Scale) -> str:
    if failure.broken_step is None or failure.resumed_step is None or failure.resumed_step >= failure.broken_step:
        return ""
    left, right = max(x(failure.resumed_step), LEFT), min(x(failure.broken_step), WIDTH - RIGHT)
    if right <= left:
        return ""
    return f'<rect class="band" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{HEIGHT - BOTTOM - TOP}"/>'


def _marks(failures: Sequence[Failure], x: _Scale) -> list[str]:
    """A cross and a line per failure. One failure is told beside its cross, in two rows: in the middle a single one
    would fit on neither side. Several have the numbers that the report's list gives them, on three levels so that
    neighbours do not cover each other."""
    parts = []
    for number, failure in enumerate(failures, start=1):
        if failure.broken_step is None:
            continue
        at = min(max(x(failure.broken_step), LEFT), WIDTH - RIGHT)
        rows, level, long = [f"{_failure_label(failure)},", _resume_label(failure)], TOP - 12, ' class="long"'
        label = " ".join(rows)
        if len(failures) > 1:
            rows, level, long = [str(number)], TOP - 6 - 14 * ((number - 1) % 3), ""
        fits = at + 8 + max(map(len, rows)) * LABEL_CHARACTER < WIDTH
        place = f'x="{at + (8 if fits else -8):.1f}" text-anchor="{"start" if fits else "end"}"'
        parts.append(
            f'<g class="failure"><title>{escape(label)}</title>'
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{level - 4}" y2="{HEIGHT - BOTTOM}"/>'
            f'<path d="M{at - 4:.1f},{level - 8} l8,8 m0,-8 l-8,8"/>'
            + "".join(  # the page leaves out on a phone what is "long"
                f'<text{long} {place} y="{level - 14 * (len(rows) - 1 - row)}">{escape(text)}</text>'
                for row, text in enumerate(rows)
            )
            + "</g>"
        )
    return parts


_PART_OF_BLOCK = {
    "startup": "startup",
    "kept": "productive",
    "lost": "lost",
    "broken": "lost",
    "restart": "restart",
    "tail": "other",
    "unknown": "unknown",
}


def time_chart(job: JobAccount, parts: Sequence[PartRow]) -> str:
    """SVG of two bars over the wall time: its parts by size, and the job as it went. Empty for a job of no length."""
    if job.wall_ns <= 0:
        return ""
    body = ['<text class="label" x="0" y="14">by size</text>', *_sum_bar(job, parts, top=22)]
    body += ['<text class="label" x="0" y="98">over time</text>', *_course_bar(job.blocks, job.wall_ns, top=106)]
    body.append('<text class="tick" x="0" y="150">0</text>')
    body.append(f'<text class="tick" x="{WIDTH}" y="150" text-anchor="end">{format_duration(job.wall_ns)}</text>')
    shares = [f"{p.label.lower()} {p.duration} ({p.percent})" for p in parts if p.spent_ns]
    return _svg(WIDTH, 156, "Where the wall time went", "; ".join(shares) + ".", body, name="time")


def _sum_bar(job: JobAccount, parts: Sequence[PartRow], *, top: int) -> list[str]:
    drawn: list[str] = []
    left = 0.0
    for part in parts:
        if not part.spent_ns:
            continue
        width = part.spent_ns / job.wall_ns * WIDTH
        drawn.append(
            f'<rect class="part {part.kind}" x="{left:.2f}" y="{top}" width="{width:.2f}" height="30">'
            f"<title>{escape(part.label)}: {part.duration}, {part.percent}</title></rect>"
        )
        text = f"{part.label} {part.percent}"
        if len(text) * LABEL_CHARACTER + 4 <= width:
            drawn.append(f'<text class="tick long" x="{left + 2:.1f}" y="{top + 46}">{escape(text)}</text>')
        elif len(part.label) * LABEL_CHARACTER + 4 <= width:
            drawn.append(f'<text class="tick long" x="{left + 2:.1f}" y="{top + 46}">{escape(part.label)}</text>')
        left += width
    return drawn


def _course_bar(blocks: Sequence[Block], wall_ns: int, *, top: int) -> list[str]:
    if not blocks:
        return []
    start_ns = blocks[0].start_ns
    drawn = []
    for block in blocks:
        left = (block.start_ns - start_ns) / wall_ns * WIDTH
        width = (block.end_ns - block.start_ns) / wall_ns * WIDTH
        took = format_duration(block.end_ns - block.start_ns)
        drawn.append(
            f'<rect class="part {_PART_OF_BLOCK[block.kind]}" x="{left:.2f}" y="{top}" width="{width:.2f}" height="18">'
            f"<title>attempt {block.attempt}: {block.kind}, {took}</title></rect>"
        )
    return drawn
