"""What the soak sees of a task: by the event logs of its runs, which know at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.support.jobs.soak_facts import SOAK
from tests.support.jobs.whole_facts import RunLog

from fireflyer.base.events import AttemptStarted
from fireflyer.cluster.schema.tasks import TaskState
from fireflyer.recipes.soak.watching import task_seen


def answer() -> Any:
    return SimpleNamespace(task=SimpleNamespace(state=TaskState.RUNNING, nodes=("agent-1", "agent-2")))


def test_a_task_has_the_newest_step_of_its_last_attempt() -> None:
    log = RunLog(SOAK.task(1))
    log.attempt(0, 0, 17)
    first = task_seen(answer(), [log.entries])
    assert (first.state, first.step, first.starts, first.nodes) == ("running", 17, 1, ("agent-1", "agent-2"))
    log.log(AttemptStarted(1))
    again = task_seen(answer(), [log.entries])
    assert (again.step, again.starts) == (0, 2)


def test_the_attempts_of_all_runs_count_and_a_run_without_a_log_has_done_nothing() -> None:
    log = RunLog(SOAK.task(1))
    log.attempt(0, 0, 17)
    assert (task_seen(answer(), [log.entries, []]).step, task_seen(answer(), [log.entries, []]).starts) == (0, 1)
    assert task_seen(answer(), [log.entries, log.entries]).starts == 2
    assert (task_seen(answer(), []).step, task_seen(answer(), []).starts) == (0, 0)
