"""Buffers of batch normalization are those of rank 0 in every forward pass."""

from __future__ import annotations

from typing import Any

from tests.e2e.torch.programs.models import WIDTH, digest, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> Any:
    inner = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model = DistributedDataParallel(inner)
    losses = train(model, 4)
    return [losses, digest(model), [buffer.double().sum().item() for buffer in inner.buffers()]]
