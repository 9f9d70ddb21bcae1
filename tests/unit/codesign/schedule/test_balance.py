"""Layers into stages, beside all ways to cut them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.codesign.schedule import balance


def least_by_trying_all(costs: list[int], stages: int) -> int:
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    return min(max(sum(costs[begin:end]) for begin, end in itertools.pairwise((0, *cut, len(costs)))) for cut in cuts)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_the_costliest_stage_is_as_cheap_as_in_the_best_of_all_cuts(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    found = balance(costs, stages)
    assert sum(found.sizes) == len(costs)
    assert min(found.sizes) >= 1
    ends = [0, *itertools.accumulate(found.sizes)]
    assert found.costs == tuple(sum(costs[begin:end]) for begin, end in itertools.pairwise(ends))
    assert found.worst == least_by_trying_all(costs, stages)


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=40), st.data())
def test_costs_that_are_no_integers_get_a_cut_that_no_shift_of_one_layer_improves(
    costs: list[float], data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    found = balance(costs, stages)
    assert len(found.sizes) == stages
    assert sum(found.sizes) == len(costs)
    assert found.worst >= max(max(costs), sum(costs) / stages) * (1 - 1e-9)


def test_61_layers_with_embedding_head_and_prediction_module_on_16_ranks() -> None:
    """Costs in parts of a layer: the embedding computes nearly nothing; 61 layers; head; module with its own head."""
    found = balance([0.1, *[1.0] * 61, 0.8, 1.8], 16)
    assert len(found.sizes) == 16
    assert sum(found.sizes) == 64
    assert found.worst == 4.1  # 63.7 of 16 is 3.98, and no stage has a part of a layer
    assert found.imbalance == pytest.approx(4.1 * 16 / 64.7 * 64.7 / 63.7)


def test_28_layers_on_10_ranks() -> None:
    found = balance([1.0] * 28, 10)
    assert found.worst == 3
    assert found.sizes == (1, *[3] * 9)  # the rank with the most micro-batches in flight has the fewest layers
    assert found.imbalance == pytest.approx(3 / 2.8)


@pytest.mark.parametrize(
    ("costs", "stages", "said"),
    [
        ([1.0], 2, "1 layers do not fill 2 stages; give 1 to 1 stages"),
        ([1.0], 0, "1 layers do not fill 0 stages"),
        ([1.0, float("inf")], 1, "finite number"),
        ([1.0, -1.0], 1, "finite number"),
    ],
)
def test_what_cannot_be_cut_is_refused(costs: list[float], stages: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        balance(costs, stages)
