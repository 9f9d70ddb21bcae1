"""Which pairs of nodes `ff validate links` measures."""

from __future__ import annotations

import pytest

from fireflyer.base.errors import UsageError
from fireflyer.cli.health.validate_cluster import MAX_LEAF, pairs_below_leaves
from fireflyer.cluster.core.platform.views import NodeView


def nodes(count: int, leaf: str, group: str = "default") -> list[NodeView]:
    return [
        NodeView(
            name=f"{leaf}n{number}", zone="", leaf=leaf, group=group, labels=(), state="idle", drain_reason="",
            task=None, run=None, silent_ns=0, inventory=None,
        )
        for number in range(count)
    ]  # fmt: skip


def test_nodes_are_paired_below_their_leaf_alone() -> None:
    found = pairs_below_leaves([*nodes(3, "a"), *nodes(2, "b"), *nodes(1, "c")])
    assert sorted(tuple(sorted(pair)) for pair in found) == [
        ("an0", "an1"),
        ("an0", "an2"),
        ("an1", "an2"),
        ("bn0", "bn1"),
    ]


def test_nodes_of_which_nobody_has_said_the_leaf_are_not_all_paired() -> None:
    with pytest.raises(UsageError, match="129 nodes of group default without a leaf are 8256 pairs; say in"):
        pairs_below_leaves(nodes(MAX_LEAF + 1, ""))
    assert len(pairs_below_leaves(nodes(MAX_LEAF, "a"))) == MAX_LEAF * (MAX_LEAF - 1) // 2
