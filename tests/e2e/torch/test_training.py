"""Training over the hfreduce group, with the hooks, and with our own DDP goes as with stock PyTorch over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from tests.support.torch_ranks.processes import run_torch_ranks

pytestmark = pytest.mark.processes

LAYOUTS = [(0, 0), (0, 0, 1, 1)]
MODELS = ("vgg", "gpt")
STEPS = 4


@cache
def results(scenario: str, nodes: Sequence[int]) -> list[dict[str, Any]]:
    ended = run_torch_ranks("tests.support.torch_ranks.training", nodes, scenario=scenario, steps=STEPS, limit_s=115)
    assert [rank.code for rank in ended] == [0] * len(nodes), [rank.errors[-3000:] for rank in ended]
    return [rank.result for rank in ended]


def check(scenario: str, nodes: Sequence[int], way: str, model: str, *, relative: float) -> None:
    ranks = results(scenario, nodes)
    assert len({rank[way][model][1] for rank in ranks}) == 1, "the replicas differ"
    for rank in ranks:
        losses, _ = rank[way][model]
        assert losses == pytest.approx(rank["gloo"][model][0], rel=relative)


@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", ["hfreduce", "hook", "ours"])
def test_losses_are_those_of_stock_ddp(way: str, model: str, nodes: tuple[int, ...]) -> None:
    check("data_parallel", nodes, way, model, relative=1e-4)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", ["hfreduce", "hook", "ours"])
def test_two_ranks_end_with_the_same_bits_as_over_gloo(way: str, model: str) -> None:
    """A sum of two has one order only."""
    for rank in results("data_parallel", (0, 0)):
        assert rank[way][model] == rank["gloo"][model]


@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
def test_gradients_of_our_ddp_lie_in_shared_memory(nodes: tuple[int, ...]) -> None:
    assert [rank["memory"] for rank in results("data_parallel", nodes)] == [[True] * 3] * len(nodes)


@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", ["hook bf16", "hook fp8", "ours bf16", "ours fp8"])
def test_compressed_gradients_train_alike(way: str, model: str, nodes: tuple[int, ...]) -> None:
    check("data_parallel", nodes, way, model, relative=0.01)
    rank = results("data_parallel", nodes)[0]
    assert rank[way][model][1] != rank["gloo"][model][1], "nothing was compressed"


@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", ["hooks", "hfreduce", "hfreduce memory"])
def test_losses_are_those_of_stock_fsdp(way: str, model: str, nodes: tuple[int, ...]) -> None:
    check("fully_sharded", nodes, way, model, relative=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_replicated_shards_train_as_sharded_ones(model: str) -> None:
    for rank in results("fully_sharded", (0, 0, 1, 1)):
        assert rank["replicas"][model][0] == pytest.approx(rank["gloo"][model][0], rel=1e-4)
