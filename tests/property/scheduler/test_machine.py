"""The scheduler's machine decides as the definition does, whatever happened before."""

from __future__ import annotations

import pytest
from tests.support.scheduler.histories import History
from tests.support.scheduler.reference import ReferenceMachine

from fireflyer.cluster.core.scheduler.machine import SchedulerMachine
from fireflyer.cluster.core.scheduler.model import Interrupt
from fireflyer.cluster.core.scheduler.order import queue_key

BLOCKS = 4
SEEDS = 20
"""In each block."""
EVENTS = 80
ASKED = 3
"""So many tasks that wait are asked why, after each event."""


@pytest.mark.parametrize("block", range(BLOCKS))
def test_it_decides_and_answers_as_the_definition_after_each_event(block: int) -> None:
    for seed in range(block * SEEDS, (block + 1) * SEEDS):
        try:
            follow(seed)
        except BaseException as error:
            error.add_note(f"follow({seed})")
            raise


def follow(seed: int, events: int = EVENTS) -> None:
    history = History(seed)
    machine, reference = SchedulerMachine(history.policy), ReferenceMachine(history.policy)
    for event in history.begin():
        machine.apply(event, history.now_ns)
        reference.apply(event, history.now_ns)
    for number in range(events):
        event = history.next(reference.tasks)
        machine.apply(event, history.now_ns)
        reference.apply(event, history.now_ns)
        if history.rng.random() < 0.2:
            continue  # several events, one decision
        asked = [task.id for task in reference.tasks.values() if task.run is None]
        asked = history.rng.sample(asked, min(ASKED, len(asked)))
        expected = {one.task: one for one in reference.all_decisions(history.now_ns) if not isinstance(one, Interrupt)}
        for task in asked:
            assert machine.why(task, history.now_ns) == expected[task], (number, event)
            assert machine.before(task, history.now_ns) == come_before(task, reference, history.now_ns)
        assert machine.decide(history.now_ns) == reference.decide(history.now_ns), (number, event)
        for task in asked:
            if machine.task(task).run is None:
                decisions = reference.all_decisions(history.now_ns)
                [now] = [one for one in decisions if one.task == task and not isinstance(one, Interrupt)]
                assert machine.why(task, history.now_ns) == now, (number, event)
        same_state(machine, reference)


def come_before(task: int, reference: ReferenceMachine, now_ns: int) -> int:
    """Those for the same nodes that wait and may start, in the order of the definition."""
    snapshot, asked = reference.snapshot(), reference.tasks[task]
    mine = queue_key(asked, now_ns, snapshot)
    return sum(
        other.run is None
        and (bool(other.claim) or (not other.held and other.not_before_ns <= now_ns))
        and other.request.node_group == asked.request.node_group
        and queue_key(other, now_ns, snapshot) < mine
        for other in snapshot.tasks
    )


def same_state(machine: SchedulerMachine, reference: ReferenceMachine) -> None:
    ours, theirs = machine.snapshot(), reference.snapshot()
    assert sorted(ours.tasks, key=lambda task: task.id) == list(theirs.tasks)
    assert ours.nodes == theirs.nodes
    assert (ours.usage, ours.share, ours.limits) == (theirs.usage, theirs.share, theirs.limits)
