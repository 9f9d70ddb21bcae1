"""When a task would start: the definition, run forward in time on what is known now.

Runs end when they declared it at the latest, the interrupted ones leave after what an interruption costs, reservations
begin and end, and nothing else is submitted. Whoever declared no time stays. So this is what can be said from what was
declared, not a promise: a more important task may come, and a run may end sooner.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from fireflyer.base.errors import InvariantViolation
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.scheduler.model import Interrupt, Run, Snapshot, Start, Task, Wait
from fireflyer.cluster.core.scheduler.order import waits_since_ns
from fireflyer.cluster.core.scheduler.schedule import schedule

__all__ = ["Forecast", "forecast"]

HORIZON_NS: Final = 90 * 24 * 3600 * SECOND
"""What is further away is not known."""


class Forecast(NamedTuple):
    first: Start | Wait
    """What becomes of the task now."""
    start_ns: int | None
    """When it starts; None where what is declared does not tell."""
    until_ns: int
    """It was looked until then, and it does not start before, unless runs end sooner."""
    all_seen: bool
    """Nothing that is known happens after that: it starts only when something else changes."""
    undeclared: tuple[int, ...]
    """Tasks that run then on nodes of its group, and declared no time."""


def forecast(snapshot: Snapshot, task: int, now_ns: int, *, most_passes: int) -> Forecast:
    """`task` waits in the snapshot. Looks at `most_passes` moments at most: each is one pass of the scheduler."""
    tasks = {one.id: one for one in snapshot.tasks}
    group = tasks[task].request.node_group
    leaves: dict[int, int] = {}
    at_ns, all_seen = now_ns, False
    first: Start | Wait | None = None
    for passed in range(most_passes):
        found = _pass(snapshot, tasks, leaves, task, at_ns)
        first = first or found
        if isinstance(found, Start):
            return Forecast(first or found, at_ns, at_ns, True, ())
        edges = (edge for edge in _edges(snapshot, tasks, leaves) if at_ns < edge <= now_ns + HORIZON_NS)
        next_ns = min(edges, default=None)
        all_seen = next_ns is None
        if next_ns is None or passed + 1 == most_passes:
            break
        at_ns = next_ns
        _end_runs(tasks, leaves, at_ns)
    if first is None:
        raise InvariantViolation(f"task {task} does not wait")
    mine = (one for one in tasks.values() if one.run is not None and one.request.node_group == group)
    return Forecast(first, None, at_ns, all_seen, tuple(one.id for one in mine if one.request.time_ns is None))


def _pass(
    snapshot: Snapshot, tasks: dict[int, Task], leaves: dict[int, int], task: int, at_ns: int
) -> Start | Wait | None:
    """Does what is decided; returns what is decided for `task`."""
    found: Start | Wait | None = None
    for one in schedule(msgspec.structs.replace(snapshot, tasks=tuple(tasks.values())), at_ns):
        its = tasks[one.task]
        match one:
            case Start(nodes=nodes, backfilled=backfilled):
                run = Run(nodes=nodes, started_ns=at_ns, backfilled=backfilled)
                tasks[one.task] = msgspec.structs.replace(its, run=run, claim=())
            case Interrupt() if its.run is not None:
                leaving = msgspec.structs.replace(its.run, leaving=True)
                tasks[one.task] = msgspec.structs.replace(its, run=leaving)
            case Wait(claim=claim):
                tasks[one.task] = msgspec.structs.replace(its, claim=claim)
        if one.task == task and not isinstance(one, Interrupt):
            found = one
    for its in tasks.values():
        if its.run is not None and its.run.leaving:
            leaves.setdefault(its.id, at_ns + max(SECOND, its.request.interrupt_cost_ns))
    return found


def _edges(snapshot: Snapshot, tasks: dict[int, Task], leaves: dict[int, int]) -> Iterator[int]:
    """Moments at which the scheduler may decide something else."""
    yield from leaves.values()
    for one in tasks.values():
        if one.run is None:
            yield one.not_before_ns
            continue
        yield one.run.started_ns + one.request.guaranteed_ns
        if one.request.time_ns is not None:
            yield one.run.started_ns + one.request.time_ns
    windows = {window for node in snapshot.nodes for window in node.closed}
    windows.update((reservation.begin_ns, reservation.until_ns) for reservation in snapshot.reservations)
    leave_ns = {one.request.leave_ns for one in tasks.values() if one.run is not None}
    for begin_ns, until_ns in windows:
        yield from (begin_ns - its_ns for its_ns in leave_ns)
        yield begin_ns
        yield until_ns


def _end_runs(tasks: dict[int, Task], leaves: dict[int, int], at_ns: int) -> None:
    for one in list(tasks.values()):
        if one.run is None:
            continue
        time_ns = one.request.time_ns
        if time_ns is not None and one.run.started_ns + time_ns <= at_ns:
            del tasks[one.id]
            leaves.pop(one.id, None)
        elif leaves.get(one.id, at_ns + 1) <= at_ns:
            queued_ns = waits_since_ns(one.queued_ns, one.run.started_ns, at_ns)
            tasks[one.id] = msgspec.structs.replace(one, run=None, queued_ns=queued_ns)
            del leaves[one.id]
