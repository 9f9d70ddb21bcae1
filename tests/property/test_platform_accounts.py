"""The account of a task adds up to its life, whatever happens to it and whatever its launchers say."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.platform.desk import Desk, spec

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.commands import ResumeTask, StopTask, SuspendTask
from fireflyer.cluster.core.platform.store.rows import TASKS
from fireflyer.cluster.schema.tasks import FINISHED, Cause, RunParts, TaskState

parts = st.builds(
    RunParts,
    start_ns=st.integers(0, 9 * SECOND),
    productive_ns=st.integers(0, 9 * SECOND),
    lost_ns=st.integers(0, 1 << 62),
)
steps = st.one_of(
    st.tuples(st.just("pass"), st.integers(1, 40 * SECOND)),
    st.tuples(st.just("runs"), st.none()),
    st.tuples(st.just("gone"), st.tuples(st.sampled_from(Cause), parts)),
    st.tuples(st.just("command"), st.sampled_from([SuspendTask, ResumeTask, StopTask])),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, max_size=14))
def test_spans_and_parts_add_up_to_the_life_of_a_task(history: list[tuple[str, object]]) -> None:
    desk = Desk("n1", "n2", requeue_pause_ns=SECOND, stop_after_ns=20 * SECOND)
    task = desk.task(spec(least_nodes=2, most_nodes=2))
    for kind, what in history:
        has_run = desk.state(task) in (TaskState.SCHEDULED, TaskState.RUNNING, TaskState.SUSPENDING)
        if kind == "pass" and isinstance(what, int):
            desk.pass_time(what, step_ns=5 * SECOND)
        elif kind == "runs" and has_run:
            desk.runs_on(task, *desk.nodes_of(task))
        elif kind == "gone" and has_run and isinstance(what, tuple):
            desk.gone(task, what[0], parts=what[1])
        elif kind == "command" and callable(what):
            desk.command(what(task))
        row = next(TASKS.decode(key, value) for key, value in desk.rows.items() if key.startswith(TASKS.prefix))
        assert row.account.total_ns == row.counted_ns - row.submitted_ns
        view = desk.machine.task(task, desk.now_ns)
        until_ns = view.ended_ns if view.ended_ns is not None else desk.machine.time_ns(desk.now_ns)
        assert view.account.total_ns == until_ns - view.submitted_ns
        assert (view.outcome is not None) == (view.state is FINISHED)
        assert desk.machine.why(task, desk.now_ns).text
