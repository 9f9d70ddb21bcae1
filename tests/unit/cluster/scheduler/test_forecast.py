"""When a task would start, by what is declared."""

from __future__ import annotations

from typing import Any

from tests.support.scheduler.snapshots import NOW_NS, POLICY, nodes_of, running, waiting

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.scheduler.forecast import Forecast, forecast
from fireflyer.cluster.core.scheduler.model import Reservation, Snapshot, Start, Task, Wait


def ahead(*tasks: Task, passes: int = 50, nodes: int = 4, **more: Any) -> Forecast:
    """Of task 1, as seconds from now."""
    snapshot = Snapshot(nodes=nodes_of(nodes), tasks=tasks, policy=POLICY, **more)
    found = forecast(snapshot, 1, NOW_NS, most_passes=passes)
    start_ns = None if found.start_ns is None else (found.start_ns - NOW_NS) // SECOND
    return found._replace(start_ns=start_ns, until_ns=(found.until_ns - NOW_NS) // SECOND)


def busy(task: int, nodes: str, **more: Any) -> Task:
    return running(task, nodes, since_s=60, **more)


def test_a_task_that_fits_starts_now() -> None:
    found = ahead(waiting(1, 2))
    assert isinstance(found.first, Start)
    assert found.start_ns == 0


def test_it_starts_when_those_before_it_have_ended_as_they_declared() -> None:
    tasks = (
        waiting(1, 4),
        waiting(2, 4, age_s=9, time_ns=100 * SECOND),
        busy(3, "a0 a1", time_ns=100 * SECOND),
        busy(4, "a2", time_ns=70 * SECOND),
    )
    found = ahead(*tasks)
    assert isinstance(found.first, Wait)
    assert found.start_ns == 40 + 100, "task 2 comes first: it begins when both runs have ended"


def test_who_declared_no_time_is_named_and_nothing_is_promised() -> None:
    found = ahead(waiting(1, 4), busy(3, "a0", guaranteed_ns=1 << 61), busy(4, "a1", time_ns=90 * SECOND))
    assert found.start_ns is None
    assert found.undeclared == (3,)
    assert found.all_seen


def test_who_is_more_important_waits_for_the_guarantee_and_for_the_run_to_leave() -> None:
    found = ahead(waiting(1, 4, priority=20), busy(3, "a0", guaranteed_ns=100 * SECOND, interrupt_cost_ns=5 * SECOND))
    assert found.start_ns == 40 + 5


def test_reservations_end() -> None:
    closed = Reservation(name="fans", nodes=("a0",), begin_ns=0, until_ns=NOW_NS + 30 * SECOND)
    assert ahead(waiting(1, 4), reservations=(closed,)).start_ns == 30


def test_it_looks_no_further_than_it_was_told() -> None:
    queue = [waiting(number, 4, age_s=number, time_ns=10 * SECOND) for number in range(2, 9)]
    assert ahead(waiting(1, 4), *queue).start_ns == 70
    found = ahead(waiting(1, 4), *queue, passes=3)
    assert found.start_ns is None
    assert found.until_ns == 20
    assert not found.all_seen
    assert not found.undeclared
