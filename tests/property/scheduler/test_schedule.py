"""Whatever the cluster and the queue: what the scheduler may never do, and what it must."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from tests.support.scheduler.snapshots import NOW_NS, after, of_kind, random_snapshot

from fireflyer.cluster.core.scheduler.model import Limit, LimitKind, Node, Snapshot, Start, Task, Wait
from fireflyer.cluster.core.scheduler.order import may_interrupt, queue_key
from fireflyer.cluster.core.scheduler.schedule import schedule

BLOCKS = 4
SEEDS = 250
"""In each block."""


def for_many(check: Callable[[Snapshot], None]) -> Callable[[int], None]:
    @pytest.mark.parametrize("block", range(BLOCKS))
    def test(block: int) -> None:
        for seed in range(block * SEEDS, (block + 1) * SEEDS):
            try:
                check(random_snapshot(seed))
            except BaseException as error:
                error.add_note(f"random_snapshot({seed})")
                raise

    return test


@for_many
def test_each_waiting_task_starts_or_is_told_why_it_waits(snapshot: Snapshot) -> None:
    starts, _, waits = of_kind(schedule(snapshot, NOW_NS))
    queue = {task.id for task in snapshot.tasks if task.run is None}
    assert starts.keys() | waits.keys() == queue
    assert not starts.keys() & waits.keys()
    assert all(wait.reason for wait in waits.values())
    assert all(wait.earliest_ns is None or wait.earliest_ns >= NOW_NS for wait in waits.values())


@for_many
def test_a_gang_gets_free_nodes_that_it_may_use_all_or_none(snapshot: Snapshot) -> None:
    nodes = {node.name: node for node in snapshot.nodes}
    taken = {name for task in snapshot.tasks if task.run for name in task.run.nodes}
    starts, _, _ = of_kind(schedule(snapshot, NOW_NS))
    tasks = {task.id: task for task in snapshot.tasks}
    for start in starts.values():
        request = tasks[start.task].request
        assert request.least_nodes <= len(start.nodes) <= request.most_nodes
        for name in start.nodes:
            node = nodes[name]
            assert name not in taken
            taken.add(name)
            assert node.usable
            assert node.group == request.node_group
            assert set(request.labels) <= set(node.labels)
            assert name not in request.never
            assert not any(closed_during(node, request.time_ns or 0))


def closed_during(node: Node, time_ns: int) -> list[bool]:
    return [begin <= NOW_NS + time_ns and until > NOW_NS for begin, until in node.closed]


@for_many
def test_small_gangs_stay_in_a_zone_and_at_most_one_task_crosses(snapshot: Snapshot) -> None:
    zone = {node.name: node.zone for node in snapshot.nodes}
    starts, _, _ = of_kind(schedule(snapshot, NOW_NS))
    crossing = [start for start in starts.values() if crosses(start.nodes, snapshot)]
    group = {task.id: task.request.node_group for task in snapshot.tasks}
    already = [group[task.id] for task in snapshot.tasks if task.run and crosses(task.run.nodes, snapshot)]
    for name, count in Counter(group[start.task] for start in crossing).items():
        assert count <= max(0, snapshot.policy.cross_zone_tasks - already.count(name))
    for start in crossing:
        assert len(start.nodes) >= snapshot.policy.cross_zone_nodes
        changes = sum(zone[one] != zone[next_one] for one, next_one in zip(start.nodes, start.nodes[1:], strict=False))
        assert changes == len({zone[name] for name in start.nodes}) - 1, "ranks of a zone lie together"


def crosses(names: tuple[str, ...], snapshot: Snapshot) -> bool:
    return len({node.zone for node in snapshot.nodes if node.name in names}) > 1


@for_many
def test_limits_hold_for_all_that_run_and_start(snapshot: Snapshot) -> None:
    later = after(snapshot, schedule(snapshot, NOW_NS))
    own = {(limit.name, limit.node_group, limit.priority) for limit in snapshot.limits if limit.kind == LimitKind.USER}
    for limit in snapshot.limits:
        for who in ("ann", "bob", "cy"):
            before, now = (used(each, limit, who, own) for each in (snapshot, later))
            assert now <= max(before, limit.nodes)


def used(snapshot: Snapshot, limit: Limit, who: str, own: set[tuple[str, str, int | None]]) -> int:
    """Of the limit, by one user; of a group's limit by all of its users."""

    def counts(task: Task) -> bool:
        request = task.request
        if request.node_group != limit.node_group or limit.priority not in (None, request.priority):
            return False
        if limit.kind == LimitKind.GROUP:
            return request.user_group == limit.name
        if limit.kind == LimitKind.USER:
            return request.user == limit.name
        return request.user == who and (who, limit.node_group, limit.priority) not in own

    return sum(len(task.run.nodes) for task in snapshot.tasks if task.run and counts(task))


@for_many
def test_only_those_are_interrupted_who_may_be_and_then_the_whole_gang_fits(snapshot: Snapshot) -> None:
    snapshot = msgspec.structs.replace(snapshot, limits=())  # who leaves may make room in a limit for somebody else
    decisions = schedule(snapshot, NOW_NS)
    tasks = {task.id: task for task in snapshot.tasks}
    _, interrupts, _ = of_kind(decisions)
    assert len([task for some in interrupts.values() for task in some]) == len(
        {t for s in interrupts.values() for t in s}
    )
    for for_task, victims in interrupts.items():
        assert all(may_interrupt(tasks[for_task], tasks[victim], NOW_NS, snapshot) for victim in victims)
    if interrupts:
        gone = after(snapshot, decisions)
        left = [task for task in gone.tasks if not (task.run and task.run.leaving)]
        starts, _, _ = of_kind(schedule(msgspec.structs.replace(gone, tasks=tuple(left)), NOW_NS))
        assert interrupts.keys() <= starts.keys()


@for_many
def test_no_victim_is_interrupted_in_vain(snapshot: Snapshot) -> None:
    """One victim less, and the gang would not fit: nobody is asked to leave for a task that could do without."""
    decisions = schedule(snapshot, NOW_NS)
    _, interrupts, _ = of_kind(decisions)
    if len(interrupts) != 1:
        return  # what one gives up may be another's
    [(for_task, victims)] = interrupts.items()
    later = after(snapshot, decisions)
    place = {task.id: queue_key(task, NOW_NS, snapshot) for task in snapshot.tasks}
    started = {decision.task for decision in decisions if isinstance(decision, Start)}
    for spared in victims:
        left = []
        for task in later.tasks:
            if task.id in started and place[task.id] > place[for_task]:
                continue
            if task.run and task.run.leaving and task.id != spared:
                continue
            if task.id == for_task:
                task = msgspec.structs.replace(task, claim=())
            if task.run or place[task.id] <= place[for_task]:
                left.append(task)
        starts, _, _ = of_kind(schedule(msgspec.structs.replace(later, tasks=tuple(left)), NOW_NS))
        assert for_task not in starts or crosses(starts[for_task].nodes, snapshot), "only where fewer run in two zones"


@for_many
def test_backfill_never_keeps_the_head_waiting(snapshot: Snapshot) -> None:
    """When a task ends, the head that fits then starts, or gets the nodes of those who were backfilled before it."""
    decisions = schedule(snapshot, NOW_NS)
    starts, _, waits = of_kind(decisions)
    backfilled = {task for task, start in starts.items() if start.backfilled}
    tasks = {task.id: task for task in snapshot.tasks}
    heads = [task for task, wait in waits.items() if "are free" in wait.reason]
    if not backfilled or not heads:
        return
    head = min(heads, key=lambda task: queue_key(tasks[task], NOW_NS, snapshot))
    later = after(snapshot, decisions)
    rng = random.Random(head)
    for _ in range(4):
        ends = {task.id for task in later.tasks if task.run and task.id not in backfilled and rng.random() < 0.4}
        the_head_fits_as_well(later, head, backfilled, ends)


def the_head_fits_as_well(later: Snapshot, head: int, backfilled: set[int], ends: set[int]) -> None:
    left = [task for task in later.tasks if task.id not in ends and (task.run or task.id == head)]
    without = [task for task in left if task.id not in backfilled]
    alone, _, _ = of_kind(schedule(msgspec.structs.replace(later, tasks=tuple(without)), NOW_NS))
    if head in alone:
        both, _, told = of_kind(schedule(msgspec.structs.replace(later, tasks=tuple(left)), NOW_NS))
        assert head in both or told[head].claim, told[head]


@for_many
def test_what_was_decided_is_decided_again_alike_and_nothing_more_follows(snapshot: Snapshot) -> None:
    decisions = schedule(snapshot, NOW_NS)
    assert decisions == schedule(snapshot, NOW_NS)
    again = schedule(after(snapshot, decisions), NOW_NS)
    assert all(isinstance(decision, Wait) for decision in again)
