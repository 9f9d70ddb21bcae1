"""Data parallelism over the real communicator: processes on one node, on several, and one that dies in backward."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.collectives.thread_world import ThreadCommunicator, ThreadWorld
from tests.support.ranks.forked import TORCH, Forked
from tests.support.ranks.processes import store_running
from tests.support.torch_ranks.ddp import loss_of, network

from fireflyer.training import DistributedDataParallel

LIMIT_S = 100


def run_ranks(directory: Path, nodes: Sequence[int], scenario: str, **params: Any) -> list[dict[str, Any] | None]:
    """What each rank printed last; None for one that died."""
    directory.mkdir(exist_ok=True)
    os.chmod(directory, 0o700)
    processes: list[Forked] = []
    with store_running(directory) as (store, secret_file):
        try:
            for rank, node in enumerate(nodes):
                arguments = {"rank": rank, "world_size": len(nodes), "node": node, "store": store, "params": params}
                arguments |= {"secret_file": secret_file, "scenario": scenario}
                processes.append(Forked("tests.support.torch_ranks.ddp", json.dumps(arguments), imports=TORCH))
            outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    return [json.loads(output) if output else None for output in outputs]


@pytest.mark.processes
@pytest.mark.parametrize("nodes", [[0, 1], pytest.param([0, 0, 1, 1], marks=pytest.mark.slow)], ids=str)
def test_gradients_are_those_of_one_process_and_training_repeats_bit_for_bit(nodes: list[int], tmp_path: Path) -> None:
    outcomes = run_ranks(tmp_path / "job", nodes, "train", steps=6, gradients=str(tmp_path / "gradients.pt"))
    results = [result for result in outcomes if result is not None]
    assert len(results) == len(nodes)
    assert len({result[run] for result in results for run in ("digest", "again")}) == 1
    for result in results:
        assert result["buckets"] > 5
        assert result["early"] == result["allreduces"] == 6 * result["buckets"]
        assert 0 < result["blocked_ns"] <= result["in_flight_ns"]
    losses = [sum(result["losses"][step] for result in results) for step in range(6)]
    assert losses[-1] < losses[0]

    alone = network(seed=0)
    loss_of(alone, 0, slice(None)).backward()
    gradients = torch.load(tmp_path / "gradients.pt", weights_only=True)
    for (name, parameter), gradient in zip(alone.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.processes
@pytest.mark.parametrize("nodes", [[0, 0, 1]], ids=str)
def test_a_rank_killed_in_backward_is_named_in_the_others_backward(nodes: list[int], tmp_path: Path) -> None:
    *survivors, dead = run_ranks(tmp_path, nodes, "lose_a_rank")
    assert dead is None
    assert survivors == [{"error": "PeerFailed", "rank": 2}] * 2


@pytest.mark.processes
@pytest.mark.parametrize("model", ["gpt", pytest.param("vgg", marks=pytest.mark.slow)])
def test_sums_are_hidden_under_the_backward_pass_unless_one_bucket_waits_for_its_end(
    model: str, tmp_path: Path
) -> None:
    in_many = run_ranks(tmp_path / "many", [0, 0], "overlap", model=model, bucket_bytes=20_000, steps=10)
    in_one = run_ranks(tmp_path / "one", [0, 0], "overlap", model=model, bucket_bytes=1 << 30, steps=10)
    for many, one in zip(in_many, in_one, strict=True):
        assert many is not None
        assert one is not None
        assert (many["buckets"] > 3, one["buckets"]) == (True, 1)
        assert min(each[what] for each in (many, one) for what in ("communication_ns", "computing_ns")) > 0
        assert many["share"] > 0.0 == one["share"], (many, one)  # how much it is, a benchmark says


def test_the_scenario_overlaps_at_all() -> None:
    """Guards the scenario of these tests: its buckets are many, and the first fills early in the backward pass."""
    model = DistributedDataParallel(network(seed=0), ThreadCommunicator(ThreadWorld(1), 0), bucket_bytes=100 * 1024)
    assert len(model.buckets) > 5
    assert "12.weight" in model.buckets[0]
