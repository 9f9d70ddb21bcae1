"""Pipelines over the real communicator, a process per rank: parity for every schedule, and a rank that dies."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.patience import allowed_s
from tests.support.pipeline.models import EXECUTED, alone, batch_of, schedule_of, worst_error
from tests.support.ranks.forked import TORCH, Forked
from tests.support.ranks.processes import store_running
from tests.support.torch_ranks.pipeline import MICRO_BATCHES

LIMIT_S = 120


def run_ranks(directory: Path, ranks: int, scenario: str, **params: Any) -> list[dict[str, Any] | None]:
    """What each rank printed last; None for one that died."""
    directory.mkdir(exist_ok=True)
    os.chmod(directory, 0o700)
    processes: list[Forked] = []
    with store_running(directory) as (store, secret_file):
        try:
            for rank in range(ranks):
                arguments = {"rank": rank, "world_size": ranks, "node": rank % 2, "store": store, "params": params}
                arguments |= {"secret_file": secret_file, "scenario": scenario}
                processes.append(Forked("tests.support.torch_ranks.pipeline", json.dumps(arguments), imports=TORCH))
            outputs = [process.communicate(timeout=allowed_s(LIMIT_S))[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    return [json.loads(output) if output else None for output in outputs]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule_gives_the_gradients_of_one_process_and_twice_the_same_bits(ranks: int, tmp_path: Path) -> None:
    outcomes = run_ranks(tmp_path / "job", ranks, "all_schedules", gradients=str(tmp_path))
    for outcome in outcomes:
        assert outcome is not None
        assert all(outcome["equal"])
    parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
    assert {key.split()[0] for key in parts[0]} == set(EXECUTED)
    for key in parts[0]:
        name, dtype = key.split()
        schedule = schedule_of(name, ranks, MICRO_BATCHES)
        gradients = {one: tensor for part in parts for one, tensor in part[key].items()}
        inputs, targets = batch_of(0, MICRO_BATCHES, unequal=True)
        _, expected = alone(schedule, inputs, targets, dtype=getattr(torch, dtype))
        assert len(gradients) == len(expected) * schedule.placement.directions
        assert worst_error(gradients, expected) <= (1e-10 if dtype == "float64" else 1e-5), key


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", ["1f1b", "dualpipev"])
def test_a_rank_killed_in_a_step_is_named_by_the_others(name: str, tmp_path: Path) -> None:
    *survivors, dead = run_ranks(tmp_path, 3, "lose_a_rank", schedule=name)
    assert dead is None
    for survivor in survivors:
        assert survivor is not None
        assert (survivor["error"], survivor["rank"]) == ("PeerFailed", 2)
        assert "did not complete" in survivor["text"]
