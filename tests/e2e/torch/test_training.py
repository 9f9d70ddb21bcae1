"""Training over the hfreduce group, with the hooks, and with our own DDP goes as with stock PyTorch over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.torch_ranks.processes import run_torch_ranks

pytestmark = pytest.mark.processes

STEPS = 4


def results(scenario: str, nodes: Sequence[int], models: Sequence[str]) -> list[dict[str, Any]]:
    """What each rank found, of all ways to train in the same processes."""
    ended = run_torch_ranks(
        "tests.support.torch_ranks.training", nodes, scenario=scenario, steps=STEPS, models=models, limit_s=115
    )
    assert [rank.code for rank in ended] == [0] * len(nodes), [rank.errors[-3000:] for rank in ended]
    return [rank.result for rank in ended]


def check(ranks: list[dict[str, Any]], way: str, model: str, *, relative: float = 1e-4) -> None:
    assert len({rank[way][model][1] for rank in ranks}) == 1, f"{way}, {model}: the replicas differ"
    for rank in ranks:
        assert rank[way][model][0] == pytest.approx(rank["gloo"][model][0], rel=relative), f"{way}, {model}"


@pytest.mark.parametrize(
    ("nodes", "models"),
    [((0, 0), ("vgg", "gpt")), pytest.param((0, 0, 1, 1), ("gpt",), marks=pytest.mark.slow)],
    ids=str,
)
def test_losses_are_those_of_stock_ddp(nodes: tuple[int, ...], models: tuple[str, ...]) -> None:
    """A sum of two has one order only: there every bit is the same."""
    ranks = results("data_parallel", nodes, models)
    for model in models:
        for way in ("hfreduce", "hook", "ours"):
            check(ranks, way, model)
            if len(nodes) == 2:
                assert all(rank[way][model] == rank["gloo"][model] for rank in ranks), f"{way}, {model}"
        for way in ("hook bf16", "hook fp8", "ours bf16", "ours fp8"):
            check(ranks, way, model, relative=0.01)
            assert ranks[0][way][model][1] != ranks[0]["gloo"][model][1], f"{way}, {model}: nothing was compressed"
    assert [rank["memory"] for rank in ranks] == [[True] * 3] * len(nodes), "gradients lie outside of shared memory"


@pytest.mark.parametrize(
    ("nodes", "model"), [((0, 0), "vgg"), pytest.param((0, 0, 1, 1), "gpt", marks=pytest.mark.slow)], ids=str
)
def test_losses_are_those_of_stock_fsdp(nodes: tuple[int, ...], model: str) -> None:
    ranks = results("fully_sharded", nodes, [model])
    for way in ("hooks", "hfreduce", "hfreduce memory"):
        check(ranks, way, model)
    if len(nodes) == 4:
        for rank in ranks:
            assert rank["replicas"][model][0] == pytest.approx(rank["gloo"][model][0], rel=1e-4)
