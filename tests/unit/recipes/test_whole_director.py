"""What the whole demonstration does next."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.jobs.whole_facts import PLAN

from fireflyer.base.errors import UsageError
from fireflyer.recipes.testbed.facts import StorageSample
from fireflyer.recipes.testbed.plan import TaskPlan
from fireflyer.recipes.whole.director import (
    LIMIT_NS,
    Action,
    Director,
    GiveUp,
    KillNode,
    KillStorage,
    Phase,
    Seen,
    Submit,
    TaskSeen,
    how_far,
)
from fireflyer.recipes.whole.plan import WholePlan

NODES = {"first": ("agent-1", "agent-2"), "second": ("agent-3", "agent-4"), "urgent": ("agent-3", "agent-4")}


def task(name: str, step: int, state: str = "running") -> TaskSeen:
    return TaskSeen(state=state, step=step, nodes=NODES[name] if state == "running" else ())


def seen(tasks: dict[str, TaskSeen], *, whole: bool = True, failed: bool = False, back: bool = False) -> Seen:
    return Seen(tasks=tasks, storage_whole=whole, storage_failed=failed, storage_back=back)


def test_the_course_of_a_demonstration() -> None:
    director = Director(PLAN)
    both = {"first": task("first", PLAN.storage_step), "second": task("second", PLAN.storage_step)}
    interrupted = {"first": task("first", 30), "second": task("second", 20, "suspended")}
    done = {name: task(name, 60, "finished") for name in NODES}
    course: list[tuple[Seen, list[Action]]] = [
        (seen({}), [Submit(("first", "second"))]),
        (seen({"first": task("first", 0), "second": task("second", 0)}), []),
        (seen({**both, "second": task("second", PLAN.storage_step - 1)}), []),
        (seen(both), [KillStorage(2)]),
        (seen(both), [KillStorage(2)]),
        (seen(both, whole=False, failed=True), []),
        (seen(both, whole=False, failed=True, back=True), []),
        (seen(both, failed=True), []),
        (seen(both, failed=True, back=True), [Submit(("urgent",))]),
        (seen({**both, "urgent": task("urgent", 0, "queued")}), []),
        (seen({**interrupted, "urgent": task("urgent", PLAN.node_step - 1)}), []),
        (seen({**interrupted, "urgent": task("urgent", PLAN.node_step)}), [KillNode("agent-2", "first")]),
        (seen({**interrupted, "urgent": task("urgent", 20, "finished")}), []),
        (seen(done, whole=False), []),
        (seen(done), []),
    ]
    for number, (what, actions) in enumerate(course):
        assert director.handle(number, what) == actions, number
    assert director.phase is Phase.DONE
    assert director.handle(99, seen(done)) == []


def test_the_node_of_the_task_that_runs_beside_the_urgent_one_is_killed() -> None:
    director = Director(PLAN)
    director.phase = Phase.URGENT
    tasks = {"first": task("first", 20, "suspending"), "second": task("second", 30), "urgent": task("urgent", 9)}
    assert director.handle(0, seen(tasks)) == [KillNode("agent-4", "second")]


@pytest.mark.parametrize("phase", [Phase.TRAIN, Phase.FAILED, Phase.WHOLE, Phase.URGENT])
def test_a_task_that_finishes_before_its_disturbance_ends_the_demonstration(phase: Phase) -> None:
    director = Director(PLAN)
    director.phase = phase
    tasks = {"first": task("first", 60, "finished"), "second": task("second", 1)}
    said = director.handle(0, seen(tasks))
    gave_up = [action for action in said if isinstance(action, GiveUp)]
    if phase is Phase.FAILED:  # it is killed again, and looked at the next time
        assert said == [KillStorage(2)]
        return
    assert len(gave_up) == 1
    assert "'first' finished while" in gave_up[0].reason
    assert director.phase is Phase.DONE


def test_each_wait_is_bounded_and_says_for_what() -> None:
    director = Director(PLAN)
    director.handle(0, seen({}))
    waiting = seen({"first": task("first", 0), "second": task("second", 0)})
    assert director.handle(LIMIT_NS, waiting) == []
    assert director.handle(LIMIT_NS + 1, waiting) == [GiveUp("waited 600 s for all tasks to train")]
    assert director.phase is Phase.DONE


@pytest.mark.parametrize(
    "values",
    [
        {"nodes": 5},
        {"storage_step": 10},
        {"storage_step": 60},
        {"node_step": 20},
        {"storage_victim": 4},
        {"replicas": 1},
        {"urgent": TaskPlan(name="urgent", user="ben", steps=20, seed=3)},
        {"urgent": TaskPlan(name="urgent", user="ben", steps=20, seed=3, priority=30, nodes=3)},
        {"tasks": (TaskPlan(name="first", user="ada", steps=60, seed=1, nodes=4),)},
    ],
)
def test_a_plan_in_which_nothing_can_be_disturbed_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        msgspec.structs.replace(PLAN, **values)


def test_the_plan_of_the_demonstration_is_one() -> None:
    plan = WholePlan()
    assert (plan.nodes, len(plan.all_tasks), len({one.user for one in plan.all_tasks})) == (4, 3, 2)


def test_who_watches_is_told_how_far_each_task_is_and_what_the_storage_lacks() -> None:
    tasks = {"first": task("first", 12), "second": task("second", 20, "suspended"), "urgent": task("urgent", 3)}
    steps = {each.name: each.steps for each in PLAN.all_tasks}
    assert how_far(PLAN, seen(tasks), None) == (
        f"first running 12/{steps['first']} · second suspended · urgent running 3/{steps['urgent']}"
    )
    storage = StorageSample(at_ns=1, alive=(1, 3), incarnations=(1, 2, 1), chains=6, whole=2, serving=6)
    said = how_far(PLAN, seen({"first": task("first", 0, "queued")}), storage)
    assert said == f"first queued · storage 2/{PLAN.storage_nodes}, 2/6 whole"
