"""When exec sessions, and interactive tasks without one, have lasted too long."""

from __future__ import annotations

import pytest

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.exec_deadlines import SHELL_GRACE_NS, ExecTimes, ShellWatch, why_over

HOUR = 3600


def times(**seconds: float | None) -> ExecTimes:
    told = {f"{name}_ns": None if at is None else int(at * SECOND) for name, at in seconds.items()}
    return ExecTimes(asked_ns=0, idle_ns=HOUR * SECOND, **told)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "now_s", "why"),
    [
        (times(), 9, ""),
        (times(), 10, "nobody connected"),
        (times(attached=5), 19, ""),
        (times(attached=5), 20, "does not answer"),
        (times(attached=5, agent=20), 64, ""),
        (times(attached=5, agent=20), 65, "does not answer any more"),
        (times(attached=5, agent=HOUR, data=100), HOUR + 30, ""),
        (times(attached=5, agent=HOUR + 90, data=100), HOUR + 100, "nothing was typed"),
        (times(attached=5, agent=8 * 24 * HOUR, data=8 * 24 * HOUR), 8 * 24 * HOUR, "at most"),
    ],
)
def test_a_session_ends_for_one_reason_at_a_time(given: ExecTimes, now_s: int, why: str) -> None:
    said = why_over(given, now_s * SECOND)
    assert (why in said) if why else said == ""


def test_an_agent_whose_call_is_held_is_not_silent() -> None:
    given = times(attached=5, agent=20)
    given.agent_waits = True
    assert why_over(given, 100 * SECOND) == ""


def test_a_task_without_a_shell_is_stopped_after_the_grace_and_not_before() -> None:
    watch = ShellWatch()
    assert watch.due([1, 2], frozenset({2}), 0) == []
    assert watch.due([1, 2], frozenset({2}), SHELL_GRACE_NS - 1) == []
    assert watch.due([1, 2], frozenset({1, 2}), SHELL_GRACE_NS) == [], "there is a shell again"
    assert watch.due([1, 2], frozenset(), 2 * SHELL_GRACE_NS) == []
    assert watch.due([2], frozenset(), 3 * SHELL_GRACE_NS) == [2]
