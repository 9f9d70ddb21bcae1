"""Which nodes are due, and which of them must not be validated at the same time."""

from __future__ import annotations

from fireflyer.fs.schema.routing import Chain, Member, Node, Routing, TargetState
from fireflyer.validators.core.validation.queue import (
    MAX_INTERRUPTIONS,
    ValidationQueue,
    due_nodes,
    exclusion_groups,
    host_groups,
)
from fireflyer.validators.core.validation.records import NodeRecord

DAY = 86_400 * 10**9


def record(node: str, seen_ns: int) -> NodeRecord:
    return NodeRecord(node=node, model="m", seen_ns=seen_ns)


def routing(*chains: tuple[int, ...]) -> Routing:
    """Storage node N listens on host 10.0.0.N."""
    nodes = sorted({node for chain in chains for node in chain})
    return Routing(
        1,
        tuple(Node(node, f"10.0.0.{node}:7100", 1) for node in nodes),
        tuple(
            Chain(number, 1, tuple(Member(number * 10 + node, node, TargetState.SERVING) for node in chain))
            for number, chain in enumerate(chains, 1)
        ),
    )


def test_nodes_that_wait_longest_come_first_and_those_of_this_week_not_at_all() -> None:
    records = [record("b", 1 * DAY), record("a", 3 * DAY), record("c", 9 * DAY), record("b", 2 * DAY), record("x", 0)]
    assert due_nodes(["a", "b", "c", "d"], records, 10 * DAY, 7 * DAY) == ["d", "b", "a"]


def test_a_record_of_the_future_does_not_keep_a_node_from_being_validated() -> None:
    assert due_nodes(["a"], [record("a", 11 * DAY)], 10 * DAY, 7 * DAY) == ["a"]


def test_nodes_that_hold_replicas_of_one_chain_are_a_group() -> None:
    hosts = {"gpu-1": "10.0.0.1", "gpu-2": "10.0.0.2", "gpu-3": "10.0.0.3", "gpu-4": "10.0.0.9"}
    groups = exclusion_groups(routing((1, 2), (2, 3), (2, 1), (3, 4)), hosts)
    assert groups == (frozenset({"gpu-1", "gpu-2"}), frozenset({"gpu-2", "gpu-3"})), "node 4 has no agent"


def test_agents_of_one_machine_are_a_group_and_count_as_its_storage() -> None:
    hosts = {"a": "10.0.0.1", "b": "10.0.0.1", "c": "10.0.0.2", "d": "10.0.0.3"}
    assert host_groups(hosts) == (frozenset({"a", "b"}),)
    assert exclusion_groups(routing((1, 2)), hosts) == (frozenset({"a", "b", "c"}),)


def test_replicas_are_validated_one_after_the_other_and_others_meanwhile() -> None:
    queue = ValidationQueue([("a",), ("b",), ("c",)], [frozenset({"a", "b"})])
    assert queue.begin(["a", "b", "c"]) == [("a",), ("c",)]
    assert queue.begin(["b"]) == []
    queue.ended(("a",))
    assert queue.begin(["a", "b"]) == [("b",)]


def test_a_node_that_is_busy_does_not_hold_up_the_next_one() -> None:
    queue = ValidationQueue([("a",), ("b",)], most_nodes=1)
    assert queue.begin(["b"]) == [("b",)]
    assert queue.waiting == [("a",)]


def test_a_pair_begins_where_only_one_node_at_a_time_is_allowed() -> None:
    queue = ValidationQueue([("a", "b"), ("c",)], most_nodes=1)
    assert queue.begin(["a", "b", "c"]) == [("a", "b")]


def test_what_others_interrupt_again_and_again_is_left_for_another_day() -> None:
    queue = ValidationQueue([("a",)])
    for left in reversed(range(MAX_INTERRUPTIONS)):
        assert queue.begin(["a"]) == [("a",)]
        assert queue.interrupted(("a",)) == (left > 0)
    assert queue.done
