"""The web page of the platform in a real browser: what a user sees and does, on a desk and on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect
from tests.support.patience import allowed_s
from tests.support.platform.pages import CONTRAST, HOSTILE, UNNAMED
from tests.support.platform.running import RunningPlatform, task_of, wait_for

from fireflyer.cluster.client import read_connection
from fireflyer.cluster.core.platform.commands import DrainNode, ResumeNode, StopTask
from fireflyer.cluster.schema.tasks import FINISHED, TaskState

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PAGES: Final = ("tasks", "nodes", "health", "cluster", "users", "submit")
SCRIPT: Final = """\
import time
print("it has begun", flush=True)
from fireflyer.cluster.sdk import go_suspend, should_suspend
while True:
    if should_suspend():
        go_suspend()
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlatform]:
    directory = tmp_path_factory.mktemp("page") / "platform"
    with RunningPlatform(directory, nodes=3, zones=2, users=("ada",)) as running:
        yield running


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


class Shown:
    """A page, and what its console has reported."""

    def __init__(self, browser: Browser, platform: RunningPlatform, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(1000 * allowed_s(20))
        expect.set_options(timeout=1000 * allowed_s(20))
        self.url = read_connection(platform.layout.connection_file).url
        self.problems: list[str] = []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.goto(self.url)

    def _hear(self, message: ConsoleMessage) -> None:
        # The browser reports answers as errors: before a login the page asks whether there is a session, and whoever
        # keeps no history has no figures for charts.
        expected = "401" in message.text or "/utilisation?" in message.location["url"]
        if message.type in ("error", "warning") and not expected:
            self.problems.append(message.text)

    def log_in(self, token: str) -> Page:
        self.page.get_by_label("Your token").fill(token)
        self.page.keyboard.press("Enter")
        expect(self.page.get_by_role("heading", name="Tasks")).to_be_visible()
        return self.page

    def go(self, name: str) -> None:
        self.page.goto(f"{self.url}/#/{name}")
        expect(self.page.locator("main h2")).to_be_visible()


@pytest.fixture
def shown(browser: Browser, platform: RunningPlatform) -> Iterator[Shown]:
    made = Shown(browser, platform)
    yield made
    made.context.close()
    assert not made.problems


def admin_token(platform: RunningPlatform) -> str:
    return read_connection(platform.layout.connection_file).token


def test_a_wrong_token_is_refused_and_a_session_survives_a_reload(shown: Shown, platform: RunningPlatform) -> None:
    shown.page.get_by_label("Your token").fill("fft1.0123456789abcdef.false")
    shown.page.get_by_role("button", name="Log in").click()
    expect(shown.page.get_by_role("alert")).not_to_be_empty()
    page = shown.log_in(platform.tokens["ada"])
    (cookie,) = shown.context.cookies()
    assert cookie.get("httpOnly")
    assert cookie.get("sameSite") == "Strict"
    assert page.evaluate("document.cookie") == ""
    page.reload()
    expect(page.get_by_text("ada")).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("Your token")).to_be_visible()


def test_a_task_is_submitted_watched_suspended_resumed_read_and_stopped(
    shown: Shown, platform: RunningPlatform, script: Path
) -> None:
    page = shown.log_in(platform.tokens["ada"])
    page.get_by_role("link", name="Submit").click()
    page.get_by_label("Name", exact=True).fill("by-hand")
    page.get_by_label("Script").fill(str(script))
    page.get_by_label("Working directory, on the nodes").fill(str(script.parent))
    page.get_by_label("Nodes", exact=True).fill("2")
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", name="by-hand")).to_be_visible()
    state = page.locator("dl.facts .state")
    expect(state).to_have_text("running")
    page.keyboard.press("l")
    begun = page.get_by_role("region", name="Log lines").locator(".line", has_text="it has begun")
    for rank in ("0", "1"):  # each has written its line before the run is suspended, as it is looked for below
        page.get_by_role("combobox", name="Rank").select_option(rank)
        expect(begun).to_have_count(1)
    page.get_by_role("link", name="by-hand").click()
    page.get_by_role("button", name="Suspend").click()
    expect(state).to_have_text("suspended")
    expect(page.locator("dd", has_text="resume")).to_be_visible()
    page.get_by_role("button", name="Resume").click()
    expect(state).to_have_text("running")
    expect(page.locator(".time a")).to_have_count(2)
    page.keyboard.press("l")
    log = page.get_by_role("region", name="Log lines")
    expect(log.locator(".line", has_text="it has begun")).not_to_have_count(0)
    page.get_by_role("combobox", name="Rank").select_option("1")
    expect(log.locator(".line", has_text="it has begun")).to_have_count(1)
    page.get_by_label("Search in the logs").fill("HAS begun")
    page.keyboard.press("Enter")
    page.get_by_role("region", name="Found lines").get_by_role("button", name="run 0, rank 1").click()
    expect(log.locator(".line.found")).to_have_text("it has begun")
    page.get_by_role("link", name="by-hand").click()
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.get_by_role("button", name="Stop").click()
    expect(state).to_have_text("running")
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Stop").click()
    expect(state).to_have_text("stopped")
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)


def test_what_others_do_is_shown_without_reloading(shown: Shown, platform: RunningPlatform, script: Path) -> None:
    page = shown.log_in(platform.tokens["ada"])
    client = platform.client("ada")
    (task,) = client.submit(task_of(script, "live"), key="live")
    row = page.get_by_role("row", name="live")
    expect(row.locator(".state")).to_have_text("running")
    client.command(StopTask(task))
    expect(row).to_have_count(0)
    wait_for(lambda: client.task(task).task.state is FINISHED, "it ends")


def test_a_lost_connection_is_said_and_what_was_missed_is_shown_after_it(
    shown: Shown, platform: RunningPlatform, script: Path
) -> None:
    page = shown.log_in(platform.tokens["ada"])
    notice = page.locator("#notice")
    expect(page.get_by_text("tasks", exact=False).first).to_be_visible()
    shown.context.set_offline(True)
    expect(notice).to_contain_text("platform")
    client = platform.client("ada")
    (task,) = client.submit(task_of(script, "missed"), key="missed")
    shown.context.set_offline(False)
    expect(page.get_by_role("row", name="missed")).to_be_visible()
    expect(notice).to_be_hidden()
    client.command(StopTask(task))
    shown.problems.clear()  # the browser reports each request that failed


def test_texts_of_users_are_shown_as_text(shown: Shown, platform: RunningPlatform, script: Path) -> None:
    admin = platform.client()
    page = shown.log_in(admin_token(platform))
    node = admin.nodes()[0].name
    admin.command(DrainNode(node, HOSTILE[:200]))
    (task,) = platform.client("ada").submit(task_of(script, "args", HOSTILE, nodes=9), key="args")
    for place in ("nodes", f"tasks/{task}"):
        shown.go(place)
        expect(page.get_by_text("<img src=x")).to_be_visible()
        assert page.locator("main img, main script").count() == 0
        assert page.title() == "Fire-Flyer"
    platform.client("ada").command(StopTask(task))
    admin.command(ResumeNode(node))


def test_keys_lead_to_all_pages_and_to_the_search(shown: Shown, platform: RunningPlatform) -> None:
    page = shown.log_in(platform.tokens["ada"])
    for name in PAGES[1:]:
        page.keyboard.press(name[0])
        expect(page.get_by_role("link", name=name.capitalize(), exact=True)).to_have_attribute("aria-current", "page")
        page.locator("body").click(position={"x": 1, "y": 1})
    page.goto(f"{shown.url}/#/nodes")
    expect(page.get_by_role("searchbox")).to_be_visible()
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_can_be_read_on_a_phone_and_by_all(
    browser: Browser, platform: RunningPlatform, script: Path, scheme: str
) -> None:
    ada = platform.client("ada")
    (task,) = ada.submit(task_of(script, f"phone-{scheme}", nodes=2), key=f"phone-{scheme}")
    shown = Shown(browser, platform, viewport={"width": 390, "height": 844}, color_scheme=scheme)
    try:
        assert shown.page.evaluate(CONTRAST) == []
        page = shown.log_in(admin_token(platform))
        wait_for(lambda: ada.task(task).task.state is TaskState.RUNNING, "it runs")
        for name in (*PAGES, f"tasks/{task}"):
            shown.go(name)
            expect(page.locator("main table, main dl, main form, main .card").first).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
            assert page.evaluate(CONTRAST) == [], name
            assert page.evaluate(UNNAMED) == [], name
        assert not shown.problems
    finally:
        shown.context.close()
        ada.command(StopTask(task))
