"""Logs on the page, in a real browser against scripted answers: following, reading a place, searching, and what ranks
print to do harm."""

from __future__ import annotations

import re
from typing import Any, Final

import pytest
from playwright.sync_api import Page, expect
from tests.support.platform.pages import HOST, HOSTILE, RUNS, ScriptedPlatform, event, stream

from fireflyer.cluster.schema.logs import FoundLine, LogsEnded, LogText, RunLogs
from fireflyer.cluster.schema.tasks import Outcome, TaskState

pytestmark = [pytest.mark.processes, pytest.mark.slow]

END: Final = event(LogsEnded(state=TaskState.FINISHED, outcome=Outcome.SUCCEEDED, exit_code=0, reason=""))
LINES: Final = 120_000
"""More than the page keeps."""


def text(said: str, *, rank: int = 0, run: int = 0, offset: int = 0, **more: Any) -> str:
    one = LogText(run=run, attempt=0, rank=rank, offset=offset, text=said, **more)
    return event(one, f"{run}.0.{rank}.{offset + len(said.encode())}")


def open_logs(page: Page, scripted: ScriptedPlatform, *streams: str, run: str = "") -> Any:
    scripted.runs, scripted.streams = RUNS, list(streams)
    page.goto(f"{HOST}/#/tasks/7/logs{run}")
    box = page.get_by_role("region", name="Log lines")
    expect(box.locator(".line").first).to_be_visible()
    return box


def test_a_long_log_has_few_elements_and_is_followed_at_its_end(page: Page, scripted: ScriptedPlatform) -> None:
    numbered = [f"line {number}\n" for number in range(LINES)]
    pieces = ["".join(numbered[at : at + 4000]) for at in range(0, LINES, 4000)]
    sent, offset = "", 0
    for piece in pieces:
        sent += text(piece, offset=offset)
        offset += len(piece)
    box = open_logs(page, scripted, sent + END)
    expect(box).to_contain_text(f"line {LINES - 1}")
    expect(box).to_contain_text("the task has succeeded, exit code 0")
    assert page.locator("main *").count() < 400
    expect(page.get_by_text("lines, the last of 120,002")).to_be_visible()
    box.focus()
    page.keyboard.press("Home")
    expect(page.get_by_role("checkbox", name="Follow")).not_to_be_checked()
    expect(box).to_contain_text(f"line {LINES - 100_000}")
    expect(box).not_to_contain_text(f"line {LINES - 1}")
    page.keyboard.press("End")
    expect(page.get_by_role("checkbox", name="Follow")).to_be_checked()
    expect(box).to_contain_text(f"line {LINES - 1}")


def test_it_goes_on_where_it_was_cut_off_and_stays_where_the_reader_is(page: Page, scripted: ScriptedPlatform) -> None:
    first = "".join(f"first {number}\n" for number in range(200))
    second = "".join(f"second {number}\n" for number in range(200))
    begun = text(first)
    box = open_logs(page, scripted, begun, text(second, offset=len(first)), END)
    expect(box).to_contain_text("second 199")
    expect(box).to_contain_text("the task has succeeded")
    assert scripted.heard[:3] == ["", f"0.0.0.{len(first)}", f"0.0.0.{len(first) + len(second)}"]


def test_lines_that_come_do_not_move_a_reader_who_went_up(page: Page, scripted: ScriptedPlatform) -> None:
    first = "".join(f"first {number}\n" for number in range(200))
    box = open_logs(page, scripted, text(first), ": nothing\n\n")
    expect(box).to_contain_text("first 199")
    page.keyboard.press("f")
    box.evaluate("(box) => { box.scrollTop = 0; }")
    expect(box).to_contain_text("first 0")
    scripted.streams = [text("second\n", offset=len(first)) + END]
    expect(page.get_by_text("all was read")).to_be_visible()
    expect(page.get_by_role("checkbox", name="Follow")).not_to_be_checked()
    assert box.evaluate("(box) => box.scrollTop") == 0
    page.get_by_role("checkbox", name="Follow").check()
    expect(box).to_contain_text("second")


def test_what_ranks_print_is_shown_as_text(page: Page, scripted: ScriptedPlatform) -> None:
    bar = "\r".join(f"{part} %" for part in range(101))
    box = open_logs(page, scripted, text(f"{HOSTILE}\n{bar}\nx" + 9000 * "y" + "\n") + END)
    expect(box.get_by_text('<img src=x onerror="document.title=')).to_be_visible()
    expect(box).to_contain_text("<U+202E> ^[[31mred")
    expect(box).to_contain_text("100 %")
    expect(box).not_to_contain_text("99 %")
    expect(box).to_contain_text("(5001 characters more)")
    assert page.locator("main img, main script").count() == 0
    assert page.title() == "Fire-Flyer"


def test_lines_of_several_ranks_say_which_and_what_was_lost(page: Page, scripted: ScriptedPlatform) -> None:
    box = open_logs(page, scripted, text("zero\n") + text("one\n", rank=1, lost_bytes=77, cut=True) + END)
    expect(box.locator(".line", has_text="one")).to_contain_text("1")
    expect(box).to_contain_text("rank 1: 77 bytes were lost here")
    expect(box).to_contain_text("rank 1: the rest was not kept")
    expect(page.get_by_role("combobox", name="Rank").locator("option")).to_have_text(["all ranks", "rank 0", "rank 1"])


def test_a_found_line_is_opened_with_what_is_around_it(page: Page, scripted: ScriptedPlatform) -> None:
    lines = [f"step {number} loss {number % 7}\n" for number in range(20_000)]
    data = "".join(lines).encode()
    scripted.logs = {"attempt-0-rank-0": data}
    scripted.known_logs = (RunLogs(0, (stream(0, len(data)), stream(1, 0))),)
    offset = len("".join(lines[:9000]))
    scripted.found = [FoundLine(run=0, attempt=0, rank=0, offset=offset, line=f"{HOSTILE} {lines[9000].strip()}")]
    box = open_logs(page, scripted, text(lines[-1], offset=len(data) - len(lines[-1])) + END)
    page.get_by_label("Search in the logs").fill("STEP 9000 ")
    page.keyboard.press("Enter")
    found = page.get_by_role("region", name="Found lines")
    expect(found).to_contain_text("1 line found.")
    found.get_by_role("button", name="step 9000").click()
    expect(box.locator(".line.found")).to_have_text("step 9000 loss 5")
    expect(box.locator("mark")).to_have_text("step 9000 ")
    expect(box).to_contain_text("step 8999 ")
    expect(page.get_by_role("combobox", name="Rank")).to_have_value("0")
    shown = box.evaluate("(box) => box.scrollTop")
    page.get_by_role("button", name="Earlier lines").click()
    page.wait_for_function("([box, before]) => box.scrollTop > before", arg=[box.element_handle(), shown])
    expect(box.locator(".line.found")).to_be_visible()
    page.get_by_role("button", name="Later lines").click()
    box.evaluate("(box) => { box.scrollTop = box.scrollHeight; }")
    expect(box).to_contain_text(re.compile(r"step 1[0-9]{4} "))
    page.get_by_role("checkbox", name="Follow").check()
    expect(page.get_by_text("all was read")).to_be_visible()


def test_one_rank_is_read_back_to_its_beginning(page: Page, scripted: ScriptedPlatform) -> None:
    data = "".join(f"step {number}\n" for number in range(600_000)).encode()
    scripted.logs = {"attempt-0-rank-0": data}
    scripted.known_logs = (RunLogs(0, (stream(0, len(data)),)), RunLogs(1, (stream(0, 0),)))
    box = open_logs(page, scripted, END, run="/0")
    expect(page.get_by_role("combobox", name="Run")).to_have_value("0")
    page.get_by_role("combobox", name="Rank").select_option("0")
    expect(box).to_contain_text("the task has succeeded")
    begin = len(data) - (4 << 20)
    assert scripted.heard[-1] == f"0.0.0.{begin}"
    expect(box).to_contain_text("press Earlier lines")
    page.get_by_role("button", name="Earlier lines").click()
    box.evaluate("(box) => { box.scrollTop = 0; }")
    first = data.index(b"\n", begin - (64 << 10)) + 1
    expect(box).to_contain_text(data[first:].split(b"\n", 1)[0].decode())


def test_a_session_that_ends_is_said_and_nothing_typed_is_lost(page: Page, scripted: ScriptedPlatform) -> None:
    page.get_by_role("link", name="Submit").click()
    page.get_by_label("Name", exact=True).fill("by-hand")
    page.get_by_label("Script").fill("train.py")
    page.get_by_label("Working directory").fill("/shared")
    scripted.logged_in = False
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_text("Your session has ended.")).to_be_visible()
    assert scripted.submitted == []
    page.get_by_label("Your token").fill("token")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Name", exact=True)).to_have_value("by-hand")
    expect(page.get_by_text("Your session has ended.")).to_be_hidden()
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", name="Task 7")).to_be_visible()
    assert b'"by-hand"' in scripted.submitted[0]


def test_another_user_does_not_find_what_was_typed(page: Page, scripted: ScriptedPlatform) -> None:
    page.get_by_role("link", name="Submit").click()
    page.get_by_label("Name", exact=True).fill("by-hand")
    scripted.logged_in = False
    page.get_by_role("button", name="Log out")  # still there: nobody knows yet
    expect(page.get_by_text("Your session has ended.")).to_be_visible()
    scripted.user = "bob"
    page.get_by_label("Your token").fill("token")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Name", exact=True)).to_have_value("")
