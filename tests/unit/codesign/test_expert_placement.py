"""Experts on ranks by their loads: beside all packings of small cases, and within the limits of routing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import Experts
from fireflyer.codesign.parallel.expert_placement import imbalance, pack, place_experts


def experts_of(routed: int, groups: int = 1, groups_per_token: int = 1) -> Experts:
    return Experts(routed=routed, per_token=1, feed_forward=1, groups=groups, groups_per_token=groups_per_token)


def fullest(loads: list[float], bins: tuple[tuple[int, ...], ...]) -> float:
    return max(math.fsum(loads[item] for item in one) for one in bins)


def packings(items: tuple[int, ...], size: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    if not items:
        yield ()
        return
    for others in itertools.combinations(items[1:], size - 1):
        first = (items[0], *others)
        for rest in packings(tuple(one for one in items[1:] if one not in others), size):
            yield (first, *rest)


@pytest.mark.parametrize(("count", "bins"), [(6, 2), (6, 3), (8, 2), (8, 4), (9, 3)])
def test_packing_is_that_of_brute_force_or_near_it(count: int, bins: int) -> None:
    rng = np.random.default_rng(count * bins)
    worst, equal, cases = 0.0, 0, 30
    for _ in range(cases):
        loads = [float(one) for one in rng.zipf(1.6, count).clip(max=200)]
        found = pack(loads, bins)
        assert sorted(itertools.chain(*found)) == list(range(count))
        assert {len(one) for one in found} == {count // bins}
        best = min(fullest(loads, one) for one in packings(tuple(range(count)), count // bins))
        worst, equal = max(worst, fullest(loads, found) / best), equal + (fullest(loads, found) <= best)
    print(count, bins, worst, equal)
    assert worst <= 1.1
    assert equal >= cases * 3 // 4


@pytest.mark.parametrize(
    ("experts", "ranks", "nodes", "parts"),
    [
        (experts_of(16), 4, 2, 4),
        (experts_of(16, 4, 2), 2, 1, 2),  # whole groups on a rank
        (experts_of(16, 4, 2), 4, 2, 2),  # a group on each rank: nodes get about equal loads
        (experts_of(16, 4, 2), 8, 4, 8),  # several ranks of a group
        (experts_of(12, 4, 2), 6, 2, 0),  # 6 ranks do not divide into 4 groups
    ],
)
def test_the_fullest_part_gets_less_and_groups_stay_together(
    experts: Experts, ranks: int, nodes: int, parts: int
) -> None:
    """`parts`: ranks, or nodes, whose loads are more equal; 0: nothing can be moved."""
    rng = np.random.default_rng(ranks)
    better = 0
    for _ in range(20):
        loads = [float(one) for one in rng.integers(0, 1000, experts.routed)]
        found = place_experts(loads, experts, ranks, nodes)
        assert sorted(found.order) == list(range(experts.routed))
        assert found.before == imbalance(loads, ranks)
        assert found.after == imbalance([loads[expert] for expert in found.order], ranks) <= found.before
        moved = [loads[expert] for expert in found.order]
        better += parts > 0 and imbalance(moved, parts) < imbalance(loads, parts)
        if experts.groups_per_token < experts.groups:
            size = experts.routed // experts.groups
            for first in range(0, experts.routed, size):
                assert len({expert // size for expert in found.order[first : first + size]}) == 1
    assert (better >= 10) == (parts > 0)


def test_nodes_get_about_equal_loads() -> None:
    loads = [9.0, 9.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0]
    four, eight = (place_experts(loads, experts_of(8), ranks, 2) for ranks in (4, 8))
    for found in (four, eight):
        assert imbalance([loads[one] for one in found.order], 2) == 1.0
    assert four.after < four.before
    assert eight.after == eight.before, "each rank has one expert"


def test_loads_without_tokens_change_nothing() -> None:
    found = place_experts([0.0] * 4, experts_of(4), 2)
    assert (found.order, found.before, found.after) == ((0, 1, 2, 3), 1.0, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack([1, 2, 3], 2), "3 loads do not divide into 2 equal parts"),
        (lambda: pack([1, math.nan], 2), "a load is negative, or no number"),
        (lambda: place_experts([1.0], experts_of(2), 1), "1 loads for 2 experts"),
        (lambda: place_experts([1.0] * 4, experts_of(4), 3), "4 experts do not divide over 3 ranks on 1 nodes"),
    ],
)
def test_what_does_not_divide_is_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(UsageError, match=message):
        call()
