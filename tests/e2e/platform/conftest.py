"""A browser, and the page in it with scripted answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from tests.support.browser import find_browser
from tests.support.patience import allowed_s
from tests.support.platform.pages import HOST, ScriptedPlatform


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_browser()
    assert path is not None, "Chromium is missing; `make setup` installs it"
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


@pytest.fixture
def scripted() -> ScriptedPlatform:
    return ScriptedPlatform()


@pytest.fixture
def page(browser: Browser, scripted: ScriptedPlatform) -> Iterator[Page]:
    context = browser.new_context(color_scheme="light")
    context.route("**/*", scripted.answer)
    made = context.new_page()
    made.set_default_timeout(1000 * allowed_s(20))
    expect.set_options(timeout=1000 * allowed_s(20))
    made.goto(HOST)
    expect(made.get_by_role("heading", name="Tasks")).to_be_visible()
    yield made
    context.close()
