"""How the page is used, in a real browser against scripted answers: thousands of nodes, keys, colours, and what is
being typed while the page is drawn again. What it does with a platform is in `test_page.py`."""

from __future__ import annotations

from typing import Final

import pytest
from playwright.sync_api import Page, expect
from tests.support.platform.pages import HOST, LEAVES, NODES, ScriptedPlatform

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CONTRAST_OF_NOTICE: Final = """
() => {
  const shown = getComputedStyle(document.getElementById("notice"));
  const [one, two] = [shown.color, shown.backgroundColor].map((text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).map((value) => {
      const part = Number(value) / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  });
  return (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
}
"""


def draw_again(page: Page, selector: str) -> None:
    """Wait until `selector` is another element than now."""
    old = page.locator(selector).first.element_handle()
    page.wait_for_function("(old) => !old.isConnected", arg=old)


def test_all_of_thousands_of_nodes_are_cells_and_the_table_stays_short(page: Page) -> None:
    page.goto(f"{HOST}/#/nodes")
    expect(page.locator(".grid .cell")).to_have_count(NODES)
    expect(page.locator("main h3")).to_have_count(LEAVES)
    leaves = page.locator("main h3").all_inner_texts()
    assert [text.split()[1].rstrip(":") for text in leaves[:12]] == [f"leaf-{number}" for number in range(12)]
    expect(page.locator("tbody tr")).to_have_count(200)
    expect(page.get_by_text(f"{NODES} nodes; the table has the first 200")).to_be_visible()
    page.get_by_role("searchbox").fill("node-2099")
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("tbody tr")).to_contain_text("accused by 2 runs of 1 user")


def test_the_focus_stays_where_it_is_when_the_page_is_drawn_again(page: Page) -> None:
    page.goto(f"{HOST}/#/nodes")
    button = page.get_by_role("button", name="Drain node-0003", exact=True)
    button.focus()
    draw_again(page, "tbody tr")
    expect(button).to_be_focused()
    page.goto(f"{HOST}/#/tasks")
    row = page.get_by_role("row", name="waits")
    row.focus()
    draw_again(page, "tbody tr")
    expect(row).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Task 7")).to_be_visible()


def test_what_is_typed_is_kept_when_the_page_is_drawn_again(page: Page) -> None:
    page.goto(f"{HOST}/#/tasks/7")
    priority = page.get_by_label("Priority")
    expect(priority).to_have_value("10")
    priority.press("ControlOrMeta+a")
    draw_again(page, "main dl")
    page.keyboard.type("3")  # instead of what was selected before
    draw_again(page, "main dl")
    page.keyboard.type("3")
    draw_again(page, "main dl")
    expect(priority).to_have_value("33")
    expect(priority).to_be_focused()


def test_parts_that_a_task_does_not_have_leave_nothing_behind(page: Page) -> None:
    page.goto(f"{HOST}/#/tasks/7")
    expect(page.get_by_text("no node is free")).to_be_visible()
    expect(page.locator("main")).not_to_contain_text("null")


def test_a_question_mark_shows_the_keys(page: Page) -> None:
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keys")
    expect(dialog).to_be_visible()
    expect(dialog).to_contain_text("Search")
    page.keyboard.press("n")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("heading", name="Tasks")).to_be_visible()
    page.keyboard.press("n")
    expect(page.get_by_role("heading", name="Nodes")).to_be_visible()


def test_the_colours_are_those_of_the_system_until_others_are_chosen(page: Page) -> None:
    body = page.locator("body")
    expect(body).to_have_css("background-color", "rgb(255, 255, 255)")
    page.emulate_media(color_scheme="dark")
    expect(body).to_have_css("background-color", "rgb(23, 23, 22)")
    page.get_by_label("Colours").select_option("light")
    expect(body).to_have_css("background-color", "rgb(255, 255, 255)")
    page.reload()
    expect(body).to_have_css("background-color", "rgb(255, 255, 255)")
    expect(page.get_by_label("Colours")).to_have_value("light")
    page.get_by_label("Colours").select_option("system")
    expect(body).to_have_css("background-color", "rgb(23, 23, 22)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_notice_of_a_lost_connection_can_be_read(page: Page, scripted: ScriptedPlatform, scheme: str) -> None:
    page.get_by_label("Colours").select_option(scheme)
    scripted.reachable = False
    expect(page.locator("#notice")).to_contain_text("platform")
    assert page.evaluate(CONTRAST_OF_NOTICE) >= 4.5
