"""A browser renders the report: nothing is refused, nothing is missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright
from tests.support.browser import dump_dom, find_browser
from tests.support.jobs.job_logs import example_log

from fireflyer.analytics.html import render_html
from fireflyer.analytics.report import Fact, build_report

pytestmark = pytest.mark.processes


@pytest.fixture
def browser() -> str:
    found = find_browser()
    if found is None and not os.environ.get("CI"):
        pytest.skip("no Chromium on this machine; install the package chromium")
    assert found is not None, "the system packages of the Makefile were not installed: chromium is missing"
    return found


def test_a_browser_shows_the_whole_report(browser: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    facts = [Fact("loss curve", "bitwise that of <b>the undisturbed run</b>", True)]
    page.write_text(render_html(build_report(example_log(), facts=facts)), encoding="utf-8")
    dom, console = dump_dom(browser, page, tmp_path / "profile")
    assert console == ""
    for said in (
        "<title>Job demo · Fire-Flyer report</title>",
        "1 failure survived",
        "bitwise that of &lt;b&gt;the undisturbed run&lt;/b&gt;",
        "node 1 lost at step 71, resumed from step 60",
        "16,384 tokens/s",
        "Effective training time ratio",
        "<dd>0.709</dd>",
        "Productive 70.9%",
        "</html>",
    ):
        assert said in dom
    assert dom.count("<svg ") == 2


def test_nothing_scrolls_sideways_on_a_phone(browser: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_html(build_report(example_log())), encoding="utf-8")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        shown = running.new_page(viewport={"width": 390, "height": 844})
        shown.goto(page.as_uri())
        assert shown.evaluate("document.documentElement.scrollWidth") <= 390
        drawn = [box for svg in shown.locator("svg").all() if (box := svg.bounding_box()) is not None]
        running.close()
    assert len(drawn) == 2
    assert all(0 <= box["x"] <= box["x"] + box["width"] <= 390 for box in drawn)


def test_the_console_would_have_told(browser: str, tmp_path: Path) -> None:
    """The check above is worth something: a fetch that the page forbids does reach the console."""
    page = tmp_path / "report.html"
    html = render_html(build_report(example_log()))
    page.write_text(html.replace("</main>", '<script src="x.js"></script></main>'), encoding="utf-8")
    _, console = dump_dom(browser, page, tmp_path / "profile")
    assert "Content Security Policy" in console
