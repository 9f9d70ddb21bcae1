"""Our `DistributedDataParallel` in the place of torch's: the same programs give the same results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.torch_ranks.ddp_programs import BEYOND_TORCH, COMPILED, PROGRAMS, SHARED
from tests.support.torch_ranks.processes import run_torch_ranks

pytestmark = pytest.mark.processes


def results(
    nodes: Sequence[int], programs: Sequence[str], backend: str = "gloo", *, compare: bool = True
) -> list[dict[str, Any]]:
    """What each rank found, of all programs in the same processes. `backend`: of the process group, over which our
    class runs; torch's runs too, if `compare`."""
    module = "tests.support.torch_ranks.ddp_conformance"
    ended = run_torch_ranks(module, nodes, programs=programs, backend=backend, compare=compare, limit_s=115)
    assert [rank.code for rank in ended] == [0] * len(nodes), [rank.errors[-3000:] for rank in ended]
    return [rank.result for rank in ended]


def failures(rank: dict[str, Any], right: set[str], programs: Sequence[str]) -> dict[str, Any]:
    """The programs that ended with an error or without tensors, or are not in `right`, and what was found."""
    return {name: rank[name] for name in programs if rank[name]["tensors"] == 0 or name not in right}


IN_SHARED_MEMORY = [
    f"{name}{SHARED}"
    for name in (
        "a_script_of_torchrun",
        "values_come_from_rank_0",
        "mixed_dtypes",
        "ignored_parameters",
        "copies_of_the_wrapper",
        "uneven_inputs",
    )
]
ALL = tuple(PROGRAMS)
ON_HFREDUCE = (*ALL, *BEYOND_TORCH)
TWO_RANKS = (*ALL, *IN_SHARED_MEMORY)


def test_two_ranks_get_the_same_bits_as_with_torch() -> None:
    """A sum of two has one order only. And what averages nothing is found out."""
    for rank in results((0, 0), TWO_RANKS):
        assert failures(rank, {name for name in TWO_RANKS if rank[name]["same"]}, TWO_RANKS) == {}
        assert not rank["not wrapped"]["same"]
        assert rank["not wrapped"]["difference"] > 1e-3


@pytest.mark.slow
def test_over_the_communicator_of_an_hfreduce_group_the_bits_are_those_over_gloo() -> None:
    gloo, ours = (results((0, 0), ON_HFREDUCE, backend, compare=False) for backend in ("gloo", "hfreduce"))
    for over_gloo, rank in zip(gloo, ours, strict=True):
        alike = {name for name in ON_HFREDUCE if rank[name].get("ours") == over_gloo[name]["ours"]}
        assert failures(rank, alike, ON_HFREDUCE) == {}


@pytest.mark.slow
def test_compiled_models_get_the_same_bits_as_with_torch() -> None:
    for rank in results((0, 0), tuple(COMPILED)):
        assert failures(rank, {name for name in COMPILED if rank[name]["same"]}, tuple(COMPILED)) == {}


TOLERANCES = {"float16": 2e-3, "bfloat16": 2e-2, "mixed_dtypes": 2e-2, "fp16_hook": 1e-2, "wrapped_hook": 1e-2}
"""Relative to the largest value: where torch rounds each partial sum, we round once."""


@pytest.mark.slow
def test_four_ranks_on_two_nodes_get_what_they_get_with_torch() -> None:
    for rank in results((0, 0, 1, 1), ALL):
        close = {name for name in PROGRAMS if rank[name].get("difference", 1) <= TOLERANCES.get(name, 1e-4)}
        assert failures(rank, close, ALL) == {}
