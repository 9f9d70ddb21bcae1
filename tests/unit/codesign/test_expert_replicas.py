"""Copies of experts: no load is lost, the fullest rank has no more than without, and small cases beside all others."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.codesign.test_expert_placement import experts_of

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import Experts
from fireflyer.codesign.parallel.expert_placement import place_experts
from fireflyer.codesign.parallel.expert_replicas import rank_loads, replica_counts, replicate_experts

CASES = st.tuples(
    st.sampled_from([(2, 1), (2, 2), (4, 1), (4, 2), (8, 4)]), st.integers(1, 3), st.integers(0, 2), st.booleans()
)


@given(CASES, st.data())
def test_copies_keep_all_loads_and_the_fullest_rank_has_no_more_than_without(
    case: tuple[tuple[int, int], int, int, bool], data: st.DataObject
) -> None:
    (ranks, nodes), each, more, limited = case
    routed, copies = ranks * each, ranks * more
    groups = nodes if limited else 1
    experts = experts_of(routed, groups, max(1, groups - 1))
    loads = [float(one) for one in data.draw(st.lists(st.integers(0, 99), min_size=routed, max_size=routed))]
    room = routed // (nodes if experts.groups_per_token < experts.groups else 1)
    if each + more > room:
        with pytest.raises(UsageError, match=f"use at most {ranks * (room - each)}"):
            replicate_experts(loads, experts, ranks, copies, nodes)
        return
    found = replicate_experts(loads, experts, ranks, copies, nodes)
    held = Counter(itertools.chain(*found.ranks))
    assert tuple(held[one] for one in range(routed)) == found.copies
    assert all(one >= 1 for one in found.copies)
    assert all(len(set(one)) == len(one) for one in found.ranks), "no two copies of an expert on a rank"
    assert len({len(one) for one in found.ranks}) == 1
    assert held.total() in (routed, routed + copies), "without copies only where they help nothing"
    assert math.fsum(rank_loads(loads, found.ranks)) == pytest.approx(math.fsum(loads))
    assert found.after <= found.moved <= found.before
    mean = math.fsum(loads) / ranks
    assert max(rank_loads(loads, found.ranks)) == pytest.approx(found.after * mean, abs=1e-9)
    if experts.groups_per_token < experts.groups:
        size, on_node = routed // groups, ranks // nodes
        for group in range(groups):
            members = set(range(group * size, (group + 1) * size))
            assert len({rank // on_node for rank, one in enumerate(found.ranks) if members & set(one)}) == 1


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), st.integers(0, 6), st.integers(1, 4))
def test_numbers_of_copies_are_those_with_the_smallest_largest_share_of_all(
    loads: list[int], copies: int, most: int
) -> None:
    copies = min(copies, len(loads) * (most - 1))
    found = replica_counts([float(one) for one in loads], copies, most)
    assert sum(found) == len(loads) + copies
    assert max(found) <= most

    def largest(counts: tuple[int, ...]) -> float:
        return max(load / count for load, count in zip(loads, counts, strict=True))

    others = [
        tuple(one + 1 for one in more) for more in compositions(copies, len(loads)) if all(one < most for one in more)
    ]
    assert largest(found) == min(map(largest, others))


def least(loads: list[float], ranks: int, copies: int) -> float:
    """Load of the fullest rank, of all numbers of copies and all packings of them."""
    size = (len(loads) + copies) // ranks
    of_one = list(itertools.combinations(range(len(loads)), size))
    return min(
        max(rank_loads(loads, held))
        for held in itertools.combinations_with_replacement(of_one, ranks)
        if len({*itertools.chain(*held)}) == len(loads)
    )


@pytest.mark.parametrize(("routed", "ranks", "copies"), [(4, 2, 2), (6, 2, 2), (4, 4, 4), (6, 3, 3), (8, 2, 4)])
def test_a_placement_with_copies_is_that_of_brute_force_or_near_it(routed: int, ranks: int, copies: int) -> None:
    rng = np.random.default_rng(routed * ranks)
    worst, equal, cases = 0.0, 0, 20
    for _ in range(cases):
        loads = [float(one) for one in rng.zipf(1.6, routed).clip(max=200)]
        found = replicate_experts(loads, experts_of(routed), ranks, copies)
        mine = max(rank_loads(loads, found.ranks))
        best = min(least(loads, ranks, copies), least(loads, ranks, 0))
        worst, equal = max(worst, mine / best), equal + (mine <= best * (1 + 1e-12))
    print(routed, ranks, copies, worst, equal)
    assert worst <= 1.25
    assert equal >= cases // 2


def test_copies_for_prefill_as_deepseek_v3_has_them() -> None:
    """256 experts on 32 GPUs of 4 nodes, 8 and one copy on each; a few experts have most of the tokens."""
    experts = Experts(routed=256, per_token=8, feed_forward=2048, groups=8, groups_per_token=4)
    rng = np.random.default_rng(1)
    loads = [float(one) for one in (1e6 * rng.pareto(1.5, 256)).astype(int)]
    found = replicate_experts(loads, experts, 32, 32, 4)
    assert {len(one) for one in found.ranks} == {9}
    assert sum(found.copies) == 288
    assert found.moved == place_experts(loads, experts, 32, 4).after
    print(found.before, found.moved, found.after)
    assert found.after < found.moved / 2 < found.before / 2


def test_without_loads_nothing_is_copied() -> None:
    found = replicate_experts([0.0] * 4, experts_of(4), 2, 2)
    assert (found.ranks, found.copies, found.after) == (((0, 1), (2, 3)), (1,) * 4, 1.0)


@pytest.mark.parametrize(
    ("copies", "message"),
    [(3, "3 copies of experts do not divide over 2 ranks"), (6, "6 copies of experts are more than 2 ranks can hold")],
)
def test_copies_that_no_ranks_can_hold_are_refused(copies: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replicate_experts([1.0] * 4, experts_of(4), 2, copies)
