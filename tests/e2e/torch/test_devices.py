"""torch.distributed on a device: with the device of the tests, whose copies are made by threads, in real processes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from tests.support.torch_ranks.calls import SCENARIOS
from tests.support.torch_ranks.processes import run_torch_ranks

pytestmark = pytest.mark.processes

NODES = [(0, 0), (0, 0, 1, 1)]
STEPS = 3


@cache
def results(module: str, nodes: tuple[int, ...], **arguments: Any) -> list[dict[str, Any]]:
    ended = run_torch_ranks(f"tests.support.torch_ranks.{module}", nodes, limit_s=115, **arguments)
    assert [rank.code for rank in ended] == [0] * len(nodes), [rank.errors[-3000:] for rank in ended]
    return [rank.result for rank in ended]


@pytest.mark.slow
@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_the_process_group_gives_what_gloo_gives(nodes: tuple[int, ...]) -> None:
    scenarios = list(SCENARIOS)
    expected = results_of("gloo", (0,) * len(nodes), scenarios, "")
    found = results_of("hfreduce", nodes, scenarios, "threads")
    for mine, others in zip(found, expected, strict=True):
        for scenario in scenarios:
            assert mine[scenario] == others[scenario], scenario


def results_of(backend: str, nodes: tuple[int, ...], scenarios: list[str], device: str) -> list[dict[str, Any]]:
    ended = run_torch_ranks(
        "tests.support.torch_ranks.conformance", nodes, backend=backend, scenarios=scenarios, device=device, limit_s=110
    )
    assert [rank.code for rank in ended] == [0] * len(nodes), [rank.errors[-3000:] for rank in ended]
    return [rank.result for rank in ended]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["hfreduce", "hook", "ours", "fsdp", "fsdp hooks"])
def test_training_goes_as_over_gloo(way: str) -> None:
    for rank in results(
        "training", (0, 0), scenario="on_a_device", steps=STEPS, models=("vgg", "gpt"), device="threads"
    ):
        for model in ("vgg", "gpt"):
            assert rank[way][model][0] == pytest.approx(rank["gloo"][model][0], rel=1e-4)
