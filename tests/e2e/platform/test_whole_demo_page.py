"""The page of the whole demonstration in a browser: nothing is refused, nothing is missing, and it fits a phone."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser
from tests.support.jobs.whole_facts import PLAN, good_facts

from fireflyer.base.units import SECOND
from fireflyer.recipes.whole.checks import judge
from fireflyer.recipes.whole.html import render_whole
from fireflyer.recipes.whole.report import report_of

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.mark.parametrize("width", [390, 1100])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_and_shows_everything(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    path, facts = tmp_path / "report.html", good_facts()
    path.write_text(render_whole(report_of(PLAN, facts, judge(PLAN, facts), took_ns=SECOND)), encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)  # type: ignore[arg-type]
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    headings = page.get_by_role("heading", level=2).all_text_contents()
    assert headings == ["Checks", "Time line", "Loss", "Storage through the failure", "What was lost, and why",
                        "Effective training time ratio"]  # fmt: skip
    for drawn in page.locator("svg").all():
        box = drawn.bounding_box()
        assert box is not None
        assert 0 <= box["x"] <= box["x"] + box["width"] <= width
    assert page.locator("svg").count() == 4
    terms = page.get_by_role("rowheader").or_(page.locator("td, dt")).all_text_contents()
    assert {"u0", "Δt", "N·r_f"} <= set(terms)
    bars = page.locator(".lane .bar b")
    assert bars.count() > 10
    widths = [bar.bounding_box() for bar in bars.all()]
    assert all(box is not None and box["width"] > 0 for box in widths)
    assert page.locator(".heads em").all_text_contents() == ["1", "2", "3"]
    assert said == []
    context.close()
