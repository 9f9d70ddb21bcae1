"""`ff ps` says why tasks wait, by one request; `ff show` says once how a run ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
from tests.support.platform.desk import Desk, spec

from fireflyer.base.errors import FireflyerError, NotFound, Unreachable
from fireflyer.cli.platform.history import ended_by
from fireflyer.cli.platform.tasks import reasons
from fireflyer.cluster.core.platform.views import Why


def asked_of(desk: Desk, asked: list[Sequence[int]] | None = None) -> Callable[[Sequence[int]], Mapping[int, Why]]:
    """Answers as `Client.reasons`."""

    def ask(tasks: Sequence[int]) -> Mapping[int, Why]:
        if asked is not None:
            asked.append(tasks)
        return {task: desk.machine.why(task, desk.now_ns) for task in tasks}

    return ask


def test_tasks_that_wait_have_a_reason_and_those_that_run_have_none() -> None:
    desk = Desk("n1")
    running = desk.task(spec("runs"))
    waiting = desk.task(spec("waits"))
    found = reasons(desk.machine.tasks(desk.now_ns), asked_of(desk))
    assert found == {waiting: "needs 1 of 1 nodes that it may use; 0 are free"}
    assert running not in found


def test_one_request_asks_for_as_many_reasons_as_are_shown() -> None:
    desk = Desk("n1")
    asked: list[Sequence[int]] = []
    assert reasons(desk.machine.tasks(desk.now_ns), asked_of(desk, asked)) == {}
    assert asked == [], "nothing waits, nothing is asked"
    for number in range(50):
        desk.task(spec(f"task-{number}"))
    assert len(reasons(desk.machine.tasks(desk.now_ns), asked_of(desk, asked))) == 20
    assert [len(tasks) for tasks in asked] == [20]


@pytest.mark.parametrize("said", ["\x1b[2Jred", "two\nlines"])
def test_what_the_platform_says_is_one_line_of_text(said: str) -> None:
    desk = Desk("n1")
    desk.task(spec("runs"))
    waiting = desk.task(spec("waits"))
    shown = reasons(desk.machine.tasks(desk.now_ns), lambda tasks: dict.fromkeys(tasks, Why(said)))[waiting]
    assert "\x1b" not in shown
    assert "\n" not in shown


def test_a_task_that_has_gone_meanwhile_has_no_reason() -> None:
    desk = Desk("n1")
    desk.task(spec("runs"))
    desk.task(spec("waits"))
    assert reasons(desk.machine.tasks(desk.now_ns), lambda _tasks: {}) == {}


@pytest.mark.parametrize(
    "error", [Unreachable("the manager does not answer"), NotFound("the manager is of an older release")]
)
def test_a_platform_that_gives_no_reasons_leaves_the_tasks_without_and_the_command_says_so(
    capsys: pytest.CaptureFixture[str], error: FireflyerError
) -> None:
    desk = Desk("n1")
    desk.task(spec("runs"))
    desk.task(spec("waits"))

    def ask(_tasks: Sequence[int]) -> Mapping[int, Why]:
        raise error

    assert reasons(desk.machine.tasks(desk.now_ns), ask) == {}
    assert capsys.readouterr().err == f"why tasks wait is not known: {error.message}\n"


def test_a_reason_that_is_the_cause_is_said_once() -> None:
    assert ended_by("suspended", "suspended") == "suspended"
    assert ended_by("suspended", "") == "suspended"
    assert ended_by("failed", "rank 1: ValueError") == "failed: rank 1: ValueError"
