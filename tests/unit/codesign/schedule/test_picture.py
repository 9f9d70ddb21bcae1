"""The picture of a timeline as SVG."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from fireflyer.base.errors import UsageError
from fireflyer.codesign.schedule import Pair, Timeline, compiled, simulate, uniform_costs
from fireflyer.codesign.schedule.picture import draw

SVG = "{http://www.w3.org/2000/svg}"


def timeline(name: str, ranks: int, micro_batches: int) -> Timeline:
    program = compiled(name, ranks, micro_batches)
    return simulate(program, uniform_costs(program.schedule.placement, forward=1, backward=2, weights=1))


def blocks(name: str, ranks: int, micro_batches: int) -> dict[str, tuple[float, float, float, float]]:
    drawn = ElementTree.fromstring(draw(timeline(name, ranks, micro_batches), "a & b"))
    assert drawn.findtext(f"{SVG}title") == "a & b"
    found = {}
    for rect in drawn.iter(f"{SVG}rect"):
        text = rect.findtext(f"{SVG}title")
        if text is not None:
            x, y, width, height = (float(rect.get(name, "nan")) for name in ("x", "y", "width", "height"))
            found[text] = (x, y, width, height)
    return found


def test_blocks_are_where_their_passes_are_in_time() -> None:
    found = blocks("1f1b", 2, 2)
    assert len(found) == 8
    left, top, width, _ = found["F, stage 0, micro-batch 0"]
    assert found["B, stage 0, micro-batch 1"][2] == pytest.approx(2 * width, abs=0.02)
    x, y, _, _ = found["B, stage 1, micro-batch 0"]
    assert x == pytest.approx(left + 2 * width, abs=0.02)
    assert y > top


def test_a_pair_is_a_forward_above_a_backward() -> None:
    found = blocks("dualpipev", 2, 4)
    pairs = [(a, b) for a in found for b in found if a[0] == "F" and b[0] == "B" and found[a][0] == found[b][0]]
    stacked = [(a, b) for a, b in pairs if found[a][1] + found[a][3] == found[b][1]]
    rows = timeline("dualpipev", 2, 4).program.schedule.rows
    assert len(stacked) == sum(isinstance(item, Pair) for row in rows for item in row) > 0


def test_too_many_passes_are_refused() -> None:
    with pytest.raises(UsageError, match="20,480 passes are too many to draw, more than 20,000; give fewer"):
        draw(timeline("1f1b", 16, 640), "large")
