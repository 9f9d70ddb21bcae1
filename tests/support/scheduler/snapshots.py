"""Small clusters and queues, written down in a line or drawn by a seed."""

from __future__ import annotations

import random
from typing import Final

import msgspec

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.scheduler.model import (
    Decisions,
    Interrupt,
    Limit,
    LimitKind,
    Node,
    Policy,
    Request,
    Run,
    Snapshot,
    Start,
    Task,
    Wait,
)

NOW_NS = 1_000_000 * SECOND
USERS: Final = ("ann", "bob", "cy")
POLICY = Policy(age_step_ns=100 * SECOND, gang_age_ns=0, cross_zone_nodes=4)


def nodes_of(*zones: int, per_leaf: int = 2, group: str = "default") -> tuple[Node, ...]:
    """`nodes_of(4, 2)`: zone A with nodes a0 to a3, two to a leaf, and zone B with b0 and b1."""
    return tuple(
        Node(name=f"{zone}{number}", group=group, zone=zone.upper(), leaf=f"{zone}{number // per_leaf}")
        for zone, count in zip("abcdef", zones, strict=False)
        for number in range(count)
    )


def waiting(task: int, nodes: int = 1, user: str = "u", *, age_s: int = 0, **request: object) -> Task:
    asked = Request(user=user, **{"least_nodes": nodes, "most_nodes": nodes, **request})  # type: ignore[arg-type]
    at_ns = NOW_NS - age_s * SECOND
    return Task(id=task, request=asked, submitted_ns=at_ns, queued_ns=at_ns)


def running(
    task: int, nodes: str, user: str = "v", *, since_s: int = 0, backfilled: bool = False, **more: object
) -> Task:
    """On nodes written "a0 a1"."""
    names = tuple(nodes.split())
    leaving, unsaved_s = bool(more.pop("leaving", False)), more.pop("unsaved_s", None)
    run = Run(
        nodes=names,
        started_ns=NOW_NS - since_s * SECOND,
        backfilled=backfilled,
        leaving=leaving,
        unsaved_since_ns=NOW_NS - unsaved_s * SECOND if isinstance(unsaved_s, int) else None,
    )
    return msgspec.structs.replace(waiting(task, len(names), user, age_s=since_s, **more), run=run)


def after(snapshot: Snapshot, decisions: Decisions, now_ns: int = NOW_NS) -> Snapshot:
    """The tasks that start run, those that are interrupted are leaving, those that wait have their claims."""
    claims = {one.task: one.claim for one in decisions if isinstance(one, Wait)}
    starts = {one.task: one for one in decisions if isinstance(one, Start)}
    interrupted = {one.task for one in decisions if isinstance(one, Interrupt)}
    tasks = []
    for task in snapshot.tasks:
        if task.id in starts:
            start = starts[task.id]
            run = Run(nodes=start.nodes, started_ns=now_ns, backfilled=start.backfilled)
            task = msgspec.structs.replace(task, run=run, claim=())
        elif task.id in claims:
            task = msgspec.structs.replace(task, claim=claims[task.id])
        elif task.id in interrupted and task.run is not None:
            task = msgspec.structs.replace(task, run=msgspec.structs.replace(task.run, leaving=True))
        tasks.append(task)
    return msgspec.structs.replace(snapshot, tasks=tuple(tasks))


def of_kind(decisions: Decisions) -> tuple[dict[int, Start], dict[int, list[int]], dict[int, Wait]]:
    """Starts, the interrupted of each task that gets their nodes, waits. Not those who leave because nodes close."""
    interrupts: dict[int, list[int]] = {}
    for one in decisions:
        if isinstance(one, Interrupt) and one.for_task is not None:
            interrupts.setdefault(one.for_task, []).append(one.task)
    return (
        {one.task: one for one in decisions if isinstance(one, Start)},
        interrupts,
        {one.task: one for one in decisions if isinstance(one, Wait)},
    )


def random_snapshot(seed: int) -> Snapshot:
    """Up to 18 nodes in up to three zones, of which most are taken, and as many tasks, of which a half waits."""
    rng = random.Random(seed)
    nodes = tuple(
        msgspec.structs.replace(
            node,
            usable=rng.random() < 0.95,
            labels=("big",) if rng.random() < 0.7 else (),
            group="other" if rng.random() < 0.1 else "default",
            closed=((NOW_NS + rng.choice([-5, 50]) * SECOND, NOW_NS + 500 * SECOND),) if rng.random() < 0.05 else (),
        )
        for node in nodes_of(*(rng.randint(2, 6) for _ in range(rng.randint(1, 3))))
    )
    free = rng.sample(nodes, len(nodes))
    tasks: list[Task] = []
    for number in range(rng.randint(4, 16)):
        task = _random_task(number, rng, nodes)
        own = [node for node in free if node.group == task.request.node_group][: task.request.least_nodes]
        if rng.random() < 0.6 and len(own) == task.request.least_nodes:
            free = [node for node in free if node not in own]
            run = Run(
                nodes=tuple(node.name for node in own),
                started_ns=task.queued_ns,
                backfilled=rng.random() < 0.25,
                leaving=rng.random() < 0.1,
                unsaved_since_ns=rng.choice([None, task.queued_ns, NOW_NS - 20 * SECOND]),
            )
            task = msgspec.structs.replace(task, run=run)
        tasks.append(task)
    kinds = [LimitKind.USER, LimitKind.EACH, LimitKind.GROUP]
    limits = tuple(
        Limit(
            kind=rng.choice(kinds),
            name=rng.choice(["ann", "bob", "lab"]),
            priority=rng.choice([None, 10]),
            nodes=rng.randint(2, 12),
        )
        for _ in range(rng.choice([0, 0, 1, 3]))
    )
    usage = {user: rng.choice([0.0, 1.0, 10.0]) for user in USERS}
    policy = msgspec.structs.replace(POLICY, gang_age_ns=rng.choice([0, 0, 40, 120]) * SECOND)
    return Snapshot(nodes=nodes, tasks=tuple(tasks), limits=limits, usage=usage, share={"ann": 2.0}, policy=policy)


def _random_task(number: int, rng: random.Random, nodes: tuple[Node, ...]) -> Task:
    least = rng.choice([1, 1, 1, 2, 2, 3, 4, 5, 7])
    return waiting(
        number,
        user=rng.choice(USERS),
        age_s=rng.randint(0, 400),
        user_group=rng.choice(["", "lab"]),
        priority=rng.choice([0, 10, 10, 10, 11, 30]),
        node_group="other" if rng.random() < 0.1 else "default",
        least_nodes=least,
        most_nodes=least + rng.choice([0, 0, 0, 2]),
        labels=("big",) if rng.random() < 0.2 else (),
        never=(rng.choice(nodes).name,) if rng.random() < 0.2 else (),
        time_ns=rng.choice([None, 30 * SECOND, 300 * SECOND]),
        guaranteed_ns=rng.choice([0, 60, 200]) * SECOND,
        interrupt_cost_ns=rng.randint(1, 5) * SECOND,
        leave_ns=rng.choice([0, 0, 0, 60]) * SECOND,
    )
