"""The usual script: shuffled shares of a data set, an epoch, a checkpoint of rank 0, another epoch after loading it."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from tests.e2e.torch.programs.models import WIDTH, digest, network
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def epoch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> list[float]:
    data = TensorDataset(torch.randn(22, WIDTH, generator=torch.Generator().manual_seed(1)))
    sampler: Any = DistributedSampler(data, shuffle=True, seed=5)
    sampler.set_epoch(number)
    losses = []
    for (batch,) in DataLoader(data, batch_size=4, sampler=sampler):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> Any:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = [epoch(model, optimizer, 0)]
    saved: list[Any] = [None]
    if dist.get_rank() == 0:
        file = io.BytesIO()
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
        saved = [file.getvalue()]
    dist.broadcast_object_list(saved, src=0)
    state = torch.load(io.BytesIO(saved[0]), map_location="cpu")
    inner = network()
    inner.load_state_dict(state["model"])
    resumed = DistributedDataParallel(inner)
    other = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    other.load_state_dict(state["optimizer"])
    for each, its in ((model, optimizer), (resumed, other)):
        found.append(epoch(each, its, 1))
    return [found, digest(resumed), digest(model)]
