"""Chain tables: what every one of them fulfils, and that nothing but its arguments decides it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.fs.placement.clusters import (
    clusters,
    domain_of,
    held_by_place,
    plain_ratios,
    replicas_apart,
    slots_of,
)

from fireflyer.base.errors import UsageError
from fireflyer.fs.core.placement import Cluster, StorageNode, Table, place, quality_of, uniform_cluster
from fireflyer.fs.core.placement.quotas import chain_count, share_out
from fireflyer.fs.core.placement.seeded_random import SeededRandom

QUICK = 200


@settings(max_examples=12)
@given(clusters(), st.integers(0, 3))
def test_every_table_keeps_replicas_apart_and_nodes_equal(request: tuple[Cluster, int], seed: int) -> None:
    cluster, replicas = request
    placement = place(cluster, replicas, seed=seed, steps=QUICK)
    domains, held = domain_of(cluster), held_by_place(placement.table)
    assert all(len(chain) == replicas and replicas_apart(chain, domains) for chain in placement.table.chains)
    assert all(count <= slots_of(cluster)[where] for where, count in held.items())
    assert len(placement.table.chains) == chain_count(cluster, replicas)
    for node in cluster:
        on_disks = [held[where] for where in slots_of(cluster) if where.node == node.id]
        assert max(on_disks) - min(on_disks) <= 1
    positions = Counter((where.node, at) for chain in placement.table.chains for at, where in enumerate(chain))
    for node in cluster:
        counts = [positions[node.id, at] for at in range(replicas)]
        assert max(counts) - min(counts) <= 1


@settings(max_examples=8)
@given(clusters())
def test_the_ratio_is_what_its_definition_says_and_not_below_its_bound(request: tuple[Cluster, int]) -> None:
    cluster, replicas = request
    placement = place(cluster, replicas, steps=QUICK)
    quality = placement.quality
    assert quality == quality_of(cluster, placement.table)
    if replicas == 1:
        assert quality.reads_ratio is None
        assert quality.recovery_ratio is None
        return
    reads, recovery = plain_ratios(cluster, placement.table)
    assert quality.reads_ratio == float(reads)
    assert quality.recovery_ratio == float(recovery)
    assert quality.reads_bound is not None
    assert quality.recovery_bound is not None
    assert 1 <= quality.reads_bound <= quality.reads_ratio
    assert 1 <= quality.recovery_bound <= quality.recovery_ratio


@pytest.mark.parametrize(
    ("nodes", "replicas", "targets"),
    [
        (4, 2, 3),
        (5, 3, 6),
        (7, 3, 3),
        (9, 3, 4),
        (10, 3, 9),
        (13, 3, 6),
        (13, 4, 4),
        (16, 4, 5),
        (21, 5, 5),
        (25, 5, 6),
    ],
)
def test_where_a_balanced_design_exists_it_is_found(nodes: int, replicas: int, targets: int) -> None:
    quality = place(uniform_cluster(nodes, targets), replicas).quality
    assert quality.reads_ratio == 1
    assert quality.shared_min == quality.shared_max == targets * (replicas - 1) // (nodes - 1)


@pytest.mark.parametrize(
    ("nodes", "replicas", "targets"), [(3, 2, 5), (6, 3, 16), (12, 4, 16), (20, 3, 16), (25, 3, 16), (60, 3, 16)]
)
def test_in_between_the_bound_is_reached(nodes: int, replicas: int, targets: int) -> None:
    quality = place(uniform_cluster(nodes, targets), replicas).quality
    assert quality.reads_ratio == quality.reads_bound


@settings(max_examples=40)
@given(clusters())
def test_no_more_chains_have_room(request: tuple[Cluster, int]) -> None:
    """One more chain would need more targets than nodes and domains may give to so many."""
    cluster, replicas = request
    more = chain_count(cluster, replicas) + 1
    room: Counter[str] = Counter()
    for node in cluster:
        room[domain_of(cluster)[node.id]] += min(more, sum(node.slots))
    assert sum(min(more, count) for count in room.values()) < more * replicas


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.data())
def test_equal_places_get_equal_shares_and_keep_what_they_have(slots: list[int], data: st.DataObject) -> None:
    targets = data.draw(st.integers(0, sum(slots)))
    held = [data.draw(st.integers(0, 9)) for _ in slots]
    quotas = share_out(targets, slots, held)
    assert sum(quotas) == targets
    assert all(quota <= slot for quota, slot in zip(quotas, slots, strict=True))
    for i, j in ((i, j) for i in range(len(slots)) for j in range(len(slots)) if slots[i] == slots[j]):
        assert abs(quotas[i] - quotas[j]) <= 1
        if quotas[i] > quotas[j] and held[i] <= quotas[j]:
            assert held[j] <= quotas[j]  # who has more already goes first


def test_the_same_arguments_give_the_same_table_and_another_seed_another_one() -> None:
    cluster = uniform_cluster(11, 9, disks=3)
    assert place(cluster, 3, seed=5) == place(cluster, 3, seed=5)
    assert place(cluster, 3, seed=5).table != place(cluster, 3, seed=6).table


@given(st.integers(), st.integers(0, 40))
def test_words_come_singly_or_together(seed: int, count: int) -> None:
    one, many = SeededRandom(seed), SeededRandom(seed)
    assert [one.word() for _ in range(count)] == many.words(count).tolist()
    assert one.word() == many.word()


def test_the_generator_is_splitmix64_and_the_shuffle_is_written_down() -> None:
    rng = SeededRandom(1234567)
    assert [rng.word() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    items = list(range(10))
    SeededRandom(1).shuffle(items)
    assert items == [9, 0, 1, 4, 8, 2, 3, 7, 6, 5]


@pytest.mark.parametrize(
    ("cluster", "replicas", "message"),
    [
        (uniform_cluster(2, 4), 3, "3 replicas need 3 nodes with room for targets, and there are 2; add nodes"),
        (uniform_cluster(4, 4, domains=("a", "a", "b", "b")), 3, "3 replicas need 3 domains, and the nodes with room"),
        (uniform_cluster(4, 4), 9, "9 replicas; give 1 to 8"),
        ((StorageNode(1, (4,)), StorageNode(1, (4,))), 1, "two nodes have the same id"),
        (uniform_cluster(2, 1 << 17), 2, "more than 131072 targets; make several tables"),
    ],
)
def test_what_cannot_be_placed_is_said_in_one_line(cluster: Cluster, replicas: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        place(cluster, replicas)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_quality_is_refused_for_tables_of_other_clusters() -> None:
    table = place(uniform_cluster(4, 3), 2).table
    with pytest.raises(UsageError, match="which is not in the cluster"):
        quality_of(uniform_cluster(3, 3), table)
    with pytest.raises(UsageError, match="two targets on one node"):
        quality_of(uniform_cluster(4, 3), Table(((table.chains[0][0], table.chains[0][0]),)))
