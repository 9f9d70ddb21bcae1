"""Charts of the page, in a real browser against scripted answers, and what every page must have: contrast, names of
fields, and no more width than a phone has."""

from __future__ import annotations

import math
from typing import Final

import pytest
from playwright.sync_api import Page, expect
from tests.support.platform.pages import CONTRAST, HOST, RUNS, UNNAMED, ScriptedPlatform, event

from fireflyer.base.units import SECOND
from fireflyer.cluster.schema.logs import LogText

pytestmark = [pytest.mark.processes, pytest.mark.slow]

STEPS: Final = 72
STEP_S: Final = 1200
NODES: Final = 100
BEGAN_NS: Final = 1_790_000_000 * SECOND
SHOWN: Final = {
    "tasks": "table",
    "tasks/7": ".time a",
    "tasks/7/logs": ".log .line",
    "cluster": ".chart polyline",
    "submit": "form",
    "users": "p.dim",
}
"""Of each page what comes last."""


def report() -> dict[str, object]:
    """In the middle nothing is known for an hour."""
    steps = []
    for number in range(STEPS):
        healthy = 0.0 if 40 <= number < 43 else NODES * STEP_S
        allocated = healthy * (0.97 - 0.15 * math.sin(number / 9) ** 2)
        steps.append(
            {
                "start_ns": BEGAN_NS + number * STEP_S * SECOND,
                "allocated": allocated,
                "healthy": healthy,
                "productive": 0.9 * allocated,
            }
        )
    return {"start_ns": BEGAN_NS, "end_ns": BEGAN_NS + STEPS * STEP_S * SECOND, "steps": steps}


def test_utilisation_and_goodput_are_lines_with_a_table_behind(page: Page, scripted: ScriptedPlatform) -> None:
    scripted.utilisation = (200, report())
    page.goto(f"{HOST}/#/cluster")
    chart = page.get_by_role("img", name="utilisation")
    expect(chart).to_have_attribute(
        "aria-label", "Over 1 d 0 h: utilisation 89.8 %, goodput 80.8 %. The figures are in the table below."
    )
    expect(chart.locator("polyline")).to_have_count(4)  # two lines, in two pieces each
    expect(chart.locator("text").first).to_have_text("0 %")
    assert len(set(chart.locator("text").all_text_contents())) >= 8
    page.get_by_text("Figures", exact=True).click()
    rows = page.locator("details tbody tr")
    expect(rows).to_have_count(STEPS)
    expect(rows.first.locator("td").nth(1)).to_have_text("33.3")
    expect(rows.first.locator("td").nth(4)).to_have_text("97.0 %")
    expect(rows.nth(41).locator("td").nth(5)).to_have_text("–")
    chart.hover()
    expect(page.locator(".readout")).to_contain_text("goodput 8")
    with page.expect_request(lambda request: "/utilisation" in request.url) as asked:
        page.get_by_label("Time span").select_option("168")
    assert "steps=72" in asked.value.url


@pytest.mark.parametrize(
    ("status", "said"), [(404, "This platform keeps no history"), (503, "History is off: the database does not answer")]
)
def test_without_history_the_page_says_so(page: Page, scripted: ScriptedPlatform, status: int, said: str) -> None:
    scripted.utilisation = (status, {"code": "x", "message": "the database does not answer"})
    page.goto(f"{HOST}/#/cluster")
    expect(page.get_by_text(said)).to_be_visible()
    expect(page.get_by_text("nodes healthy")).to_be_visible()
    assert page.evaluate(CONTRAST) == []


def test_runs_are_shown_over_time_with_interruptions(page: Page, scripted: ScriptedPlatform) -> None:
    scripted.runs = RUNS
    page.goto(f"{HOST}/#/tasks/7")
    expect(page.get_by_text("3 runs, 1 interruption, ")).to_be_visible()
    bars = page.locator(".time a")
    expect(bars).to_have_count(3)
    expect(bars.first).to_have_attribute("aria-label", "Run 0 on 2 nodes, 10 min 2 s: suspended. Logs")
    lefts = bars.evaluate_all("(bars) => bars.map((bar) => bar.offsetLeft)")
    assert lefts == sorted(lefts)
    expect(page.get_by_text("suspended: a task of priority 30 needed the nodes")).to_be_visible()
    expect(page.get_by_role("link", name="Logs of run 1")).to_have_attribute("href", "#/tasks/7/logs/1")


def test_tasks_that_wait_say_why(page: Page) -> None:
    expect(page.get_by_role("row", name="waits")).to_contain_text("no node is free")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_can_be_read_on_a_phone_and_by_all(page: Page, scripted: ScriptedPlatform, scheme: str) -> None:
    said = LogText(run=0, attempt=0, rank=0, offset=0, text="".join(f"step {one} {'x' * 200}\n" for one in range(99)))
    scripted.utilisation, scripted.runs = (200, report()), RUNS
    page.get_by_label("Colours").select_option(scheme)
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 844})
        for name, last in SHOWN.items():
            scripted.streams = [event(said, "0.0.0.20000"), ": nothing\n\n"]
            page.goto(f"{HOST}/#/{name}")
            expect(page.locator(f"main {last}").first).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            assert page.evaluate(CONTRAST) == [], name
            assert page.evaluate(UNNAMED) == [], name
