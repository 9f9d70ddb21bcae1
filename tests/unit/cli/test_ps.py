"""`ff ps` says why tasks wait, of as many as it may ask; `ff show` says once how a run ended."""

from __future__ import annotations

import pytest
from tests.support.platform.desk import Desk, spec

from fireflyer.base.errors import NotFound, Unreachable
from fireflyer.cli.platform.history import ended_by
from fireflyer.cli.platform.tasks import reasons


def test_tasks_that_wait_have_a_reason_and_those_that_run_have_none() -> None:
    desk = Desk("n1")
    running = desk.task(spec("runs"))
    waiting = desk.task(spec("waits"))
    found = reasons(desk.machine.tasks(desk.now_ns), lambda task: desk.machine.why(task, desk.now_ns).text)
    assert found == {waiting: "needs 1 of 1 nodes that it may use; 0 are free"}
    assert running not in found


def test_the_number_of_requests_is_bounded() -> None:
    desk = Desk("n1")
    for number in range(50):
        desk.task(spec(f"task-{number}"))
    asked: list[int] = []

    def ask(task: int) -> str:
        asked.append(task)
        return "why"

    reasons(desk.machine.tasks(desk.now_ns), ask)
    assert len(asked) == 20


@pytest.mark.parametrize("said", ["\x1b[2Jred", "two\nlines"])
def test_what_the_platform_says_is_one_line_of_text(said: str) -> None:
    desk = Desk("n1")
    desk.task(spec("runs"))
    waiting = desk.task(spec("waits"))
    shown = reasons(desk.machine.tasks(desk.now_ns), lambda _task: said)[waiting]
    assert "\x1b" not in shown
    assert "\n" not in shown


def test_a_task_that_has_gone_meanwhile_has_no_reason() -> None:
    desk = Desk("n1")
    desk.task(spec("runs"))
    desk.task(spec("waits"))

    def gone(task: int) -> str:
        raise NotFound(f"there is no task {task}")

    assert reasons(desk.machine.tasks(desk.now_ns), gone) == {}


def test_a_platform_that_answers_no_more_leaves_the_tasks_without_reasons() -> None:
    desk = Desk("n1")
    desk.task(spec("runs"))
    first, second = desk.task(spec("waits")), desk.task(spec("waits-too"))

    def ask(task: int) -> str:
        if task == first:
            raise Unreachable("the manager does not answer")
        return "why"

    assert reasons(desk.machine.tasks(desk.now_ns), ask) in ({}, {second: "why"})


def test_a_reason_that_is_the_cause_is_said_once() -> None:
    assert ended_by("suspended", "suspended") == "suspended"
    assert ended_by("suspended", "") == "suspended"
    assert ended_by("failed", "rank 1: ValueError") == "failed: rank 1: ValueError"
