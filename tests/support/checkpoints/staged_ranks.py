"""One rank of a job whose model is cut into pipeline stages: it restores, says what it has, trains, saves, says so.

Run as `python -m tests.support.checkpoints.staged_ranks JSON`, with `directory`, `stages`, `fsdp` and `last`. Gradients
follow from names and steps alone, so that each arrangement computes the same; no activations are sent.
"""

from __future__ import annotations

import hashlib
import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fireflyer.checkpoint import TrainingLoop, capture

__all__ = ["LAYERS"]

LAYERS = 8


def stage_of(first: int, count: int) -> nn.Module:
    """Layers of the whole model, by their names in it."""
    stage = nn.Module()
    for number in range(first, first + count):
        torch.manual_seed(number)
        stage.add_module(f"layer{number}", nn.Linear(5 + number % 3, 6))
    return stage


def digests(stage: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Of every bit of each whole tensor."""
    found = {}
    for name, value in capture(stage, optimizer, rng=False, by_name=True).shared.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        data = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = hashlib.sha256(data).hexdigest()
    return found


def train(stage: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for name, parameter in stage.named_parameters():
        generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
        gradient = torch.rand(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = gradient
    optimizer.step()


def run(directory: str, stages: int, *, fsdp: bool, last: int) -> dict[str, Any]:
    replicas = dist.get_world_size() // stages
    count = LAYERS // stages
    stage = stage_of(dist.get_rank() // replicas * count, count)
    if fsdp:
        mesh = init_device_mesh("cpu", (stages, replicas), mesh_dim_names=("pp", "dp"))
        fully_shard(stage, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    with TrainingLoop(directory, stage, optimizer, stop_signals=(), by_name=True) as loop:
        restored = digests(stage, optimizer) if loop.restored else {}
        for step in loop.steps(last):
            train(stage, optimizer, step)
    return {"restored": restored, "saved": digests(stage, optimizer)}


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = run(**arguments)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
