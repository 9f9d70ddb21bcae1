"""One rank of jobs that shard their model in several ways: each restores, says what it has, trains, saves, and says so.

Run as `python -m tests.support.checkpoints.sharded_ranks JSON`, with `jobs`: directories, and how each shards.
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
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fireflyer.checkpoint import CheckpointManager, capture, layouts_of, load_into, load_rng
from fireflyer.checkpoint.state import tensors_of

__all__ = ["sharded"]

TENSOR_PARALLEL = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def sharded(how: str) -> tuple[nn.Module, nn.Module]:
    """The module whose state is saved, and the one that is called. 7 rows do not divide by 2, 3 or 4."""
    size = dist.get_world_size()
    torch.manual_seed(1)
    net: Any = nn.Sequential(nn.Linear(5, 12), nn.GELU(), nn.Linear(12, 7))
    if how == "ddp":
        return net, DistributedDataParallel(net)
    if how == "fsdp":
        return net, fully_shard(net)
    if how == "hsdp":
        replicas = size if size % 2 else 2
        return net, fully_shard(
            net, mesh=init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("r", "s"))
        )
    if how == "tp":
        return net, parallelize_module(net, init_device_mesh("cpu", (size,)), TENSOR_PARALLEL)
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], TENSOR_PARALLEL)
    if how == "tp in replicas":
        return net, net
    assert how == "fsdp of tp"
    return net, fully_shard(net, mesh=mesh["dp"])


def digest(net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of every bit of the whole state."""
    state = capture(net, optimizer, rng=False).shared
    found = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(name.encode() + whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def run(directory: str, how: str, last: int) -> dict[str, Any]:
    net, model = sharded(how)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with CheckpointManager.from_environment(directory) as manager:
        restored = manager.restore(tensors_of(net), layouts_of(optimizer))
        found: dict[str, Any] = {"restored": None, "step": 0, "whole": None}
        if restored is not None:
            load_into(restored.shared, restored.values, net, optimizer)
            if restored.own is not None:
                load_rng(restored.own)
            sharded_there = [name for name, value in restored.shared.items() if isinstance(value, DTensor)]
            found = {"restored": digest(net, optimizer), "step": restored.step, "sharded": len(sharded_there)}
        for step in range(found["step"] + 1, last + 1):
            train(model, optimizer, step)
        manager.save(last, capture(net, optimizer), blocking=True).result()
        return found | {"saved": digest(net, optimizer)}


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {directory: run(directory, how, arguments["last"]) for directory, how in arguments["jobs"].items()}
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
