"""The rules of the scheduler, one small cluster each."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.support.scheduler.snapshots import NOW_NS, POLICY, after, nodes_of, of_kind, running, waiting

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.scheduler.model import Decisions, Limit, LimitKind, Node, Policy, Request, Snapshot, Task
from fireflyer.cluster.core.scheduler.schedule import schedule

FOUR = nodes_of(4)
LONG_S = 3 * 3600


def decide(*tasks: Task, nodes: tuple[Node, ...] = FOUR, **more: Any) -> Decisions:
    return schedule(Snapshot(nodes=nodes, tasks=tasks, policy=POLICY, **more), NOW_NS)


def test_higher_priority_goes_first_then_less_usage_over_share_then_who_came_first() -> None:
    def order(*tasks: Task, **more: Any) -> list[int]:
        return [decision.task for decision in decide(*tasks, **more)]

    assert order(waiting(1, age_s=9), waiting(2, priority=20)) == [2, 1]
    assert order(waiting(1, user="ann", age_s=9), waiting(2, user="bob"), usage={"ann": 3.0}) == [2, 1]
    assert order(
        waiting(1, user="ann"), waiting(2, user="bob", age_s=9), usage={"ann": 3.0, "bob": 2.0}, share={"ann": 2.0}
    ) == [1, 2]
    assert order(waiting(1), waiting(2, age_s=9)) == [2, 1]


def test_who_has_waited_long_passes_every_newcomer() -> None:
    old = waiting(1, priority=0, age_s=51 * 100)  # a step of age is 100 s
    assert decide(old, waiting(2, priority=50))[0].task == 1


def test_a_gang_counts_older_by_a_part_for_each_doubling_of_its_nodes() -> None:
    policy = msgspec.structs.replace(POLICY, gang_age_ns=50 * SECOND)  # half a step of age

    def first(*tasks: Task) -> int:
        return schedule(Snapshot(nodes=nodes_of(8), tasks=tasks, policy=policy), NOW_NS)[0].task

    old, few, many = waiting(1, age_s=90), waiting(2, 3), waiting(3, 4)
    assert first(old, few) == 1, "half a step is none"
    assert first(old, few, many) == 3
    assert first(waiting(1, age_s=110), many) == 1, "who counts the same and was submitted first"
    elastic = waiting(4, least_nodes=1, most_nodes=8)
    assert first(old, elastic) == 1, "it is the gang that counts, not what is taken when it is there"


def test_a_large_run_keeps_the_age_of_its_gang_when_it_may_be_interrupted() -> None:
    policy = msgspec.structs.replace(POLICY, gang_age_ns=100 * SECOND)
    large = running(2, "a0 a1 a2 a3", since_s=LONG_S)  # counts two steps more than it was submitted with

    def interrupts(age_s: int) -> bool:
        decisions = schedule(Snapshot(nodes=FOUR, tasks=(waiting(1, age_s=age_s), large), policy=policy), NOW_NS)
        return bool(of_kind(decisions)[1])

    assert not interrupts(299)
    assert interrupts(300)


def test_a_gang_starts_with_all_its_nodes_or_waits() -> None:
    starts, _, waits = of_kind(decide(waiting(1, 5), running(2, "a0")))
    assert not starts
    assert waits[1].reason == "needs 5 nodes of default; 4 have what it asks for, and it waits until there are as many"
    starts, _, waits = of_kind(decide(waiting(1, 4), running(2, "a0")))
    assert not starts
    assert waits[1].reason == "needs 4 of 4 nodes that it may use; 3 are free"


def test_an_elastic_task_takes_what_is_there_from_its_least_size_on() -> None:
    elastic = waiting(1, least_nodes=2, most_nodes=4)
    assert len(of_kind(decide(elastic, running(2, "a0")))[0][1].nodes) == 3
    assert len(of_kind(decide(elastic))[0][1].nodes) == 4


def test_higher_priority_interrupts_after_the_guaranteed_time_and_then_has_a_claim() -> None:
    more = waiting(1, 4, priority=20)
    _, interrupts, _ = of_kind(decide(more, running(2, "a0 a1", since_s=60)))
    assert not interrupts
    decisions = decide(more, running(2, "a0 a1", since_s=LONG_S))
    _, interrupts, waits = of_kind(decisions)
    assert interrupts == {1: [2]}
    assert set(waits[1].claim) == {"a0", "a1", "a2", "a3"}
    later = after(Snapshot(nodes=FOUR, tasks=(more, running(2, "a0 a1", since_s=LONG_S)), policy=POLICY), decisions)
    gone = Snapshot(nodes=FOUR, tasks=(*later.tasks[:1], waiting(3, age_s=1)), policy=POLICY)
    starts, _, waits = of_kind(schedule(gone, NOW_NS))
    assert starts.keys() == {1}
    assert waits.keys() == {3}


def test_nobody_interrupts_their_own_task_of_equal_priority() -> None:
    aged = waiting(1, 4, user="ann", age_s=1000)
    assert not of_kind(decide(aged, running(2, "a0", user="ann", since_s=LONG_S)))[1]
    assert of_kind(decide(aged, running(2, "a0", user="bob", since_s=LONG_S)))[1] == {1: [2]}


def test_at_equal_priority_usage_over_share_decides_by_a_margin() -> None:
    def interrupts(theirs: float) -> bool:
        tasks = waiting(1, 4, user="ann"), running(2, "a0", user="bob", since_s=LONG_S)
        return bool(of_kind(decide(*tasks, usage={"ann": 2.0, "bob": theirs}))[1])

    assert not interrupts(3.0)
    assert interrupts(3.1)


def test_those_are_interrupted_who_lose_the_fewest_node_seconds() -> None:
    more = waiting(1, 3, priority=20)
    three = running(2, "a0 a1 a2", since_s=LONG_S)
    one = running(3, "a3", since_s=LONG_S)
    assert of_kind(decide(more, three, one))[1] == {1: [2]}
    two = waiting(1, 2, priority=20)
    pair = running(2, "a0 a1", since_s=LONG_S, interrupt_cost_ns=200 * SECOND)
    single, other = running(3, "a2", since_s=LONG_S), running(4, "a3", since_s=LONG_S)
    assert set(of_kind(decide(two, pair, single, other))[1][1]) == {3, 4}


def test_what_is_not_saved_counts_as_lost_unless_a_task_saves_when_it_is_asked() -> None:
    more = waiting(1, 2, priority=20)
    long_ago = running(2, "a0 a1", since_s=2 * LONG_S, unsaved_s=30)
    started, saves = running(3, "a2", since_s=LONG_S, unsaved_s=LONG_S), running(4, "a3", since_s=3 * LONG_S)
    assert of_kind(decide(more, long_ago, started, saves))[1] == {1: [2]}, "its checkpoint is 30 s old"
    just = running(3, "a2", since_s=LONG_S, unsaved_s=20)
    assert set(of_kind(decide(more, long_ago, just, saves))[1][1]) == {3, 4}
    month = running(2, "a0 a1", since_s=LONG_S, unsaved_s=10**10)
    assert set(of_kind(decide(more, month, started, saves))[1][1]) == {3, 4}, "sums of any size"


def test_what_is_backfilled_yields_at_once_unless_it_is_gone_in_time() -> None:
    head, small = waiting(1, 4, age_s=9), waiting(2, 1)
    busy = running(3, "a0 a1", since_s=60, time_ns=100 * SECOND)
    start = of_kind(decide(head, small, busy))[0][2]
    assert start.backfilled
    assert of_kind(decide(head, small, busy))[2][1].earliest_ns == NOW_NS + 40 * SECOND
    short = waiting(2, 1, time_ns=40 * SECOND)
    assert not of_kind(decide(head, short, busy))[0][2].backfilled
    slow = waiting(2, 1, time_ns=41 * SECOND)
    assert of_kind(decide(head, slow, busy))[0][2].backfilled
    yielding = running(2, "a2", user="u", since_s=1, backfilled=True)
    assert of_kind(decide(waiting(1, 4, age_s=9), yielding))[1] == {1: [2]}


def test_a_limit_holds_a_task_back_and_says_which() -> None:
    each = Limit(kind=LimitKind.EACH, nodes=1)
    own = Limit(kind=LimitKind.USER, name="ann", nodes=3)
    lab = Limit(kind=LimitKind.GROUP, name="lab", priority=10, nodes=2)
    _, _, waits = of_kind(decide(waiting(1, 2, user="bob"), limits=(each, own)))
    assert waits[1].reason == "user bob may use 1 nodes of default at a time"
    assert of_kind(decide(waiting(1, 2, user="ann"), limits=(each, own)))[0].keys() == {1}
    tasks = waiting(1, 1, user="ann", user_group="lab"), running(2, "a0 a1", user_group="lab")
    assert (
        of_kind(decide(*tasks, limits=(lab,)))[2][1].reason
        == "group lab may use 2 nodes of default at priority 10 at a time"
    )


def test_a_gang_lies_in_one_zone_on_few_leaves_and_the_tightest_zone_is_taken() -> None:
    two_zones = nodes_of(6, 4)
    assert set(of_kind(decide(waiting(1, 4), nodes=two_zones))[0][1].nodes) == {"b0", "b1", "b2", "b3"}
    start = of_kind(decide(waiting(1, 2), running(2, "a0 b0 b1 b2"), nodes=two_zones))[0][1]
    assert start.nodes == ("a2", "a3")  # a leaf of its own, and not a1 with one of another leaf


def test_large_gangs_cross_once_and_small_ones_never() -> None:
    two_zones = nodes_of(3, 3)
    start = of_kind(decide(waiting(1, 5), nodes=two_zones))[0][1]
    assert [name[0] for name in start.nodes] == list("aaabb")
    assert not of_kind(decide(waiting(1, 3), running(2, "a0 b0"), nodes=two_zones))[0]
    crossing = running(2, "a0 a1 b0 b1")
    six = nodes_of(4, 4)
    assert not of_kind(decide(waiting(1, 4), crossing, nodes=six))[0]


def test_closed_and_drained_nodes_are_given_to_nobody() -> None:
    window = (NOW_NS + 100 * SECOND, NOW_NS + 200 * SECOND)
    closed = Node(name="a0", closed=(window,))
    assert of_kind(decide(waiting(1, time_ns=99 * SECOND), nodes=(closed,)))[0]
    assert not of_kind(decide(waiting(1, time_ns=100 * SECOND), nodes=(closed,)))[0]
    drained = Node(name="a0", usable=False)
    _, _, waits = of_kind(decide(waiting(1), nodes=(drained,)))
    assert waits[1].reason == (
        "needs 1 nodes of default; 1 have what it asks for, of which 1 are down, drained, closed or reserved"
    )


def test_held_and_paused_tasks_wait_for_what_they_wait_for() -> None:
    held = Task(id=1, request=waiting(1).request, submitted_ns=0, queued_ns=NOW_NS, held="task 7 must end first")
    assert of_kind(decide(held))[2][1].reason == "task 7 must end first"
    paused = Task(id=1, request=held.request, submitted_ns=0, queued_ns=NOW_NS, not_before_ns=NOW_NS + 5)
    assert of_kind(decide(paused))[2][1].earliest_ns == NOW_NS + 5


def test_nobody_is_backfilled_who_would_use_up_the_limit_or_the_crossing_of_the_head() -> None:
    limit = Limit(kind=LimitKind.USER, name="u", nodes=4)
    busy = running(3, "a0 a1")
    _, _, waits = of_kind(decide(waiting(1, 4, age_s=9), waiting(2, 1), busy, nodes=nodes_of(5), limits=(limit,)))
    assert waits[2].reason == "it would keep what task 1 needs, which comes first"
    _, _, waits = of_kind(decide(waiting(1, 8, age_s=9), waiting(2, 6), running(3, "a0"), nodes=nodes_of(4, 4)))
    assert waits[2].reason == "it would keep what task 1 needs, which comes first"


def test_who_would_take_too_much_beside_the_head_is_backfilled_on_fewer_nodes() -> None:
    limit = Limit(kind=LimitKind.USER, name="u", nodes=6)
    head, elastic = waiting(1, 4, age_s=9), waiting(2, least_nodes=1, most_nodes=3)
    start = of_kind(decide(head, elastic, running(3, "a0 a1"), nodes=nodes_of(5), limits=(limit,)))[0][2]
    assert len(start.nodes) == 2, "the head may use 4 of 6"
    assert start.backfilled
    policy = msgspec.structs.replace(POLICY, cross_zone_nodes=3)
    claimed = msgspec.structs.replace(waiting(2, 3), claim=("a2", "b3", "b4"))
    busy = running(3, "a0 a1 b0 b1 b2")
    snapshot = Snapshot(nodes=nodes_of(5, 5, 4), tasks=(waiting(1, 10, age_s=9), claimed, busy), policy=policy)
    start = of_kind(schedule(snapshot, NOW_NS))[0][2]
    assert {name[0] for name in start.nodes} == {"a"}, "in one zone"


def test_of_two_that_would_cross_one_starts() -> None:
    starts, _, waits = of_kind(decide(waiting(1, 5, age_s=9), waiting(2, 5), nodes=nodes_of(3, 3, 3, 3)))
    assert (list(starts), list(waits)) == ([1], [2])


def test_what_is_claimed_by_later_ones_is_taken_last() -> None:
    later = msgspec.structs.replace(waiting(2, 2), claim=("a2", "a3"))
    leaves = running(3, "a3", leaving=True)
    starts, _, waits = of_kind(decide(waiting(1, 1, priority=20), later, leaves))
    assert starts[1].nodes == ("a0",)
    assert set(waits[2].claim) == {"a2", "a3"}
    starts, _, _ = of_kind(decide(waiting(1, 3, priority=20), later, leaves))
    assert set(starts[1].nodes) == {"a0", "a1", "a2"}


@pytest.mark.parametrize(("least", "most"), [(0, 1), (3, 2), (-1, 4)])
def test_a_gang_of_no_possible_size_is_refused(least: int, most: int) -> None:
    with pytest.raises(UsageError, match=f"not {least} to {most}"):
        Request(user="u", least_nodes=least, most_nodes=most)


def test_ageing_in_no_time_is_refused() -> None:
    with pytest.raises(UsageError, match="age_step_ns"):
        Policy(age_step_ns=0)
