"""The calls with which the collectives are tested, and their numbers: no two ranks may contribute the same to one."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.collectives.calls import DTYPES, INTEGERS, PLACES, Call, all_calls, data_of, wide

COUNT = 1025


@pytest.mark.parametrize("counts", [[0, 1, 63, 1024, 1025, 9973], [0, 1, 63, 1024, 1025, 9973, 70_001]])
def test_each_call_meets_every_count_and_every_place_and_in_more_rounds_all_combinations(counts: list[int]) -> None:
    def met(rounds: int) -> list[list[tuple[int, tuple[bool, str]]]]:
        found: dict[tuple[str, str, str], list[tuple[int, tuple[bool, str]]]] = {}
        for call in all_calls(4, counts, rounds=range(rounds)):
            found.setdefault((call.kind, call.dtype, call.op), []).append((call.count, (call.in_place, call.memory)))
        return list(found.values())

    assert all(sorted(count for count, _ in ways) == counts for ways in met(len(counts)))
    assert all({place for _, place in ways} == {*PLACES} for ways in met(len(PLACES)))
    combinations = len(counts) * len(PLACES)
    assert all(len({*ways}) == len(ways) == combinations for ways in met(combinations))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_contribute_different_numbers_to_a_call_and_to_nearly_all_calls(dtype: str) -> None:
    everything = set()
    for seed in range(64):
        found = [data_of(Call("allreduce", dtype, seed=seed), rank, COUNT) for rank in range(8)]
        assert all(np.unique(array).size > 20 for array in found)
        assert len({array.tobytes() for array in found}) == len(found)
        everything |= {array.tobytes() for array in found}
    assert len(everything) > 0.95 * 64 * 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rank_computes_the_same_contribution_of_a_rank_and_may_overwrite_it(dtype: str) -> None:
    call = Call("reduce", dtype, "max", seed=7)
    first = data_of(call, 3, COUNT)
    expected = first.tobytes()
    first[:] = 0
    assert data_of(call, 3, COUNT).tobytes() == expected


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in INTEGERS])
def test_each_rank_contributes_a_nan_to_minimum_and_maximum(dtype: str) -> None:
    places = set()
    for rank in range(4):
        nans = np.flatnonzero(np.isnan(wide(data_of(Call("allreduce", dtype, "min"), rank, COUNT), dtype)))
        assert nans.size == 1
        places |= set(nans)
    assert len(places) > 1
    assert not np.isnan(wide(data_of(Call("allreduce", dtype, "sum"), 0, COUNT), dtype)).any()


@pytest.mark.parametrize("count", [0, 1, 2, 65_535, 65_536, 400_000])
def test_a_contribution_has_any_size(count: int) -> None:
    assert data_of(Call("allreduce", "i32"), 1, count).size == count
