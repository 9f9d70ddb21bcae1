"""Rebalancing: as few moves as possible, safe at every step, the same end after any interruption."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.support.fs.placement.clusters import apply_move, clusters, domain_of, held_by_place, replicas_apart, slots_of

from fireflyer.base.errors import UsageError
from fireflyer.fs.core.placement import (
    Cluster,
    DiskLocation,
    Plan,
    StorageNode,
    Table,
    moves_between,
    place,
    quality_of,
    rebalance,
    uniform_cluster,
)

QUICK = 200
FILTERED = [HealthCheck.filter_too_much]
"""Some changes leave no room."""


@st.composite
def changes(draw: st.DrawFn) -> tuple[Cluster, Cluster, int]:
    """A cluster, what becomes of it, and replicas: nodes or disks that come, go, or are to be emptied."""
    before, replicas = draw(clusters(most_nodes=10))
    after = list(before)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(after) - 1))
        node = after[at]
        match draw(st.sampled_from(["add node", "drain node", "remove node", "drain disk", "add disk"])):
            case "add node":
                after.append(StorageNode(100 + len(after), node.slots, node.domain))
            case "drain node":
                after[at] = StorageNode(node.id, (0,) * len(node.slots), node.domain)
            case "remove node":
                del after[at]
            case "drain disk":
                after[at] = StorageNode(node.id, (0, *node.slots[1:]), node.domain)
            case _:
                after[at] = StorageNode(node.id, (*node.slots, max(node.slots)), node.domain)
        assume(after)
    if draw(st.integers(0, 3)):
        after = [StorageNode(one.id, tuple(2 * n for n in one.slots), one.domain) for one in after]
    return before, tuple(after), replicas


def planned(cluster: Cluster, table: Table, extra_percent: int = 0) -> Plan:
    """Where there is no room, another example is taken."""
    try:
        return rebalance(cluster, table, extra_percent=extra_percent)
    except UsageError:
        assume(False)
        raise


@settings(max_examples=12, suppress_health_check=FILTERED)
@given(changes(), st.sampled_from([0, 0, 30]))
def test_every_step_is_safe_and_the_end_is_the_goal(change: tuple[Cluster, Cluster, int], extra_percent: int) -> None:
    before, after, replicas = change
    table = place(before, replicas, steps=QUICK).table
    plan = planned(after, table, extra_percent)
    domains, slots, known = domain_of(after), slots_of(after), {node.id for node in after}
    rounds: dict[int, list[int]] = {}
    for index, move in enumerate(plan.moves):
        rounds.setdefault(move.round, []).append(index)
        assert move.lost == (move.source.node not in known)
    assert list(rounds) == list(range(len(rounds)))
    for indices in rounds.values():
        moves = [plan.moves[index] for index in indices]
        assert max(Counter(move.chain for move in moves).values()) == 1
        assert max(Counter(move.to.node for move in moves).values()) == 1
        held = held_by_place(table)
        held.update(move.to for move in moves)
        assert all(held[move.to] <= slots[move.to] for move in moves)
        for move in moves:
            table = apply_move(table, move)
            assert replicas_apart(table.chains[move.chain], domains)
            assert len(table.chains[move.chain]) == replicas
    assert [sorted(chain) for chain in table.chains] == [sorted(chain) for chain in plan.goal.chains]
    assert plan.quality == quality_of(after, plan.goal)
    held = held_by_place(plan.goal)
    assert all(held[where] <= count for where, count in slots.items())
    assert held.keys() <= {where for where, count in slots.items() if count}


@settings(max_examples=6, suppress_health_check=FILTERED)
@given(changes())
def test_no_more_moves_than_needed_and_none_in_what_is_settled(change: tuple[Cluster, Cluster, int]) -> None:
    before, after, replicas = change
    table = place(before, replicas, steps=QUICK).table
    plan = planned(after, table)
    assert len(plan.moves) <= plan.minimum * 5 // 4 + 2
    again = rebalance(after, plan.goal, seed=1)
    assert again.moves == ()
    assert again.goal == plan.goal
    assert again.minimum == 0


@settings(max_examples=6, suppress_health_check=FILTERED)
@given(changes(), st.data())
def test_after_any_interruption_a_new_plan_finishes_what_is_left(
    change: tuple[Cluster, Cluster, int], data: st.DataObject
) -> None:
    before, after, replicas = change
    table = place(before, replicas, steps=QUICK).table
    first = planned(after, table)
    made = 0
    left: dict[int, set[int]] = {}
    for attempt in range(100):
        plan = rebalance(after, table, seed=attempt)
        if not plan.moves:
            break
        for move in plan.moves[: data.draw(st.integers(1, len(plan.moves)))]:
            assert move.to.node not in left.get(move.chain, ()) or len(plan.moves) > plan.minimum
            left.setdefault(move.chain, set()).add(move.source.node)
            table = apply_move(table, move)
            made += 1
    else:
        pytest.fail("it never ends")
    if len(first.moves) == first.minimum:
        assert made <= first.minimum + max(2, first.minimum // 4)


@settings(max_examples=6, suppress_health_check=FILTERED)
@given(changes(), st.data())
def test_what_is_left_of_a_stored_goal_is_the_rest_of_the_plan(
    change: tuple[Cluster, Cluster, int], data: st.DataObject
) -> None:
    before, after, replicas = change
    table = place(before, replicas, steps=QUICK).table
    plan = planned(after, table, extra_percent=30)
    stop = data.draw(st.integers(0, len(plan.moves)))
    for move in plan.moves[:stop]:
        table = apply_move(table, move)
    rest = moves_between(table, plan.goal, after)
    assert rest is not None
    assert len(rest) == len(plan.moves) - stop


def grown(cluster: Cluster, nodes: int) -> Cluster:
    return cluster + tuple(StorageNode(100 + i, cluster[0].slots) for i in range(nodes))


def shrunk(cluster: Cluster, nodes: int) -> Cluster:
    return tuple(StorageNode(node.id, tuple(n + 2 for n in node.slots)) for node in cluster[nodes:])


EQUAL = uniform_cluster(25, 16, disks=4)


@functools.cache
def table_of_equals() -> Table:
    return place(EQUAL, 3).table


@pytest.mark.parametrize(
    ("after", "moves"),
    [
        (grown(EQUAL, 1), 15),
        (grown(EQUAL, 5), 65),
        (grown(EQUAL, 25), 199),
        (shrunk(EQUAL, 1), 16),
        (shrunk(EQUAL, 3), 48),
    ],
    ids=["one more", "five more", "twice as many", "one less", "three less"],
)
def test_it_ends_about_as_even_as_a_new_table(after: Cluster, moves: int) -> None:
    table = table_of_equals()
    plan = rebalance(after, table)
    assert len(plan.moves) == plan.minimum == moves
    fresh = place(after, 3, chains=len(table.chains)).quality
    assert plan.quality.reads_ratio is not None
    assert fresh.reads_ratio is not None
    assert plan.quality.shared_max <= fresh.shared_max + 1
    assert plan.quality.targets_max - plan.quality.targets_min <= 1


def test_a_disk_is_emptied_into_its_node_and_others() -> None:
    table = table_of_equals()
    after = tuple(StorageNode(node.id, (5,) * 4 if node.id != 7 else (0, 5, 5, 5)) for node in EQUAL)
    plan = rebalance(after, table)
    assert len(plan.moves) == plan.minimum == 4
    assert {(move.source.node, move.source.disk) for move in plan.moves} == {(7, 0)}


def test_lost_targets_come_first_and_say_so() -> None:
    table = table_of_equals()
    after = tuple(
        StorageNode(node.id, (0,) * 4 if node.id == 2 else (6,) * 4, node.domain) for node in EQUAL if node.id != 1
    )
    plan = rebalance(after, table)
    lost = [move for move in plan.moves if move.lost]
    assert {move.source.node for move in lost} == {1}
    assert len(lost) == 16
    assert max(move.round for move in lost) <= min(move.round for move in plan.moves if not move.lost) + 1


def test_domains_that_are_named_anew_are_kept_apart_again() -> None:
    cluster = uniform_cluster(8, 6)
    table = place(cluster, 3).table
    racks = tuple(StorageNode(node.id, (8,), f"rack-{i // 2}") for i, node in enumerate(cluster))
    plan = rebalance(racks, table)
    assert plan.moves
    assert all(replicas_apart(chain, domain_of(racks)) for chain in plan.goal.chains)


def test_no_room_is_said_in_one_line() -> None:
    table = table_of_equals()
    with pytest.raises(UsageError, match="have no room on these disks; add nodes or disks"):
        rebalance(EQUAL[1:], table)


def chains(*rows: tuple[int, ...]) -> Table:
    return Table(tuple(tuple(DiskLocation(node, 0) for node in row) for row in rows))


def test_a_target_moves_only_to_a_slot_that_is_free_already() -> None:
    before, goal = chains((1, 2), (3, 4)), chains((3, 2), (1, 4))
    full = tuple(StorageNode(node, (1,)) for node in (1, 2, 3, 4))
    assert moves_between(before, goal, full) is None
    roomier = (StorageNode(1, (2,)), *full[1:])
    moves = moves_between(before, goal, roomier)
    assert moves is not None
    assert [(move.chain, move.to.node, move.round) for move in moves] == [(1, 1, 0), (0, 3, 1)]


def test_a_chain_moves_one_target_at_a_time() -> None:
    cluster = tuple(StorageNode(node, (2,)) for node in (1, 2, 3, 4))
    moves = moves_between(chains((1, 2)), chains((3, 4)), cluster)
    assert moves is not None
    assert [move.round for move in moves] == [0, 1]
